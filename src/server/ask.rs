//! What an endpoint asks of the engine, and the fields that several endpoints share.

use serde_json::Value;

use super::error::ApiError;
use super::fields::RequestFields;
use super::steer::{SteerField, read_steer};
use crate::engine::{Request, SamplingOverrides, SamplingParams};
use crate::text::grammar::Grammar;
use crate::text::model::TextModel;
use crate::text::reply::Parser;

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum stop strings of a request, and bytes of each. Matching costs their product for every token.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;

/// Bytes of a token with its logprob on the way to the client.
const LOGPROBS: usize = 256;

/// Maximum answers to one request.
const MAX_CHOICES: usize = 16;

/// Maximum tokens with a bias.
const MAX_BIASES: usize = 1024;

/// What a body asks of the engine, and how to answer it.
pub(super) struct Ask {
    /// One request per choice, with the parser of its answer. `None`: all of it is content.
    pub(super) choices: Vec<(Request, Option<Parser>)>,
    /// Consecutive choices of one prompt.
    pub(super) n: usize,
    /// Strings that end an answer.
    pub(super) stops: Vec<String>,
    /// Markers in the answers may be special tokens.
    pub(super) special_tokens: bool,
    /// Steering vectors for all choices.
    pub(super) steer: Vec<SteerField>,
}

impl Ask {
    /// Maximum bytes of the logprobs of all tokens, in a context of `limit` tokens.
    pub(super) fn logprobs_bytes(&self, limit: usize) -> u64 {
        let one = |(request, _): &(Request, Option<Parser>)| {
            let tokens = limit.saturating_sub(request.prompt.len()).min(request.max_tokens.unwrap_or(limit));
            request.logprobs.map_or(0, |top| (tokens * (LOGPROBS + top * size_of::<(u32, f32)>())) as u64)
        };
        self.choices.iter().map(one).sum()
    }
}

/// The options of a request besides its prompt.
pub(super) struct RequestOptions {
    pub(super) max_tokens: Option<usize>,
    pub(super) sampling: SamplingParams,
    pub(super) ignore_eos: bool,
    pub(super) stops: Vec<String>,
    pub(super) n: usize,
    pub(super) logprobs: Option<usize>,
    pub(super) steer: Vec<SteerField>,
}

impl RequestOptions {
    /// Reads the fields that OpenAI's endpoints share.
    pub(super) fn read(model: &TextModel, fields: &mut RequestFields) -> Result<Self> {
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

    /// Asks for the answers to `prompts`, which the field `param` gave, in a format that another field gave. Each
    /// choice has its own seed, constraint and parser.
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
                "This model's context holds {limit} tokens including the answer, and the prompt has {} tokens",
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

/// Refuses more choices than the queue holds, before any work on them.
fn check_choices(model: &TextModel, choices: usize) -> Result<()> {
    let most = model.engine().info().max_queue;
    if choices > most {
        let message = format!(
            "'n' asks for {choices} answers in all and the queue holds {most}: ask for fewer, or raise --max-queue"
        );
        return Err(ApiError::bad_field("n", message));
    }
    Ok(())
}

/// A seed for a request without one.
fn random_seed() -> u64 {
    getrandom::u64().expect("Linux has random numbers")
}

fn sampling(model: &TextModel, fields: &mut RequestFields) -> Result<SamplingParams> {
    let overrides = SamplingOverrides {
        temperature: fields.number("temperature", 0.0..=2.0)?,
        top_p: fields.number("top_p", 1e-6..=1.0)?,
        top_k: fields.integer("top_k", 0)?,
        min_p: fields.number("min_p", 0.0..=1.0)?,
        repetition_penalty: fields.number("repetition_penalty", 0.01..=100.0)?,
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?,
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?,
        logit_bias: logit_bias(model, fields)?,
        seed: fields.seed()?,
    };
    Ok(overrides.over(model.sampling()))
}

/// `{"token id": bias}`, biases from -100 to 100.
fn logit_bias(model: &TextModel, fields: &mut RequestFields) -> Result<Option<Vec<(u32, f32)>>> {
    let wrong = || {
        let message = format!(
            "'logit_bias' must map token ids of this model to numbers from -100 to 100, at most {MAX_BIASES} of them"
        );
        ApiError::bad_field("logit_bias", message)
    };
    let Some(map) = fields.object("logit_bias")? else { return Ok(None) };
    if map.len() > MAX_BIASES {
        return Err(wrong());
    }
    let one = |(token, bias): (&String, &Value)| {
        let token = token.parse::<u32>().ok().filter(|&t| (t as usize) < model.tokenizer().vocab_size())?;
        Some((token, bias.as_f64().filter(|b| b.abs() <= 100.0)? as f32))
    };
    map.iter().map(|entry| one(entry).ok_or_else(wrong)).collect::<Result<_>>().map(Some)
}

/// Stop strings: one, or a list.
pub(super) fn stops(name: &str, value: Option<Value>) -> Result<Vec<String>> {
    let wrong = || {
        let message = format!(
            "'{name}' must be a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_BYTES} bytes"
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

/// Whether to stream, and whether the stream ends with the usage.
pub(super) fn streaming(fields: &mut RequestFields) -> Result<(bool, bool)> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(options) = fields.object("stream_options")? else { return Ok((stream, false)) };
    if !stream {
        return Err(ApiError::bad_field("stream_options", "'stream_options' requires 'stream': true"));
    }
    for (name, value) in &options {
        match (name.as_str(), value) {
            ("include_usage", Value::Bool(_) | Value::Null) | ("include_obfuscation", Value::Bool(false)) => {}
            _ => return Err(ApiError::unsupported(&format!("stream_options.{name}"))),
        }
    }
    Ok((true, options.get("include_usage") == Some(&Value::Bool(true))))
}
