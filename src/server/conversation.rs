//! What the chat APIs have in common: messages, tools and the form of the answer, from a body to a prompt.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::ask::{Ask, Options};
use super::error::ApiError;
use super::fields::Fields;
use super::text::encode_conversation;
use crate::text::chat_template::RenderOptions;
use crate::text::grammar::Grammar;
use crate::text::model::TextModel;
use crate::text::reply::{Calls, Start, Tool, ToolChoice};

type Result<T> = std::result::Result<T, ApiError>;

/// Messages, and tools, of one request at most.
const MAX_MESSAGES: usize = 10_000;
const MAX_TOOLS: usize = 256;

/// Bytes of tool definitions at most: a grammar may be made of them.
const MAX_TOOL_BYTES: usize = 1 << 20;

/// A conversation to be continued.
#[derive(Default)]
pub(super) struct Conversation {
    /// As chat templates expect them.
    pub(super) messages: Vec<Value>,
    /// What the model may call.
    pub(super) tools: Tools,
    /// What the answer has to look like, and the field that says it.
    pub(super) format: Option<(&'static str, Grammar)>,
    /// Further variables of the chat template.
    pub(super) kwargs: Map<String, Value>,
    /// The last message is the beginning of the answer.
    pub(super) continues: bool,
}

/// Tools, and how they may be called.
pub(super) struct Tools {
    pub(super) list: Vec<Tool>,
    pub(super) choice: ToolChoice,
    /// How many calls one answer may make.
    pub(super) calls: Calls,
}

impl Default for Tools {
    fn default() -> Self {
        Self { list: Vec::new(), choice: ToolChoice::Auto, calls: Calls::Several }
    }
}

/// A conversation as the model reads it.
pub(super) struct Prompt {
    /// Token ids.
    pub(super) ids: Vec<u32>,
    /// Where the answer begins.
    pub(super) start: Start,
}

impl Conversation {
    /// Reads the fields of OpenAI's chat completions.
    pub(super) fn read(model: &TextModel, fields: &mut Fields) -> Result<Self> {
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
            let message = "'continue_final_message' wants the last message to be the assistant's";
            return Err(ApiError::bad_field("continue_final_message", message));
        }
        if fields.boolean("add_generation_prompt")? == Some(continues) {
            let message = "'add_generation_prompt' must be the opposite of 'continue_final_message'";
            return Err(ApiError::bad_field("add_generation_prompt", message));
        }
        Self { messages, tools: Tools::read(fields)?, format: read_format(fields)?, kwargs, continues }
            .check("messages")
    }

