//! Arguments given one by one between tags, made JSON by the types that the tool's schema gives them.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::format::{CallFormat, Frame, Kind};
use super::json::escaped;
use super::literals;
use super::nested;
use super::pipe::{Input, ReplyOutput};
use super::schema::{only_text, schema_of};

/// The parameters of one call, as they come.
#[derive(Debug)]
pub(super) struct Parameters {
    format: &'static CallFormat,
    frame: Frame,
    tool: String,
    count: usize,
    value: Option<Pending>,
}

/// A value on its way.
#[derive(Debug)]
struct Pending {
    is_text: bool,     // and may go out as it comes
    first_break: bool, // the line break before it is still to be dropped
    may_quote: bool,   // [`CDATA`] may still come
    close: String,     // what ends it
}

/// Opens text that may have any character.
const CDATA: &str = "<![CDATA[";

/// What a step did.
pub(super) enum ParameterStep {
    /// Nothing more without more text.
    Wait,
    /// Something; try again.
    More,
    /// The arguments are complete.
    Done,
}

impl Parameters {
    pub(super) fn new(format: &'static CallFormat, frame: Frame, tool: &str) -> Self {
        Self { format, frame, tool: tool.into(), count: 0, value: None }
    }

    pub(super) fn step(&mut self, input: &mut Input, output: &mut ReplyOutput) -> ParameterStep {
        match self.value {
            Some(_) => self.value(input, output),
            None => self.between(input, output),
        }
    }

    fn between(&mut self, input: &mut Input, output: &mut ReplyOutput) -> ParameterStep {
        input.skip_blank();
        let text = &input.text;
        // An outer end will do where the inner one was forgotten.
        let end = self.frame.end.trim_end();
        let section = self.format.section.as_ref().map_or("", |section| section.close.trim_start());
        let ends = [end, self.format.closer, section].into_iter().filter(|end| !end.is_empty());
        if let Some(found) = ends.clone().find(|end| text.starts_with(end)) {
            if found == end {
                input.skip(end.len());
            }
            output.arguments(if self.count == 0 { "{}" } else { "}" });
            return ParameterStep::Done;
        }
        let open = self.frame.before_key.trim_end_matches('"');
        if !input.ended && ends.chain([open]).any(|marker| marker.starts_with(text)) {
            return ParameterStep::Wait;
        }
        if let Some(after) = text.strip_prefix(open) {
            let named = self.frame.before_value.trim_end();
            match after.find(named) {
                Some(at) => {
                    let (key, said) = self.key(&after[..at]);
                    let said = said.to_string();
                    input.skip(open.len() + at + named.len());
                    self.begin((key, &said), output);
                    return ParameterStep::More;
                }
                None if !input.ended => return ParameterStep::Wait,
                None => {}
            }
        }
        // Text that belongs to no parameter.
        let stray = match text.char_indices().skip(1).find(|(_, c)| *c == '<') {
            Some((at, _)) => at,
            None if input.ended => text.len(),
            None => return ParameterStep::Wait,
        };
        output.content(text[..stray].trim_end());
        input.skip(stray);
        if input.text.is_empty() { ParameterStep::Wait } else { ParameterStep::More }
    }

    /// The key in a tag, and what the tag says of the value behind it.
    fn key<'t>(&self, text: &'t str) -> (String, &'t str) {
        let text = text.trim();
        match self.frame.after_key.trim_end() {
            "\"" => {
                let text = text.trim_start_matches(['"', '\'']);
                let (key, said) = text.split_once(['"', '\'']).unwrap_or((text, ""));
                (key.into(), said)
            }
            after => (text.strip_suffix(after).unwrap_or(text).trim().into(), ""),
        }
    }

    fn begin(&mut self, (key, said): (String, &str), output: &mut ReplyOutput) {
        let by_schema = || output.tool(&self.tool).and_then(|tool| schema_of(tool, &key)).is_some_and(only_text);
        let is_text = match self.frame.kind {
            Kind::Flag if said.contains("string=") => said.contains("\"true\""),
            Kind::Type if said.contains("type=") => said.contains("\"string\""),
            _ => by_schema(),
        };
        let before = if self.count == 0 { "{" } else { ", " };
        let quote = if is_text { "\"" } else { "" };
        output.arguments(&format!("{before}\"{}\": {quote}", escaped(&key)));
        self.count += 1;
        let close = self.frame.close(&key).trim_start().into();
        let may_quote = self.frame.kind == Kind::Cdata;
        self.value = Some(Pending { is_text, first_break: self.frame.before_value.ends_with('\n'), may_quote, close });
    }

    fn value(&mut self, input: &mut Input, output: &mut ReplyOutput) -> ParameterStep {
        let Some(pending) = &mut self.value else { return ParameterStep::More };
        if pending.first_break {
            match input.text.chars().next() {
                Some('\n') => input.skip(1),
                None if !input.ended => return ParameterStep::Wait,
                _ => {}
            }
            pending.first_break = false;
        }
        if pending.may_quote {
            if input.text.starts_with(CDATA) {
                input.skip(CDATA.len());
                pending.close.insert_str(0, "]]>");
            } else if !input.ended && CDATA.starts_with(&*input.text) {
                return ParameterStep::Wait;
            }
            pending.may_quote = false;
        }
        let close = pending.close.as_str();
        let has_break = self.frame.after_value.starts_with('\n');
        let without_break = |value: &str| value.strip_suffix('\n').filter(|_| has_break).unwrap_or(value).len();
        match input.text.find(close) {
            Some(at) => {
                let value = &input.text[..without_break(&input.text[..at])];
                let json = match (pending.is_text, self.frame.kind) {
                    (true, _) => escaped(value) + "\"",
                    (false, Kind::Nested(tag)) if value.contains(tag) => nested::to_json(value, tag),
                    (false, _) => to_json(value),
                };
                let length = at + close.len();
                output.arguments(&json);
                input.skip(length);
                self.value = None;
                ParameterStep::More
            }
            None => {
                let known = match (input.ended, pending.is_text) {
                    (true, _) => input.text.len(),
                    (false, true) => without_break(&input.text[..input.text.len() - input.held(&[close])]),
                    (false, false) => 0,
                };
                let value = &input.text[..known];
                output.arguments(&if pending.is_text { escaped(value) } else { value.to_string() });
                input.skip(known);
                ParameterStep::Wait
            }
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
        _ if serde_json::from_str::<IgnoredAny>(trimmed).is_ok() => trimmed.into(),
        _ => {
            let python = literals::to_json(trimmed).filter(|json| serde_json::from_str::<IgnoredAny>(json).is_ok());
            python.unwrap_or_else(|| Value::from(value).to_string())
        }
    }
}
