//! `/v1/capture`: residual stream, logits and experts of a prompt and of the generated tokens.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use base64::prelude::BASE64_STANDARD;
use base64::write::EncoderWriter;
use serde_json::{Map, Value, json};

use super::ask::RequestOptions;
use super::body::understand;
use super::chunked::chunked;
use super::completions::one_prompt;
use super::conversation::Conversation;
use super::error::ApiError;
use super::fields::RequestFields;
use super::front::{Caller, new_id};
use super::memory::give_back;
use super::steer::{SteerField, read_layers, read_positions};
use super::write::{open_object, write_list};
use super::{App, unix_seconds};
use crate::engine::{CaptureWanted, Captured, Event, Events, FinishReason, HookPoint, Request, RequestStats};
use crate::model::StreamShape;
use crate::text::model::TextModel;

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum bytes of numbers in one answer.
const MAX_BYTES: usize = 256 << 20;

/// Encoding of the numbers.
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
pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response> {
    let asked = understand(&app, caller.client, body, read).await?;
    let Asked { mut request, steering, encoding, bytes } = asked;
    let held = app.memory.outgoing.admit(caller.client, bytes as u64).await?;
    let model = app.model()?.clone();
    caller.sign(&mut request);
    request.steer = app.vectors.resolve(caller.tenant, &steering)?;
    let prompt = request.prompt.clone();
    let found = CaptureAnswer::collect(prompt, model.engine().submit(request)?).await?;
    app.http.observe(&found.stats);
    let kind = match encoding {
        Encoding::Safetensors => "application/octet-stream",
        _ => "application/json",
    };
    let body = chunked(app.client_timeout, move |out| {
        let written = found.write(&model, encoding, out);
        drop(found);
        give_back(held);
        written
    });
    Ok(([(CONTENT_TYPE, kind)], body).into_response())
}

/// What a request asks for.
pub(super) struct Asked {
    request: Request,
    steering: Vec<SteerField>,
    encoding: Encoding,
    bytes: usize, // of all numbers
}

/// Reads the request and the encoding of its answer.
pub(super) fn read(model: &TextModel, fields: &mut RequestFields) -> Result<Asked> {
    let prompt = match fields.take("prompt") {
        Some(prompt) => {
            one_prompt(model, &prompt, || ApiError::bad_field("prompt", "'prompt' must be a string or token ids"))?
        }
        None => Conversation::read(model, fields)?.prompt(model)?.ids,
    };
    let max_tokens = fields.integer("max_tokens", 0)?.unwrap_or(0);
    let capture = CaptureWanted {
        layers: read_layers(model, fields)?,
        positions: read_positions(fields)?,
        logits: fields.boolean("logits")?.unwrap_or(false),
        router: fields.boolean("router")?.unwrap_or(false),
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
    let of_wrong = if capture.router && info.choices == 0 { "router" } else { "layers" };
    capture.check(info.row_sizes()).map_err(|e| ApiError::of_field(of_wrong, e))?;
    let longest = prompt.len().saturating_add(max_tokens).min(info.max_context);
    let bytes = capture.bytes(prompt.len(), longest, info.row_sizes());
    if bytes > MAX_BYTES {
        let message = format!(
            "This captures up to {} MiB and one answer may hold {}: ask for fewer layers or positions, for no logits, \
             or in several requests",
            bytes.div_ceil(1 << 20),
            MAX_BYTES >> 20
        );
        return Err(ApiError::bad_field("layers", message));
    }
    let options = RequestOptions { max_tokens: None, ..RequestOptions::read(model, fields)? };
    if options.n > 1 || !options.stops.is_empty() {
        let field = if options.n > 1 { "n" } else { "stop" };
        return Err(ApiError::unsupported(field));
    }
    let mut ask = options.ask(model, "prompt", vec![prompt], None, || None)?;
    let (request, _) = ask.choices.pop().expect("one prompt, one choice");
    let request = Request { max_tokens: Some(max_tokens), capture: Some(capture), ..request };
    Ok(Asked { request, steering: ask.steer, encoding, bytes })
}

/// The answer to a request.
struct CaptureAnswer {
    tokens: Vec<u32>,
    rows: BTreeMap<HookPoint, CapturedRows>,
    reason: FinishReason,
    stats: RequestStats,
}

/// Captured rows of one kind.
#[derive(Default)]
struct CapturedRows {
    positions: Vec<Range<usize>>,
    // As the engine gave them: joining them would need them twice.
    rows: Vec<Vec<f32>>,
    experts: Vec<Vec<i32>>,
}

/// One array of an answer.
struct Array<'a> {
    shape: Vec<usize>,
    numbers: Numbers<'a>,
}

