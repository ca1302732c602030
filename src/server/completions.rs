//! `/v1/completions`: continues plain text, whole and as server-sent events.

use std::io::{self, Write};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

use super::answer::{Answer, AnswerStep, Finish};
use super::ask::{Ask, RequestOptions, streaming, token_ids};
use super::body::understand;
use super::chunked::chunked_json;
use super::error::ApiError;
use super::events::{EventFormat, stream};
use super::fields::RequestFields;
use super::format::read_format;
use super::front::{Caller, new_id};
use super::text::encode_prompt;
use super::write::{write_list, write_whole};
use super::{App, unix_seconds};
use crate::engine::Logprobs;
use crate::text::model::TextModel;
use crate::text::reply::Part;

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum prompts of one request.
const MAX_PROMPTS: usize = 64;

/// Answers `/v1/completions`.
pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response> {
    let (ask, echo, streams, include_usage) = understand(&app, caller.client, body, read).await?;
    let model = app.model()?.clone();
    let n = ask.choices.len();
    let name = model.engine().info().model.clone();
    let mut answer = Answer::start(&app, caller, ask).await?;
    let offsets = echo.iter().map(|text| text.len()).collect();
    let shape = TextObject { id: new_id("cmpl"), created: unix_seconds(), name, include_usage, echo, offsets, model };
    if streams {
        return Ok(stream(answer, shape));
    }
    let mut tokens: Vec<Vec<(u32, Logprobs)>> = vec![Vec::new(); n];
    let mut choices: Vec<Value> =
        (0..n).map(|i| shape.choice(i, shape.echo[i].to_string(), None, Value::Null)).collect();
    while let Some(step) = answer.next().await {
        let Said { choice: i, text, finish, logprobs } = step?.into();
        tokens[i].extend(logprobs);
        let choice = &mut choices[i];
        if let (Value::String(all), Some(text)) = (&mut choice["text"], text) {
            all.push_str(&text);
        }
        choice["finish_reason"] = finish.map(Finish::name).into();
    }
    let mut object = shape.object(choices.into());
    object.insert("usage".into(), answer.usage().to_json());
    object.insert("timings".into(), answer.timings());
    if tokens.iter().all(Vec::is_empty) {
        return Ok(Json(object).into_response());
    }
    Ok(chunked_json(app.client_timeout, move |out| {
        let _held = answer;
        write_whole(out, object, |i, out| shape.write_logprobs(i, &tokens[i], out))
    }))
}

/// Reads the request: what to ask, the prompts to repeat, whether to stream, and whether the stream ends with the
/// usage.
pub(super) fn read(model: &TextModel, fields: &mut RequestFields) -> Result<(Ask, Vec<Arc<str>>, bool, bool)> {
    let (streams, include_usage) = streaming(fields)?;
    let prompts = prompts(model, fields)?;
    let mut options = RequestOptions::read(model, fields)?;
    // This API answers with 16 tokens by default.
    options.max_tokens = options.max_tokens.or(Some(16));
    options.logprobs = fields.integer("logprobs", 0)?;
    if options.logprobs > Some(20) {
        return Err(ApiError::bad_field("logprobs", "'logprobs' must be at most 20"));
    }
    if let Some(best_of) = fields.integer("best_of", 1)?.filter(|&best_of| best_of != options.n) {
        return Err(ApiError::bad_field(
            "best_of",
            format!("'best_of' is {best_of}, but this server does not rank answers: it must equal 'n'"),
        ));
    }
    let echo = match fields.boolean("echo")?.unwrap_or(false) {
        true if options.logprobs.is_some() => {
            return Err(ApiError::bad_field("echo", "'echo' cannot be had together with 'logprobs'"));
        }
        true => prompts.iter().map(|ids| model.tokenizer().decode(ids, true)).collect::<crate::Result<Vec<_>>>()?,
        false => vec![String::new(); prompts.len()],
    };
    let echo = echo.into_iter().flat_map(|text| std::iter::repeat_n(Arc::from(text), options.n)).collect();
    let form = read_format(fields)?;
    Ok((
        options.ask(model, "prompt", prompts, form.as_ref().map(|(param, grammar)| (*param, grammar)), || None)?,
        echo,
        streams,
        include_usage,
    ))
}

/// A string or token ids, or a list of either.
fn prompts(model: &TextModel, fields: &mut RequestFields) -> Result<Vec<Vec<u32>>> {
    let wrong = || {
        ApiError::bad_field(
            "prompt",
            format!("'prompt' must be a string or token ids, or a list of at most {MAX_PROMPTS} of either"),
        )
    };
    let prompt = fields.take("prompt").ok_or_else(|| ApiError::bad_field("prompt", "'prompt' is missing"))?;
    match &prompt {
        Value::Array(list) if list.iter().any(|entry| !entry.is_number()) => match list.len() {
            1..=MAX_PROMPTS => list.iter().map(|entry| one_prompt(model, entry, wrong)).collect(),
            _ => Err(wrong()),
        },
        single => Ok(vec![one_prompt(model, single, wrong)?]),
    }
}

