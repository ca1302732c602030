//! Anthropic's `/v1/messages`, whole and as server-sent events, and `/v1/messages/count_tokens`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

use super::App;
use super::answer::{Answer, AnswerStep, Finish, Item, Items, Usage};
use super::ask::{Ask, RequestOptions, stops};
use super::body::understand;
use super::conversation::{Conversation, check_count, read_content};
use super::error::ApiError;
use super::events::{EventFormat, stream};
use super::fields::RequestFields;
use super::front::{Caller, new_id};
use super::steer::read_steer;
use super::tools::{Tools, check_tools, read_function};
use crate::engine::SamplingOverrides;
use crate::text::grammar::Grammar;
use crate::text::model::TextModel;
use crate::text::reply::{Calls, Tool, ToolChoice};

type Result<T> = std::result::Result<T, ApiError>;

/// Answers `/v1/messages`.
pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response> {
    let (ask, streams) = understand(&app, caller.client, body, read).await?;
    let name = app.model()?.engine().info().model.clone();
    let request_id = caller.request_id.clone();
    let mut answer = Answer::start(&app, caller, ask).await?;
    let mut shape = Messages { id: new_id("msg"), name, items: Items::default(), finish: Finish::Stop };
    if streams {
        let opening = shape.message(answer.usage(), None);
        return Ok(stream(answer, Streamed { shape, opening, request_id, at: None }));
    }
    while let Some(step) = answer.next().await {
        match step? {
            AnswerStep::Part(_, part, _) => drop(shape.items.add(part)),
            AnswerStep::End(_, finish, _) => shape.finish = finish,
        }
    }
    Ok(Json(shape.message(answer.usage(), Some(&answer))).into_response())
}

/// Answers `/v1/messages/count_tokens`.
pub(super) async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Value>> {
    let count = understand(&app, caller.client, body, |model, fields| {
        Ok(conversation(model, fields)?.prompt(model)?.ids.len())
    })
    .await?;
    Ok(Json(json!({"input_tokens": count})))
}

/// Reads the request, and whether to stream.
pub(super) fn read(model: &TextModel, fields: &mut RequestFields) -> Result<(Ask, bool)> {
    let max_tokens = fields.integer("max_tokens", 1)?;
    let sampling = SamplingOverrides {
        temperature: fields.number("temperature", 0.0..=2.0)?,
        top_p: fields.number("top_p", 1e-6..=1.0)?,
        top_k: fields.integer("top_k", 0)?,
        ..SamplingOverrides::default()
    };
    let options = RequestOptions {
        max_tokens: Some(max_tokens.ok_or_else(|| ApiError::bad_field("max_tokens", "'max_tokens' is missing"))?),
        sampling: sampling.over(model.sampling()),
        ignore_eos: false,
        stops: stops("stop_sequences", fields.take("stop_sequences"))?,
        n: 1,
        logprobs: None,
        steer: read_steer(model, fields)?,
    };
    let streams = fields.boolean("stream")?.unwrap_or(false);
    Ok((conversation(model, fields)?.ask(model, options)?, streams))
}

/// The conversation of a body: `system`, `messages`, `tools`, `tool_choice`, `thinking`.
fn conversation(model: &TextModel, fields: &mut RequestFields) -> Result<Conversation> {
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        messages.push(json!({"role": "system", "content": read_content("system", Some(&system))?}));
    }
    let list = fields.take("messages").ok_or_else(|| ApiError::bad_field("messages", "'messages' is missing"))?;
    let list =
        list.as_array().ok_or_else(|| ApiError::bad_field("messages", "'messages' must be a list of messages"))?;
    check_count("messages", list.len())?;
    for (i, message) in list.iter().enumerate() {
        read_message(&format!("messages[{i}]"), message, &mut messages)?;
    }
    let continues =
        messages.last().is_some_and(|message| message["role"] == "assistant" && message.get("tool_calls").is_none());
    let mut kwargs = thinking(model, fields.object("thinking")?)?;
    let format = read_output_config(model, fields.object("output_config")?.unwrap_or_default(), &mut kwargs)?;
    fields.take("cache_control"); // prefixes are kept without being asked
    Conversation { messages, tools: read_tools(fields)?, format, kwargs, continues }.check("messages")
}

/// The format of the answer, and the effort of reasoning.
fn read_output_config(
    model: &TextModel,
    mut config: Map<String, Value>,
    kwargs: &mut Map<String, Value>,
) -> Result<Option<(&'static str, Grammar)>> {
    const FORMAT: &str = "output_config.format";
    let mut take = |name: &str| config.remove(name).filter(|value| !value.is_null());
    let (format, effort) = (take("format"), take("effort"));
    if let Some(effort) = effort {
        if !model.has_template_variable("reasoning_effort") {
            return Err(ApiError::unsupported("output_config.effort"));
        }
        kwargs.insert("reasoning_effort".into(), effort);
    }
    if let Some(name) = config.keys().next() {
        return Err(ApiError::unsupported(&format!("output_config.{name}")));
    }
    match format {
        None => Ok(None),
        Some(mut format) if format["type"] == "json_schema" && format["schema"].is_object() => {
            Ok(Some((FORMAT, Grammar::JsonSchema(format["schema"].take()))))
        }
        Some(_) => {
            Err(ApiError::bad_field(FORMAT, "'output_config.format' must be of type \"json_schema\", with a schema"))
        }
    }
}