/// Its numbers, in parts.
enum Numbers<'a> {
    F32(&'a [Vec<f32>]),
    I32(&'a [Vec<i32>]),
}

impl Array<'_> {
    fn dtype(&self) -> &'static str {
        match self.numbers {
            Numbers::F32(_) => "F32",
            Numbers::I32(_) => "I32",
        }
    }

    /// Its numbers as little-endian bytes; every supported machine is little-endian.
    fn write_bytes(&self, out: &mut dyn Write) -> io::Result<()> {
        match self.numbers {
            Numbers::F32(parts) => parts.iter().try_for_each(|part| out.write_all(bytemuck::cast_slice(part))),
            Numbers::I32(parts) => parts.iter().try_for_each(|part| out.write_all(bytemuck::cast_slice(part))),
        }
    }

    fn write_json(&self, encoding: Encoding, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"{\"shape\":")?;
        serde_json::to_writer(&mut *out, &self.shape)?;
        out.write_all(b",\"data\":")?;
        match (encoding, &self.numbers) {
            (Encoding::Float, Numbers::F32(parts)) => write_list(out, parts.iter().flatten())?,
            (Encoding::Float, Numbers::I32(parts)) => write_list(out, parts.iter().flatten())?,
            _ => {
                out.write_all(b"\"")?;
                let mut base64 = EncoderWriter::new(&mut *out, &BASE64_STANDARD);
                self.write_bytes(&mut base64)?;
                base64.finish()?;
                drop(base64);
                out.write_all(b"\"")?;
            }
        }
        out.write_all(b"}")
    }
}

impl CapturedRows {
    /// What `what` has of so many positions: rows, or weights of experts.
    fn floats(&self, what: &HookPoint, positions: usize, streams: StreamShape) -> Array<'_> {
        let shape = match what {
            HookPoint::Hidden(_) => streams.rows(positions),
            HookPoint::Logits | HookPoint::Router(_) => self.each(positions),
        };
        Array { shape, numbers: Numbers::F32(&self.rows) }
    }

    /// The experts.
    fn experts(&self, positions: usize) -> Array<'_> {
        Array { shape: self.each(positions), numbers: Numbers::I32(&self.experts) }
    }

    fn each(&self, positions: usize) -> Vec<usize> {
        vec![positions, self.rows.iter().map(Vec::len).sum::<usize>() / positions.max(1)]
    }
}

