//! The head of a call, from its opener to its arguments: which tool it calls.

use serde_json::Value;

use super::format::{CallFormat, Fields, Name};
use super::json::{Scan, Scanner};
use super::pipe::Input;

/// Bytes within which a call must name its tool.
const MAX_NAME: usize = 256;

/// What the text says about a call.
#[derive(Debug)]
pub(super) enum CallHead {
    /// More text decides.
    Open,
    /// It is no call.
    Other,
    /// It is a call.
    Call(Call),
}

/// The head of a call.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) format: &'static CallFormat, // the way in which it is written
    pub(super) name: String,
    pub(super) id: Option<String>,
    pub(super) length: usize,             // bytes up to the arguments
    pub(super) arguments: Option<String>, // those that are known already
}

/// Reads the head that begins at byte `at` of the input, with the opener of a section or of a call.
pub(super) fn read(format: &'static CallFormat, input: &Input, at: usize) -> CallHead {
    let mut open = false;
    for format in format.ways() {
        match read_way(format, input, at) {
            CallHead::Call(call) => return CallHead::Call(call),
            CallHead::Open => open = true,
            CallHead::Other => {}
        }
    }
    if open { CallHead::Open } else { CallHead::Other }
}

fn read_way(format: &'static CallFormat, input: &Input, at: usize) -> CallHead {
    let text = &input.text[at..];
    let mut rest = text;
    match named(format, &mut rest) {
        Ok((name, id)) => CallHead::Call(Call { format, name, id, length: text.len() - rest.len(), arguments: None }),
        Err(Miss::Open) if !input.ended => CallHead::Open,
        Err(_) => match &format.name {
            Name::Field(fields) => whole(format, fields, input, at),
            _ => CallHead::Other,
        },
    }
}

/// Why something expected was not found.
enum Miss {
    Open, // the text ends too early
    Other,
}

type Found<T> = Result<T, Miss>;

/// Steps over `marker`.
fn expect(rest: &mut &str, marker: &str) -> Found<()> {
    match rest.strip_prefix(marker) {
        Some(after) => {
            *rest = after;
            Ok(())
        }
        None if marker.starts_with(*rest) => Err(Miss::Open),
        None => Err(Miss::Other),
    }
}

/// Steps over `marker`, if it is there.
fn skip(rest: &mut &str, marker: &str) -> Found<()> {
    match expect(rest, marker) {
        Err(Miss::Other) => Ok(()),
        found => found,
    }
}

/// What stands before `marker`, and steps over both.
fn until<'t>(rest: &mut &'t str, marker: &str) -> Found<&'t str> {
    match rest.find(marker) {
        Some(at) if at <= MAX_NAME => {
            let found = &rest[..at];
            *rest = &rest[at + marker.len()..];
            Ok(found.trim())
        }
        None if rest.len() < MAX_NAME + marker.len() => Err(Miss::Open),
        _ => Err(Miss::Other),
    }
}

/// `text`, if it can be the name of a tool.
fn name_of(text: &str) -> Found<&str> {
    let text = text.trim();
    let is_name = !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || "[](){}<>\"'`,".contains(c));
    if is_name { Ok(text) } else { Err(Miss::Other) }
}

/// A text of a row without the white space and the quotes that a model may leave out.
fn plain(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || c == '"')
}

/// Steps from the beginning of a call or of a section to what follows the call's opener.
fn opened(format: &CallFormat, rest: &mut &str) -> Found<()> {
    if let Some(section) = &format.section {
        let marker = section.marker();
        skip(rest, marker)?;
        *rest = rest.trim_start();
        // The bracket of a list; the model's opener may be the same.
        if section.open.trim_end() != marker && section.open.trim_end().ends_with('[') {
            skip(rest, "[")?;
            *rest = rest.trim_start();
        }
    }
    let tag = if let Name::Tag(before, _) = format.name { plain(before) } else { "" };
    if tag.is_empty() || !rest.starts_with(tag) {
        expect(rest, format.opener)?;
    }
    Ok(())
}

/// The tool's name and the call's own id; steps to the arguments.
fn named(format: &CallFormat, rest: &mut &str) -> Found<(String, Option<String>)> {
    opened(format, rest)?;
    let name = match &format.name {
        Name::Field(fields) => field(rest, fields)?,
        Name::Key => {
            let name = string(rest)?;
            token(rest, ":")?;
            *rest = rest.trim_start();
            name
        }
        Name::Tag(before, after) | Name::Numbered(before, _, after) => {
            token(rest, plain(before))?;
            let name = until(rest, plain(after))?;
            if before.ends_with('"') { quoted(name) } else { name }.into()
        }
        Name::Line(_) => line(rest)?.into(),
        Name::Before(separator) | Name::Fenced(separator, _) => separated(rest, separator.trim_end())?.into(),
        Name::BeforeId(mark, separator) => {
            let both = until(rest, separator)?;
            let (name, id) = both.split_once(mark).map_or((both, None), |(name, id)| (name, Some(id.trim())));
            return Ok((name_of(name)?.into(), id.filter(|id| !id.is_empty()).map(String::from)));
        }
        Name::AfterId(mark, separator) => {
            let id = until(rest, mark)?.to_string();
            return Ok((name_of(until(rest, separator)?)?.into(), Some(id).filter(|id| !id.is_empty())));
        }
        Name::Id(separator) => {
            let id = until(rest, separator)?;
            return Ok((name_in(id).into(), Some(id.into())));
        }
    };
    Ok((name, None))
}

