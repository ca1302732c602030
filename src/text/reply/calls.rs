//! Grammars of replies with tags: where calls may stand, and what their arguments must be.

use serde_json::Value;

use super::format::{ArgumentForm, CallFormat, Dialect, Fields, Frame, Kind, Markup, Name, Place};
use super::schema::{self, only_text};
use super::{Calls, ReplyStart, Tool};
use crate::text::grammar::Grammar;
use crate::{Error, Result};

/// What the model thinks, if anything, and then `rest`.
pub(super) fn thoughts_then(markup: Markup, rest: Grammar, start: ReplyStart) -> Grammar {
    let Some(thoughts) = markup.thoughts else { return rest };
    let then =
        if thoughts.then.is_empty() { Grammar::Regex(r"\n{0,2}".into()) } else { Grammar::literal(thoughts.then) };
    let end = Grammar::sequence([Grammar::Until(thoughts.close.into()), then]);
    match start {
        ReplyStart::Thought => rest,
        ReplyStart::Reasoning => Grammar::sequence([end, rest]),
        ReplyStart::Answer => {
            let opened = [Grammar::Regex(r"\n?".into()), Grammar::literal(thoughts.open.trim_end()), end];
            Grammar::sequence([Grammar::sequence(opened).optional(), rest])
        }
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
    if format.place == Place::First {
        let text = Grammar::Regex(r"([^\s{\[<](?s:.*))?".into());
        return Ok(Grammar::Either(vec![alone(format, tools, calls)?, text]));
    }
    let open = format!("{}{}", section_open(format), format.opener);
    let (marker, in_section, close) = match &format.section {
        Some(section) => (section.marker(), calls, section.close),
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
    let count = || Grammar::Regex("[0-9]{1,4}".into());
    let mut end = "";
    let mut items = match &format.name {
        Name::Field(Fields { before, number, name: key, arguments }) => {
            let rest = format!("\"{key}\": {}, \"{arguments}\": ", Value::from(name.as_str()));
            match *number {
                "" => text(format!("{before}{rest}")),
                number => {
                    let before = Grammar::Literal(format!("{before}\"{number}\": \""));
                    vec![before, count(), Grammar::Literal(format!("\", {rest}"))]
                }
            }
        }
        Name::Key => text(format!("{}: ", Value::from(name.as_str()))),
        Name::Tag(before, after) => text(format!("{before}{name}{after}")),
        Name::Numbered(before, middle, after) => {
            vec![Grammar::Literal(format!("{before}{name}{middle}")), count(), Grammar::literal(after)]
        }
        Name::Line(end) => text(format!("{name}{end}")),
        Name::Before(separator) | Name::BeforeId(_, separator) => text(format!("{name}{separator}")),
        Name::AfterId(mark, separator) => {
            let id = Grammar::Regex("[0-9A-Za-z_-]{1,32}".into());
            vec![id, Grammar::Literal(format!("{mark}{name}{separator}"))]
        }
        Name::Fenced(separator, [open, close]) => {
            end = close;
            text(format!("function{separator}{name}{open}"))
        }
        Name::Id(separator) => {
            vec![Grammar::Literal(format!("functions.{name}:")), count(), Grammar::literal(separator)]
        }
    };
    match &format.arguments {
        ArgumentForm::Json => items.push(schema::object(tool)),
        ArgumentForm::Parameters(frame) => {
            items.extend(parameters(tool, frame)?);
            end = frame.end;
        }
        ArgumentForm::Literals(dialect) => {
            items.push(literals(tool, dialect)?);
            items.push(Grammar::Literal(dialect.end.into()));
        }
    }
    items.push(Grammar::Literal(format!("{end}{}", format.closer)));
    Ok(Grammar::Sequence(items))
}

/// The arguments of a tool by their names, and whether each must be there.
fn properties(tool: &Tool) -> impl Iterator<Item = (&String, &Value, bool)> {
    let required =
        |key: &str| tool.parameters["required"].as_array().is_some_and(|keys| keys.iter().any(|name| name == key));
    let properties = tool.parameters.get("properties").and_then(Value::as_object);
    properties.into_iter().flatten().map(move |(key, schema)| (key, schema, required(key)))
}

/// Arguments as literals between commas: those that are required, then others.
fn literals(tool: &Tool, dialect: &Dialect) -> Result<Grammar> {
    let literal = |key: &str, schema: &Value| {
        let value = match dialect.quote {
            quote if !quote.is_empty() && only_text(schema) => {
                Grammar::sequence([Grammar::literal(quote), value(tool, key, schema, quote)?])
            }
            _ => schema::value(tool, schema),
        };
        Ok::<_, Error>(Grammar::sequence([Grammar::Literal(format!("{key}{}", dialect.equals)), value]))
    };
    let (mut first, mut more) = (Vec::new(), Vec::new());
    for (key, schema, required) in properties(tool) {
        if required { &mut first } else { &mut more }.push(literal(key, schema)?);
    }
    let behind = |item: &Grammar| Grammar::sequence([Grammar::literal(dialect.between), item.clone()]);
    let others = |from: usize| more[from..].iter().map(|item| behind(item).optional());
    if let Some((one, rest)) = first.split_first() {
        return Ok(Grammar::Sequence(
            std::iter::once(one.clone()).chain(rest.iter().map(behind)).chain(others(0)).collect(),
        ));
    }
    let beginning = |(at, item): (usize, &Grammar)| {
        Grammar::Sequence(std::iter::once(item.clone()).chain(others(at + 1)).collect())
    };
    Ok(Grammar::Either(more.iter().enumerate().map(beginning).collect()).optional())
}

/// Arguments one by one, in the order of the schema. Those that are not required may be left out.
fn parameters(tool: &Tool, frame: &Frame) -> Result<Vec<Grammar>> {
    let parameter = |(key, schema, required): (&String, &Value, bool)| {
        let Frame { before_key, after_key, before_value, between, .. } = *frame;
        let said = match (frame.kind, only_text(schema)) {
            (Kind::Flag, is_text) => format!(" string=\"{is_text}\""),
            (Kind::Type, true) => " type=\"string\"".into(),
            (Kind::Type, false) => format!(" type=\"{}\"", json_type(schema)),
            (Kind::Unsaid | Kind::Cdata | Kind::Nested(_), _) => String::new(),
        };
        let before = Grammar::Literal(format!("{before_key}{key}{after_key}{said}{before_value}"));
        let value = value(tool, key, schema, &frame.close(key))?;
        let parameter = Grammar::sequence([before, value, Grammar::literal(between)]);
        Ok(if required { parameter } else { parameter.optional() })
    };
    properties(tool).map(parameter).collect()
}

/// The type of a value that is no text, as JSON names it; an object where the schema leaves it open.
fn json_type(schema: &Value) -> &str {
    match schema["type"].as_str() {
        Some("integer" | "number") => "number",
        Some(name @ ("array" | "boolean" | "null")) => name,
        _ => "object",
    }
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
