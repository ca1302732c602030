//! OpenAI's `/v1/responses`, whole and as server-sent events. The server stores nothing: clients send the whole
//! conversation.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

use super::answer::{Answer, AnswerStep, Finish, Item, Items, Usage};
use super::ask::{Ask, RequestOptions};
use super::body::understand;
use super::conversation::{Conversation, check_count, read_content};
use super::error::ApiError;
use super::events::{EventFormat, stream};
use super::fields::RequestFields;
use super::format::response_format;
use super::front::{Caller, new_id};
use super::tools::{Tools, check_tools, choice_by_word, read_calls, read_function, wrong_choice};
use super::{App, unix_seconds};
use crate::text::grammar::Grammar;
use crate::text::model::TextModel;
use crate::text::reply::{Calls, Part, ToolChoice};

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum bytes of fields that are only echoed to the client.
const MAX_KEPT_BYTES: usize = 64 << 10;

/// Answers `/v1/responses`.
pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response> {
    let (ask, echo, streams) = understand(&app, caller.client, body, read).await?;
    let name = app.model()?.engine().info().model.clone();
    let mut answer = Answer::start(&app, caller, ask).await?;
    let mut shape = Responses {
        id: new_id("resp"),
        created: unix_seconds(),
        name,
        echo,
        items: Items::default(),
        ids: Vec::new(),
        finish: None,
        events: 0,
    };
    if streams {
        return Ok(stream(answer, shape));
    }
    while let Some(step) = answer.next().await {
        match step? {
            AnswerStep::Part(_, part, _) => drop(shape.add(part)),
            AnswerStep::End(_, finish, _) => shape.finish = Some(finish),
        }
    }
    Ok(Json(shape.response(Some(answer.usage()))).into_response())
}

/// Reads the request, the fields that the response repeats, and whether to stream.
pub(super) fn read(model: &TextModel, fields: &mut RequestFields) -> Result<(Ask, String, bool)> {
    let streams = fields.boolean("stream")?.unwrap_or(false);
    fields.only("previous_response_id", &[])?;
    fields.only("conversation", &[])?;
    fields.only("prompt", &[])?;
    fields.only("background", &[json!(false)])?;
    fields.only("truncation", &[json!("disabled")])?;
    fields.only("max_tool_calls", &[])?;
    fields.only("n", &[json!(1)])?; // a response is one answer
    fields.only("top_logprobs", &[json!(0)])?;
    fields.only("include", &[json!([]), json!(["reasoning.encrypted_content"])])?;
    fields.only("stream_options", &[json!({}), json!({"include_obfuscation": false})])?;

    let max_output_tokens = fields.integer("max_output_tokens", 1)?;
    let mut options = RequestOptions::read(model, fields)?;
    options.max_tokens = max_output_tokens.or(options.max_tokens);
    let mut messages = Vec::new();
    let instructions = fields.string("instructions")?;
    messages.extend(instructions.as_ref().map(|text| json!({"role": "system", "content": text})));
    read_input(fields, &mut messages)?;
    let (text, format) = read_text(fields)?;
    let mut kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
    let reasoning = fields.object("reasoning")?.unwrap_or_default();
    if let Some(effort) = reasoning.get("effort").filter(|effort| !effort.is_null()) {
        if !model.has_template_variable("reasoning_effort") {
            return Err(ApiError::unsupported("reasoning.effort"));
        }
        kwargs.insert("reasoning_effort".into(), effort.clone());
    }
    let (tools, raw_tools, raw_choice) = read_tools(fields)?;
    let (metadata, user) =
        (fields.take("metadata").unwrap_or_else(|| json!({})), fields.take("user").unwrap_or_default());
    for (name, value) in [("metadata", &metadata), ("user", &user)] {
        if value.to_string().len() > MAX_KEPT_BYTES {
            return Err(ApiError::bad_field(
                name,
                format!("'{name}' is too large: the limit is {MAX_KEPT_BYTES} bytes"),
            ));
        }
    }
    let echo = Map::from_iter([
        ("instructions".to_string(), json!(instructions)),
        ("max_output_tokens".to_string(), json!(max_output_tokens)),
        ("temperature".to_string(), json!(options.sampling.temperature)),
        ("top_p".to_string(), json!(options.sampling.top_p)),
        ("parallel_tool_calls".to_string(), json!(tools.calls == Calls::Several)),
        ("tools".to_string(), raw_tools),
        ("tool_choice".to_string(), raw_choice),
        ("text".to_string(), text),
        ("reasoning".to_string(), json!({"effort": reasoning.get("effort"), "summary": null})),
        ("metadata".to_string(), metadata),
        ("user".to_string(), user),
    ]);
    let conversation = Conversation { messages, tools, format, kwargs, continues: false }.check("input")?;
    Ok((conversation.ask(model, options)?, Value::Object(echo).to_string(), streams))
}

