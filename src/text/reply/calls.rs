//! Grammars of replies with tags: where calls may stand, and what their arguments must be.

use serde_json::{Map, Value};

use super::format::{ArgumentForm, CallFormat, Frame, Markup, Name};
use super::schema::{self, only_text};
use super::{Calls, ReplyStart, Tool};
use crate::text::grammar::Grammar;
use crate::{Error, Result};

/// What the model thinks, if anything, and then `rest`.
pub(super) fn thoughts_then(markup: Markup, rest: Grammar, start: ReplyStart) -> Grammar {
    let end = || Grammar::sequence([Grammar::Until("</think>".into()), Grammar::Regex(r"\n{0,2}".into())]);
    match start {
        ReplyStart::Reasoning => Grammar::sequence([end(), rest]),
        ReplyStart::Answer if markup.thinks => {
            let opened = [Grammar::Regex(r"\n?".into()), Grammar::literal("<think>"), end()];
            Grammar::sequence([Grammar::sequence(opened).optional(), rest])
        }
        ReplyStart::Answer => rest,
    }
}

/// Nothing but calls of `tools`.
pub(super) fn alone(format: &CallFormat, tools: &[&Tool], calls: Calls) -> Result<Grammar> {
    let close = format.section.as_ref().map_or("", |section| section.close);
    let open = Grammar::Literal(format!("{}{}", section_open(format), format.opener));
    Ok(Grammar::sequence([open, some(format, tools, calls)?, Grammar::literal(close)]))
}

/// Text, and calls of `tools` where their marker comes up.
pub(super) fn among_text(format: &CallFormat, tools: &[&Tool], calls: Calls) -> Result<Grammar> {
    let open = format!("{}{}", section_open(format), format.opener);
    let (marker, in_section, close) = match &format.section {
        Some(section) => (section.open.trim_end(), calls, section.close),
        None => (format.opener, Calls::One, ""),
    };
    let found = Grammar::sequence([
        Grammar::Until(marker.into()),
        Grammar::literal(&open[marker.len()..]),
        some(format, tools, in_section)?,
        Grammar::literal(close),
    ]);
    let found = match (&format.section, calls) {
        (None, Calls::Several) => Grammar::Repeated(Box::new(found)),
        _ => found.optional(),
    };
    Ok(Grammar::sequence([found, Grammar::Without(marker.into())]))
}

fn section_open(format: &CallFormat) -> &'static str {
    format.section.as_ref().map_or("", |section| section.open)
}

/// One call or several, behind the opener of the first.
fn some(format: &CallFormat, tools: &[&Tool], calls: Calls) -> Result<Grammar> {
    let one = Grammar::Either(tools.iter().map(|tool| call(format, tool)).collect::<Result<Vec<_>>>()?);
    let more = Grammar::sequence([Grammar::Literal(format!("{}{}", format.between, format.opener)), one.clone()]);
    Ok(match calls {
        Calls::Several => Grammar::sequence([one, Grammar::Repeated(Box::new(more))]),
        Calls::One => one,
    })
}

/// A call of `tool` behind its opener.
fn call(format: &CallFormat, tool: &Tool) -> Result<Grammar> {
    let name = &tool.name;
    let text = |text: String| vec![Grammar::Literal(text)];
    let (mut items, tail) = match format.name {
        Name::Field(before) => {
            (text(format!("{before}{{\"name\": {}, \"arguments\": ", Value::from(name.as_str()))), "}")
        }
        Name::Tag(before, after) => (text(format!("{before}{name}{after}")), ""),
        Name::Line(end) => (text(format!("{name}{end}")), ""),
        Name::Before(separator) => (text(format!("{name}{separator}")), ""),
        Name::Fenced(separator, [open, close]) => (text(format!("function{separator}{name}{open}")), close),
        Name::Id(separator) => {
            let count = Grammar::Regex("[0-9]{1,4}".into());
            (vec![Grammar::Literal(format!("functions.{name}:")), count, Grammar::literal(separator)], "")
        }
    };
    let end = match &format.arguments {
        ArgumentForm::Json => {
            items.push(schema::object(tool));
            tail
        }
        ArgumentForm::Parameters(frame) => {
            items.extend(parameters(tool, frame)?);
            frame.end
        }
    };
    items.push(Grammar::Literal(format!("{end}{}", format.closer)));
    Ok(Grammar::Sequence(items))
}

/// Arguments one by one, in the order of the schema. Those that are not required may be left out.
fn parameters(tool: &Tool, frame: &Frame) -> Result<Vec<Grammar>> {
    let none = Map::new();
    let properties = tool.parameters.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let required =
        |key: &str| tool.parameters["required"].as_array().is_some_and(|keys| keys.iter().any(|name| name == key));
    let parameter = |(key, schema): (&String, &Value)| {
        let Frame { before_key, after_key, before_value, after_value, between, .. } = *frame;
        let before = Grammar::Literal(format!("{before_key}{key}{after_key}{before_value}"));
        let parameter = Grammar::sequence([before, value(tool, key, schema, after_value)?, Grammar::literal(between)]);
        Ok(if required(key) { parameter } else { parameter.optional() })
    };
    properties.iter().map(parameter).collect()
}

/// A value and the text that ends it. Text stands there as it is, without quotes.
fn value(tool: &Tool, key: &str, schema: &Value, close: &str) -> Result<Grammar> {
    if !only_text(schema) {
        return Ok(Grammar::sequence([schema::value(tool, schema), Grammar::literal(close)]));
    }
    let texts = |value: &Value| {
        value.as_array().map(|list| list.iter().filter_map(Value::as_str).map(String::from).collect::<Vec<_>>())
    };
    let choice = schema["const"].as_str().map(|text| vec![text.to_string()]).or_else(|| texts(&schema["enum"]));
    if let Some(choice) = choice.filter(|choice| !choice.is_empty()) {
        return Ok(Grammar::sequence([Grammar::Choice(choice), Grammar::literal(close)]));
    }
    let unenforced = ["pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf", "not"];
    match unenforced.iter().find(|keyword| tool.strict && schema.get(**keyword).is_some()) {
        Some(keyword) => Err(Error::Invalid(format!(
            "'{keyword}' of the argument '{key}' of the tool '{}' cannot be enforced in this model's syntax of calls: \
             leave it out, or 'strict'",
            tool.name
        ))),
        None => Ok(Grammar::Until(close.into())),
    }
}
