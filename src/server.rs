//! The HTTP server: the APIs of OpenAI and Anthropic over one [`TextModel`].
//!
//! ```text
//! error                      every answer that is a refusal
//! fields, structure, text    a body: read whole, and counted before it takes memory
//! memory                     what all requests may take together
//! chunked                    an answer that is written while it is sent
//! connections                sockets, who has a place, TLS, timeouts
//! front                      who may ask, request ids, the log, panics
//! steer                      what is added to the residual stream, and vectors by name
//! ask, answer                what to ask the engine; what it says, as parts
//! conversation               messages of all APIs to those of a chat template
//! completions, chat, responses, messages, capture, tokens, metrics    one file for each endpoint
//! web                        the page for people
//! local                      a conversation on the command line
//! ```
//!
//! Imports machine, forward, load, engine and text. Read `chat` first.

mod answer;
mod ask;
mod capture;
mod chat;
mod chunked;
mod completions;
mod connections;
mod conversation;
mod error;
mod fields;
mod front;
pub mod local;
mod memory;
mod messages;
mod metrics;
mod responses;
mod steer;
mod structure;
mod text;
mod tokens;
mod web;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::engine::SamplingParams;
use crate::text::model::TextModel;
use crate::{Error, Result};
use error::ApiError;
use front::Keys;
use metrics::HttpMetrics;

/// What a user can choose about the server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Who may ask: anyone if empty, else whoever has one of these.
    pub api_keys: Vec<String>,
    /// Requests share the prefixes that were read, whoever asks; otherwise those of one key do.
    pub share_prefixes: bool,
    /// Web pages of these origins may ask, `*` for all; the server's own page always may.
    pub cors_origins: Vec<String>,
    /// Certificate chain and private key, in PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Anyone who reaches the port may ask.
    pub insecure: bool,
    /// How long running answers may go on after the signal to stop.
    pub drain: Duration,
    /// Prompts and answers go into the log.
    pub log_prompts: bool,
    /// Connections at the same time, as far as the system's limit of open files goes.
    pub max_connections: usize,
    /// How long a client may take to send a request, or to take what it is sent.
    pub client_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            share_prefixes: false,
            cors_origins: Vec::new(),
            tls: None,
            insecure: false,
            drain: Duration::from_secs(30),
            log_prompts: false,
            max_connections: 1024,
            client_timeout: Duration::from_secs(30),
        }
    }
}

/// A server that has its port and waits for a model.
pub struct Server {
    listener: std::net::TcpListener,
    address: SocketAddr,
    options: ServerOptions,
    tls: Option<connections::Tls>,
}

impl Server {
    /// Takes the port and checks the options.
    ///
    /// Errors: `Error::Invalid` when the port is taken, not allowed, or not an address of this machine, when others
    /// could reach it without a key, or when certificate and key are not usable.
    pub fn bind(address: SocketAddr, options: ServerOptions) -> Result<Self> {
        if !address.ip().is_loopback() && options.api_keys.is_empty() && !options.insecure {
            return Err(Error::Invalid(format!(
                "others could reach {} without a key: give one with --api-key-file or --api-key, or say --insecure",
                address.ip()
            )));
        }
        let tls = options.tls.as_ref().map(|(chain, key)| connections::Tls::load(chain, key)).transpose()?;
        let refused = |e: std::io::Error| {
            Error::Invalid(match e.kind() {
                std::io::ErrorKind::AddrInUse => {
                    format!("{address} is in use by another program: choose another --port")
                }
                std::io::ErrorKind::PermissionDenied => {
                    format!("we may not listen on {address}: choose a --port above 1023")
                }
                _ => format!("cannot listen on {address} ({e}): check --host and --port"),
            })
        };
        let listener = connections::listen(address).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { listener, address, options, tls })
    }

    /// Where it listens, with the real port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What clients put before the paths.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    /// Begins to answer: until there is a model, that it is being loaded.
    pub fn start(self) -> Result<Running> {
        let failed = |e: std::io::Error| Error::Resources(format!("the server cannot run: {e}"));
        moebius_cache::threads::probe(4)?; // tokio panics where its two do not start
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(failed)?;
        let app = Arc::new(App::new(&self));
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let listener = {
            let _context = runtime.enter();
            tokio::net::TcpListener::from_std(self.listener).map_err(failed)?
        };
        let connections = connections::Server {
            tls: self.tls,
            router: router(app.clone(), &self.options.cors_origins)?,
            places: app.places.clone(),
            patience: self.options.client_timeout,
            stop: stopped,
        };
        let done = runtime.spawn(connections.serve(listener));
        Ok(Running { runtime, app, stop, done, drain: self.options.drain })
    }
}

