//! What an endpoint asks the engine for, and the fields that several endpoints share.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::StatusCode;
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::App;
use super::chunked::SLOWEST;
use super::error::ApiError;
use super::fields::Fields;
use super::memory::{Held, give_back};
use super::steer::{Steering, read_steer};
use super::structure::Structure;
use super::text::{ENCODED_AT_ONCE, encoding_bytes};
use crate::engine::{Request, SamplingParams};
use crate::text::grammar::Grammar;
use crate::text::model::TextModel;
use crate::text::reply::Parser;

type Result<T> = std::result::Result<T, ApiError>;

/// Bytes of a request body at most: a million tokens of text, and no more than a box can hold many of.
const MAX_BODY_BYTES: usize = 16 << 20;

/// What is read of a refused body and dropped, so that its client gets to read why; most write all before they read.
const MAX_DROPPED_BYTES: usize = 4 * MAX_BODY_BYTES;
const DROPPED_WITHIN: Duration = Duration::from_secs(5);
const DROPPED_SILENCE: Duration = Duration::from_secs(1);

/// What a body takes beside itself while it is understood, for each of its bytes: its strings, messages made of them,
/// and the prompt made of those.
const COPIES: u64 = 8;

/// Stop strings of a request at most, and bytes of each: matching costs their product for every token.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;

/// Bytes that a token takes with how likely it was, on its way to the client.
const LOGPROBS: usize = 256;

/// Answers to one request at most.
const MAX_CHOICES: usize = 16;

/// Tokens with a bias at most.
const MAX_BIASES: usize = 1024;

/// A body, whole.
struct Whole {
    bytes: Vec<u8>,
    structure: Structure,
    held: Held,
}

/// A body, understood: what to ask the engine, and how to answer.
pub(super) struct Ask {
    /// One request for each choice, with what tells the parts of its answer apart; `None`: it is all content.
    pub(super) choices: Vec<(Request, Option<Parser>)>,
    /// Choices of one prompt, which stand beside each other.
    pub(super) n: usize,
    /// Strings that end an answer.
    pub(super) stops: Vec<String>,
    /// Markers in the answers may be special tokens.
    pub(super) special_tokens: bool,
    /// What is added to the residual stream of all choices.
    pub(super) steer: Vec<Steering>,
}

impl Ask {
    /// Bytes that the logprobs of all its tokens take at most, in a context of `limit` tokens.
    pub(super) fn logprobs_bytes(&self, limit: usize) -> u64 {
        let one = |(request, _): &(Request, Option<Parser>)| {
            let tokens = limit.saturating_sub(request.prompt.len()).min(request.max_tokens.unwrap_or(limit));
            request.logprobs.map_or(0, |top| (tokens * (LOGPROBS + top * size_of::<(u32, f32)>())) as u64)
        };
        self.choices.iter().map(one).sum()
    }
}

/// How one answer is asked for, whatever the prompt is.
pub(super) struct Options {
    pub(super) max_tokens: Option<usize>,
    pub(super) sampling: SamplingParams,
    pub(super) ignore_eos: bool,
    pub(super) stops: Vec<String>,
    pub(super) n: usize,
    pub(super) logprobs: Option<usize>,
    pub(super) steer: Vec<Steering>,
}

impl Options {
    /// Reads the fields that OpenAI's endpoints share.
    pub(super) fn read(model: &TextModel, fields: &mut Fields) -> Result<Self> {
        let max_tokens = fields.integer("max_tokens", 1)?;
        Ok(Self {
            max_tokens: fields.integer("max_completion_tokens", 1)?.or(max_tokens),
            sampling: sampling(model, fields)?,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            stops: stops("stop", fields.take("stop"))?,
            n: match fields.integer("n", 1)? {
                Some(n) if n > MAX_CHOICES => {
                    return Err(ApiError::bad_field("n", format!("'n' must be at most {MAX_CHOICES}")));
                }
                n => n.unwrap_or(1),
            },
            logprobs: None,
            steer: read_steer(model, fields)?,
        })
    }

