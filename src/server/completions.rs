//! `/v1/chat/completions` and `/v1/completions`, whole and as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use tokio_stream::Stream;

use super::error::ApiError;
use super::fields::Fields;
use super::{App, unix_seconds};
use crate::chat_template::RenderOptions;
use crate::engine::{FinishReason, Request, RequestStats};
use crate::text_stream::{Delta, TextStream};

type Result<T> = std::result::Result<T, ApiError>;

/// Stop strings of a request at most, and bytes of each: matching costs their product for every token.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;

/// Silence on a stream after which a comment is sent, so that proxies do not give up on a long prompt.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Answers `/v1/chat/completions`.
pub(super) async fn chat(State(app): State<Arc<App>>, body: std::result::Result<Bytes, BytesRejection>) -> Result<Response> {
    respond(app, body, Kind::Chat).await
}

/// Answers `/v1/completions`.
pub(super) async fn text(State(app): State<Arc<App>>, body: std::result::Result<Bytes, BytesRejection>) -> Result<Response> {
    respond(app, body, Kind::Text).await
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Chat,
    Text,
}

/// A body, understood: what to ask the engine, and how to answer.
struct Ask {
    request: Request,
    stops: Vec<String>,
    stream: bool,
    include_usage: bool,
}

async fn respond(app: Arc<App>, body: std::result::Result<Bytes, BytesRejection>, kind: Kind) -> Result<Response> {
    let body = body.map_err(|rejection| ApiError::body(rejection.status(), rejection.body_text()))?;
    // Tokenizing a long prompt takes long enough to hold up everyone else on an async thread.
    let asked = app.clone();
    let ask = tokio::task::spawn_blocking(move || parse(&asked, &body, kind)).await.map_err(|_| ApiError::internal())??;

    let limit = app.model.engine().info().max_context;
    if ask.request.prompt.len() >= limit {
        let message =
            format!("This model's context holds {limit} tokens, answer included; the prompt has {} tokens", ask.request.prompt.len());
        return Err(ApiError::context_length(message, if kind == Kind::Chat { "messages" } else { "prompt" }));
    }
    let shape = Shape::new(kind, app.name(), ask.include_usage);
    let answer = app.model.complete(ask.request, ask.stops)?;
    if ask.stream {
        return Ok(Sse::new(EventStream::new(answer, shape)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response());
    }
    whole(answer, &shape).await
}

/// Waits for the end. When the client goes away, this future and with it the request are dropped.
async fn whole(mut answer: TextStream, shape: &Shape) -> Result<Response> {
    let mut text = String::new();
    while let Some(step) = answer.next().await {
        match step? {
            Delta::Text(piece) => text += &piece,
            Delta::End(reason, stats) => return Ok(Json(shape.whole(&text, reason, &stats)).into_response()),
        }
    }
    Err(ApiError::internal())
}

fn parse(app: &App, body: &[u8], kind: Kind) -> Result<Ask> {
    let mut fields = Fields::parse(body)?;
    if let Some(name) = fields.string("model")? {
        app.check_model(&name)?;
    }
    let prompt = match kind {
        Kind::Chat => chat_prompt(app, &mut fields)?,
        Kind::Text => text_prompt(app, &mut fields)?,
    };
    let mut sampling = app.model.sampling().clone();
    sampling.temperature = fields.number("temperature", 0.0..=2.0)?.unwrap_or(sampling.temperature);
    sampling.top_p = fields.number("top_p", 1e-6..=1.0)?.unwrap_or(sampling.top_p);
    sampling.top_k = fields.integer("top_k", 0)?.unwrap_or(sampling.top_k);
    sampling.min_p = fields.number("min_p", 0.0..=1.0)?.unwrap_or(sampling.min_p);
    sampling.repetition_penalty = fields.number("repetition_penalty", 0.01..=100.0)?.unwrap_or(sampling.repetition_penalty);
    sampling.seed = fields.seed()?;

    let max_tokens = fields.integer("max_tokens", 1)?;
    let max_tokens = fields.integer("max_completion_tokens", 1)?.or(max_tokens);
    let ignore_eos = fields.boolean("ignore_eos")?.unwrap_or(false);
    let stops = stops(fields.take("stop"))?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = stream_options(&mut fields, stream)?;
    fields.finish()?;
    // The completions API of old answers with 16 tokens unless told.
    let max_tokens = max_tokens.or((kind == Kind::Text).then_some(16));
    Ok(Ask { request: Request { prompt, max_tokens, sampling, ignore_eos, ..Request::default() }, stops, stream, include_usage })
}

fn chat_prompt(app: &App, fields: &mut Fields) -> Result<Vec<u32>> {
    let Some(messages) = fields.take("messages") else {
        return Err(ApiError::bad_field("messages", "'messages' is missing"));
    };
    let Some(list) = messages.as_array().filter(|list| !list.is_empty()) else {
        return Err(ApiError::bad_field("messages", "'messages' must be a list with at least one message"));
    };
    let messages = list.iter().enumerate().map(|(i, message)| read_message(i, message)).collect::<Result<Vec<_>>>()?;
    let kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(name) = kwargs.keys().find(|name| ["messages", "add_generation_prompt", "tools"].contains(&name.as_str())) {
        return Err(ApiError::bad_field("chat_template_kwargs", format!("'{name}' cannot be set in 'chat_template_kwargs'")));
    }
    let options = RenderOptions { add_generation_prompt: true, tools: None, kwargs };
    app.model.chat_prompt(&messages, &options).map_err(|e| ApiError::bad_field("messages", e.to_string()))
}

/// One message as chat templates expect it: a role they know, and its content as one string.
fn read_message(i: usize, message: &Value) -> Result<Value> {
    let place = |field: &str| format!("messages[{i}].{field}");
    let Some(message) = message.as_object() else {
        return Err(ApiError::bad_field(&format!("messages[{i}]"), format!("messages[{i}] must be an object")));
    };
    let role = match message.get("role").and_then(Value::as_str) {
        Some("developer") => "system", // OpenAI's newer name for it
        Some(role @ ("system" | "user" | "assistant")) => role,
        Some("tool" | "function") => return Err(ApiError::unsupported(&place("role"))),
        _ => return Err(ApiError::bad_field(&place("role"), "a message's role must be system, developer, user or assistant")),
    };
    for (name, value) in message.iter().filter(|(_, value)| !value.is_null()) {
        let neutral = name == "tool_calls" && value.as_array().is_some_and(Vec::is_empty);
        if !["role", "content", "name", "refusal", "annotations"].contains(&name.as_str()) && !neutral {
            return Err(ApiError::unsupported(&place(name)));
        }
    }
    let mut out =
        Map::from_iter([("role".to_string(), json!(role)), ("content".to_string(), read_content(i, message.get("content"))?.into())]);
    if let Some(name) = message.get("name").filter(|name| name.is_string()) {
        out.insert("name".into(), name.clone());
    }
    Ok(Value::Object(out))
}

/// A string, or text parts joined.
fn read_content(i: usize, content: Option<&Value>) -> Result<String> {
    let place = format!("messages[{i}].content");
    let parts = match content {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        _ => return Err(ApiError::bad_field(&place, format!("{place} must be a string or a list of text parts"))),
    };
    let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_string()),
        (Some("text"), None) | (None, _) => Err(ApiError::bad_field(&place, format!("{place} has a part without text"))),
        (Some(_), _) => Err(ApiError::unsupported(&place)),
    };
    parts.iter().map(text).collect()
}

