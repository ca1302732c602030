//! What the chat APIs have in common: messages of a body become those of a chat template, and a prompt.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::ask::{Ask, RequestOptions};
use super::error::ApiError;
use super::fields::RequestFields;
use super::format::read_format;
use super::text::encode_conversation;
use super::tools::{MAX_TOOL_BYTES, Tools, tool_json};
use crate::text::chat_template::RenderOptions;
use crate::text::grammar::Grammar;
use crate::text::model::TextModel;
use crate::text::reply::{ReplyStart, Tool, ToolChoice};

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum messages of one request.
const MAX_MESSAGES: usize = 10_000;

/// A conversation to continue.
#[derive(Default)]
pub(super) struct Conversation {
    /// Messages as chat templates expect them.
    pub(super) messages: Vec<Value>,
    /// Tools that the model may call.
    pub(super) tools: Tools,
    /// The format of the answer, and the field that gave it.
    pub(super) format: Option<(&'static str, Grammar)>,
    /// Additional variables of the chat template.
    pub(super) kwargs: Map<String, Value>,
    /// Whether the last message is the beginning of the answer.
    pub(super) continues: bool,
}

/// A conversation as token ids.
pub(super) struct Prompt {
    /// The token ids.
    pub(super) ids: Vec<u32>,
    /// Where the answer begins.
    pub(super) start: ReplyStart,
}

impl Conversation {
    /// Reads the fields of OpenAI's chat completions.
    pub(super) fn read(model: &TextModel, fields: &mut RequestFields) -> Result<Self> {
        let messages =
            fields.take("messages").ok_or_else(|| ApiError::bad_field("messages", "'messages' is missing"))?;
        let list = messages
            .as_array()
            .ok_or_else(|| ApiError::bad_field("messages", "'messages' must be a list of messages"))?;
        check_count("messages", list.len())?;
        let messages =
            list.iter().enumerate().map(|(i, message)| read_message(i, message)).collect::<Result<Vec<_>>>()?;
        let mut kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(name) =
            kwargs.keys().find(|name| ["messages", "add_generation_prompt", "tools"].contains(&name.as_str()))
        {
            return Err(ApiError::bad_field(
                "chat_template_kwargs",
                format!("'{name}' cannot be set in 'chat_template_kwargs'"),
            ));
        }
        if let Some(effort) = fields.string("reasoning_effort")? {
            if !model.has_template_variable("reasoning_effort") {
                return Err(ApiError::unsupported("reasoning_effort"));
            }
            kwargs.insert("reasoning_effort".into(), effort.into());
        }
        check_variables(&kwargs)?;
        let continues = fields.boolean("continue_final_message")?.unwrap_or(false);
        let ends_open = messages.last().is_some_and(|message| message["role"] == "assistant");
        if continues && !ends_open {
            let message = "'continue_final_message' requires that the last message is the assistant's";
            return Err(ApiError::bad_field("continue_final_message", message));
        }
        if fields.boolean("add_generation_prompt")? == Some(continues) {
            let message = "'add_generation_prompt' must be the opposite of 'continue_final_message'";
            return Err(ApiError::bad_field("add_generation_prompt", message));
        }
        Self { messages, tools: Tools::read(fields)?, format: read_format(fields)?, kwargs, continues }
            .check("messages")
    }

    /// Refuses a conversation, which the field `param` gave, with no messages or too many.
    pub(super) fn check(self, param: &str) -> Result<Self> {
        check_count(param, self.messages.len()).map(|()| self)
    }

    /// The conversation as token ids.
    ///
    /// Errors: the model's chat template refuses it, or has no tools.
    pub(super) fn prompt(&self, model: &TextModel) -> Result<Prompt> {
        let syntax = model.syntax();
        let tools = match self.tools.choice {
            ToolChoice::None => None,
            _ if self.tools.list.is_empty() => None,
            _ if !syntax.calls_tools() && !model.has_template_variable("tools") => {
                return Err(ApiError::bad_field(
                    "tools",
                    "This model's chat template does not support tools: leave out 'tools', or serve another model",
                ));
            }
            _ => Some(self.tools.list.iter().map(tool_json).collect()),
        };
        let mut messages = self.messages.clone();
        let begun = if self.continues { messages.pop() } else { None };
        model.adapt_history(&mut messages).map_err(|e| ApiError::of_field("messages", e))?;
        let options = RenderOptions { add_generation_prompt: true, tools, kwargs: self.kwargs.clone() };
        let mut text = model.render(&messages, &options).map_err(|e| ApiError::of_field("messages", e))?;
        let mut start = syntax.start(text.as_str());
        if let Some(begun) = begun {
            let part = |name: &str| begun[name].as_str().unwrap_or_default();
            let (reasoning, content) = (part("reasoning_content"), part("content"));
            if !content.is_empty() {
                start = ReplyStart::Answer;
            }
            model.push_answer(&mut text, reasoning);
            if !reasoning.is_empty() && !content.is_empty() {
                text.push(&syntax.after_thoughts());
            }
            model.push_answer(&mut text, content);
        }
        Ok(Prompt { ids: encode_conversation(model, "messages", &text)?, start })
    }

