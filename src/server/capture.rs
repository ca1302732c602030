//! `/v1/capture`: the residual stream and logits of a prompt and of what is generated after it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ask::{Options, understand};
use super::completions::one_prompt;
use super::conversation::Conversation;
use super::error::ApiError;
use super::fields::Fields;
use super::front::{Caller, new_id};
use super::steer::{Steering, read_layers, read_positions};
use super::{App, unix_seconds};
use crate::engine::{Activation, CaptureWanted, Captured, Event, Events, FinishReason, Request, RequestStats};
use crate::text_model::TextModel;

type Result<T> = std::result::Result<T, ApiError>;

/// Bytes of numbers of one answer at most, and answers that are held at a time: what a box has for them beside its model.
const MAX_BYTES: usize = 256 << 20;
const MAX_ANSWERS: usize = 4;

/// Places for answers.
pub(super) struct Places(Arc<Semaphore>);

impl Default for Places {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_ANSWERS)))
    }
}

/// How numbers are written.
#[derive(Clone, Copy)]
pub(super) enum Encoding {
    /// Little-endian f32 in base64, in JSON.
    Base64,
    /// JSON numbers.
    Float,
    /// The body is a safetensors file.
    Safetensors,
}

/// Answers `/v1/capture`.
pub(super) async fn answer(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>, body: Body) -> Result<Response> {
    let (mut request, steering, encoding) = understand(&app, body, read).await?;
    let too_many = |_| ApiError::too_many(format!("{MAX_ANSWERS} captures are being answered: try again in a while"));
    let place = app.captures.0.clone().try_acquire_owned().map_err(too_many)?;
    let model = app.model()?.clone();
    caller.sign(&mut request);
    request.steer = app.vectors.resolve(caller.tenant, &steering)?;
    let prompt = request.prompt.clone();
    let found = Found::collect(prompt, model.engine().submit(request)?).await?;
    app.http.observe(&found.stats);
    // Writing millions of numbers takes too long for an async thread.
    let write = move || found.write(&model, encoding, place);
    tokio::task::spawn_blocking(write).await.map_err(|_| ApiError::internal())?
}

/// What to ask for, and how to write what comes.
pub(super) fn read(model: &TextModel, fields: &mut Fields) -> Result<(Request, Vec<Steering>, Encoding)> {
    let prompt = match fields.take("prompt") {
        Some(prompt) => one_prompt(model, &prompt, || ApiError::bad_field("prompt", "'prompt' must be a string or token ids"))?,
        None => Conversation::read(model, fields)?.prompt(model)?.ids,
    };
    let max_tokens = fields.integer("max_tokens", 0)?.unwrap_or(0);
    let capture = CaptureWanted {
        layers: read_layers(model, fields)?,
        positions: read_positions(fields)?,
        logits: fields.boolean("logits")?.unwrap_or(false),
    };
    let encoding = match fields.string("encoding_format")?.as_deref() {
        None | Some("base64") => Encoding::Base64,
        Some("float") => Encoding::Float,
        Some("safetensors") => Encoding::Safetensors,
        Some(_) => {
            let message = "'encoding_format' must be \"base64\", \"float\" or \"safetensors\"";
            return Err(ApiError::bad_field("encoding_format", message));
        }
    };
    let info = model.engine().info();
    capture.check(info.layers).map_err(|e| ApiError::of_field("layers", e))?;
    let longest = prompt.len().saturating_add(max_tokens).min(info.max_context);
    let bytes = capture.bytes(prompt.len(), longest, info.layers, info.hidden_size, info.vocab_size);
    if bytes > MAX_BYTES {
        let message = format!(
            "This captures up to {} MiB and one answer may hold {}: ask for fewer layers or positions, for no logits, or in several requests",
            bytes.div_ceil(1 << 20),
            MAX_BYTES >> 20
        );
        return Err(ApiError::bad_field("layers", message));
    }
    let options = Options { max_tokens: None, ..Options::read(model, fields)? };
    if options.n > 1 || !options.stops.is_empty() {
        let field = if options.n > 1 { "n" } else { "stop" };
        return Err(ApiError::unsupported(field));
    }
    let mut ask = options.ask(model, "prompt", vec![prompt], None, || None)?;
    let (request, _) = ask.choices.pop().expect("one prompt, one choice");
    Ok((Request { max_tokens: Some(max_tokens), capture: Some(capture), ..request }, ask.steer, encoding))
}

/// What came of a request.
struct Found {
    tokens: Vec<u32>,
    rows: BTreeMap<Activation, Rows>,
    reason: FinishReason,
    stats: RequestStats,
}

/// What was captured of one kind.
#[derive(Default)]
struct Rows {
    positions: Vec<Range<usize>>,
    numbers: Vec<f32>,
}

