//! Untrusted JSON schemas: bounded before they are compiled, and compiled so that their JSON ends.

use llguidance::api::ParserLimits;
use serde_json::{Value, json};

use crate::{Error, Result};

/// Maximum bytes of a schema, of a grammar, or of all choices.
pub(super) const MAX_BYTES: usize = 256 << 10;

/// Maximum nesting of a schema, well below what its compiler's stack holds.
const MAX_DEPTH: usize = 64;

/// Maximum properties of one object. The cost of optional ones is quadratic: about a second at this number.
const MAX_PROPERTIES: usize = 1000;

/// White space between two tokens of JSON: a space, or a line break and indentation. Without a bound a weak model can
/// write blanks forever.
const WHITESPACE: &str = r" |\r?\n(?: {0,40}|\t{0,10})";

/// Maximum cost of a grammar: 40 MB of lexer states and about 20 ms per step. Objects with thousands of optional
/// properties need long rows.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 20_000,
        max_items_in_row: 20_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// A schema with only the type that `schema` has.
pub(super) fn type_only(schema: &Value) -> Value {
    match schema["type"].as_str() {
        Some(name @ ("object" | "array" | "string" | "integer" | "number" | "boolean" | "null")) => {
            json!({"type": name})
        }
        _ => json!({}),
    }
}

/// `schema` with the options for its compiler.
///
/// Errors: `Error::Invalid` when it is too long, too deep or too wide.
pub(super) fn prepared(schema: &Value, loose: bool) -> Result<Value> {
    let (depth, properties) = extent(schema);
    if depth > MAX_DEPTH {
        return Err(Error::Invalid(format!("the JSON schema is nested too deeply: the limit is {MAX_DEPTH} levels")));
    }
    if properties > MAX_PROPERTIES {
        return Err(Error::Invalid(format!(
            "an object in the JSON schema has too many properties: the limit is {MAX_PROPERTIES}"
        )));
    }
    if schema.to_string().len() > MAX_BYTES {
        return Err(Error::Invalid(format!("the JSON schema is too long: the limit is {} KiB", MAX_BYTES >> 10)));
    }
    let mut schema = match schema {
        Value::Object(fields) => fields.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        _ => return Err(Error::Invalid("a JSON schema must be an object".into())),
    };
    schema.insert("x-guidance".into(), json!({"whitespace_pattern": WHITESPACE, "lenient": loose}));
    Ok(Value::Object(schema))
}

/// The levels of nesting and the size of the largest object, computed without recursion because the value is untrusted.
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
