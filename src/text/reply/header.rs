//! Where a call begins, and whom it calls: from its marker to its arguments.

use serde_json::Value;

use super::json::{self, Opening};
use super::syntax::Format;

/// Bytes within which a call must name its tool.
const MAX_NAME: usize = 256;

/// What is known of a call.
#[derive(Debug)]
pub(super) enum Header {
    /// More text decides.
    Open,
    /// It is none.
    Other,
    /// It is one, whose arguments begin after `length` bytes.
    Begin { name: String, id: Option<String>, length: usize, arguments: Arguments },
}

/// How arguments come.
#[derive(Debug)]
pub(super) enum Arguments {
    /// As JSON.
    Json,
    /// As JSON that is known already.
    Whole(String),
    /// One by one, between tags.
    Parameters,
}

/// What a call begins with, outside or inside of a section; the marker of a section is first.
pub(super) fn openers(format: Format, in_section: bool) -> &'static [&'static str] {
    match format {
        Format::Hermes | Format::Pairs => &["<tool_call>"],
        // Qwen3-Coder forgets the outer tag at times.
        Format::Function => &["<tool_call>", "<function="],
        Format::DeepSeekFenced | Format::DeepSeek => &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
        Format::Kimi => &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        Format::Invoke if in_section => &["<minimax:tool_call>", "<invoke name="],
        Format::Invoke => &["<minimax:tool_call>"],
        Format::Harmony => &[],
    }
}

/// What ends a section of calls.
pub(super) fn section_end(format: Format) -> Option<&'static str> {
    match format {
        Format::DeepSeekFenced | Format::DeepSeek => Some("<｜tool▁calls▁end｜>"),
        Format::Kimi => Some("<|tool_calls_section_end|>"),
        Format::Invoke => Some("</minimax:tool_call>"),
        _ => None,
    }
}

/// Whether calls stand in sections.
pub(super) fn has_sections(format: Format) -> bool {
    section_end(format).is_some()
}

/// Whether arguments are given one by one.
pub(super) fn has_parameters(format: Format) -> bool {
    matches!(format, Format::Function | Format::Pairs | Format::Invoke)
}

/// What follows a call's arguments.
pub(super) fn call_end(format: Format) -> Option<&'static str> {
    match format {
        Format::Hermes | Format::Function | Format::Pairs => Some("</tool_call>"),
        Format::DeepSeekFenced | Format::DeepSeek => Some("<｜tool▁call▁end｜>"),
        Format::Kimi => Some("<|tool_call_end|>"),
        Format::Invoke | Format::Harmony => None,
    }
}

/// Reads `text`, which begins with one of the openers. With `end`, nothing follows it.
pub(super) fn read(format: Format, text: &str, end: bool) -> Header {
    let mut rest = text;
    let found = match format {
        Format::Hermes => return hermes(text, end),
        Format::Function => function(&mut rest),
        Format::Pairs => pair(&mut rest),
        Format::DeepSeekFenced | Format::DeepSeek => deepseek(&mut rest),
        Format::Kimi => kimi(&mut rest),
        Format::Invoke => invoke(&mut rest),
        Format::Harmony => Err(Miss::Other),
    };
    match found {
        Ok((name, id)) => {
            let arguments = if has_parameters(format) { Arguments::Parameters } else { Arguments::Json };
            Header::Begin { name, id, length: text.len() - rest.len(), arguments }
        }
        Err(Miss::More) => Header::Open,
        Err(Miss::Other) => Header::Other,
    }
}

/// Why something expected was not found.
enum Miss {
    More,
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
        None if marker.starts_with(*rest) => Err(Miss::More),
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
        None if rest.len() < MAX_NAME + marker.len() => Err(Miss::More),
        _ => Err(Miss::Other),
    }
}

type Named = Found<(String, Option<String>)>;

fn hermes(text: &str, end: bool) -> Header {
    let Some(body) = text.strip_prefix("<tool_call>") else { return Header::Other };
    let begin = text.len() - body.len();
    match json::opening(body) {
        Opening::Named(name, at) => {
            return Header::Begin { name, id: None, length: begin + at, arguments: Arguments::Json };
        }
        Opening::Open if !end => return Header::Open,
        _ => {}
    }
    // The arguments before the name, or as a text of their own: such a call is read as a whole.
    let length = match body.find("</tool_call>") {
        Some(at) => at,
        None if end => body.len(),
        None => return Header::Open,
    };
    let Ok(Value::Object(call)) = serde_json::from_str(body[..length].trim()) else { return Header::Other };
    let Some(name) = call.get("name").and_then(Value::as_str) else { return Header::Other };
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => "{}".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    Header::Begin { name: name.into(), id: None, length: begin + length, arguments: Arguments::Whole(arguments) }
}

fn function(rest: &mut &str) -> Named {
    if expect(rest, "<tool_call>").is_ok() {
        *rest = rest.trim_start();
    }
    expect(rest, "<function=")?;
    Ok((until(rest, ">")?.into(), None))
}

fn pair(rest: &mut &str) -> Named {
    expect(rest, "<tool_call>")?;
    *rest = rest.trim_start();
    // The name's line ends, or a tag follows it at once.
    let Some(length) = rest.find(['\n', '<']) else {
        return Err(if rest.len() <= MAX_NAME { Miss::More } else { Miss::Other });
    };
    let name = rest[..length].trim();
    if name.is_empty() || length > MAX_NAME {
        return Err(Miss::Other);
    }
    *rest = &rest[length..];
    Ok((name.into(), None))
}

fn deepseek(rest: &mut &str) -> Named {
    skip(rest, "<｜tool▁calls▁begin｜>")?;
    *rest = rest.trim_start();
    expect(rest, "<｜tool▁call▁begin｜>")?;
    let name = until(rest, "<｜tool▁sep｜>")?;
    if name != "function" {
        return Ok((name.into(), None));
    }
    let name = until(rest, "\n")?;
    *rest = rest.trim_start();
    skip(rest, "```json")?;
    Ok((name.into(), None))
}

fn kimi(rest: &mut &str) -> Named {
    skip(rest, "<|tool_calls_section_begin|>")?;
    *rest = rest.trim_start();
    expect(rest, "<|tool_call_begin|>")?;
    let id = until(rest, "<|tool_call_argument_begin|>")?;
    let name = id.strip_prefix("functions.").unwrap_or(id);
    let name = match name.rsplit_once(':') {
        Some((name, count)) if count.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => name,
    };
    Ok((name.into(), Some(id.into())))
}

fn invoke(rest: &mut &str) -> Named {
    skip(rest, "<minimax:tool_call>")?;
    *rest = rest.trim_start();
    expect(rest, "<invoke name=")?;
    Ok((until(rest, ">")?.trim_matches(['"', '\'']).into(), None))
}
