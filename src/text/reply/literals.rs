//! Arguments given as literals, `KEY=VALUE` or `KEY:VALUE` between commas, made JSON as they come.

use super::format::Dialect;
use super::json::escaped;
use super::pipe::{Input, ReplyOutput, overlap};

/// Bytes that a key may have, and a value that is neither text nor a list.
const MAX_WORD: usize = 256;

/// The arguments of one call.
#[derive(Debug)]
pub(super) struct Literals {
    dialect: Dialect,
    open: Vec<Level>,
    expected: Expected,
}

/// A list or an object that is not closed yet.
#[derive(Debug)]
struct Level {
    is_list: bool,
    end: char,
    is_empty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    /// A key or a list's value, or the end.
    Item,
    /// The value of a key.
    Value,
    /// More of a text, up to this quote.
    Text(&'static str),
    /// A comma or the end.
    Comma,
}

/// What could be read.
enum Step {
    /// So many bytes.
    Read(usize),
    /// The last of the arguments, and so many bytes.
    Done(usize),
    /// More text decides.
    Wait,
}

impl Literals {
    pub(super) fn new(dialect: Dialect) -> Self {
        let arguments = Level { is_list: false, end: dialect.end, is_empty: true };
        Self { dialect, open: vec![arguments], expected: Expected::Item }
    }

    /// Reads what there is; whether the arguments are complete.
    pub(super) fn read(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let mut json = String::new();
        let (mut at, complete) = self.convert(&input.text, input.ended, &mut json);
        if !complete && input.ended {
            // What was cut off, as it is.
            json += &input.text[at..];
            at = input.text.len();
        }
        output.arguments(&json);
        input.skip(at);
        complete
    }

    /// Appends the JSON of what can be read: how many bytes, and whether the arguments are complete.
    fn convert(&mut self, text: &str, ended: bool, json: &mut String) -> (usize, bool) {
        let mut at = 0;
        loop {
            match self.step(&text[at..], ended, json) {
                Step::Read(length) => at += length,
                Step::Done(length) => return (at + length, true),
                Step::Wait => return (at, false),
            }
        }
    }

    fn step(&mut self, text: &str, ended: bool, json: &mut String) -> Step {
        if let Expected::Text(quote) = self.expected {
            return self.text(quote, text, ended, json);
        }
        let blank = text.len() - text.trim_start().len();
        if blank > 0 {
            return Step::Read(blank);
        }
        let Some(next) = text.chars().next() else { return Step::Wait };
        let level = self.open.last().expect("the arguments are open until they are complete");
        if next == level.end && self.expected != Expected::Value {
            return self.close(json, next.len_utf8());
        }
        match self.expected {
            Expected::Item | Expected::Comma if next == ',' => {
                self.expected = Expected::Item;
                Step::Read(1)
            }
            // A comma that was forgotten.
            Expected::Comma => {
                self.expected = Expected::Item;
                Step::Read(0)
            }
            Expected::Item if !level.is_list => self.key(text, json),
            Expected::Item => {
                self.begin_item(json);
                self.value(text, ended, json)
            }
            _ => self.value(text, ended, json),
        }
    }

    fn begin_item(&mut self, json: &mut String) {
        let level = self.open.last_mut().expect("the arguments are open until they are complete");
        match (level.is_empty, level.is_list) {
            (true, true) => {}
            (true, false) => json.push('{'),
            (false, _) => json.push_str(", "),
        }
        level.is_empty = false;
        self.expected = Expected::Value;
    }

    fn close(&mut self, json: &mut String, length: usize) -> Step {
        let level = self.open.pop().expect("the arguments are open until they are complete");
        json.push_str(match (level.is_list, level.is_empty) {
            (true, _) => "]",
            (false, true) => "{}",
            (false, false) => "}",
        });
        self.expected = Expected::Comma;
        if self.open.is_empty() { Step::Done(length) } else { Step::Read(length) }
    }

    fn key(&mut self, text: &str, json: &mut String) -> Step {
        let equals = if self.open.len() == 1 { self.dialect.equals } else { ':' };
        let window = window(text);
        let Some(at) = window.find(equals) else {
            if window.len() == text.len() {
                return Step::Wait; // at the end it goes out as it is
            }
            // No key: as it is, up to what may end it.
            let length = word(window);
            json.push_str(&escaped(&text[..length]));
            return Step::Read(length);
        };
        let key = text[..at].trim();
        let quotes = ["'", "\"", self.dialect.quote];
        let unquoted = |quote: &&str| key.strip_prefix(*quote).and_then(|key| key.strip_suffix(*quote));
        let key = quotes.iter().filter(|quote| !quote.is_empty()).find_map(unquoted).unwrap_or(key);
        self.begin_item(json);
        json.push_str(&format!("\"{}\": ", escaped(key)));
        Step::Read(at + equals.len_utf8())
    }

