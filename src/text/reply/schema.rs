//! What a tool's schema says of its arguments.

use serde_json::{Value, json};

use super::Tool;
use crate::text::grammar::Grammar;

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

/// All arguments as one JSON object. A schema without a type means an object here.
pub(super) fn object(tool: &Tool) -> Grammar {
    let mut schema = tool.parameters.clone();
    match schema.as_object_mut() {
        Some(fields) if fields.contains_key("type") || fields.contains_key("$ref") || fields.contains_key("anyOf") => {}
        Some(fields) => drop(fields.insert("type".into(), "object".into())),
        None => schema = json!({"type": "object"}),
    }
    enforced(tool, schema)
}

/// One argument as JSON.
pub(super) fn value(tool: &Tool, schema: &Value) -> Grammar {
    let mut schema = schema.clone();
    // The schema may refer to the definitions of the whole.
    for name in ["$defs", "definitions"] {
        if let (Some(fields), Some(definitions)) = (schema.as_object_mut(), tool.parameters.get(name)) {
            fields.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    enforced(tool, schema)
}

fn enforced(tool: &Tool, schema: Value) -> Grammar {
    if tool.strict { Grammar::JsonSchema(schema) } else { Grammar::LooseSchema(schema) }
}