/// A server that answers.
pub struct Running {
    runtime: tokio::runtime::Runtime,
    app: Arc<App>,
    stop: tokio::sync::watch::Sender<bool>,
    done: tokio::task::JoinHandle<()>,
    drain: Duration,
}

impl Running {
    /// From now on requests are answered with `model`.
    pub fn set_model(&self, model: TextModel) {
        let _ = self.app.model.set(model);
    }

    /// Does `act` at each SIGHUP, which does not end the process any more. Errors: `Error::Resources`.
    pub fn on_hangup(&self, mut act: impl FnMut() + Send + 'static) -> Result<()> {
        use tokio::signal::unix::{SignalKind, signal};
        let _context = self.runtime.enter();
        let mut hangups =
            signal(SignalKind::hangup()).map_err(|e| Error::Resources(format!("cannot watch for SIGHUP: {e}")))?;
        self.runtime.spawn(async move {
            while hangups.recv().await.is_some() {
                act();
            }
        });
        Ok(())
    }

    /// Answers until Ctrl-C or SIGTERM; then running answers may end, until a second signal or the time to drain has
    /// passed.
    pub fn wait(self) {
        let signals = async {
            signal().await;
            tracing::info!("stopping: running answers may end");
            Some(signal())
        };
        self.wait_until(signals);
    }