/// The template variables that switch reasoning on or off.
fn thinking(model: &TextModel, field: Option<Map<String, Value>>) -> Result<Map<String, Value>> {
    let Some(field) = field else { return Ok(Map::new()) };
    let on = match field.get("type").and_then(Value::as_str) {
        Some("enabled" | "adaptive") => true,
        Some("disabled") => false,
        _ => return Err(ApiError::bad_field("thinking", "'thinking' must be of type \"enabled\" or \"disabled\"")),
    };
    let switches: Vec<&str> =
        ["enable_thinking", "thinking"].into_iter().filter(|name| model.has_template_variable(name)).collect();
    match (model.syntax().thinks(), on) {
        (true, false) if switches.is_empty() => {
            Err(ApiError::bad_field("thinking", "This model always thinks: leave out 'thinking'"))
        }
        (false, true) => Err(ApiError::bad_field("thinking", "This model has no reasoning: leave out 'thinking'")),
        _ => Ok(switches.into_iter().map(|name| (name.to_string(), json!(on))).collect()),
    }
}

fn read_tools(fields: &mut RequestFields) -> Result<Tools> {
    let list = match fields.take("tools") {
        None => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(ApiError::bad_field("tools", "'tools' must be a list")),
    };
    let list = list.iter().enumerate().map(|(i, tool)| read_tool(&format!("tools[{i}]"), tool));
    let mut tools = Tools { list: check_tools(list.collect::<Result<_>>()?)?, ..Tools::default() };
    if let Some(choice) = fields.object("tool_choice")? {
        if choice.get("disable_parallel_tool_use") == Some(&Value::Bool(true)) {
            tools.calls = Calls::One;
        }
        tools.choice = match (choice.get("type").and_then(Value::as_str), choice.get("name").and_then(Value::as_str)) {
            (Some("auto"), _) => ToolChoice::Auto,
            (Some("any"), _) => ToolChoice::Required,
            (Some("none"), _) => ToolChoice::None,
            (Some("tool"), Some(name)) => ToolChoice::Named(name.into()),
            _ => {
                return Err(ApiError::bad_field(
                    "tool_choice",
                    "'tool_choice' must be of type auto, any, none, or tool with a name",
                ));
            }
        };
    }
    tools.check()
}

/// A tool of the client. Tools that Anthropic runs itself are refused.
fn read_tool(place: &str, tool: &Value) -> Result<Tool> {
    if tool.get("type").is_some_and(|kind| !kind.is_null() && kind != "custom") {
        return Err(ApiError::unsupported(&format!("{place}.type")));
    }
    let mut function = tool.as_object().cloned().unwrap_or_default();
    function.remove("type");
    function.remove("cache_control"); // prefixes are kept without being asked
    function.remove("eager_input_streaming"); // arguments are never held back
    for (name, neutral) in [("defer_loading", json!(false)), ("allowed_callers", json!(["direct"]))] {
        if function.get(name).is_some_and(|value| value.is_null() || *value == neutral) {
            function.remove(name);
        }
    }
    if let Some(schema) = function.remove("input_schema") {
        function.insert("parameters".into(), schema);
    }
    read_function(place, &Value::Object(function))
}

/// A message of the user or the assistant as one or more messages for templates, which have each tool result as its own
/// message.
fn read_message(place: &str, message: &Value, out: &mut Vec<Value>) -> Result<()> {
    let role = match message["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => {
            return Err(ApiError::bad_field(
                &format!("{place}.role"),
                format!("{place}.role must be user or assistant"),
            ));
        }
    };
    let blocks = match &message["content"] {
        Value::String(text) => vec![json!({"type": "text", "text": text})],
        Value::Array(blocks) => blocks.clone(),
        _ => {
            return Err(ApiError::bad_field(
                &format!("{place}.content"),
                format!("{place}.content must be a string or a list of blocks"),
            ));
        }
    };
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for (k, block) in blocks.iter().enumerate() {
        let place = format!("{place}.content[{k}]");
        let string = |name: &str| {
            block[name].as_str().ok_or_else(|| ApiError::bad_field(&place, format!("{place} has no '{name}'")))
        };
        match (block["type"].as_str(), role) {
            (Some("text"), _) => text += string("text")?,
            (Some("thinking"), "assistant") => reasoning += string("thinking")?,
            (Some("redacted_thinking"), "assistant") => {}
            (Some("tool_use"), "assistant") => {
                let function = json!({"name": string("name")?, "arguments": block["input"].to_string()});
                calls.push(json!({"id": string("id")?, "type": "function", "function": function}));
            }
            (Some("tool_result"), "user") => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => read_content(&format!("{place}.content"), Some(content))?,
                };
                out.push(json!({"role": "tool", "tool_call_id": string("tool_use_id")?, "content": content}));
            }
            (Some(kind), _) => return Err(ApiError::not_text(&place, kind)),
            (None, _) => return Err(ApiError::bad_field(&place, format!("{place} must be a block with a type"))),
        }
    }
    // A message of only tool results has no text.
    if text.is_empty() && calls.is_empty() && out.last().is_some_and(|last| last["role"] == "tool") && role == "user" {
        return Ok(());
    }
    let mut own = json!({"role": role, "content": text});
    if !reasoning.is_empty() {
        own["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        own["tool_calls"] = calls.into();
    }
    // Consecutive turns of one role are joined; templates would refuse or separate them.
    match out.last_mut() {
        Some(last) if last["role"] == role && role != "system" && last.get("tool_calls").is_none() => join(last, own),
        _ => out.push(own),
    }
    Ok(())
}

