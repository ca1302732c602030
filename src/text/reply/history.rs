//! Past calls in the form that templates read. Clients send arguments as JSON text; most templates loop over an object.

use serde_json::Value;

/// The form that a template expects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct History {
    arguments_as_text: bool,
    content_may_be_null: bool,
}

impl History {
    pub(super) fn of(source: &str) -> Self {
        let joins =
            ["arguments'] +", "arguments']+", "+ tool['function']['arguments']", "+tool['function']['arguments']"];
        // A template that tests the type of arguments accepts both; one that only joins them to text needs text.
        let asks = ["arguments is string", "arguments'] is string", "arguments is mapping", "arguments'] is mapping"];
        let arguments_as_text =
            joins.iter().any(|join| source.contains(join)) && !asks.iter().any(|ask| source.contains(ask));
        let nulls =
            ["content'] is none", "content'] is not none", "content is none", "content is not none", "content == none"];
        Self { arguments_as_text, content_may_be_null: nulls.iter().any(|null| source.contains(null)) }
    }
}

/// Changes `messages` in place. Values of an unexpected form stay as they are.
pub(super) fn adapt(history: History, messages: &mut [Value]) {
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        if message.get("role").and_then(Value::as_str) == Some("assistant") {
            match message.get("content") {
                None | Some(Value::Null) if history.content_may_be_null => {
                    message.insert("content".into(), Value::Null)
                }
                None | Some(Value::Null) => message.insert("content".into(), "".into()),
                Some(_) => None,
            };
        }
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
                continue;
            };
            let adapted = match arguments {
                Value::String(text) if !history.arguments_as_text => {
                    let text = if text.trim().is_empty() { "{}" } else { text.as_str() };
                    serde_json::from_str(text).ok().filter(Value::is_object)
                }
                Value::Object(_) if history.arguments_as_text => Some(Value::from(arguments.to_string())),
                _ => None,
            };
            if let Some(adapted) = adapted {
                *arguments = adapted;
            }
        }
    }
}
