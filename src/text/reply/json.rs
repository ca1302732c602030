//! Finds the end of a JSON value while its text comes.

/// Which bytes of a JSON text belong to strings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Strings {
    inside: bool,
    escaped: bool,
}

impl Strings {
    /// Whether the next byte of the text belongs to a string, quotes included.
    pub(crate) fn have(&mut self, byte: u8) -> bool {
        let inside = self.inside;
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = inside,
            b'"' => self.inside = !inside,
            _ => {}
        }
        inside || self.inside
    }
}

/// Follows one JSON object through its text.
#[derive(Clone, Debug, Default)]
pub(super) struct Scanner {
    depth: usize,
    strings: Strings,
}

/// The effect of a byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scan {
    /// The object continues.
    More,
    /// The object ends with this byte.
    End,
    /// JSON cannot have this byte here.
    Alien,
}

impl Scanner {
    pub(super) fn push(&mut self, byte: u8) -> Scan {
        if self.strings.have(byte) {
            return Scan::More;
        }
        match byte {
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' if self.depth <= 1 => return Scan::End,
            b'}' | b']' => self.depth -= 1,
            b'<' => return Scan::Alien,
            _ => {}
        }
        Scan::More
    }
}

/// The inside of a JSON string: `text` escaped, without quotes.
pub(super) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_string()
}