/// A string, token ids, or a list with exactly one of either.
fn text_prompt(app: &App, fields: &mut Fields) -> Result<Vec<u32>> {
    let wrong = || ApiError::bad_field("prompt", "'prompt' must be one string, or one list of token ids");
    let prompt = fields.take("prompt").ok_or_else(|| ApiError::bad_field("prompt", "'prompt' is missing"))?;
    let prompt = match prompt {
        Value::Array(mut list) if list.len() == 1 && !list[0].is_number() => list.remove(0),
        other => other,
    };
    match prompt {
        Value::String(text) => Ok(app.model.tokenizer().encode(&text, true)?),
        Value::Array(ids) => {
            let ids =
                ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)).collect::<Result<Vec<_>>>()?;
            app.model.tokenizer().check_ids(&ids).map_err(|e| ApiError::bad_field("prompt", e.to_string()))?;
            Ok(ids)
        }
        _ => Err(wrong()),
    }
}

fn stops(value: Option<Value>) -> Result<Vec<String>> {
    let wrong = || {
        let message =
            format!("'stop' must be a string, or a list of at most {MAX_STOPS}, none empty or longer than {MAX_STOP_BYTES} bytes");
        ApiError::bad_field("stop", message)
    };
    let list = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(single) => vec![single],
    };
    if list.len() > MAX_STOPS {
        return Err(wrong());
    }
    let valid = |stop: &Value| stop.as_str().filter(|s| !s.is_empty() && s.len() <= MAX_STOP_BYTES).map(String::from).ok_or_else(wrong);
    list.iter().map(valid).collect()
}