    /// What to ask for `prompts`, which `param` gave, in a form that a field of its own gave. Each choice has its own
    /// seed, constraint and parser.
    pub(super) fn ask(
        self,
        model: &TextModel,
        param: &str,
        prompts: Vec<Vec<u32>>,
        form: Option<(&str, &Grammar)>,
        parser: impl Fn() -> Option<Parser>,
    ) -> Result<Ask> {
        let limit = model.engine().info().max_context;
        if let Some(prompt) = prompts.iter().find(|prompt| prompt.len() >= limit) {
            let message = format!(
                "This model's context holds {limit} tokens, answer included; the prompt has {} tokens",
                prompt.len()
            );
            return Err(ApiError::context_length(message, param));
        }
        check_choices(model, prompts.len() * self.n)?;
        let constraint = form
            .map(|(param, grammar)| model.compile(grammar).map_err(|e| ApiError::of_field(param, e)))
            .transpose()?;
        let seed = self.sampling.seed.unwrap_or_else(random_seed);
        let mut choices = Vec::with_capacity(prompts.len() * self.n);
        for prompt in prompts {
            for i in 0..self.n {
                let request = Request {
                    prompt: prompt.clone(),
                    max_tokens: self.max_tokens,
                    sampling: SamplingParams { seed: Some(seed.wrapping_add(i as u64)), ..self.sampling.clone() },
                    ignore_eos: self.ignore_eos,
                    constraint: constraint.as_ref().map(|constraint| constraint.fork()),
                    logprobs: self.logprobs,
                    ..Request::default()
                };
                choices.push((request, parser()));
            }
        }
        Ok(Ask { choices, n: self.n, stops: self.stops, special_tokens: false, steer: self.steer })
    }
}

/// Refuses more choices than may wait, before anything is done for them.
fn check_choices(model: &TextModel, choices: usize) -> Result<()> {
    let most = model.engine().info().max_queue;
    if choices > most {
        let message =
            format!("'n' asks for {choices} answers together and {most} may wait: ask for fewer, or raise --max-queue");
        return Err(ApiError::bad_field("n", message));
    }
    Ok(())
}

/// A seed that nobody asked for.
fn random_seed() -> u64 {
    getrandom::u64().expect("Linux has random numbers")
}

/// Reads a body to its end, once there is memory for it.
///
/// Errors: it is larger than anyone may send, cut off, or takes too long.
async fn read_body(app: &App, client: u64, body: &mut Body) -> Result<Whole> {
    // One that is too large by its own account is not read until it is.
    let length = body.size_hint();
    if length.lower() > MAX_BODY_BYTES as u64 {
        return Err(ApiError::body_too_large(MAX_BODY_BYTES));
    }
    // Without a length it takes what has come, step by step.
    let mut held = app.memory.bodies.admit(client, length.exact().unwrap_or(SLOWEST)).await?;
    let mut bytes = Vec::with_capacity(length.exact().unwrap_or(0) as usize);
    let mut structure = Structure::default();
    let started = Instant::now();
    loop {
        // A large body may take longer, but neither forever nor while it brings nothing.
        let patience = app.client_timeout + Duration::from_secs(bytes.len() as u64 / SLOWEST);
        let frame = match timeout_at(started + patience.min(4 * app.client_timeout), body.frame()).await {
            Ok(None) => return Ok(Whole { bytes, structure, held }),
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => {
                let message = "The request body was cut off, or is not encoded as its headers say";
                return Err(ApiError::body(StatusCode::BAD_REQUEST, message));
            }
            Err(_) => return Err(ApiError::too_slow()),
        };
        let Ok(data) = frame.into_data() else { continue }; // trailers
        let all = bytes.len() + data.len();
        if all > MAX_BODY_BYTES {
            return Err(ApiError::body_too_large(MAX_BODY_BYTES));
        }
        if all > bytes.capacity() {
            // Both are there while it is copied.
            let larger = (2 * all).min(MAX_BODY_BYTES);
            held.grow(((bytes.capacity() + larger) as u64).saturating_sub(held.bytes())).await?;
            bytes.reserve_exact(larger - bytes.len());
        }
        structure.read(&data)?;
        bytes.extend_from_slice(&data);
    }
}

/// Reads on what nobody wants, for a moment.
async fn drop_body(mut body: Body) {
    let until = Instant::now() + DROPPED_WITHIN;
    let mut dropped = 0;
    while dropped < MAX_DROPPED_BYTES
        && let Ok(Some(Ok(frame))) = timeout_at(until.min(Instant::now() + DROPPED_SILENCE), body.frame()).await
    {
        dropped += frame.data_ref().map_or(0, Bytes::len);
    }
}