/// A value between quotes, and without what follows them. Quotes may be missing.
fn quoted(text: &str) -> &str {
    let text = text.trim_start_matches(['"', '\'']);
    text.split(['"', '\'']).next().unwrap_or(text)
}

/// NAME in `{"name": NAME, "arguments": {`; steps to the last brace. Other fields may stand between.
fn field(rest: &mut &str, fields: &Fields) -> Found<String> {
    token(rest, plain(fields.before))?;
    let mut name = None;
    loop {
        let key = string(rest)?;
        token(rest, ":")?;
        match &*key {
            "arguments" | "parameters" => break,
            "name" | "tool_name" if name.is_none() => name = Some(string(rest)?),
            _ => scalar(rest)?,
        }
        token(rest, ",")?;
    }
    let mut ahead = *rest;
    token(&mut ahead, "{")?;
    *rest = rest.trim_start();
    name.ok_or(Miss::Other)
}

/// Steps over a text or a number.
fn scalar(rest: &mut &str) -> Found<()> {
    *rest = rest.trim_start();
    if rest.starts_with('"') {
        return string(rest).map(drop);
    }
    let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && !['-', '.', '+'].contains(&c)).ok_or(Miss::Open)?;
    *rest = &rest[length..];
    if length > 0 { Ok(()) } else { Err(Miss::Other) }
}

/// Steps over white space and a token of JSON.
fn token(rest: &mut &str, text: &str) -> Found<()> {
    *rest = rest.trim_start();
    expect(rest, text)
}

/// Steps over a string of JSON.
fn string(rest: &mut &str) -> Found<String> {
    token(rest, "\"")?;
    let mut escaped = false;
    let end = rest.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    let end = end.ok_or(Miss::Open)?;
    let name = serde_json::from_str(&format!("\"{}\"", &rest[..end])).map_err(|_| Miss::Other)?;
    *rest = &rest[end + 1..];
    Ok(name)
}

/// A call whose arguments come before its name, or as a text of their own: it is read as a whole.
fn whole(format: &'static CallFormat, fields: &Fields, input: &Input, at: usize) -> CallHead {
    let mut body = &input.text[at..];
    let before = body.len();
    if opened(format, &mut body).is_err() {
        return CallHead::Other;
    }
    // The object's braces may belong to the opener and to the closer.
    let brace = if plain(fields.before).is_empty() { "{" } else { "" };
    let mut scanner = Scanner::default();
    let mut scans = brace.bytes().chain(body.bytes()).map(|byte| scanner.push(byte));
    let length = match scans.position(|scan| scan != Scan::More) {
        Some(at) => at + 1 - brace.len(),
        None if input.ended => body.len(),
        None => return CallHead::Open,
    };
    let text = format!("{brace}{}", &body[..length]);
    let Ok(Value::Object(call)) = serde_json::from_str(text.trim()) else { return CallHead::Other };
    let name = [fields.name, "name"].iter().find_map(|key| call.get(*key).and_then(Value::as_str));
    let Some(name) = name else { return CallHead::Other };
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => "{}".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let length = before - body.len() + length;
    CallHead::Call(Call { format, name: name.into(), id: None, length, arguments: Some(arguments) })
}

/// The rest of the line; steps to its end, or to a tag that follows the name at once.
fn line<'t>(rest: &mut &'t str) -> Found<&'t str> {
    *rest = rest.trim_start();
    let Some(length) = rest.find(['\n', '<']) else {
        return Err(if rest.len() <= MAX_NAME { Miss::Open } else { Miss::Other });
    };
    let name = rest[..length].trim();
    if name.is_empty() || length > MAX_NAME {
        return Err(Miss::Other);
    }
    *rest = &rest[length..];
    Ok(name)
}

/// What stands before the separator or, after `function` and the separator, on its line and in front of a fence.
fn separated<'t>(rest: &mut &'t str, separator: &str) -> Found<&'t str> {
    let name = name_of(until(rest, separator)?)?;
    if name != "function" {
        return Ok(name);
    }
    let name = until(rest, "\n")?;
    *rest = rest.trim_start();
    skip(rest, "```json")?;
    Ok(name)
}

/// NAME in `functions.NAME:COUNT`, of which either end may be missing.
fn name_in(id: &str) -> &str {
    let name = id.strip_prefix("functions.").unwrap_or(id);
    match name.rsplit_once(':') {
        Some((name, count)) if count.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => name,
    }
}
