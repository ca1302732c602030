//! The HTTP server: the APIs of OpenAI and Anthropic over one [`TextModel`].
//!
//! ```text
//! error                      refusals
//! fields, structure, text    a body as fields, its memory, its text as tokens
//! memory                     what all requests together may take
//! chunked, write             answers that are written while they are sent
//! connections                sockets, places, TLS, timeouts
//! front                      before every route: keys, request ids, the log, panics
//! body                       reads a body and understands it
//! steer                      steering vectors, and their names
//! ask                        what an endpoint asks the engine
//! answer, events             the engine's answer as steps, and as server-sent events
//! tools, format              tools of a request; the format of its answer
//! conversation               messages of all APIs to those of a chat template
//! completions, chat, responses, messages, capture, tokens, metrics, health    the endpoints
//! web                        the chat page
//! local                      the same for callers in this process
//! running                    from the start to the end of a server
//! ```
//!
//! Imports machine, model, forward, load, engine and text. Read `chat` first.

mod answer;
mod ask;
mod body;
mod capture;
mod chat;
mod chunked;
mod completions;
mod connections;
mod conversation;
mod error;
mod events;
mod fields;
mod format;
mod front;
mod health;
pub mod local;
mod memory;
mod messages;
mod metrics;
mod responses;
mod running;
mod steer;
mod structure;
mod text;
mod tokens;
mod tools;
mod web;
mod write;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::engine::SamplingParams;
use crate::text::model::TextModel;
use crate::{Error, Result};
use error::ApiError;
use front::Keys;
use metrics::HttpMetrics;
pub use running::Running;

/// Options of the server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// API keys. Empty: no key is required.
    pub api_keys: Vec<String>,
    /// Share one prefix cache among all keys instead of one cache per key.
    pub share_prefixes: bool,
    /// Origins of web pages that may use the server, `*` for all. Its own page always may.
    pub cors_origins: Vec<String>,
    /// Files of the certificate chain and the private key (PEM).
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Accept every client that reaches the port.
    pub insecure: bool,
    /// How long running answers may continue after the signal to stop.
    pub drain: Duration,
    /// Write prompts and answers to the log.
    pub log_prompts: bool,
    /// Maximum connections, as far as the limit of open files allows.
    pub max_connections: usize,
    /// Maximum time for a client to send a request or to read an answer.
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

/// A server that has its port and is not yet started.
pub struct Server {
    listener: std::net::TcpListener,
    address: SocketAddr,
    options: ServerOptions,
    tls: Option<connections::Tls>,
}

impl Server {
    /// Binds the port and checks the options.
    ///
    /// Errors: `Error::Invalid` when the address cannot be bound, when others could reach it without a key, or when
    /// certificate and key cannot be used.
    pub fn bind(address: SocketAddr, options: ServerOptions) -> Result<Self> {
        if !address.ip().is_loopback() && options.api_keys.is_empty() && !options.insecure {
            return Err(Error::Invalid(format!(
                "other machines could reach {} without a key: give a key with --api-key-file, or allow it with \
                 --insecure",
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
                    format!("no permission to listen on {address}: choose a --port above 1023")
                }
                _ => format!("cannot listen on {address} ({e}): check --host and --port"),
            })
        };
        let listener = connections::listen(address).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { listener, address, options, tls })
    }

    /// The address it listens on, with the real port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The base URL for clients.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    /// Starts to answer. Until it has a model, it answers that the model is being loaded.
    pub fn start(self) -> Result<Running> {
        let failed = |e: std::io::Error| Error::Resources(format!("the server cannot run: {e}"));
        moebius_cache::threads::probe(4)?; // tokio panics when its two threads cannot start
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(failed)?;
        let app = Arc::new(App::new(&self));
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let listener = {
            let _context = runtime.enter();
            tokio::net::TcpListener::from_std(self.listener).map_err(failed)?
        };
        let connections = connections::ConnectionContext {
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

/// What every route sees.
struct App {
    model: OnceLock<TextModel>,
    keys: Keys,
    share_prefixes: bool,
    hosts: front::Hosts,
    http: HttpMetrics,
    places: Arc<connections::ConnectionPlaces>,
    memory: memory::RequestMemory,
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
            places: Arc::new(connections::ConnectionPlaces::new(connections::fit(options.max_connections))),
            memory: memory::RequestMemory::default(),
            vectors: steer::Vectors::of(options.api_keys.len()),
            log_prompts: options.log_prompts,
            client_timeout: options.client_timeout,
            draining: AtomicBool::new(false),
            created: unix_seconds(),
        }
    }

    /// The model. Errors: it is still being loaded, or the server is stopping.
    fn model(&self) -> std::result::Result<&TextModel, ApiError> {
        if self.draining.load(Relaxed) {
            return Err(ApiError::unavailable("The server is stopping and accepts no new requests", None));
        }
        self.model
            .get()
            .ok_or_else(|| ApiError::unavailable("The model is still being loaded; try again later", Some(5)))
    }

    /// Refuses a request for another model. A directory may also go by its last part.
    fn check_model(&self, asked: &str) -> std::result::Result<(), ApiError> {
        let name = &self.model()?.engine().info().model;
        let short = std::path::Path::new(name).file_name().and_then(|name| name.to_str());
        if asked == name || Some(asked) == short { Ok(()) } else { Err(ApiError::no_such_model(asked, name)) }
    }

    fn describe(&self) -> std::result::Result<Value, ApiError> {
        let info = self.model()?.engine().info();
        let mut description = json!({
            "id": info.model,
            "object": "model",
            "created": self.created,
            "owned_by": "moebius",
            // For Anthropic's clients; its API has the epoch for an unknown release date.
            "type": "model",
            "display_name": info.model,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
            "max_input_tokens": info.max_context,
            "max_model_len": info.max_context,
            "num_hidden_layers": info.layers,
            "hidden_size": info.hidden_size,
            "residual_streams": info.streams,
            "sampling": sampling(self.model()?.sampling()),
        });
        let mut setup = json!(info);
        for name in ["architecture", "experts", "dense", "kv", "activations", "device", "simd", "threads"] {
            description[name] = setup[name].take();
        }
        Ok(description)
    }
}

/// The default sampling parameters.
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
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/version", get(async || Json(json!({"version": env!("CARGO_PKG_VERSION")}))))
        .route("/metrics", get(metrics::show))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/models", get(health::models))
        .route("/v1/models/{*name}", get(health::model_by_name))
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

/// Reads a body as an endpoint would, without an answer. Errors: the refusal. For tests of arbitrary bodies.
#[doc(hidden)]
pub fn read_request(model: &TextModel, path: &str, body: &[u8]) -> std::result::Result<(), String> {
    let read = |body: &[u8]| -> std::result::Result<(), ApiError> {
        let mut fields = fields::RequestFields::parse(body)?;
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

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