/// The common beginning of an endpoint: its body as fields, for a model that is there and is the one asked for.
pub(super) async fn understand<T: Send + 'static>(
    app: &Arc<App>,
    client: u64,
    mut body: Body,
    read: impl FnOnce(&TextModel, &mut Fields) -> Result<T> + Send + 'static,
) -> Result<T> {
    let whole = match app.model() {
        Ok(_) => read_body(app, client, &mut body).await,
        Err(refusal) => Err(refusal),
    };
    let Whole { bytes, structure, held } = match whole {
        Ok(whole) => whole,
        Err(refusal) => {
            drop_body(body).await;
            return Err(refusal);
        }
    };
    let text = bytes.len() as u64;
    let takes = structure.bytes() + COPIES * text + encoding_bytes(text.min(ENCODED_AT_ONCE));
    let understanding = app.memory.understood.admit(client, takes).await?;
    let app = app.clone();
    // Tokenizing a long prompt and compiling a grammar take too long for an async thread.
    let work = move || {
        let fields = Fields::parse(&bytes);
        drop((bytes, held));
        let result = fields.and_then(|mut fields| {
            if let Some(name) = fields.string("model")? {
                app.check_model(&name)?;
            }
            let read = read(app.model()?, &mut fields)?;
            fields.finish()?;
            Ok(read)
        });
        give_back(understanding);
        result
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::internal())?
}

fn sampling(model: &TextModel, fields: &mut Fields) -> Result<SamplingParams> {
    let default = model.sampling();
    Ok(SamplingParams {
        temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(default.temperature),
        top_p: fields.number("top_p", 1e-6..=1.0)?.unwrap_or(default.top_p),
        top_k: fields.integer("top_k", 0)?.unwrap_or(default.top_k),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(default.min_p),
        repetition_penalty: fields.number("repetition_penalty", 0.01..=100.0)?.unwrap_or(default.repetition_penalty),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(default.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(default.frequency_penalty),
        logit_bias: logit_bias(model, fields)?,
        seed: fields.seed()?,
    })
}

/// `{"token id": bias}`, biases from -100 to 100.
fn logit_bias(model: &TextModel, fields: &mut Fields) -> Result<Vec<(u32, f32)>> {
    let wrong = || {
        let message = format!(
            "'logit_bias' must map token ids of this model to numbers from -100 to 100, at most {MAX_BIASES} of them"
        );
        ApiError::bad_field("logit_bias", message)
    };
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    if map.len() > MAX_BIASES {
        return Err(wrong());
    }
    let one = |(token, bias): (&String, &Value)| {
        let token = token.parse::<u32>().ok().filter(|&t| (t as usize) < model.tokenizer().vocab_size())?;
        Some((token, bias.as_f64().filter(|b| b.abs() <= 100.0)? as f32))
    };
    map.iter().map(|entry| one(entry).ok_or_else(wrong)).collect()
}

/// Stop strings: one, or a list.
pub(super) fn stops(name: &str, value: Option<Value>) -> Result<Vec<String>> {
    let wrong = || {
        let message = format!(
            "'{name}' must be a string, or a list of at most {MAX_STOPS}, none empty or longer than {MAX_STOP_BYTES} \
             bytes"
        );
        ApiError::bad_field(name, message)
    };
    let list = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(single) => vec![single],
    };
    if list.len() > MAX_STOPS {
        return Err(wrong());
    }
    let valid = |stop: &Value| {
        stop.as_str().filter(|s| !s.is_empty() && s.len() <= MAX_STOP_BYTES).map(String::from).ok_or_else(wrong)
    };
    list.iter().map(valid).collect()
}

/// A list of token ids of the model.
pub(super) fn token_ids(model: &TextModel, name: &str, value: &Value) -> Result<Vec<u32>> {
    let wrong = || ApiError::bad_field(name, format!("'{name}' must be a list of token ids"));
    let list = value.as_array().ok_or_else(wrong)?;
    let ids = list
        .iter()
        .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong))
        .collect::<Result<Vec<_>>>()?;
    model.tokenizer().check_ids(&ids).map_err(|e| ApiError::bad_field(name, e.to_string()))?;
    Ok(ids)
}

/// Whether to stream, and whether usage is told at the end of the stream.
pub(super) fn streaming(fields: &mut Fields) -> Result<(bool, bool)> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(options) = fields.object("stream_options")? else { return Ok((stream, false)) };
    if !stream {
        return Err(ApiError::bad_field("stream_options", "'stream_options' is only for requests with 'stream': true"));
    }
    for (name, value) in &options {
        match (name.as_str(), value) {
            ("include_usage", Value::Bool(_) | Value::Null) | ("include_obfuscation", Value::Bool(false)) => {}
            _ => return Err(ApiError::unsupported(&format!("stream_options.{name}"))),
        }
    }
    Ok((true, options.get("include_usage") == Some(&Value::Bool(true))))
}