fn stream_options(fields: &mut Fields, stream: bool) -> Result<bool> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        return Err(ApiError::bad_field("stream_options", "'stream_options' is only for requests with 'stream': true"));
    }
    for (name, value) in &options {
        match (name.as_str(), value) {
            ("include_usage", Value::Bool(_) | Value::Null) | ("include_obfuscation", Value::Bool(false)) => {}
            _ => return Err(ApiError::unsupported(&format!("stream_options.{name}"))),
        }
    }
    Ok(options.get("include_usage") == Some(&Value::Bool(true)))
}

/// The wire form of one answer: what its objects have in common.
struct Shape {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    include_usage: bool,
}

impl Shape {
    fn new(kind: Kind, model: &str, include_usage: bool) -> Self {
        static ANSWERS: AtomicU64 = AtomicU64::new(0);
        let created = unix_seconds();
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{created:x}{:08x}", ANSWERS.fetch_add(1, Ordering::Relaxed));
        Self { kind, id, created, model: model.into(), include_usage }
    }

    fn object(&self, object: &str, choices: Value) -> Map<String, Value> {
        Map::from_iter([
            ("id".to_string(), json!(self.id)),
            ("object".to_string(), json!(object)),
            ("created".to_string(), json!(self.created)),
            ("model".to_string(), json!(self.model)),
            ("choices".to_string(), choices),
        ])
    }

    fn whole(&self, text: &str, reason: FinishReason, stats: &RequestStats) -> Value {
        let reason = finish_reason(reason);
        let (object, choice) = match self.kind {
            Kind::Chat => (
                "chat.completion",
                json!({"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": null, "finish_reason": reason}),
            ),
            Kind::Text => ("text_completion", json!({"index": 0, "text": text, "logprobs": null, "finish_reason": reason})),
        };
        let mut object = self.object(object, json!([choice]));
        object.insert("usage".into(), usage(stats));
        Value::Object(object)
    }

    /// One chunk of a stream. With usage asked for, every chunk but the last has a null, as OpenAI sends it.
    fn chunk(&self, choices: Value, usage: Option<Value>) -> Event {
        let object = if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" };
        let mut object = self.object(object, choices);
        if self.include_usage {
            object.insert("usage".into(), usage.unwrap_or(Value::Null));
        }
        Event::default().data(Value::Object(object).to_string())
    }

    fn opening(&self) -> Option<Event> {
        let choices = json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}]);
        (self.kind == Kind::Chat).then(|| self.chunk(choices, None))
    }

    fn text(&self, text: &str) -> Event {
        let choice = match self.kind {
            Kind::Chat => json!({"index": 0, "delta": {"content": text}, "logprobs": null, "finish_reason": null}),
            Kind::Text => json!({"index": 0, "text": text, "logprobs": null, "finish_reason": null}),
        };
        self.chunk(json!([choice]), None)
    }

    fn closing(&self, reason: FinishReason, stats: &RequestStats) -> Vec<Event> {
        let reason = finish_reason(reason);
        let choice = match self.kind {
            Kind::Chat => json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": reason}),
            Kind::Text => json!({"index": 0, "text": "", "logprobs": null, "finish_reason": reason}),
        };
        let mut events = vec![self.chunk(json!([choice]), None)];
        if self.include_usage {
            events.push(self.chunk(json!([]), Some(usage(stats))));
        }
        events.push(Event::default().data("[DONE]"));
        events
    }
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

fn usage(stats: &RequestStats) -> Value {
    json!({
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    })
}

/// An answer as server-sent events. A client that goes away drops it, and with it the request.
struct EventStream {
    answer: TextStream,
    shape: Shape,
    queue: VecDeque<Event>,
}

impl EventStream {
    fn new(answer: TextStream, shape: Shape) -> Self {
        Self { answer, queue: shape.opening().into_iter().collect(), shape }
    }
}

impl Stream for EventStream {
    type Item = std::result::Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(event) = self.queue.pop_front() {
            return Poll::Ready(Some(Ok(event)));
        }
        let event = match ready!(self.answer.poll_next(context)) {
            None => return Poll::Ready(None),
            Some(Ok(Delta::Text(text))) => self.shape.text(&text),
            Some(Ok(Delta::End(reason, stats))) => {
                let mut events = VecDeque::from(self.shape.closing(reason, &stats));
                let first = events.pop_front().expect("closing() begins with the finish reason");
                self.queue = events;
                first
            }
            // The status line is long gone: say it in the stream, which then ends without [DONE].
            Some(Err(e)) => Event::default().data(ApiError::from(e).to_json().to_string()),
        };
        Poll::Ready(Some(Ok(event)))
    }
}
