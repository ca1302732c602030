//! Arguments given one by one between tags, made JSON by the types that the tool's schema gives them.

use serde_json::Value;

use super::format::{CallFormat, Frame};
use super::json::escaped;
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
}

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
                    let key = self.key(&after[..at]);
                    input.skip(open.len() + at + named.len());
                    self.begin(&key, output);
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

    fn key(&self, text: &str) -> String {
        let key = text.trim();
        match self.frame.after_key.trim_end() {
            "\"" => key.trim_matches(['"', '\'']).into(),
            after => key.strip_suffix(after).unwrap_or(key).trim().into(),
        }
    }

    fn begin(&mut self, key: &str, output: &mut ReplyOutput) {
        let is_text = output.tool(&self.tool).and_then(|tool| schema_of(tool, key)).is_some_and(only_text);
        let before = if self.count == 0 { "{" } else { ", " };
        let quote = if is_text { "\"" } else { "" };
        output.arguments(&format!("{before}\"{}\": {quote}", escaped(key)));
        self.count += 1;
        self.value = Some(Pending { is_text, first_break: self.frame.before_value.ends_with('\n') });
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
        let close = self.frame.after_value.trim_start();
        let has_break = close != self.frame.after_value;
        let without_break = |value: &str| value.strip_suffix('\n').filter(|_| has_break).unwrap_or(value).len();
        match input.text.find(close) {
            Some(at) => {
                let value = &input.text[..without_break(&input.text[..at])];
                let json = if pending.is_text { escaped(value) + "\"" } else { to_json(value) };
                output.arguments(&json);
                input.skip(at + close.len());
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
        _ if serde_json::from_str::<serde::de::IgnoredAny>(trimmed).is_ok() => trimmed.into(),
        _ => Value::from(value).to_string(),
    }
}
