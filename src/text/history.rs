//! Past turns in the form that a chat template reads.
//!
//! Clients send arguments of calls as JSON text, ids of any length, and null beside calls. Some templates print text as
//! JSON a second time, others join arguments to text; some refuse long ids; some print null as `None`, others look for
//! it. Which form a template reads is found by rendering a call in each of them.

use std::cmp::Reverse;

use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::text::chat_template::{ChatTemplate, RenderOptions};
use crate::{Error, Result};

/// The form of past turns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct History {
    arguments: Arguments,
    ids: Ids,
    no_content: NoContent,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Arguments {
    Object,
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ids {
    Any,
    /// Nine letters and digits: Mistral.
    Nine,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum NoContent {
    Null,
    Empty,
}

/// How well a template renders a call: what stands first counts most.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Fit {
    renders: bool,
    has_call: bool,
    is_plain: bool,
    fewest_words: Reverse<usize>, // for nothing
}

/// A key that no template has.
const KEY: &str = "probed_key";

impl History {
    /// The form in which `template` renders a call best: the first of equals.
    ///
    /// Errors: as [`ChatTemplate::render`], but for a refusal.
    pub fn of(template: &ChatTemplate) -> Result<Self> {
        let mut best = None;
        for ids in [Ids::Any, Ids::Nine] {
            for arguments in [Arguments::Object, Arguments::Text] {
                for no_content in [NoContent::Null, NoContent::Empty] {
                    let history = Self { arguments, ids, no_content };
                    let fit = history.fit(template)?;
                    if best.is_none_or(|(most, _)| fit > most) {
                        best = Some((fit, history));
                    }
                }
            }
        }
        Ok(best.expect("the loops run").1)
    }

    /// How well `template` renders a call in this form.
    fn fit(self, template: &ChatTemplate) -> Result<Fit> {
        let id = "call_0123456789abcdefghijklmn";
        let function = json!({"name": "probe", "arguments": json!({KEY: "\"x"}).to_string()});
        let mut messages = [
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": id, "type": "function", "function": function}]}),
            json!({"role": "tool", "tool_call_id": id, "name": "probe", "content": "x"}),
        ];
        self.adapt(&mut messages);
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        match template.render(&messages, &options) {
            Ok(text) => Ok(Fit {
                renders: true,
                has_call: text.contains(KEY),
                // Neither encoded twice nor printed as Python does.
                is_plain: ![format!("\\\"{KEY}"), format!("'{KEY}'")].iter().any(|form| text.contains(form)),
                fewest_words: Reverse(["None", "null"].iter().map(|word| text.matches(word).count()).sum()),
            }),
            Err(Error::Invalid(_)) => Ok(Fit::default()),
            Err(e) => Err(e),
        }
    }

    /// Changes `messages` in place. Values of an unexpected form stay as they are.
    pub fn adapt(self, messages: &mut [Value]) {
        for message in messages.iter_mut().filter_map(Value::as_object_mut) {
            self.adapt_content(message);
            if let Some(id) = message.get_mut("tool_call_id") {
                self.adapt_id(id);
            }
            for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                if let Some(id) = call.get_mut("id") {
                    self.adapt_id(id);
                }
                if let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) {
                    self.adapt_arguments(arguments);
                }
            }
        }
    }

    fn adapt_content(self, message: &mut Map<String, Value>) {
        let calls = message.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
        let is_empty = match message.get("content") {
            None | Some(Value::Null) => true,
            Some(content) => calls && content == "",
        };
        if is_empty && message.get("role").is_some_and(|role| role == "assistant") {
            let content = if self.no_content == NoContent::Null { Value::Null } else { "".into() };
            message.insert("content".into(), content);
        }
    }

    fn adapt_arguments(self, arguments: &mut Value) {
        let adapted = match arguments {
            Value::String(text) if self.arguments == Arguments::Object => {
                let text = if text.trim().is_empty() { "{}" } else { text.as_str() };
                serde_json::from_str(text).ok().filter(Value::is_object)
            }
            Value::Object(_) if self.arguments == Arguments::Text => Some(Value::from(arguments.to_string())),
            _ => None,
        };
        if let Some(adapted) = adapted {
            *arguments = adapted;
        }
    }

    fn adapt_id(self, id: &mut Value) {
        let Some(text) = id.as_str().filter(|_| self.ids == Ids::Nine) else { return };
        if text.len() != 9 || !text.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            *id = format!("{:09}", xxh3_64(text.as_bytes()) % 1_000_000_000).into();
        }
    }
}
