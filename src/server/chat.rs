//! `/v1/chat/completions`, whole and as server-sent events.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

use super::answer::{Answer, AnswerStep, Finish};
use super::ask::{Ask, RequestOptions, streaming};
use super::body::understand;
use super::chunked::chunked_json;
use super::conversation::Conversation;
use super::error::ApiError;
use super::events::{EventFormat, stream};
use super::fields::RequestFields;
use super::front::{Caller, new_id};
use super::write::{write_list, write_whole};
use super::{App, unix_seconds};
use crate::engine::Logprobs;
use crate::text::model::TextModel;
use crate::text::reply::Part;

type Result<T> = std::result::Result<T, ApiError>;

/// Answers `/v1/chat/completions`.
pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response> {
    let (ask, streams, include_usage) = understand(&app, caller.client, body, read).await?;
    let n = ask.choices.len();
    let model = app.model()?.clone();
    let mut answer = Answer::start(&app, caller, ask).await?;
    let name = model.engine().info().model.clone();
    let shape = ChatObject { id: new_id("chatcmpl"), created: unix_seconds(), name, include_usage, n, model };
    if streams {
        return Ok(stream(answer, shape));
    }
    let mut choices: Vec<WholeChoice> = std::iter::repeat_with(WholeChoice::default).take(n).collect();
    while let Some(step) = answer.next().await {
        match step? {
            AnswerStep::Part(i, part, logprobs) => choices[i].add(part, logprobs),
            AnswerStep::End(i, finish, logprobs) => choices[i].end(finish, logprobs),
        }
    }
    let logprobs: Vec<Vec<(u32, Logprobs)>> =
        choices.iter_mut().map(|choice| std::mem::take(&mut choice.logprobs)).collect();
    let choices: Vec<Value> = choices.into_iter().enumerate().map(|(i, choice)| choice.into_json(i)).collect();
    let mut object = shape.object("chat.completion", choices.into());
    object.insert("usage".into(), answer.usage().to_json());
    object.insert("timings".into(), answer.timings());
    if logprobs.iter().all(Vec::is_empty) {
        return Ok(Json(object).into_response());
    }
    Ok(chunked_json(app.client_timeout, move |out| {
        let _held = answer;
        write_whole(out, object, |i, out| {
            out.write_all(b"{\"refusal\":null,\"content\":")?;
            write_list(out, logprobs[i].iter().map(|token| logprob(&shape.model, token)))?;
            out.write_all(b"}")
        })
    }))
}

/// Reads the request: what to ask, whether to stream, and whether the stream ends with the usage.
pub(super) fn read(model: &TextModel, fields: &mut RequestFields) -> Result<(Ask, bool, bool)> {
    let (streams, include_usage) = streaming(fields)?;
    let mut options = RequestOptions::read(model, fields)?;
    let top = fields.integer("top_logprobs", 0)?;
    options.logprobs = match (fields.boolean("logprobs")?.unwrap_or(false), top) {
        (_, Some(top)) if top > 20 => {
            return Err(ApiError::bad_field("top_logprobs", "'top_logprobs' must be at most 20"));
        }
        (true, top) => Some(top.unwrap_or(0)),
        (false, Some(1..)) => return Err(ApiError::bad_field("top_logprobs", "'top_logprobs' wants 'logprobs': true")),
        (false, _) => None,
    };
    Ok((Conversation::read(model, fields)?.ask(model, options)?, streams, include_usage))
}

/// One choice of an answer that is sent as a whole.
#[derive(Default)]
struct WholeChoice {
    content: String,
    reasoning: String,
    calls: Vec<Value>,
    logprobs: Vec<(u32, Logprobs)>,
    finish: Option<Finish>,
}

impl WholeChoice {
    fn add(&mut self, part: Part, logprobs: Vec<(u32, Logprobs)>) {
        self.logprobs.extend(logprobs);
        match part {
            Part::Content(text) => self.content += &text,
            Part::Reasoning(text) => self.reasoning += &text,
            Part::Call { id, name, .. } => {
                self.calls.push(json!({"id": id, "type": "function", "function": {"name": name, "arguments": ""}}));
            }
            Part::Arguments { index, json } => {
                if let Some(Value::String(arguments)) =
                    self.calls.get_mut(index).map(|call| &mut call["function"]["arguments"])
                {
                    arguments.push_str(&json);
                }
            }
        }
    }

