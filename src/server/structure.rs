//! The memory that a JSON text will take when parsed, computed while its bytes arrive: a list of empty objects grows a
//! hundredfold.

use super::error::ApiError;
use crate::text::reply::Strings;

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum bytes of the values of a body: three million token ids, or a hundred thousand messages.
const MAX_BYTES: u64 = 512 << 20;

/// Bytes of an object, with places for the four members that its first one makes; copies of it are made on the way to a
/// prompt.
const OBJECT: u64 = 1024;
/// Of a list, with places for four values.
const LIST: u64 = 640;
/// Of one more member: its key, its value and its place in the table of an object that has doubled.
const MEMBER: u64 = 320;
/// Of one more value, in a list that has doubled.
const VALUE: u64 = 144;

/// The structure of a JSON text as far as it was read. For a text that is not JSON the result means nothing; the parser
/// refuses it.
#[derive(Default)]
pub(super) struct Structure {
    bytes: u64,
    strings: Strings,
}

impl Structure {
    /// Reads more. Errors: the values take more than any honest request.
    pub(super) fn read(&mut self, text: &[u8]) -> Result<()> {
        for &byte in text {
            if self.strings.have(byte) {
                continue;
            }
            self.bytes += match byte {
                b'{' => OBJECT,
                b'[' => LIST,
                b':' => MEMBER,
                b',' => VALUE,
                _ => 0,
            };
        }
        match self.bytes <= MAX_BYTES {
            true => Ok(()),
            false => Err(ApiError::bad_request(
                "The request body has too many objects, lists and numbers: send smaller requests",
            )),
        }
    }

    /// Bytes of its values without their text.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> u64 {
        let mut whole = Structure::default();
        whole.read(text.as_bytes()).unwrap();
        let mut parts = Structure::default();
        text.as_bytes().chunks(3).for_each(|part| parts.read(part).unwrap());
        assert_eq!(whole.bytes(), parts.bytes(), "{text}");
        whole.bytes()
    }

    #[test]
    fn only_what_is_outside_of_strings_counts() {
        assert_eq!(bytes(r#"{"a{[,:\"{[": "}],\\", "b": [1, 2]}"#), OBJECT + 2 * MEMBER + 2 * VALUE + LIST);
        assert_eq!(bytes(r#""[[[[""#), 0);
    }

    #[test]
    fn a_million_token_ids_pass_and_a_million_objects_do_not() {
        assert!(bytes(&format!("[{}1]", "12345,".repeat(1_000_000))) < 200 << 20);
        let objects = format!("[{}{{}}]", r#"{"":0},"#.repeat(1_000_000));
        assert!(Structure::default().read(objects.as_bytes()).is_err());
    }
}