/// A string or token ids.
pub(super) fn one_prompt(model: &TextModel, prompt: &Value, wrong: impl Fn() -> ApiError) -> Result<Vec<u32>> {
    let ids = match prompt {
        Value::String(text) => encode_prompt(model, "prompt", text, true)?,
        Value::Array(ids) if !ids.is_empty() => token_ids(model, "prompt", prompt)?,
        _ => return Err(wrong()),
    };
    match ids.is_empty() {
        true => Err(ApiError::bad_field("prompt", "'prompt' is empty: give it some text, or token ids")),
        false => Ok(ids),
    }
}

/// The content of a step: these answers have no other parts.
struct Said {
    choice: usize,
    text: Option<String>,
    finish: Option<Finish>,
    logprobs: Vec<(u32, Logprobs)>,
}

impl From<AnswerStep> for Said {
    fn from(step: AnswerStep) -> Self {
        match step {
            AnswerStep::Part(choice, Part::Content(text) | Part::Reasoning(text), logprobs) => {
                Self { choice, text: Some(text), finish: None, logprobs }
            }
            AnswerStep::Part(choice, _, logprobs) => Self { choice, text: None, finish: None, logprobs },
            AnswerStep::End(choice, finish, logprobs) => Self { choice, text: None, finish: Some(finish), logprobs },
        }
    }
}

/// The fields that all objects of one answer have.
struct TextObject {
    id: String,
    created: u64,
    name: String,
    include_usage: bool,
    echo: Vec<Arc<str>>, // by choice
    offsets: Vec<usize>, // by choice: bytes of the tokens sent so far
    model: TextModel,
}

impl TextObject {
    fn object(&self, choices: Value) -> Map<String, Value> {
        Map::from_iter([
            ("id".to_string(), json!(self.id)),
            ("object".to_string(), json!("text_completion")),
            ("created".to_string(), json!(self.created)),
            ("model".to_string(), json!(self.name)),
            ("choices".to_string(), choices),
        ])
    }

    fn choice(&self, i: usize, text: String, finish: Option<Finish>, logprobs: Value) -> Value {
        json!({"index": i, "text": text, "logprobs": logprobs, "finish_reason": finish.map(Finish::name)})
    }

    fn event(&self, choices: Value, usage: Option<&Answer>) -> Event {
        let mut object = self.object(choices);
        if self.include_usage {
            object.insert("usage".into(), usage.map_or(Value::Null, |answer| answer.usage().to_json()));
            object.extend(usage.map(|answer| ("timings".to_string(), answer.timings())));
        }
        Event::default().data(Value::Object(object).to_string())
    }

    /// This API's lists for some tokens of a stream.
    fn logprobs(&mut self, i: usize, tokens: &[(u32, Logprobs)]) -> Value {
        let mut text = Vec::new();
        if self.write_logprobs(i, tokens, &mut text).is_err() {
            return Value::Null;
        }
        self.offsets[i] +=
            tokens.iter().map(|(token, _)| self.model.tokenizer().token_bytes(*token).len()).sum::<usize>();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// This API's lists: tokens, their logprobs, the likeliest tokens, and their offsets in the text.
    fn write_logprobs(&self, i: usize, tokens: &[(u32, Logprobs)], out: &mut dyn Write) -> io::Result<()> {
        if tokens.is_empty() {
            return out.write_all(b"null");
        }
        let bytes = |token: u32| self.model.tokenizer().token_bytes(token);
        let text = |token: u32| String::from_utf8_lossy(bytes(token)).into_owned();
        let top = |(_, logprobs): &(u32, Logprobs)| {
            Map::from_iter(logprobs.top.iter().map(|&(token, logprob)| (text(token), json!(logprob.max(-9999.0)))))
        };
        let mut offset = self.offsets[i];
        let offsets = tokens.iter().map(|(token, _)| {
            offset += bytes(*token).len();
            offset - bytes(*token).len()
        });
        out.write_all(b"{\"tokens\":")?;
        write_list(out, tokens.iter().map(|(token, _)| text(*token)))?;
        out.write_all(b",\"token_logprobs\":")?;
        write_list(out, tokens.iter().map(|(_, logprobs)| logprobs.logprob.max(-9999.0)))?;
        out.write_all(b",\"top_logprobs\":")?;
        write_list(out, tokens.iter().map(top))?;
        out.write_all(b",\"text_offset\":")?;
        write_list(out, offsets)?;
        out.write_all(b"}")
    }
}

impl EventFormat for TextObject {
    fn open(&mut self) -> Vec<Event> {
        let echoed = self.echo.iter().enumerate().filter(|(_, text)| !text.is_empty());
        echoed.map(|(i, text)| self.event(json!([self.choice(i, text.to_string(), None, Value::Null)]), None)).collect()
    }

    fn step(&mut self, step: AnswerStep, _: &Answer) -> Vec<Event> {
        let Said { choice: i, text, finish, logprobs } = step.into();
        let logprobs = self.logprobs(i, &logprobs);
        vec![self.event(json!([self.choice(i, text.unwrap_or_default(), finish, logprobs)]), None)]
    }

    fn close(&mut self, answer: &Answer) -> Vec<Event> {
        let mut events = Vec::new();
        if self.include_usage {
            events.push(self.event(json!([]), Some(answer)));
        }
        events.push(Event::default().data("[DONE]"));
        events
    }
}
