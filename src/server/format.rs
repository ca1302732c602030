//! The format of an answer: the fields that ask for JSON, a schema or another grammar.

use serde_json::Value;

use super::error::ApiError;
use super::fields::RequestFields;
use crate::text::grammar::Grammar;

type Result<T> = std::result::Result<T, ApiError>;

/// The grammar of `response_format`, or of one of the fields that other servers have, and the field's name.
pub(super) fn read_format(fields: &mut RequestFields) -> Result<Option<(&'static str, Grammar)>> {
    let mut found: Vec<(&'static str, Grammar)> = Vec::new();
    if let Some(format) = fields.object("response_format")?
        && let Some(grammar) = response_format("response_format", &Value::Object(format))?
    {
        found.push(("response_format", grammar));
    }
    if let Some(map) = fields.object("structured_outputs")? {
        for (name, value) in map.iter().filter(|(_, value)| !value.is_null()) {
            found.push(("structured_outputs", guide(&format!("structured_outputs.{name}"), name, value)?));
        }
    }
    for (field, name) in
        [("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "grammar")]
    {
        if let Some(value) = fields.take(field) {
            found.push((field, guide(field, name, &value)?));
        }
    }
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => Err(ApiError::bad_field(found[1].0, format!("'{}' and '{}' cannot be combined", found[0].0, found[1].0))),
    }
}

/// The grammar of OpenAI's `response_format`, which the field `place` gave. `None`: free text.
pub(super) fn response_format(place: &str, format: &Value) -> Result<Option<Grammar>> {
    let wrong = |message: String| ApiError::bad_field(place, message);
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Grammar::Json)),
        Some("json_schema") => match &format["json_schema"]["schema"] {
            schema @ (Value::Object(_) | Value::Bool(_)) => Ok(Some(Grammar::JsonSchema(schema.clone()))),
            _ => Err(wrong(format!("'{place}' must have a JSON schema"))),
        },
        Some(_) => Err(ApiError::unsupported(&format!("{place}.type"))),
        None => Err(wrong(format!("'{place}' must have a type: text, json_object or json_schema"))),
    }
}

fn guide(place: &str, name: &str, value: &Value) -> Result<Grammar> {
    let wrong = |what: &str| ApiError::bad_field(place, format!("'{place}' must be {what}"));
    let text = || value.as_str().map(String::from).ok_or_else(|| wrong("a string"));
    match name {
        "json" => match value {
            Value::Object(_) => Ok(Grammar::JsonSchema(value.clone())),
            Value::String(text) => {
                serde_json::from_str(text).map(Grammar::JsonSchema).map_err(|_| wrong("a JSON schema"))
            }
            _ => Err(wrong("a JSON schema")),
        },
        "regex" => Ok(Grammar::Regex(text()?)),
        "grammar" => Ok(Grammar::Lark(text()?)),
        "choice" => {
            let list = value
                .as_array()
                .filter(|list| (1..=1000).contains(&list.len()))
                .ok_or_else(|| wrong("a list of strings"))?;
            let strings =
                list.iter().map(|entry| entry.as_str().map(String::from).ok_or_else(|| wrong("a list of strings")));
            Ok(Grammar::Choice(strings.collect::<Result<_>>()?))
        }
        _ => Err(ApiError::unsupported(place)),
    }
}
