//! Arguments given one by one between tags, made JSON by the types that the tool's schema gives them.

use serde_json::Value;

use super::json::escaped;
use super::parser::{Output, content, overlap};
use super::syntax::Format;
use super::{Part, Tool};

/// The tags of a parameter.
#[derive(Clone, Copy, Debug)]
struct Style {
    open: &'static str,  // before the key
    named: &'static str, // after it
    close: &'static str, // after the value
    done: &'static str,  // after all parameters
    quoted: bool,        // the key stands in quotes
    framed: bool,        // the value stands on lines of its own
}

const FUNCTION: Style =
    Style { open: "<parameter=", named: ">", close: "</parameter>", done: "</function>", quoted: false, framed: true };
const INVOKE: Style = Style {
    open: "<parameter name=",
    named: ">",
    close: "</parameter>",
    done: "</invoke>",
    quoted: true,
    framed: false,
};
/// Its parameters end where the call does, which is left to be found there.
const PAIRS: Style = Style {
    open: "<arg_key>",
    named: "<arg_value>",
    close: "</arg_value>",
    done: "</tool_call>",
    quoted: false,
    framed: false,
};

/// The parameters of one call, as they come.
#[derive(Debug)]
pub(super) struct Parameters {
    style: Style,
    tool: String,
    count: usize,
    value: Option<Pending>,
}

/// A value on its way.
#[derive(Debug)]
struct Pending {
    is_text: bool, // and may go out as it comes
    framed: bool,  // the line's end before it is still to be dropped
}

/// What a step did.
pub(super) enum Step {
    /// Nothing more without more text.
    Wait,
    /// Something; try again.
    More,
    /// The arguments are complete.
    Done,
}

impl Parameters {
    pub(super) fn new(format: Format, tool: &str) -> Self {
        let style = match format {
            Format::Invoke => INVOKE,
            Format::Pairs => PAIRS,
            _ => FUNCTION,
        };
        Self { style, tool: tool.into(), count: 0, value: None }
    }

    pub(super) fn step(&mut self, text: &mut String, end: bool, output: &mut Output, parts: &mut Vec<Part>) -> Step {
        match &mut self.value {
            Some(_) => self.value(text, end, output, parts),
            None => self.between(text, end, output, parts),
        }
    }

    fn between(&mut self, text: &mut String, end: bool, output: &mut Output, parts: &mut Vec<Part>) -> Step {
        let blank = text.len() - text.trim_start().len();
        text.drain(..blank);
        let Style { open, done, .. } = self.style;
        // An outer end will do where the inner one was forgotten.
        let ends = [done, "</tool_call>", "</minimax:tool_call>"];
        if let Some(found) = ends.iter().find(|end| text.starts_with(**end)) {
            if *found == done && done != "</tool_call>" {
                text.drain(..done.len());
            }
            output.arguments(if self.count == 0 { "{}" } else { "}" }, parts);
            return Step::Done;
        }
        if !end && [open].iter().chain(&ends).any(|marker| marker.starts_with(&**text)) {
            return Step::Wait;
        }
        if let Some(after) = text.strip_prefix(open) {
            match after.find(self.style.named) {
                Some(at) => {
                    let key = self.key(&after[..at]);
                    let length = open.len() + at + self.style.named.len();
                    text.drain(..length);
                    self.begin(&key, output, parts);
                    return Step::More;
                }
                None if !end => return Step::Wait,
                None => {}
            }
        }
        // Text that belongs to no parameter.
        let stray = match text.char_indices().skip(1).find(|(_, c)| *c == '<') {
            Some((at, _)) => at,
            None if end => text.len(),
            None => return Step::Wait,
        };
        content(text[..stray].trim_end(), parts);
        text.drain(..stray);
        if text.is_empty() { Step::Wait } else { Step::More }
    }

    fn key(&self, text: &str) -> String {
        let key = text.trim();
        match (self.style.quoted, self.style.open) {
            (true, _) => key.trim_matches(['"', '\'']).into(),
            (_, "<arg_key>") => key.strip_suffix("</arg_key>").unwrap_or(key).trim().into(),
            _ => key.into(),
        }
    }

    fn begin(&mut self, key: &str, output: &Output, parts: &mut Vec<Part>) {
        let is_text = output.tool(&self.tool).and_then(|tool| schema_of(tool, key)).is_some_and(only_text);
        let before = if self.count == 0 { "{" } else { ", " };
        let quote = if is_text { "\"" } else { "" };
        output.arguments(&format!("{before}\"{}\": {quote}", escaped(key)), parts);
        self.count += 1;
        self.value = Some(Pending { is_text, framed: self.style.framed });
    }

    fn value(&mut self, text: &mut String, end: bool, output: &Output, parts: &mut Vec<Part>) -> Step {
        let Some(pending) = &mut self.value else { return Step::More };
        if pending.framed {
            match text.chars().next() {
                Some('\n') => drop(text.drain(..1)),
                None if !end => return Step::Wait,
                _ => {}
            }
            pending.framed = false;
        }
        let close = self.style.close;
        let unframed =
            |value: &str| if self.style.framed { value.strip_suffix('\n').unwrap_or(value).len() } else { value.len() };
        match text.find(close) {
            Some(at) => {
                let value = &text[..unframed(&text[..at])];
                let json = if pending.is_text { escaped(value) + "\"" } else { to_json(value) };
                output.arguments(&json, parts);
                text.drain(..at + close.len());
                self.value = None;
                Step::More
            }
            None => {
                let said = match (end, pending.is_text) {
                    (true, _) => text.len(),
                    (false, true) => unframed(&text[..text.len() - overlap(text, close)]),
                    (false, false) => 0,
                };
                output
                    .arguments(&if pending.is_text { escaped(&text[..said]) } else { text[..said].to_string() }, parts);
                text.drain(..said);
                Step::Wait
            }
        }
    }
}

/// The schema of one argument.
pub(super) fn schema_of<'t>(tool: &'t Tool, key: &str) -> Option<&'t Value> {
    tool.parameters.get("properties")?.get(key)
}

/// Whether a schema allows text and nothing else, so that a value needs no look at it to be text.
pub(super) fn only_text(schema: &Value) -> bool {
    let all = |list: &Value, test: fn(&Value) -> bool| {
        list.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(test))
    };
    match &schema["type"] {
        Value::String(name) => name == "string",
        Value::Array(_) => all(&schema["type"], |name| name == "string"),
        _ => {
            schema["const"].is_string()
                || all(&schema["enum"], Value::is_string)
                || all(&schema["anyOf"], only_text)
                || all(&schema["oneOf"], only_text)
        }
    }
}

/// A value of another type as it was written, if it is JSON or what Python calls it; else as text.
fn to_json(value: &str) -> String {
    let trimmed = value.trim();
    match trimmed {
        "True" => "true".into(),
        "False" => "false".into(),
        "None" => "null".into(),
        _ if serde_json::from_str::<serde::de::IgnoredAny>(trimmed).is_ok() => trimmed.into(),
        _ => Value::from(value).to_string(),
    }
}
