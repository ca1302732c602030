//! How far a JSON value reaches, found as its text comes.

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

/// What a byte does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scan {
    /// The object goes on.
    More,
    /// The object ends with this byte.
    End,
    /// No JSON has this byte here.
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

/// `{"name": NAME, "arguments": {`, as far as it has come.
#[derive(Debug, PartialEq)]
pub(super) enum Opening {
    /// It may still become one.
    Open,
    /// It is: the name, and the byte where the arguments begin.
    Named(String, usize),
    /// It is something else.
    Other,
}

/// Whether `text` begins as a call does whose arguments can be told before its end.
pub(super) fn opening(text: &str) -> Opening {
    let mut rest = text;
    match open(&mut rest) {
        Ok(name) => Opening::Named(name, text.len() - rest.len()),
        Err(unfinished) if unfinished => Opening::Open,
        Err(_) => Opening::Other,
    }
}

/// Errors: whether it is only that more must come.
fn open(rest: &mut &str) -> Result<String, bool> {
    expect(rest, "{")?;
    expect(rest, "\"name\"")?;
    expect(rest, ":")?;
    let name = string(rest)?;
    expect(rest, ",")?;
    let mut other = *rest;
    match expect(rest, "\"arguments\"") {
        Err(false) => {
            expect(&mut other, "\"parameters\"")?;
            *rest = other;
        }
        found => found?,
    }
    expect(rest, ":")?;
    *rest = rest.trim_start();
    match rest.as_bytes().first() {
        Some(b'{') => Ok(name),
        Some(_) => Err(false),
        None => Err(true),
    }
}

fn expect(rest: &mut &str, text: &str) -> Result<(), bool> {
    let trimmed = rest.trim_start();
    match trimmed.strip_prefix(text) {
        Some(after) => {
            *rest = after;
            Ok(())
        }
        None => Err(text.starts_with(trimmed)),
    }
}

fn string(rest: &mut &str) -> Result<String, bool> {
    let trimmed = rest.trim_start();
    if trimmed.is_empty() {
        return Err(true);
    }
    if !trimmed.starts_with('"') {
        return Err(false);
    }
    let mut escaped = false;
    for (at, byte) in trimmed.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => {
                let name = serde_json::from_str(&trimmed[..=at]).map_err(|_| false)?;
                *rest = &trimmed[at + 1..];
                return Ok(name);
            }
            _ => {}
        }
    }
    Err(true)
}

/// The inside of a JSON string: `text` escaped, without quotes.
pub(super) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_string()
}