    /// Refuses a conversation, given by the field `param`, of no messages or too many.
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
            _ if !syntax.calls_tools() => {
                return Err(ApiError::bad_field(
                    "tools",
                    "This model's chat template has no tools: leave 'tools' away, or serve another model",
                ));
            }
            _ => Some(self.tools.list.iter().map(tool_json).collect()),
        };
        let mut messages = self.messages.clone();
        let begun = if self.continues { messages.pop() } else { None };
        syntax.adapt_history(&mut messages);
        let options = RenderOptions { add_generation_prompt: true, tools, kwargs: self.kwargs.clone() };
        let mut text = model.render(&messages, &options).map_err(|e| ApiError::of_field("messages", e))?;
        let mut start = syntax.start(text.as_str());
        if let Some(begun) = begun {
            let part = |name: &str| begun[name].as_str().unwrap_or_default();
            let (reasoning, content) = (part("reasoning_content"), part("content"));
            if !content.is_empty() {
                start = Start::Answer;
            }
            model.push_answer(&mut text, reasoning);
            if !reasoning.is_empty() && !content.is_empty() {
                text.push("\n</think>\n\n");
            }
            model.push_answer(&mut text, content);
        }
        Ok(Prompt { ids: encode_conversation(model, "messages", &text)?, start })
    }

    /// What to ask the engine for it.
    pub(super) fn ask(&self, model: &TextModel, options: Options) -> Result<Ask> {
        let Prompt { ids, start } = self.prompt(model)?;
        let syntax = model.syntax();
        let Tools { list, choice, calls } = &self.tools;
        let tools: &[Tool] = if matches!(choice, ToolChoice::None) { &[] } else { list };
        let form = match &self.format {
            Some((param, _)) if !tools.is_empty() => {
                let message = format!(
                    "'{param}' cannot be had together with tools that may be called: set 'tool_choice' to \"none\""
                );
                return Err(ApiError::bad_field(param, message));
            }
            Some((param, format)) => Some((*param, syntax.after_reasoning(format.clone(), start))),
            None if tools.is_empty() => None,
            None => {
                let grammar = syntax.grammar(tools, choice, *calls, start);
                grammar.map_err(|e| ApiError::of_field("tools", e))?.map(|grammar| ("tools", grammar))
            }
        };
        // Text of a model that neither thinks nor calls is content as it is.
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

/// Refuses no messages or too many, before they are looked at.
pub(super) fn check_count(param: &str, messages: usize) -> Result<()> {
    match messages {
        1..=MAX_MESSAGES => Ok(()),
        0 => Err(ApiError::bad_field(param, format!("'{param}' has no message"))),
        _ => Err(ApiError::bad_field(param, format!("'{param}' has more than {MAX_MESSAGES} messages"))),
    }
}

/// Refuses variables of the template that are larger than tools may be.
fn check_variables(kwargs: &Map<String, Value>) -> Result<()> {
    let bytes: usize = kwargs.iter().map(|(name, value)| name.len() + value.to_string().len()).sum();
    match bytes <= MAX_TOOL_BYTES {
        true => Ok(()),
        false => {
            let message = format!("'chat_template_kwargs' may have {MAX_TOOL_BYTES} bytes at most");
            Err(ApiError::bad_field("chat_template_kwargs", message))
        }
    }
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls` as OpenAI's chat completions have them.
    fn read(fields: &mut Fields) -> Result<Self> {
        let list = match fields.take("tools") {
            None => Vec::new(),
            Some(Value::Array(list)) => list,
            Some(_) => return Err(ApiError::bad_field("tools", "'tools' must be a list")),
        };
        let list = list.iter().enumerate().map(|(i, tool)| {
            let place = format!("tools[{i}]");
            match tool["type"].as_str() {
                Some("function") => read_function(&format!("{place}.function"), &tool["function"]),
                Some(_) => Err(ApiError::unsupported(&format!("{place}.type"))),
                None => Err(ApiError::bad_field(&place, format!("{place} must be an object of type \"function\""))),
            }
        });
        let list = check_tools(list.collect::<Result<Vec<_>>>()?)?;
        let choice = match fields.take("tool_choice") {
            None => ToolChoice::Auto,
            Some(Value::String(word)) => choice_by_word(&word)?,
            Some(choice) => match (choice["type"].as_str(), choice["function"]["name"].as_str()) {
                (Some("function"), Some(name)) => ToolChoice::Named(name.into()),
                _ => return Err(wrong_choice()),
            },
        };
        Self { list, choice, calls: read_calls(fields)? }.check()
    }

    /// Refuses a choice that the list does not have.
    pub(super) fn check(self) -> Result<Self> {
        let known = |name: &String| self.list.iter().any(|tool| &tool.name == name);
        match &self.choice {
            ToolChoice::Named(name) if !known(name) => Err(ApiError::bad_field(
                "tool_choice",
                format!("'tool_choice' names '{name}', which is not among the tools"),
            )),
            ToolChoice::Required if self.list.is_empty() => {
                Err(ApiError::bad_field("tool_choice", "'tool_choice' wants a call, and there are no tools"))
            }
            _ => Ok(self),
        }
    }
}

/// How many calls `parallel_tool_calls` allows.
pub(super) fn read_calls(fields: &mut Fields) -> Result<Calls> {
    Ok(match fields.boolean("parallel_tool_calls")? {
        Some(false) => Calls::One,
        _ => Calls::Several,
    })
}

/// `none`, `auto` or `required`.
pub(super) fn choice_by_word(word: &str) -> Result<ToolChoice> {
    match word {
        "none" => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        _ => Err(wrong_choice()),
    }
}

pub(super) fn wrong_choice() -> ApiError {
    ApiError::bad_field("tool_choice", "'tool_choice' must be \"none\", \"auto\", \"required\", or name a function")
}

/// Refuses too many tools, too large ones, and two of one name.
pub(super) fn check_tools(tools: Vec<Tool>) -> Result<Vec<Tool>> {
    let bytes: usize = tools.iter().map(|tool| tool_json(tool).to_string().len()).sum();
    if tools.len() > MAX_TOOLS || bytes > MAX_TOOL_BYTES {
        let message = format!("'tools' may have at most {MAX_TOOLS} entries and {MAX_TOOL_BYTES} bytes together");
        return Err(ApiError::bad_field("tools", message));
    }
    let mut names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(ApiError::bad_field("tools", format!("'tools' has two functions called '{}'", pair[0]))),
        None => Ok(tools),
    }
}

/// A tool as chat templates expect it.
fn tool_json(tool: &Tool) -> Value {
    let mut function = Map::from_iter([("name".to_string(), json!(tool.name))]);
    function.extend(tool.description.as_ref().map(|text| ("description".to_string(), json!(text))));
    function.insert("parameters".into(), tool.parameters.clone());
    json!({"type": "function", "function": function})
}

/// A function's definition: name, description, parameters, strict.
pub(super) fn read_function(place: &str, function: &Value) -> Result<Tool> {
    let wrong = |what: &str| ApiError::bad_field(place, format!("{place} {what}"));
    let Some(map) = function.as_object() else { return Err(wrong("must be an object with a name")) };
    if let Some(unknown) =
        map.keys().find(|name| !["type", "name", "description", "parameters", "strict"].contains(&name.as_str()))
    {
        return Err(ApiError::unsupported(&format!("{place}.{unknown}")));
    }
    let valid = |name: &&str| {
        (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
    };
    let name = map.get("name").and_then(Value::as_str).filter(valid);
    let name =
        name.ok_or_else(|| wrong("must have a name of at most 64 letters, digits, dashes, dots and underscores"))?;
    let parameters = match map.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(wrong("must have a JSON schema as its parameters")),
    };
    let description = map.get("description").and_then(Value::as_str).map(String::from);
    let strict = map.get("strict").and_then(Value::as_bool).unwrap_or(false);
    Ok(Tool { name: name.into(), description, parameters, strict })
}

/// One message as chat templates expect it: a role they know, and its content as one string.
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
    // Only what the assistant said by calling may be without words.
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

/// A call that the assistant made before.
fn read_call(place: &str, call: &Value) -> Result<Value> {
    let function = &call["function"];
    let (Some(name), Some(arguments)) = (function["name"].as_str(), function["arguments"].as_str()) else {
        return Err(ApiError::bad_field(
            place,
            format!("{place} must be a function with a name and arguments, as the server sent it"),
        ));
    };
    Ok(
        json!({"id": call["id"].as_str().unwrap_or_default(), "type": "function", "function": {"name": name, "arguments": arguments}}),
    )
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
        (Some(_), _) => Err(ApiError::unsupported(place)),
    };
    parts.iter().map(text).collect()
}

/// `response_format`, or one of the fields by which other servers have grammars, with its name.
pub(super) fn read_format(fields: &mut Fields) -> Result<Option<(&'static str, Grammar)>> {
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
        _ => Err(ApiError::bad_field(
            found[1].0,
            format!("'{}' and '{}' cannot be had together", found[0].0, found[1].0),
        )),
    }
}

/// OpenAI's `response_format`, given by the field `place`; `None`: free text.
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