    /// Asks the engine to continue it.
    pub(super) fn ask(&self, model: &TextModel, options: RequestOptions) -> Result<Ask> {
        let Prompt { ids, start } = self.prompt(model)?;
        let syntax = model.syntax();
        let Tools { list, choice, calls } = &self.tools;
        let tools: &[Tool] = if matches!(choice, ToolChoice::None) { &[] } else { list };
        let form = match &self.format {
            Some((param, _)) if !tools.is_empty() => {
                let message = format!("'{param}' cannot be combined with tools: set 'tool_choice' to \"none\"");
                return Err(ApiError::bad_field(param, message));
            }
            Some((param, format)) => Some((*param, syntax.after_reasoning(format.clone(), start))),
            None if tools.is_empty() => None,
            None => {
                let grammar = syntax.grammar(tools, choice, *calls, start);
                grammar.map_err(|e| ApiError::of_field("tools", e))?.map(|grammar| ("tools", grammar))
            }
        };
        // All text of a model that neither thinks nor calls is content.
        let parses = syntax.thinks() || !tools.is_empty();
        let shared: Arc<[Tool]> = tools.into();
        let mut ask = options.ask(
            model,
            "messages",
            vec![ids],
            form.as_ref().map(|(param, grammar)| (*param, grammar)),
            || parses.then(|| syntax.parser(shared.clone(), start)),
        )?;
        ask.special_tokens = parses && syntax.needs_special_tokens();
        Ok(ask)
    }
}

/// Refuses no messages or too many.
pub(super) fn check_count(param: &str, messages: usize) -> Result<()> {
    match messages {
        1..=MAX_MESSAGES => Ok(()),
        0 => Err(ApiError::bad_field(param, format!("'{param}' is empty: it needs at least one message"))),
        _ => Err(ApiError::bad_field(param, format!("'{param}' has more than {MAX_MESSAGES} messages"))),
    }
}

/// Refuses template variables that are larger than tools may be.
fn check_variables(kwargs: &Map<String, Value>) -> Result<()> {
    let bytes: usize = kwargs.iter().map(|(name, value)| name.len() + value.to_string().len()).sum();
    match bytes <= MAX_TOOL_BYTES {
        true => Ok(()),
        false => {
            let message = format!("'chat_template_kwargs' is too large: the limit is {MAX_TOOL_BYTES} bytes");
            Err(ApiError::bad_field("chat_template_kwargs", message))
        }
    }
}

/// One message as chat templates expect it: with a known role, and its content as one string.
fn read_message(i: usize, message: &Value) -> Result<Value> {
    let place = |field: &str| format!("messages[{i}].{field}");
    let Some(message) = message.as_object() else {
        return Err(ApiError::bad_field(&format!("messages[{i}]"), format!("messages[{i}] must be an object")));
    };
    let role = match message.get("role").and_then(Value::as_str) {
        Some("developer") => "system", // OpenAI's newer name for it
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        Some("function") => return Err(ApiError::unsupported(&place("role"))),
        _ => {
            return Err(ApiError::bad_field(
                &place("role"),
                "a message's role must be system, developer, user, assistant or tool",
            ));
        }
    };
    let mut out = Map::from_iter([("role".to_string(), json!(role))]);
    let calls = match message.get("tool_calls") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(calls)) if role == "assistant" => {
            check_count(&place("tool_calls"), calls.len().max(1))?;
            calls
                .iter()
                .enumerate()
                .map(|(k, call)| read_call(&place(&format!("tool_calls[{k}]")), call))
                .collect::<Result<_>>()?
        }
        Some(_) => {
            return Err(ApiError::bad_field(
                &place("tool_calls"),
                "'tool_calls' must be a list, in a message of the assistant",
            ));
        }
    };
    for (name, value) in message.iter().filter(|(_, value)| !value.is_null()) {
        match name.as_str() {
            "role" | "content" | "refusal" | "annotations" | "tool_calls" | "audio" if name != "audio" => {}
            "name" | "tool_call_id" if value.is_string() => drop(out.insert(name.clone(), value.clone())),
            "reasoning_content" | "reasoning" if role == "assistant" && value.is_string() => {
                out.insert("reasoning_content".into(), value.clone());
            }
            _ => return Err(ApiError::unsupported(&place(name))),
        }
    }
    // Only a message of the assistant with calls may have no content.
    let content = match message.get("content") {
        None | Some(Value::Null) if !calls.is_empty() => String::new(),
        content => read_content(&place("content"), content)?,
    };
    out.insert("content".into(), content.into());
    if !calls.is_empty() {
        out.insert("tool_calls".into(), calls.into());
    }
    Ok(Value::Object(out))
}

/// A past call of the assistant.
fn read_call(place: &str, call: &Value) -> Result<Value> {
    let function = &call["function"];
    let (Some(name), Some(arguments)) = (function["name"].as_str(), function["arguments"].as_str()) else {
        return Err(ApiError::bad_field(
            place,
            format!("{place} must be a function with a name and arguments, as the server sent it"),
        ));
    };
    Ok(json!({"id": call["id"].as_str().unwrap_or_default(), "type": "function", "function": {"name": name,
            "arguments": arguments}}))
}

/// A string, or text parts joined.
pub(super) fn read_content(place: &str, content: Option<&Value>) -> Result<String> {
    let parts = match content {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        _ => return Err(ApiError::bad_field(place, format!("{place} must be a string or a list of text parts"))),
    };
    let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text" | "input_text" | "output_text"), Some(text)) => Ok(text.to_string()),
        (Some("text" | "input_text" | "output_text"), None) | (None, _) => {
            Err(ApiError::bad_field(place, format!("{place} has a part without text")))
        }
        (Some(kind), _) => Err(ApiError::not_text(place, kind)),
    };
    parts.iter().map(text).collect()
}
