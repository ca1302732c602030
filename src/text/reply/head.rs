//! The head of a call, from its opener to its arguments: which tool it calls.

use serde_json::Value;

use super::format::{CallFormat, Name};
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
    /// It is a call, whose arguments begin after `length` bytes.
    Call { name: String, id: Option<String>, length: usize, arguments: Option<String> }, // those that are known already
}

/// Reads the head that begins at byte `at` of the input, with the opener of a section or of a call.
pub(super) fn read(format: &CallFormat, input: &Input, at: usize) -> CallHead {
    let text = &input.text[at..];
    let mut rest = text;
    match named(format, &mut rest) {
        Ok((name, id)) => CallHead::Call { name, id, length: text.len() - rest.len(), arguments: None },
        Err(Miss::Open) if !input.ended => CallHead::Open,
        Err(_) if matches!(format.name, Name::Field(_)) => whole(format, input, at),
        Err(_) => CallHead::Other,
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

/// A text of a row without the white space and the quotes that a model may leave out.
fn plain(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || c == '"')
}

/// The tool's name and the call's own id; steps to the arguments.
fn named(format: &CallFormat, rest: &mut &str) -> Found<(String, Option<String>)> {
    if let Some(section) = &format.section {
        skip(rest, section.open.trim_end())?;
        *rest = rest.trim_start();
    }
    let tag = if let Name::Tag(before, _) = format.name { plain(before) } else { "" };
    if tag.is_empty() || !rest.starts_with(tag) {
        expect(rest, format.opener)?;
    }
    let name = match format.name {
        Name::Field(_) => field(rest)?,
        Name::Tag(before, after) => {
            token(rest, tag)?;
            let name = until(rest, plain(after))?;
            if before.ends_with('"') { name.trim_matches(['"', '\'']) } else { name }.into()
        }
        Name::Line(_) => line(rest)?.into(),
        Name::Before(separator) | Name::Fenced(separator, _) => separated(rest, separator)?.into(),
        Name::Id(separator) => {
            let id = until(rest, separator)?;
            return Ok((name_in(id).into(), Some(id.into())));
        }
    };
    Ok((name, None))
}

/// NAME in `{"name": NAME, "arguments": {`; steps to the last brace.
fn field(rest: &mut &str) -> Found<String> {
    for text in ["{", "\"name\"", ":"] {
        token(rest, text)?;
    }
    let name = string(rest)?;
    token(rest, ",")?;
    match token(rest, "\"arguments\"") {
        Err(Miss::Other) => token(rest, "\"parameters\"")?,
        found => found?,
    }
    token(rest, ":")?;
    let mut ahead = *rest;
    token(&mut ahead, "{")?;
    *rest = rest.trim_start();
    Ok(name)
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
fn whole(format: &CallFormat, input: &Input, at: usize) -> CallHead {
    let body = input.text[at..].strip_prefix(format.opener).unwrap_or_default();
    let length = match body.find(format.closer.trim_start()) {
        Some(at) => at,
        None if input.ended => body.len(),
        None => return CallHead::Open,
    };
    let Ok(Value::Object(call)) = serde_json::from_str(body[..length].trim()) else { return CallHead::Other };
    let Some(name) = call.get("name").and_then(Value::as_str) else { return CallHead::Other };
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => "{}".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    CallHead::Call { name: name.into(), id: None, length: format.opener.len() + length, arguments: Some(arguments) }
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
    let name = until(rest, separator)?;
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
