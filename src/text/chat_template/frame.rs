//! The protocol between a child process that renders templates and its parent: frames of a length and that many bytes.
//!
//! The parent sends the template first, which the child answers when it is compiled. Then it sends the variables of
//! each rendering as JSON, and the child answers each with the text.

use std::io::{self, Read, Write};

use super::RenderFailure;

/// Bytes of an answer besides its text.
const ANSWER_HEAD: usize = 2;

/// Maximum bytes of an error.
const MAX_ERROR_BYTES: usize = 4096;

/// An answer of the child.
pub(super) struct Rendered {
    pub(super) text: Result<String, RenderFailure>,
    /// The child exits now.
    pub(super) leaves: bool,
}

/// Sends one frame of joined parts.
pub(super) fn write(to: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    to.write_all(&(bytes as u64).to_le_bytes())?;
    parts.iter().try_for_each(|part| to.write_all(part))
}

/// Receives the next frame of at most `limit` bytes. `None` at the end.
pub(super) fn read(from: &mut impl Read, limit: usize) -> io::Result<Option<Vec<u8>>> {
    let mut length = Vec::new();
    from.take(8).read_to_end(&mut length)?;
    let Ok(length) = <[u8; 8]>::try_from(length.as_slice()) else {
        return if length.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
    };
    let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > limit {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    Ok(Some(bytes))
}

impl Rendered {
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let (kind, text) = match &self.text {
            Ok(text) => (0, text),
            Err(RenderFailure::Refused(words)) => (1, words),
            Err(RenderFailure::Broken(why)) => (2, why),
            Err(RenderFailure::Machine(error)) => return Err(io::Error::other(error.to_string())),
        };
        write(to, &[&[kind, u8::from(self.leaves)], text.as_bytes()])
    }

    /// Receives the next answer, with a text of at most `limit` bytes.
    pub(super) fn read(from: &mut impl Read, limit: usize) -> io::Result<Self> {
        let mut bytes = read(from, limit.max(MAX_ERROR_BYTES) + ANSWER_HEAD)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let text = bytes.split_off(ANSWER_HEAD.min(bytes.len()));
        let text = String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData)?;
        let (text, leaves) = match bytes[..] {
            [0, leaves] => (Ok(text), leaves),
            [1, leaves] => (Err(RenderFailure::Refused(text)), leaves),
            [2, leaves] => (Err(RenderFailure::Broken(text)), leaves),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        Ok(Self { text, leaves: leaves != 0 })
    }
}