    fn end(&mut self, finish: Finish, logprobs: Vec<(u32, Logprobs)>) {
        self.logprobs.extend(logprobs);
        self.finish = Some(finish);
    }

    fn into_json(self, index: usize) -> Value {
        let said_nothing = self.content.is_empty() && !self.calls.is_empty();
        let mut message = Map::from_iter([
            ("role".to_string(), json!("assistant")),
            ("content".to_string(), if said_nothing { Value::Null } else { self.content.into() }),
        ]);
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".into(), self.reasoning.into());
        }
        if !self.calls.is_empty() {
            message.insert("tool_calls".into(), self.calls.into());
        }
        json!({"index": index, "message": message, "logprobs": null, "finish_reason": self.finish.map(Finish::name)})
    }
}

/// A token and its logprob. Its bytes are exact even if its text is half a character.
fn logprob(model: &TextModel, (token, logprobs): &(u32, Logprobs)) -> Value {
    let one = |token: u32, logprob: f32| {
        let bytes = model.tokenizer().token_bytes(token);
        // OpenAI has no infinities; this value stands for impossible tokens.
        json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob.max(-9999.0), "bytes": bytes})
    };
    let mut entry = one(*token, logprobs.logprob);
    entry["top_logprobs"] = logprobs.top.iter().map(|&(token, logprob)| one(token, logprob)).collect();
    entry
}

/// The fields that all objects of one answer have.
struct ChatObject {
    id: String,
    created: u64,
    name: String,
    include_usage: bool,
    n: usize,
    model: TextModel,
}

impl ChatObject {
    fn object(&self, object: &str, choices: Value) -> Map<String, Value> {
        Map::from_iter([
            ("id".to_string(), json!(self.id)),
            ("object".to_string(), json!(object)),
            ("created".to_string(), json!(self.created)),
            ("model".to_string(), json!(self.name)),
            ("choices".to_string(), choices),
        ])
    }

    fn event(&self, object: Map<String, Value>) -> Event {
        Event::default().data(Value::Object(object).to_string())
    }

    /// One chunk of a stream. If usage was requested, every chunk but the last has a null usage, as OpenAI sends it.
    fn chunk(&self, i: usize, delta: Value, finish: Option<Finish>, logprobs: &[(u32, Logprobs)]) -> Event {
        let logprobs = match logprobs {
            [] => Value::Null,
            tokens => {
                json!({"content": tokens.iter().map(|token| logprob(&self.model, token)).collect::<Vec<_>>(),
                    "refusal": null})
            }
        };
        let choice =
            json!({"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish.map(Finish::name)});
        let mut object = self.object("chat.completion.chunk", json!([choice]));
        if self.include_usage {
            object.insert("usage".into(), Value::Null);
        }
        self.event(object)
    }
}

impl EventFormat for ChatObject {
    fn open(&mut self) -> Vec<Event> {
        (0..self.n).map(|i| self.chunk(i, json!({"role": "assistant", "content": ""}), None, &[])).collect()
    }

    fn step(&mut self, step: AnswerStep, _: &Answer) -> Vec<Event> {
        let (i, delta, logprobs) = match step {
            AnswerStep::End(i, finish, logprobs) => return vec![self.chunk(i, json!({}), Some(finish), &logprobs)],
            AnswerStep::Part(i, Part::Content(text), logprobs) => (i, json!({"content": text}), logprobs),
            AnswerStep::Part(i, Part::Reasoning(text), logprobs) => (i, json!({"reasoning_content": text}), logprobs),
            AnswerStep::Part(i, Part::Call { index, id, name }, logprobs) => {
                let function = json!({"name": name, "arguments": ""});
                (
                    i,
                    json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}),
                    logprobs,
                )
            }
            AnswerStep::Part(i, Part::Arguments { index, json }, logprobs) => {
                (i, json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]}), logprobs)
            }
        };
        vec![self.chunk(i, delta, None, &logprobs)]
    }

    fn close(&mut self, answer: &Answer) -> Vec<Event> {
        let mut events = Vec::new();
        if self.include_usage {
            let mut object = self.object("chat.completion.chunk", json!([]));
            object.insert("usage".into(), answer.usage().to_json());
            object.insert("timings".into(), answer.timings());
            events.push(self.event(object));
        }
        events.push(Event::default().data("[DONE]"));
        events
    }
}