/// `text`: the format of the answer.
fn read_text(fields: &mut RequestFields) -> Result<(Value, Option<(&'static str, Grammar)>)> {
    let mut text = fields.object("text")?.unwrap_or_default();
    let format = text.remove("format").filter(|format| !format.is_null()).unwrap_or_else(|| json!({"type": "text"}));
    if let Some((name, _)) = text.iter().find(|(_, value)| !value.is_null()) {
        return Err(ApiError::unsupported(&format!("text.{name}")));
    }
    // The schema is beside its name here, and in an object of its own in chat completions.
    let grammar = match format["type"] == "json_schema" {
        true => response_format(
            "text.format",
            &json!({"type": "json_schema", "json_schema": {"schema": format["schema"]}}),
        )?,
        false => response_format("text.format", &format)?,
    };
    Ok((json!({ "format": format }), grammar.map(|grammar| ("text.format", grammar))))
}

/// The tools, and `tools` and `tool_choice` as the client sent them.
fn read_tools(fields: &mut RequestFields) -> Result<(Tools, Value, Value)> {
    let raw_tools = fields.take("tools").unwrap_or_else(|| json!([]));
    let list = raw_tools.as_array().ok_or_else(|| ApiError::bad_field("tools", "'tools' must be a list"))?;
    let list = list.iter().enumerate().map(|(i, tool)| match tool["type"].as_str() {
        Some("function") => read_function(&format!("tools[{i}]"), tool),
        _ => Err(ApiError::unsupported(&format!("tools[{i}].type"))),
    });
    let list = check_tools(list.collect::<Result<_>>()?)?;
    let raw_choice = fields.take("tool_choice").unwrap_or_else(|| json!("auto"));
    let choice = match (&raw_choice, raw_choice["type"].as_str(), raw_choice["name"].as_str()) {
        (Value::String(word), ..) => choice_by_word(word)?,
        (_, Some("function"), Some(name)) => ToolChoice::Named(name.into()),
        _ => return Err(wrong_choice()),
    };
    Ok((Tools { list, choice, calls: read_calls(fields)? }.check()?, raw_tools, raw_choice))
}

/// `input`: a text, or the items of a conversation, including those of the model.
fn read_input(fields: &mut RequestFields, messages: &mut Vec<Value>) -> Result<()> {
    let items = match fields.take("input") {
        Some(Value::String(text)) => {
            messages.push(json!({"role": "user", "content": text}));
            return Ok(());
        }
        Some(Value::Array(items)) => items,
        _ => return Err(ApiError::bad_field("input", "'input' must be a text or a list of items")),
    };
    check_count("input", items.len())?;
    for (i, item) in items.iter().enumerate() {
        let place = format!("input[{i}]");
        let string = |name: &str| {
            item[name].as_str().ok_or_else(|| ApiError::bad_field(&place, format!("{place} has no '{name}'")))
        };
        match item["type"].as_str() {
            None | Some("message") => {
                let role = match string("role")? {
                    "developer" => "system",
                    role @ ("user" | "system" | "assistant") => role,
                    _ => {
                        return Err(ApiError::bad_field(
                            &place,
                            format!("{place}.role must be user, system, developer or assistant"),
                        ));
                    }
                };
                let content = read_content(&format!("{place}.content"), item.get("content"))?;
                match role {
                    "assistant" => assistant(messages)["content"] = content.into(),
                    role => messages.push(json!({"role": role, "content": content})),
                }
            }
            Some("reasoning") => {
                let parts = item["content"].as_array().into_iter().flatten();
                let text: String = parts.filter_map(|part| part["text"].as_str()).collect();
                if !text.is_empty() {
                    messages.push(json!({"role": "assistant", "content": "", "reasoning_content": text}));
                }
            }
            Some("function_call") => {
                let function = json!({"name": string("name")?, "arguments": string("arguments")?});
                let call = json!({"id": string("call_id")?, "type": "function", "function": function});
                match &mut assistant(messages)["tool_calls"] {
                    Value::Array(calls) => calls.push(call),
                    none => *none = json!([call]),
                }
            }
            Some("function_call_output") => {
                let content = read_content(&format!("{place}.output"), item.get("output"))?;
                messages.push(json!({"role": "tool", "tool_call_id": string("call_id")?, "content": content}));
            }
            Some(_) => return Err(ApiError::unsupported(&format!("{place}.type"))),
        }
    }
    Ok(())
}

/// The message that an item of the assistant belongs to: the last one if it is the assistant's, else a new one.
fn assistant(messages: &mut Vec<Value>) -> &mut Value {
    if messages.last().is_none_or(|last| last["role"] != "assistant") {
        messages.push(json!({"role": "assistant", "content": ""}));
    }
    messages.last_mut().expect("just made sure")
}

/// One answer in this API's format.
struct Responses {
    id: String,
    created: u64,
    name: String,
    echo: String, // as JSON: its values would take many times as much until the answer ends
    items: Items,
    ids: Vec<String>, // of the items
    finish: Option<Finish>,
    events: usize,
}

impl Responses {
    /// Adds a part. Returns the text that it adds to the last item.
    fn add(&mut self, part: Part) -> String {
        if self.items.begins(&part) {
            self.ids.push(new_id(match &part {
                Part::Reasoning(_) => "rs",
                Part::Call { .. } => "fc",
                _ => "msg",
            }));
        }
        self.items.add(part)
    }

    /// The response object. `used`: the answer has ended.
    fn response(&self, used: Option<Usage>) -> Value {
        let cut = self.finish == Some(Finish::Length);
        let status = match used {
            None => "in_progress",
            Some(_) if cut => "incomplete",
            Some(_) => "completed",
        };
        let last = self.items.0.len().wrapping_sub(1);
        let output = (0..self.items.0.len()).map(|i| self.item(i, if i == last { status } else { "completed" }));
        let mut object = Map::from_iter([
            ("id".to_string(), json!(self.id)),
            ("object".to_string(), json!("response")),
            ("created_at".to_string(), json!(self.created)),
            ("status".to_string(), json!(status)),
            ("error".to_string(), Value::Null),
            (
                "incomplete_details".to_string(),
                if cut && used.is_some() { json!({"reason": "max_output_tokens"}) } else { Value::Null },
            ),
            ("model".to_string(), json!(self.name)),
            ("output".to_string(), output.collect()),
            ("previous_response_id".to_string(), Value::Null),
            ("store".to_string(), json!(false)),
            ("truncation".to_string(), json!("disabled")),
            ("usage".to_string(), used.map_or(Value::Null, usage)),
        ]);
        object.extend(serde_json::from_str::<Map<String, Value>>(&self.echo).unwrap_or_default());
        Value::Object(object)
    }

    fn item(&self, i: usize, status: &str) -> Value {
        let id = &self.ids[i];
        match &self.items.0[i] {
            Item::Reasoning(text) => {
                json!({"type": "reasoning", "id": id, "status": status, "summary": [],
                    "content": [{"type": "reasoning_text", "text": text}]})
            }
            Item::Content(text) => {
                json!({"type": "message", "id": id, "status": status, "role": "assistant",
                    "content": [text_part(text)]})
            }
            Item::Call { id: call_id, name, arguments } => {
                json!({"type": "function_call", "id": id, "status": status, "call_id": call_id, "name": name,
                    "arguments": arguments})
            }
        }
    }

    fn event(&mut self, kind: &str, mut data: Value) -> Event {
        data["type"] = kind.into();
        data["sequence_number"] = self.events.into();
        self.events += 1;
        Event::default().event(kind).data(data.to_string())
    }

    /// The last item, complete.
    fn end_item(&mut self) -> Vec<Event> {
        let Some(i) = self.items.0.len().checked_sub(1) else { return Vec::new() };
        let status = if self.finish == Some(Finish::Length) { "incomplete" } else { "completed" };
        let (item, id) = (self.item(i, status), self.ids[i].clone());
        let mut events = match self.items.0[i].clone() {
            Item::Reasoning(text) => {
                vec![self.event(
                    "response.reasoning_text.done",
                    json!({"item_id": id, "output_index": i, "content_index": 0, "text": text}),
                )]
            }
            Item::Content(text) => {
                let done = json!({"item_id": id, "output_index": i, "content_index": 0, "text": text, "logprobs": []});
                let part = json!({"item_id": id, "output_index": i, "content_index": 0, "part": text_part(&text)});
                vec![self.event("response.output_text.done", done), self.event("response.content_part.done", part)]
            }
            Item::Call { name, arguments, .. } => {
                let done = json!({"item_id": id, "output_index": i, "name": name, "arguments": arguments});
                vec![self.event("response.function_call_arguments.done", done)]
            }
        };
        events.push(self.event("response.output_item.done", json!({"output_index": i, "item": item})));
        events
    }

    /// The last item, still empty.
    fn begin_item(&mut self, i: usize) -> Vec<Event> {
        let id = self.ids[i].clone();
        let mut item = self.item(i, "in_progress");
        let is_text = item["type"] == "message";
        match item["type"].as_str() {
            Some("function_call") => item["arguments"] = "".into(),
            _ => item["content"] = json!([]),
        }
        let mut events = vec![self.event("response.output_item.added", json!({"output_index": i, "item": item}))];
        if is_text {
            let part = json!({"item_id": id, "output_index": i, "content_index": 0, "part": text_part("")});
            events.push(self.event("response.content_part.added", part));
        }
        events
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

impl EventFormat for Responses {
    fn open(&mut self) -> Vec<Event> {
        let response = self.response(None);
        vec![
            self.event("response.created", json!({ "response": response })),
            self.event("response.in_progress", json!({ "response": response })),
        ]
    }

    fn step(&mut self, step: AnswerStep, _: &Answer) -> Vec<Event> {
        let part = match step {
            AnswerStep::Part(_, part, _) => part,
            AnswerStep::End(_, finish, _) => {
                self.finish = Some(finish);
                return self.end_item();
            }
        };
        let mut events = Vec::new();
        let begins = self.items.begins(&part);
        if begins {
            events.extend(self.end_item());
        }
        let added = self.add(part);
        let i = self.items.0.len() - 1;
        if begins {
            events.extend(self.begin_item(i));
        }
        if !added.is_empty() {
            let (kind, mut delta) = match &self.items.0[i] {
                Item::Reasoning(_) => ("response.reasoning_text.delta", json!({"content_index": 0})),
                Item::Content(_) => ("response.output_text.delta", json!({"content_index": 0, "logprobs": []})),
                Item::Call { .. } => ("response.function_call_arguments.delta", json!({})),
            };
            delta["item_id"] = self.ids[i].clone().into();
            delta["output_index"] = i.into();
            delta["delta"] = added.into();
            events.push(self.event(kind, delta));
        }
        events
    }

    fn close(&mut self, answer: &Answer) -> Vec<Event> {
        let response = self.response(Some(answer.usage()));
        let kind = if self.finish == Some(Finish::Length) { "response.incomplete" } else { "response.completed" };
        vec![self.event(kind, json!({ "response": response }))]
    }

    fn fail(&mut self, error: ApiError) -> Event {
        let mut response = self.response(None);
        response["status"] = "failed".into();
        response["error"] = json!({"code": "server_error", "message": error.to_json()["error"]["message"]});
        self.event("response.failed", json!({ "response": response }))
    }
}