impl Found {
    async fn collect(mut tokens: Vec<u32>, mut events: Events) -> Result<Self> {
        let mut rows = BTreeMap::<Activation, Rows>::new();
        loop {
            match events.recv().await {
                Some(Event::Token(token)) => tokens.push(token.id),
                Some(Event::Captured(Captured { what, position, count, rows: numbers })) => {
                    let all = rows.entry(what).or_default();
                    match all.positions.last_mut() {
                        Some(last) if last.end == position => last.end += count,
                        _ => all.positions.push(position..position + count),
                    }
                    all.numbers.extend(numbers);
                }
                Some(Event::Done(reason, stats)) => return Ok(Self { tokens, rows, reason, stats }),
                Some(Event::Failed(error)) => return Err(error.into()),
                None => return Err(crate::Error::Stopped("it gave no reason".into()).into()),
            }
        }
    }

    /// Positions of the rows, which are those of all kinds.
    fn positions(&self) -> Vec<usize> {
        self.rows.values().next().map_or(Vec::new(), |rows| rows.positions.iter().cloned().flatten().collect())
    }

    fn write(self, model: &TextModel, encoding: Encoding, place: OwnedSemaphorePermit) -> Result<Response> {
        let (kind, bytes) = match encoding {
            Encoding::Safetensors => ("application/octet-stream", self.safetensors()),
            _ => ("application/json", self.json(model, encoding)?.to_string().into_bytes()),
        };
        // The place is free when the last byte is with the client.
        let body = Bytes::from_owner(Held(bytes, place));
        Ok(([(CONTENT_TYPE, kind)], body).into_response())
    }

    fn json(&self, model: &TextModel, encoding: Encoding) -> Result<Value> {
        let info = model.engine().info();
        let positions = self.positions();
        let one = |rows: &Rows| {
            let data = match encoding {
                Encoding::Float => json!(rows.numbers),
                _ => BASE64_STANDARD.encode(bytes_of(&rows.numbers)).into(),
            };
            json!({"shape": [positions.len(), rows.numbers.len() / positions.len().max(1)], "data": data})
        };
        let mut hidden = Map::new();
        let mut logits = Value::Null;
        for (what, rows) in &self.rows {
            match what {
                Activation::Hidden(layer) => _ = hidden.insert(layer.to_string(), one(rows)),
                Activation::Logits => logits = one(rows),
            }
        }
        let generated = &self.tokens[self.stats.prompt_tokens..];
        Ok(json!({
            "id": new_id("capture"),
            "object": "capture",
            "created": unix_seconds(),
            "model": info.model,
            "tokens": self.tokens,
            "text": model.tokenizer().decode(generated, true)?,
            "finish_reason": match self.reason { FinishReason::Stop => "stop", FinishReason::Length => "length" },
            "positions": positions,
            "hidden": hidden,
            "logits": logits,
            "usage": {
                "prompt_tokens": self.stats.prompt_tokens,
                "completion_tokens": generated.len(),
                "total_tokens": self.tokens.len(),
            },
        }))
    }

    /// `tokens` [T] and `positions` [n], I64; `hidden.{i}` [n, hidden] and `logits` [n, vocab], F32: the names of `moebius capture`.
    fn safetensors(&self) -> Vec<u8> {
        let tokens: Vec<i64> = self.tokens.iter().map(|&t| i64::from(t)).collect();
        let positions: Vec<i64> = self.positions().iter().map(|&p| p as i64).collect();
        let n = positions.len();
        let view = |dtype, shape, data| TensorView::new(dtype, shape, data).expect("a tensor's bytes are its shape's");
        let mut tensors = vec![
            ("tokens".to_string(), view(Dtype::I64, vec![tokens.len()], bytemuck::cast_slice(&tokens))),
            ("positions".to_string(), view(Dtype::I64, vec![n], bytemuck::cast_slice(&positions))),
        ];
        for (what, rows) in &self.rows {
            let name = match what {
                Activation::Hidden(layer) => format!("hidden.{layer}"),
                Activation::Logits => "logits".into(),
            };
            tensors.push((name, view(Dtype::F32, vec![n, rows.numbers.len() / n.max(1)], bytes_of(&rows.numbers))));
        }
        safetensors::serialize(tensors, None).expect("tensors with distinct names serialize")
    }
}

/// Little-endian, as every machine is that this runs on.
fn bytes_of(numbers: &[f32]) -> &[u8] {
    bytemuck::cast_slice(numbers)
}

/// A body, and the place it takes.
struct Held(Vec<u8>, #[allow(dead_code)] OwnedSemaphorePermit); // held until it is dropped

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
