//! Grammars of replies: where calls may stand, and what their arguments must be.

use serde_json::{Map, Value, json};

use super::syntax::Format;
use super::xml::only_text;
use super::{Tool, ToolChoice};
use crate::text::grammar::Grammar;
use crate::{Error, Result};

/// See [`super::Syntax::grammar`].
pub(super) fn grammar(
    format: Option<Format>,
    thinks: bool,
    tools: &[Tool],
    choice: &ToolChoice,
    parallel: bool,
    in_reasoning: bool,
) -> Result<Option<Grammar>> {
    let forced = match choice {
        ToolChoice::None => return Ok(None),
        ToolChoice::Auto if format.is_none() || !tools.iter().any(|tool| tool.strict) => return Ok(None),
        ToolChoice::Auto => false,
        ToolChoice::Required | ToolChoice::Named(_) => true,
    };
    let Some(format) = format else {
        return Err(Error::Invalid("this model's chat template knows no tools: ask without 'tool_choice'".into()));
    };
    let (tools, parallel): (Vec<&Tool>, bool) = match choice {
        ToolChoice::Named(name) => (tools.iter().filter(|tool| tool.name == *name).collect(), false),
        _ => (tools.iter().collect(), parallel),
    };
    if tools.is_empty() {
        return Err(Error::Invalid(match choice {
            ToolChoice::Named(name) => format!("there is no tool '{name}' to choose: name one of 'tools'"),
            _ => "a tool must be called, but 'tools' is empty".into(),
        }));
    }
    let calls = match format {
        Format::Harmony => return harmony(&tools, forced, in_reasoning).map(Some),
        _ => Calls {
            format,
            one: Grammar::Either(tools.iter().map(|tool| call(format, tool)).collect::<Result<Vec<_>>>()?),
        },
    };
    let reply = if forced { calls.alone(parallel) } else { calls.among_text(parallel) };
    Ok(Some(after_reasoning(Some(format), thinks, reply, in_reasoning)))
}

/// See [`super::Syntax::after_reasoning`].
pub(super) fn after_reasoning(format: Option<Format>, thinks: bool, grammar: Grammar, in_reasoning: bool) -> Grammar {
    if format == Some(Format::Harmony) {
        let answer = sequence([Grammar::literal("<|channel|>final<|message|>"), grammar]);
        return harmony_analysis(answer, in_reasoning);
    }
    let rest = || Grammar::Sequence(vec![Grammar::Until("</think>".into()), Grammar::Regex(r"\n{0,2}".into())]);
    match (in_reasoning, thinks) {
        (true, _) => sequence([rest(), grammar]),
        (false, true) => {
            let opened = sequence([Grammar::Regex(r"\n?".into()), Grammar::literal("<think>"), rest()]);
            sequence([opened.optional(), grammar])
        }
        (false, false) => grammar,
    }
}

fn sequence<const N: usize>(items: [Grammar; N]) -> Grammar {
    Grammar::Sequence(items.into())
}

/// The calls of one reply.
struct Calls {
    format: Format,
    one: Grammar, // a call, without what opens it
}