impl CaptureAnswer {
    async fn collect(mut tokens: Vec<u32>, mut events: Events) -> Result<Self> {
        let mut rows = BTreeMap::<HookPoint, CapturedRows>::new();
        loop {
            match events.recv().await {
                Some(Event::Token(token)) => tokens.push(token.id),
                Some(Event::Captured(Captured { what, position, count, rows: numbers, experts })) => {
                    let all = rows.entry(what).or_default();
                    match all.positions.last_mut() {
                        Some(last) if last.end == position => last.end += count,
                        _ => all.positions.push(position..position + count),
                    }
                    all.rows.push(numbers);
                    all.experts.push(experts);
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

    fn write(&self, model: &TextModel, encoding: Encoding, out: &mut dyn Write) -> io::Result<()> {
        match encoding {
            Encoding::Safetensors => self.write_safetensors(model.engine().info().stream_shape(), out),
            _ => self.write_json(model, encoding, out),
        }
    }

    fn write_json(&self, model: &TextModel, encoding: Encoding, out: &mut dyn Write) -> io::Result<()> {
        let (positions, streams) = (self.positions(), model.engine().info().stream_shape());
        let generated = &self.tokens[self.stats.prompt_tokens..];
        let head = json!({
            "id": new_id("capture"),
            "object": "capture",
            "created": unix_seconds(),
            "model": model.engine().info().model,
            "text": model.tokenizer().decode(generated, true).map_err(io::Error::other)?,
            "finish_reason": match self.reason { FinishReason::Stop => "stop", FinishReason::Length => "length" },
            "usage": {
                "prompt_tokens": self.stats.prompt_tokens,
                "completion_tokens": generated.len(),
                "total_tokens": self.tokens.len(),
            },
        });
        open_object(out, head)?;
        out.write_all(b",\"tokens\":")?;
        serde_json::to_writer(&mut *out, &self.tokens)?;
        out.write_all(b",\"positions\":")?;
        serde_json::to_writer(&mut *out, &positions)?;
        let floats = |what, rows: &CapturedRows, out: &mut dyn Write| {
            rows.floats(what, positions.len(), streams).write_json(encoding, out)
        };
        let mut between = "";
        out.write_all(b",\"hidden\":{")?;
        for (what, rows) in &self.rows {
            let HookPoint::Hidden(layer) = what else { continue };
            write!(out, "{between}\"{layer}\":")?;
            floats(what, rows, out)?;
            between = ",";
        }
        out.write_all(b"},\"logits\":")?;
        match self.rows.get(&HookPoint::Logits) {
            Some(rows) => floats(&HookPoint::Logits, rows, out)?,
            None => out.write_all(b"null")?,
        }
        between = "";
        out.write_all(b",\"router\":{")?;
        for (what, rows) in &self.rows {
            let HookPoint::Router(layer) = what else { continue };
            write!(out, "{between}\"{layer}\":{{\"ids\":")?;
            rows.experts(positions.len()).write_json(encoding, out)?;
            out.write_all(b",\"weights\":")?;
            floats(what, rows, out)?;
            out.write_all(b"}")?;
            between = ",";
        }
        out.write_all(b"}}")
    }

    /// `tokens` [T] and `positions` [n], I64; `hidden.{i}` [n, hidden] or [n, streams, hidden] and `logits` [n, vocab],
    /// F32; `router.{i}.ids`, I32, and `router.{i}.weights`, F32, [n, top_k].
    fn write_safetensors(&self, streams: StreamShape, out: &mut dyn Write) -> io::Result<()> {
        let tokens: Vec<i64> = self.tokens.iter().map(|&t| i64::from(t)).collect();
        let positions: Vec<i64> = self.positions().iter().map(|&p| p as i64).collect();
        let mut header = Map::new();
        let mut end = 0;
        let mut tensor = |name: String, dtype: &str, shape: Vec<usize>, size: usize| {
            let start = end;
            end += shape.iter().product::<usize>() * size;
            header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
        };
        tensor("tokens".into(), "I64", vec![tokens.len()], 8);
        tensor("positions".into(), "I64", vec![positions.len()], 8);
        let mut arrays = Vec::new();
        for (what, rows) in &self.rows {
            let floats = rows.floats(what, positions.len(), streams);
            match what {
                HookPoint::Hidden(layer) => arrays.push((format!("hidden.{layer}"), floats)),
                HookPoint::Logits => arrays.push(("logits".into(), floats)),
                HookPoint::Router(layer) => {
                    arrays.push((format!("router.{layer}.ids"), rows.experts(positions.len())));
                    arrays.push((format!("router.{layer}.weights"), floats));
                }
            }
        }
        for (name, array) in &arrays {
            tensor(name.clone(), array.dtype(), array.shape.clone(), 4);
        }
        // The format aligns tensors to 8 bytes.
        let header = Value::Object(header).to_string();
        let padded = header.len().next_multiple_of(8);
        out.write_all(&(padded as u64).to_le_bytes())?;
        write!(out, "{header:padded$}")?;
        out.write_all(bytemuck::cast_slice(&tokens))?;
        out.write_all(bytemuck::cast_slice(&positions))?;
        arrays.iter().try_for_each(|(_, array)| array.write_bytes(out))
    }
}
