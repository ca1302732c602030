//! The body of a request: read once there is memory for it, and parsed into fields.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::StatusCode;
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout_at};

use super::App;
use super::chunked::SLOWEST;
use super::error::ApiError;
use super::fields::RequestFields;
use super::memory::{Reservation, give_back};
use super::structure::Structure;
use super::text::{ENCODED_AT_ONCE, encoding_bytes};
use crate::text::model::TextModel;

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum bytes of a request body: a million tokens of text, and small enough that memory holds many bodies.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Limits for reading on after a refusal. Most clients write the whole body before they read the answer.
const MAX_DROPPED_BYTES: usize = 4 * MAX_BODY_BYTES;
const DROPPED_WITHIN: Duration = Duration::from_secs(5);
const DROPPED_SILENCE: Duration = Duration::from_secs(1);

/// Further bytes per byte of a body while it is understood: its strings, the messages made of them, and the prompt.
const COPIES: u64 = 8;

/// A body that has been read.
struct Whole {
    bytes: Vec<u8>,
    structure: Structure,
    held: Reservation,
}

/// Reads a body to its end, once there is memory for it.
///
/// Errors: the body is too large, cut off, or too slow.
async fn read_body(app: &App, client: u64, body: &mut Body) -> Result<Whole> {
    // A body with too large a Content-Length is not read at all.
    let length = body.size_hint();
    if length.lower() > MAX_BODY_BYTES as u64 {
        return Err(ApiError::body_too_large(MAX_BODY_BYTES));
    }
    // A body without a length reserves memory as it grows.
    let mut held = app.memory.bodies.admit(client, length.exact().unwrap_or(SLOWEST)).await?;
    let mut bytes = Vec::with_capacity(length.exact().unwrap_or(0) as usize);
    let mut structure = Structure::default();
    let started = Instant::now();
    loop {
        // A large body may take longer, but not forever, and not without progress.
        let patience = app.client_timeout + Duration::from_secs(bytes.len() as u64 / SLOWEST);
        let frame = match timeout_at(started + patience.min(4 * app.client_timeout), body.frame()).await {
            Ok(None) => return Ok(Whole { bytes, structure, held }),
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => {
                let message = "The request body was cut off, or its encoding does not match its headers";
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
            // Old and new buffer both exist during the copy.
            let larger = (2 * all).min(MAX_BODY_BYTES);
            held.grow(((bytes.capacity() + larger) as u64).saturating_sub(held.bytes())).await?;
            bytes.reserve_exact(larger - bytes.len());
        }
        structure.read(&data)?;
        bytes.extend_from_slice(&data);
    }
}

/// Reads and drops the rest of a refused body for a moment.
async fn drop_body(mut body: Body) {
    let until = Instant::now() + DROPPED_WITHIN;
    let mut dropped = 0;
    while dropped < MAX_DROPPED_BYTES
        && let Ok(Some(Ok(frame))) = timeout_at(until.min(Instant::now() + DROPPED_SILENCE), body.frame()).await
    {
        dropped += frame.data_ref().map_or(0, Bytes::len);
    }
}

/// The common beginning of an endpoint: waits for the model, checks its name, and reads the body's fields with `read`.
pub(super) async fn understand<T: Send + 'static>(
    app: &Arc<App>,
    client: u64,
    mut body: Body,
    read: impl FnOnce(&TextModel, &mut RequestFields) -> Result<T> + Send + 'static,
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
        let fields = RequestFields::parse(&bytes);
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