impl Calls {
    /// What stands before a call, what before all of them, between two and after all.
    fn frame(&self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self.format {
            Format::Hermes | Format::Function | Format::Pairs | Format::Harmony => ("<tool_call>", "", "\n", ""),
            Format::DeepSeekFenced => ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
            Format::DeepSeek => ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
            Format::Kimi => ("<|tool_call_begin|>", "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
            Format::Invoke => ("<invoke name=", "<minimax:tool_call>", "\n", "\n</minimax:tool_call>"),
        }
    }

    /// One call or, if they may be `parallel`, several.
    fn some(&self, parallel: bool) -> Grammar {
        let (opener, _, between, _) = self.frame();
        let more = sequence([Grammar::Literal(format!("{between}{opener}")), self.one.clone()]);
        match parallel {
            true => sequence([self.one.clone(), Grammar::Repeated(Box::new(more))]),
            false => self.one.clone(),
        }
    }

    /// Nothing but calls.
    fn alone(&self, parallel: bool) -> Grammar {
        let (opener, section, _, end) = self.frame();
        let lead = if self.format == Format::Invoke { "\n" } else { "" };
        sequence([Grammar::Literal(format!("{section}{lead}{opener}")), self.some(parallel), Grammar::literal(end)])
    }

    /// Text, and calls where their marker comes up.
    fn among_text(&self, parallel: bool) -> Grammar {
        let (opener, section, _, end) = self.frame();
        let lead = if self.format == Format::Invoke { "\n" } else { "" };
        let (marker, rest) =
            if section.is_empty() { (opener, String::new()) } else { (section, format!("{lead}{opener}")) };
        let calls = sequence([
            Grammar::Until(marker.into()),
            Grammar::Literal(rest),
            self.some(parallel && !section.is_empty()),
            Grammar::literal(end),
        ]);
        let calls = if parallel && section.is_empty() { Grammar::Repeated(Box::new(calls)) } else { calls.optional() };
        sequence([calls, Grammar::Without(marker.into())])
    }
}

/// A call of `tool` behind the marker that opens a call.
fn call(format: Format, tool: &Tool) -> Result<Grammar> {
    let name = &tool.name;
    let around =
        |before: String, after: &str| sequence([Grammar::Literal(before), arguments(tool), Grammar::literal(after)]);
    Ok(match format {
        Format::Hermes => {
            around(format!("\n{{\"name\": {}, \"arguments\": ", Value::from(name.as_str())), "}\n</tool_call>")
        }
        Format::DeepSeekFenced => {
            around(format!("function<｜tool▁sep｜>{name}\n```json\n"), "\n```<｜tool▁call▁end｜>")
        }
        Format::DeepSeek => around(format!("{name}<｜tool▁sep｜>"), "<｜tool▁call▁end｜>"),
        Format::Kimi => sequence([
            Grammar::Literal(format!("functions.{name}:")),
            Grammar::Regex("[0-9]{1,4}".into()),
            around("<|tool_call_argument_begin|>".into(), "<|tool_call_end|>"),
        ]),
        Format::Harmony => around(format!("functions.{name} <|constrain|>json<|message|>"), ""),
        Format::Function => {
            let value = Frame { open: "<parameter=", named: ">\n", close: "\n</parameter>", after: "\n" };
            parameters(tool, &value, format!("\n<function={name}>\n"), "</function>\n</tool_call>")?
        }
        Format::Pairs => {
            let value =
                Frame { open: "<arg_key>", named: "</arg_key>\n<arg_value>", close: "</arg_value>", after: "\n" };
            parameters(tool, &value, format!("{name}\n"), "</tool_call>")?
        }
        Format::Invoke => {
            let value = Frame { open: "<parameter name=\"", named: "\">", close: "</parameter>", after: "\n" };
            parameters(tool, &value, format!("\"{name}\">\n"), "</invoke>")?
        }
    })
}

/// Arguments as JSON. A schema that says nothing about the type means an object here.
fn arguments(tool: &Tool) -> Grammar {
    let mut schema = tool.parameters.clone();
    match schema.as_object_mut() {
        Some(fields) if fields.contains_key("type") || fields.contains_key("$ref") || fields.contains_key("anyOf") => {}
        Some(fields) => drop(fields.insert("type".into(), "object".into())),
        None => schema = json!({"type": "object"}),
    }
    if tool.strict { Grammar::JsonSchema(schema) } else { Grammar::LooseSchema(schema) }
}

/// What stands around a parameter's key and value.
struct Frame {
    open: &'static str,
    named: &'static str,
    close: &'static str,
    after: &'static str,
}

/// Arguments one by one, in the order of the schema; those not required may be left out.
fn parameters(tool: &Tool, frame: &Frame, before: String, after: &str) -> Result<Grammar> {
    let none = Map::new();
    let properties = tool.parameters.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let required =
        |key: &str| tool.parameters["required"].as_array().is_some_and(|keys| keys.iter().any(|name| name == key));
    let mut items = vec![Grammar::Literal(before)];
    for (key, schema) in properties {
        let parameter = sequence([
            Grammar::Literal(format!("{}{key}{}", frame.open, frame.named)),
            value(tool, key, schema, frame.close)?,
            Grammar::literal(frame.after),
        ]);
        items.push(if required(key) { parameter } else { parameter.optional() });
    }
    items.push(Grammar::literal(after));
    Ok(Grammar::Sequence(items))
}

/// A value and the tag that ends it. Text stands there as it is, without quotes.
fn value(tool: &Tool, key: &str, schema: &Value, close: &str) -> Result<Grammar> {
    if !only_text(schema) {
        let schema = with_definitions(schema, &tool.parameters);
        let value = if tool.strict { Grammar::JsonSchema(schema) } else { Grammar::LooseSchema(schema) };
        return Ok(sequence([value, Grammar::literal(close)]));
    }
    let texts = |value: &Value| {
        value.as_array().map(|list| list.iter().filter_map(Value::as_str).map(String::from).collect::<Vec<_>>())
    };
    let choice = schema["const"].as_str().map(|text| vec![text.to_string()]).or_else(|| texts(&schema["enum"]));
    if let Some(choice) = choice.filter(|choice| !choice.is_empty()) {
        return Ok(sequence([Grammar::Choice(choice), Grammar::literal(close)]));
    }
    let unenforced = ["pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf", "not"];
    match unenforced.iter().find(|keyword| tool.strict && schema.get(**keyword).is_some()) {
        Some(keyword) => Err(Error::Invalid(format!(
            "'{keyword}' of the argument '{key}' of the tool '{}' cannot be enforced in the syntax of this model: \
             leave it out, or 'strict'",
            tool.name
        ))),
        None => Ok(Grammar::Until(close.into())),
    }
}

/// A schema taken out of `root`, with the definitions that it may refer to.
fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = schema.clone();
    for name in ["$defs", "definitions"] {
        if let (Some(fields), Some(definitions)) = (schema.as_object_mut(), root.get(name)) {
            fields.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    schema
}

/// Messages of gpt-oss. A call ends the reply, so there is one at most.
fn harmony(tools: &[&Tool], forced: bool, in_reasoning: bool) -> Result<Grammar> {
    let calls = tools.iter().map(|tool| call(Format::Harmony, tool)).collect::<Result<Vec<_>>>()?;
    let call = sequence([Grammar::literal("<|channel|>commentary to="), Grammar::Either(calls)]);
    if forced {
        return Ok(harmony_analysis(call, in_reasoning));
    }
    // A word to the user before the call, or the answer.
    let preamble = sequence([
        Grammar::literal("<|channel|>commentary<|message|>"),
        Grammar::Until("<|end|>".into()),
        Grammar::literal("<|start|>assistant"),
    ]);
    let answer = sequence([Grammar::literal("<|channel|>final<|message|>"), Grammar::Without("<|start|>".into())]);
    Ok(harmony_analysis(sequence([preamble.optional(), Grammar::Either(vec![call, answer])]), in_reasoning))
}

/// Analysis, if the model likes, and then `rest`.
fn harmony_analysis(rest: Grammar, in_reasoning: bool) -> Grammar {
    let body = || sequence([Grammar::Until("<|end|>".into()), Grammar::literal("<|start|>assistant")]);
    match in_reasoning {
        true => sequence([body(), rest]),
        false => sequence([sequence([Grammar::literal("<|channel|>analysis<|message|>"), body()]).optional(), rest]),
    }
}