/// Appends a message to the one before it.
fn join(last: &mut Value, more: Value) {
    let Value::Object(more) = more else { return };
    for (name, value) in more {
        match (&mut last[&name], value) {
            (_, _) if name == "role" => {}
            (Value::String(before), Value::String(more)) if !before.is_empty() && !more.is_empty() => {
                *before += &format!("\n\n{more}")
            }
            (_, Value::String(more)) if more.is_empty() => {}
            (before, value) => *before = value,
        }
    }
}

/// One answer in Anthropic's format.
struct Messages {
    id: String,
    name: String,
    items: Items,
    finish: Finish,
}

impl Messages {
    /// The message object: empty at its start, or with the whole of `answer`.
    fn message(&self, used: Usage, answer: Option<&Answer>) -> Value {
        let content: Vec<Value> = if answer.is_some() { self.items.0.iter().map(block).collect() } else { Vec::new() };
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.name, "content": content,
            "stop_reason": answer.map(|answer| self.stop_reason(answer)),
            "stop_sequence": answer.and_then(Answer::stopped_at),
            "usage": usage(used),
        })
    }

    fn stop_reason(&self, answer: &Answer) -> &'static str {
        match self.finish {
            Finish::Length => "max_tokens",
            Finish::ToolCalls => "tool_use",
            Finish::Stop if answer.stopped_at().is_some() => "stop_sequence",
            Finish::Stop => "end_turn",
        }
    }
}

/// Usage as Anthropic counts it: cached tokens are not input.
fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    })
}

fn block(item: &Item) -> Value {
    match item {
        Item::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Item::Content(text) => json!({"type": "text", "text": text}),
        Item::Call { id, name, arguments } => {
            // The arguments may be cut off in the middle.
            let input =
                serde_json::from_str::<Value>(arguments).ok().filter(Value::is_object).unwrap_or_else(|| json!({}));
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

/// A message as a stream of blocks.
struct Streamed {
    shape: Messages,
    opening: Value,
    request_id: String,
    at: Option<usize>, // the block that is open
}

fn event(kind: &str, mut data: Value) -> Event {
    data["type"] = kind.into();
    Event::default().event(kind).data(data.to_string())
}

impl Streamed {
    fn end_block(&mut self) -> Option<Event> {
        self.at.take().map(|index| event("content_block_stop", json!({ "index": index })))
    }
}

impl EventFormat for Streamed {
    fn open(&mut self) -> Vec<Event> {
        vec![event("message_start", json!({"message": self.opening})), event("ping", json!({}))]
    }

    fn step(&mut self, step: AnswerStep, _: &Answer) -> Vec<Event> {
        let part = match step {
            AnswerStep::Part(_, part, _) => part,
            AnswerStep::End(_, finish, _) => {
                self.shape.finish = finish;
                return Vec::new();
            }
        };
        let begins = self.shape.items.begins(&part);
        let added = self.shape.items.add(part);
        let index = self.shape.items.0.len() - 1;
        let item = &self.shape.items.0[index];
        let (empty, delta) = match item {
            Item::Reasoning(_) => (
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                json!({"type": "thinking_delta", "thinking": added}),
            ),
            Item::Content(_) => (json!({"type": "text", "text": ""}), json!({"type": "text_delta", "text": added})),
            Item::Call { id, name, .. } => (
                json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
                json!({"type": "input_json_delta", "partial_json": added}),
            ),
        };
        let mut events = Vec::new();
        if begins {
            events.extend(self.end_block());
            self.at = Some(index);
            events.push(event("content_block_start", json!({"index": index, "content_block": empty})));
        }
        if !added.is_empty() {
            events.push(event("content_block_delta", json!({"index": index, "delta": delta})));
        }
        events
    }

    fn close(&mut self, answer: &Answer) -> Vec<Event> {
        let delta = json!({"stop_reason": self.shape.stop_reason(answer), "stop_sequence": answer.stopped_at()});
        let mut events: Vec<Event> = self.end_block().into_iter().collect();
        events.push(event("message_delta", json!({"delta": delta, "usage": usage(answer.usage())})));
        events.push(event("message_stop", json!({})));
        events
    }

    fn fail(&mut self, error: ApiError) -> Event {
        Event::default().event("error").data(error.to_anthropic_json(&self.request_id).to_string())
    }
}
