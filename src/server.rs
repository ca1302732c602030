//! The HTTP server: OpenAI-compatible routes over one [`TextModel`].
//!
//! `error` is the shape of every refusal, `fields` reads request bodies and leaves nothing unread, `completions` answers, `web` is the page
//! for people.

mod completions;
mod error;
mod fields;
mod web;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::header::CONTENT_LENGTH;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::engine::SamplingParams;
use crate::text_model::TextModel;
use crate::{Error, Result};
use error::ApiError;

/// Bytes of a request body at most: a million tokens of text, and no more than a box can hold many of.
const MAX_BODY_BYTES: usize = 16 << 20;

/// How long running answers may go on after the signal to stop.
const DRAIN: Duration = Duration::from_secs(30);

/// A server that has its port and waits for a model.
pub struct Server {
    listener: std::net::TcpListener,
    address: SocketAddr,
}

impl Server {
    /// Takes the port.
    ///
    /// Errors: `Error::Invalid` when it is taken, not allowed, or not an address of this machine.
    pub fn bind(address: SocketAddr) -> Result<Self> {
        let refused = |e: std::io::Error| {
            Error::Invalid(match e.kind() {
                std::io::ErrorKind::AddrInUse => format!("{address} is in use by another program: choose another --port"),
                std::io::ErrorKind::PermissionDenied => format!("we may not listen on {address}: choose a --port above 1023"),
                _ => format!("cannot listen on {address} ({e}): check --host and --port"),
            })
        };
        let listener = std::net::TcpListener::bind(address).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { listener, address })
    }

    /// Where it listens, with the real port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until Ctrl-C or SIGTERM; then running answers may end, until a second signal or half a minute has passed.
    pub fn run(self, model: TextModel) -> Result<()> {
        let failed = |e: std::io::Error| Error::Resources(format!("the server cannot run: {e}"));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(failed)?;
        let result = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(self.listener).map_err(failed)?;
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let serve = axum::serve(listener, router(model)).with_graceful_shutdown(async {
                let _ = stopped.await; // a dropped sender stops it as well
            });
            let mut serve = std::pin::pin!(serve.into_future());
            tokio::select! {
                result = &mut serve => return result.map_err(failed),
                () = signal() => drop(stop),
            }
            tokio::select! {
                result = &mut serve => result.map_err(failed),
                () = signal() => Ok(()),
                () = tokio::time::sleep(DRAIN) => Ok(()),
            }
        });
        // Tokenizing may still run on another thread; nobody waits for it.
        runtime.shutdown_background();
        result
    }
}

async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let terminate = async {
        match signal(SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        () = terminate => {}
    }
}

/// What every route sees.
struct App {
    model: TextModel,
    created: u64, // Unix seconds at which the server started
}

impl App {
    /// The name that clients use; a directory goes by its last part too.
    fn name(&self) -> &str {
        &self.model.engine().info().model
    }

    /// Refuses a request for another model.
    fn check_model(&self, asked: &str) -> std::result::Result<(), ApiError> {
        let short = std::path::Path::new(self.name()).file_name().and_then(|name| name.to_str());
        if asked == self.name() || Some(asked) == short { Ok(()) } else { Err(ApiError::no_such_model(asked, self.name())) }
    }

    fn describe(&self) -> Value {
        let info = self.model.engine().info();
        json!({
            "id": info.model,
            "object": "model",
            "created": self.created,
            "owned_by": "moebius",
            "max_model_len": info.max_context,
            "sampling": sampling(self.model.sampling()),
            "architecture": info.architecture,
            "experts": info.experts,
            "dense": info.dense,
            "kv": info.kv,
            "device": info.device,
            "simd": info.simd.to_string(),
            "threads": info.threads,
        })
    }
}

/// What a request that sets nothing is sampled with.
fn sampling(defaults: &SamplingParams) -> Value {
    json!({
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
    })
}

/// All routes, over a running model.
pub fn router(model: TextModel) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model_by_name))
        .route("/v1/chat/completions", post(completions::chat))
        .route("/v1/completions", post(completions::text))
        .merge(web::router())
        .fallback(async |uri: axum::http::Uri| ApiError::no_such_route(uri.path()))
        .method_not_allowed_fallback(async |method: axum::http::Method, uri: axum::http::Uri| ApiError::wrong_method(&method, uri.path()))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(axum::middleware::from_fn(refuse_announced_size))
        .with_state(Arc::new(App { model, created: unix_seconds() }))
}

/// Refuses a body that is too large by its own account, instead of reading it until it is.
async fn refuse_announced_size(request: Request, next: Next) -> Response {
    let announced = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match announced {
        Some(bytes) if bytes > MAX_BODY_BYTES as u64 => ApiError::body_too_large(bytes, MAX_BODY_BYTES).into_response(),
        _ => next.run(request).await,
    }
}

/// Whether requests would be answered: a load balancer and a supervisor ask here.
async fn health(State(app): State<Arc<App>>) -> Response {
    if app.model.engine().is_running() {
        return Json(json!({"status": "ok"})).into_response();
    }
    ApiError::from(Error::Stopped("start it again".into())).into_response()
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [app.describe()]}))
}

async fn model_by_name(State(app): State<Arc<App>>, Path(name): Path<String>) -> std::result::Result<Json<Value>, ApiError> {
    app.check_model(&name)?;
    Ok(Json(app.describe()))
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
