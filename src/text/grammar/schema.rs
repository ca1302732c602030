//! JSON schemas that strangers send: bounded before they are compiled, and compiled to JSON that ends.

use llguidance::api::ParserLimits;
use serde_json::{Value, json};

use crate::{Error, Result};

/// Bytes of a schema, of a grammar, or of all choices.
pub(super) const MAX_BYTES: usize = 256 << 10;

/// How deep a schema may nest, well below what its compiler's stack holds.
const MAX_DEPTH: usize = 64;

/// Properties of one object. What optional ones cost grows with their square: about a second for as many as these.
const MAX_PROPERTIES: usize = 1000;

/// What may stand between two tokens of JSON: a space, or a line's end and its indentation. Without a bound a weak
/// model can write blanks forever.
const WHITESPACE: &str = r" |\r?\n(?: {0,40}|\t{0,10})";

/// What one grammar may cost: 40 MB of lexer states and, for a step, some 20 ms. Objects of thousands of optional
/// properties need long rows.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 20_000,
        max_items_in_row: 20_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// A schema that says of values what `schema` says of their type.
pub(super) fn type_only(schema: &Value) -> Value {
    match schema["type"].as_str() {
        Some(name @ ("object" | "array" | "string" | "integer" | "number" | "boolean" | "null")) => {
            json!({"type": name})
        }
        _ => json!({}),
    }
}

/// `schema` with the options it is compiled with.
///
/// Errors: `Error::Invalid` when it is too long, too deep or too wide.
pub(super) fn prepared(schema: &Value, loose: bool) -> Result<Value> {
    let (depth, properties) = extent(schema);
    if depth > MAX_DEPTH {
        return Err(Error::Invalid(format!("the JSON schema is nested too deeply: {MAX_DEPTH} levels are allowed")));
    }
    if properties > MAX_PROPERTIES {
        return Err(Error::Invalid(format!(
            "an object in the JSON schema has too many properties: {MAX_PROPERTIES} are allowed"
        )));
    }
    if schema.to_string().len() > MAX_BYTES {
        return Err(Error::Invalid(format!("the JSON schema is too long: {} KiB are allowed", MAX_BYTES >> 10)));
    }
    let mut schema = match schema {
        Value::Object(fields) => fields.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        _ => return Err(Error::Invalid("a JSON schema must be an object".into())),
    };
    schema.insert("x-guidance".into(), json!({"whitespace_pattern": WHITESPACE, "lenient": loose}));
    Ok(Value::Object(schema))
}

/// Levels of nesting and the largest object, without recursion: the value may come from anywhere.
fn extent(value: &Value) -> (usize, usize) {
    let (mut deepest, mut largest) = (0, 0);
    let mut open = vec![(value, 1)];
    while let Some((value, level)) = open.pop() {
        deepest = deepest.max(level);
        match value {
            Value::Array(items) => open.extend(items.iter().map(|item| (item, level + 1))),
            Value::Object(fields) => {
                largest = largest.max(fields.len());
                open.extend(fields.values().map(|field| (field, level + 1)));
            }
            _ => {}
        }
    }
    (deepest, largest)
}