    fn value(&mut self, text: &str, ended: bool, json: &mut String) -> Step {
        let quote = self.dialect.quote;
        for quote in ["\"", "'", quote].into_iter().filter(|quote| !quote.is_empty()) {
            if text.starts_with(quote) {
                json.push('"');
                self.expected = Expected::Text(quote);
                return Step::Read(quote.len());
            }
        }
        if quote.starts_with(text) && !ended {
            return Step::Wait;
        }
        let opened = match text.as_bytes()[0] {
            b'[' => Some((true, ']')),
            b'(' => Some((true, ')')),
            b'{' => Some((false, '}')),
            _ => None,
        };
        if let Some((is_list, end)) = opened {
            json.push_str(if is_list { "[" } else { "" });
            self.open.push(Level { is_list, end, is_empty: true });
            self.expected = Expected::Item;
            return Step::Read(1);
        }
        let length = word(window(text));
        if length == text.len() && !ended {
            return Step::Wait;
        }
        json.push_str(&match text[..length].trim() {
            "True" => "true".into(),
            "False" => "false".into(),
            "None" => "null".into(),
            word if serde_json::from_str::<serde::de::IgnoredAny>(word).is_ok() => word.to_string(),
            word => serde_json::Value::from(word).to_string(),
        });
        self.expected = Expected::Comma;
        Step::Read(length)
    }

    fn text(&mut self, quote: &'static str, text: &str, ended: bool, json: &mut String) -> Step {
        let has_escapes = quote.len() == 1;
        let first = match has_escapes {
            true => text.find(|c| c == '\\' || quote.starts_with(c)),
            false => text.find(quote),
        };
        match first {
            Some(0) if has_escapes && text.starts_with('\\') => escape_to_json(text, ended, json),
            Some(0) => {
                json.push('"');
                self.expected = Expected::Comma;
                Step::Read(quote.len())
            }
            _ => {
                // A part of a longer quote may stand at the end.
                let held = if ended { 0 } else { overlap(text, quote) };
                let length = first.unwrap_or(text.len() - held);
                json.push_str(&escaped(&text[..length]));
                if length == 0 { Step::Wait } else { Step::Read(length) }
            }
        }
    }
}

/// The JSON of a list or an object as Python prints it.
pub(super) fn to_json(text: &str) -> Option<String> {
    let (open, close) = text.split_at_checked(1)?;
    let end = close.chars().next_back()?;
    if !["[", "{"].contains(&open) || ![']', '}'].contains(&end) {
        return None;
    }
    let mut literals = Literals::new(Dialect { equals: '=', end: ')', quote: "", between: "" });
    (literals.open, literals.expected) = (vec![Level { is_list: true, end: ')', is_empty: true }], Expected::Item);
    let mut json = String::new();
    let (length, _) = literals.convert(text, true, &mut json);
    (length == text.len() && literals.open.len() == 1).then_some(json)
}

/// The text in which a key or a word must end.
fn window(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_WORD)]
}

/// An escape of Python at the beginning of `text`, as JSON has it.
fn escape_to_json(text: &str, ended: bool, json: &mut String) -> Step {
    let Some(c) = text[1..].chars().next() else {
        return if ended { keep(text, 1, json) } else { Step::Wait };
    };
    let digits = match c {
        'u' => 4,
        'x' => 2,
        _ => 0,
    };
    let hex = text[2.min(text.len())..].bytes().take(digits).take_while(u8::is_ascii_hexdigit).count();
    if digits > 0 && hex < digits {
        let undecided = !ended && text.len() == 2 + hex;
        return if undecided { Step::Wait } else { keep(text, 2, json) };
    }
    match c {
        'u' => json.push_str(&text[..6]),
        'x' => json.push_str(&format!("\\u00{}", &text[2..4])),
        '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => json.extend(['\\', c]),
        '\'' => json.push('\''),
        '\n' => {}
        _ => return keep(text, 1 + c.len_utf8(), json),
    }
    Step::Read(1 + c.len_utf8() + digits)
}

/// What is no escape stays as it is.
fn keep(text: &str, length: usize, json: &mut String) -> Step {
    json.push_str(&escaped(&text[..length]));
    Step::Read(length)
}

/// Bytes of a word: up to what ends a value, and one at least.
fn word(text: &str) -> usize {
    let end = text.find([',', ']', ')', '}']).unwrap_or(text.len());
    end.max(text.chars().next().map_or(0, char::len_utf8))
}
