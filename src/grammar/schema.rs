//! JSON schemas that strangers send: bounded before they are compiled, and compiled to JSON that ends.

use llguidance::api::ParserLimits;
use serde_json::{Value, json};

use crate::{Error, Result};

/// Bytes of a schema, of a grammar, or of all choices.
pub(super) const MAX_BYTES: usize = 256 << 10;

/// How deep a schema may nest, well below what its compiler's stack holds.
const MAX_DEPTH: usize = 64;

/// What may stand between two tokens of JSON: a space, or a line's end and its indentation. Without a bound a weak model
/// can write blanks forever.
const WHITESPACE: &str = r" |\r?\n(?: {0,40}|\t{0,10})";

/// What one grammar may cost: about 20 ms to compile, 20 ms for the mask of a step and 40 MB of lexer states, at worst.
pub(super) fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 20_000, verbose_errors: false, ..ParserLimits::default() }
}

/// `schema` with the options it is compiled with.
///
/// Errors: `Error::Invalid` when it is too large or too deep.
pub(super) fn prepared(schema: &Value, loose: bool) -> Result<Value> {
    if depth(schema) > MAX_DEPTH {
        return Err(Error::Invalid(format!("the JSON schema is nested too deeply: {MAX_DEPTH} levels are allowed")));
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

/// Levels of nesting, without recursion: the value may come from anywhere.
fn depth(value: &Value) -> usize {
    let mut deepest = 0;
    let mut open = vec![(value, 1)];
    while let Some((value, level)) = open.pop() {
        deepest = deepest.max(level);
        match value {
            Value::Array(items) => open.extend(items.iter().map(|item| (item, level + 1))),
            Value::Object(fields) => open.extend(fields.values().map(|field| (field, level + 1))),
            _ => {}
        }
    }
    deepest
}