    /// As [`wait`](Running::wait), until `stop` ends; what it gives ends the wait for running answers.
    pub fn wait_until<F: Future<Output = ()>>(self, stop: impl Future<Output = Option<F>>) {
        let Self { runtime, app, stop: tell, mut done, drain } = self;
        runtime.block_on(async {
            let again = tokio::select! {
                _ = &mut done => return,
                again = stop => again,
            };
            app.draining.store(true, Relaxed);
            let _ = tell.send(true);
            let impatient = async {
                match again {
                    Some(again) => again.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = done => {}
                () = impatient => {}
                () = tokio::time::sleep(drain) => {}
            }
        });
        // Tokenizing may still run on another thread; nobody waits for it.
        runtime.shutdown_background();
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
    model: OnceLock<TextModel>,
    keys: Keys,
    share_prefixes: bool,
    hosts: front::Hosts,
    http: HttpMetrics,
    places: Arc<connections::Places>,
    memory: memory::Memory,
    vectors: steer::Vectors,
    log_prompts: bool,
    client_timeout: Duration,
    draining: AtomicBool,
    created: u64, // Unix seconds at which the server started
}

impl App {
    fn new(server: &Server) -> Self {
        let options = &server.options;
        Self {
            model: OnceLock::new(),
            keys: Keys::new(&options.api_keys),
            share_prefixes: options.share_prefixes,
            hosts: front::Hosts::new(server.address, options),
            http: HttpMetrics::default(),
            places: Arc::new(connections::Places::new(connections::fit(options.max_connections))),
            memory: memory::Memory::default(),
            vectors: steer::Vectors::of(options.api_keys.len()),
            log_prompts: options.log_prompts,
            client_timeout: options.client_timeout,
            draining: AtomicBool::new(false),
            created: unix_seconds(),
        }
    }

    /// The model. Errors: it is still being loaded, or the server stops.
    fn model(&self) -> std::result::Result<&TextModel, ApiError> {
        if self.draining.load(Relaxed) {
            return Err(ApiError::unavailable("The server is stopping and takes no new requests", None));
        }
        self.model
            .get()
            .ok_or_else(|| ApiError::unavailable("The model is still being loaded; ask again in a while", Some(5)))
    }

    /// Refuses a request for another model. A directory goes by its last part too.
    fn check_model(&self, asked: &str) -> std::result::Result<(), ApiError> {
        let name = &self.model()?.engine().info().model;
        let short = std::path::Path::new(name).file_name().and_then(|name| name.to_str());
        if asked == name || Some(asked) == short { Ok(()) } else { Err(ApiError::no_such_model(asked, name)) }
    }

    fn describe(&self) -> std::result::Result<Value, ApiError> {
        let info = self.model()?.engine().info();
        Ok(json!({
            "id": info.model,
            "object": "model",
            "created": self.created,
            "owned_by": "moebius",
            // What Anthropic's clients look for; its API has the epoch for a release nobody knows.
            "type": "model",
            "display_name": info.model,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
            "max_input_tokens": info.max_context,
            "max_model_len": info.max_context,
            "num_hidden_layers": info.layers,
            "hidden_size": info.hidden_size,
            "sampling": sampling(self.model()?.sampling()),
            "architecture": info.architecture,
            "experts": info.experts,
            "dense": info.dense,
            "kv": info.kv,
            "device": info.device,
            "simd": info.simd.to_string(),
            "threads": info.threads,
        }))
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

fn router(app: Arc<App>, cors_origins: &[String]) -> Result<Router> {
    let router = Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/version", get(async || Json(json!({"version": env!("CARGO_PKG_VERSION")}))))
        .route("/metrics", get(metrics::show))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model_by_name))
        .route("/v1/chat/completions", post(chat::answer))
        .route("/v1/completions", post(completions::answer))
        .route("/v1/responses", post(responses::answer))
        .route("/v1/messages", post(messages::answer))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/capture", post(capture::answer))
        .route("/v1/vectors", get(steer::list))
        .route("/v1/vectors/{name}", get(steer::get).put(steer::put).delete(steer::delete))
        .merge(web::router())
        .fallback(async |uri: axum::http::Uri| ApiError::no_such_route(uri.path()))
        .method_not_allowed_fallback(async |method: axum::http::Method, uri: axum::http::Uri| {
            ApiError::wrong_method(&method, uri.path())
        })
        .layer(axum::extract::DefaultBodyLimit::disable()) // `ask::read_body` has its own
        .layer(axum::middleware::from_fn_with_state(app.clone(), front::front))
        .with_state(app);
    Ok(match front::cors(cors_origins)? {
        Some(cors) => router.layer(cors),
        None => router,
    })
}

/// Reads a body as an endpoint would and asks nobody: the refusal, if there is one. For tests that send anything.
#[doc(hidden)]
pub fn read_request(model: &TextModel, path: &str, body: &[u8]) -> std::result::Result<(), String> {
    let read = |body: &[u8]| -> std::result::Result<(), ApiError> {
        let mut fields = fields::Fields::parse(body)?;
        fields.string("model")?;
        match path {
            "/v1/chat/completions" => drop(chat::read(model, &mut fields)?),
            "/v1/completions" => drop(completions::read(model, &mut fields)?),
            "/v1/responses" => drop(responses::read(model, &mut fields)?),
            "/v1/capture" => drop(capture::read(model, &mut fields)?),
            _ => drop(messages::read(model, &mut fields)?),
        }
        fields.finish()
    };
    read(body).map_err(|refusal| refusal.to_json().to_string())
}

/// Whether the process works: a supervisor asks here, also while a model is being loaded.
async fn health(State(app): State<Arc<App>>) -> Response {
    match app.model.get() {
        None => Json(json!({"status": "loading"})).into_response(),
        Some(model) if model.engine().is_running() => Json(json!({"status": "ok"})).into_response(),
        Some(_) => ApiError::from(Error::Stopped("start it again".into())).into_response(),
    }
}

/// Whether requests would be answered: a load balancer asks here.
async fn ready(State(app): State<Arc<App>>) -> std::result::Result<Response, ApiError> {
    app.model()?;
    Ok(health(State(app)).await)
}

async fn models(State(app): State<Arc<App>>) -> std::result::Result<Json<Value>, ApiError> {
    let model = app.describe()?;
    let id = model["id"].clone();
    Ok(Json(json!({"object": "list", "data": [model], "has_more": false, "first_id": id, "last_id": id})))
}

async fn model_by_name(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> std::result::Result<Json<Value>, ApiError> {
    app.check_model(&name)?;
    Ok(Json(app.describe()?))
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
