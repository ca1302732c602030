//! Before every route: access, request ids, the log, and panics.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, CACHE_CONTROL, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowOrigin, CorsLayer};

use super::connections::OfReserve;
use super::error::ApiError;
use super::{App, ServerOptions, unix_seconds};
use crate::engine::{self, Tenant};
use crate::{Error, Result};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Anthropic's name of it.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Paths that reveal nothing about requests: open without a key.
const OPEN: [&str; 3] = ["/health", "/ready", "/version"];

/// Paths that are answered even when all places are taken.
const ALWAYS: [&str; 3] = ["/health", "/ready", "/metrics"];

/// A request's id and its client, for the log, for fair turns and for keeping clients apart.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// The client's own id for the request, if it sent a plain one.
    pub(super) request_id: String,
    /// A number for the client's key, or without keys for its address.
    pub(super) client: u64,
    /// Whose vectors it may use: those of its key, or without keys those of all clients.
    pub(super) tenant: Tenant,
    /// Whose prefixes it shares.
    pub(super) prefixes: Tenant,
}

impl Caller {
    /// Writes the client into an engine request.
    pub(super) fn sign(&self, request: &mut engine::Request) {
        (request.client, request.tenant) = (self.client, self.prefixes);
    }
}

/// The API keys of this server.
pub(super) struct Keys(Vec<String>);

impl Keys {
    pub(super) fn new(keys: &[String]) -> Self {
        Self(keys.to_vec())
    }

    /// The index of the key in `headers`. `None`: it is not one of these. Takes the same time for all keys of one
    /// length.
    fn find(&self, headers: &HeaderMap) -> Option<usize> {
        let bearer = headers.get(AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
        });
        let given = bearer.or_else(|| headers.get(API_KEY).map(HeaderValue::as_bytes))?;
        let mut found = None;
        for (i, key) in self.0.iter().enumerate() {
            if bool::from(key.as_bytes().ct_eq(given)) {
                found = Some(i);
            }
        }
        found
    }
}

/// The host names that this server accepts. Otherwise a foreign web page could point its own name here and use a server
/// without keys (DNS rebinding).
pub(super) struct Hosts {
    local_only: bool,
    origins: Vec<String>, // of pages that may use this server, besides its own
}

impl Hosts {
    pub(super) fn new(address: SocketAddr, options: &ServerOptions) -> Self {
        let local_only = address.ip().is_loopback() && options.api_keys.is_empty() && !options.insecure;
        Self { local_only, origins: options.cors_origins.clone() }
    }

    fn check(&self, headers: &HeaderMap) -> std::result::Result<(), ApiError> {
        let host = headers.get(HOST).map_or(Ok(""), HeaderValue::to_str);
        let host = host.map_err(|_| ApiError::bad_request("The Host header is not text"))?;
        let (name, _) = name_and_port(host);
        let local =
            name.is_empty() || name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok();
        if local || !self.local_only {
            return Ok(());
        }
        Err(ApiError::forbidden(format!(
            "This server accepts only requests to its address, not to '{name}': start it with --api-key-file, or with \
             --insecure behind a proxy"
        )))
    }

    fn check_origin(&self, headers: &HeaderMap) -> std::result::Result<(), ApiError> {
        let (Some(origin), Some(host)) = (headers.get(ORIGIN), headers.get(HOST)) else { return Ok(()) };
        let (origin, host) = (origin.to_str().unwrap_or_default(), host.to_str().unwrap_or_default());
        let own = origin.split_once("://").is_some_and(|(_, name)| name_and_port(name) == name_and_port(host));
        if own || self.origins.iter().any(|allowed| allowed == "*" || origin.eq_ignore_ascii_case(allowed)) {
            return Ok(());
        }
        Err(ApiError::forbidden("Pages of other origins may not use this server: allow this origin with --cors-origin"))
    }
}

/// The two parts of `name:port`, with the name in lower case and without a final dot.
fn name_and_port(host: &str) -> (String, &str) {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').unwrap_or((rest, "")),
        None => host.split_once(':').unwrap_or((host, "")),
    };
    (name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase(), port.trim_start_matches(':'))
}

/// The origins whose pages may read answers. `None`: no other origin. Errors: `Error::Invalid` for a malformed origin.
pub(super) fn cors(origins: &[String]) -> Result<Option<CorsLayer>> {
    if origins.is_empty() {
        return Ok(None);
    }
    let origin = |text: &String| {
        let valid = text.contains("://") && !text.ends_with('/');
        text.to_ascii_lowercase().parse::<HeaderValue>().ok().filter(|_| valid).ok_or_else(|| {
            Error::Invalid(format!(
                "--cors-origin {text}: give an origin such as https://chat.example.com, without a slash at its end, \
                 or *"
            ))
        })
    };
    let allow = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().map(origin).collect::<Result<Vec<_>>>()?)
    };
    let layer = CorsLayer::new().allow_origin(allow).allow_methods([Method::GET, Method::POST]);
    Ok(Some(layer.allow_headers(tower_http::cors::AllowHeaders::mirror_request()).expose_headers([REQUEST_ID])))
}

/// Passes a request to its route, and its answer back.
pub(super) async fn front(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_string());
    let route = request.extensions().get::<MatchedPath>().map_or("none".into(), |route| route.as_str().to_string());
    let request_id = request_id(request.headers());
    let admitted = admit(&app, &request).map(|(client, tenant)| {
        let prefixes = if app.share_prefixes { Tenant::default() } else { tenant };
        Caller { request_id: request_id.clone(), client, tenant, prefixes }
    });
    let mut response = match admitted {
        Err(refusal) => refusal.into_response(),
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            // A panic in one request concerns only its client.
            AssertUnwindSafe(next.run(request))
                .catch_unwind()
                .await
                .unwrap_or_else(|_| ApiError::internal().into_response())
        }
    };
    if path.starts_with("/v1/messages")
        && let Some(refusal) = response.extensions().get::<ApiError>()
    {
        response = refusal.to_anthropic(&request_id);
    }
    let status = response.status();
    app.http.count(&route, status.as_u16());
    let ms = started.elapsed().as_millis() as u64;
    if OPEN.contains(&path.as_str()) || ["/", "/web/{name}", "/favicon.svg", "/metrics"].contains(&route.as_str()) {
        tracing::debug!(request_id, %method, path, status = status.as_u16(), ms, "answered");
    } else {
        tracing::info!(request_id, %method, path, status = status.as_u16(), ms, "answered");
    }
    let headers = response.headers_mut();
    let id = HeaderValue::from_str(&request_id).expect("letters, digits and dashes");
    if path.starts_with("/v1/messages") {
        headers.insert(ANTHROPIC_REQUEST_ID, id.clone());
    }
    headers.insert(REQUEST_ID, id);
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The client of a request. Errors: it may not use the server.
fn admit(app: &App, request: &Request) -> std::result::Result<(u64, Tenant), ApiError> {
    let headers = request.headers();
    app.hosts.check(headers)?;
    let (mut hasher, mut tenant) = (DefaultHasher::new(), Tenant::default());
    let path = request.uri().path();
    if request.extensions().get::<OfReserve>().is_some() && !ALWAYS.contains(&path) {
        return Err(ApiError::unavailable(
            "The server has reached its maximum of connections (--max-connections); try again later",
            Some(2),
        ));
    }
    let is_page = request.method() == Method::GET && !path.starts_with("/v1/") && path != "/metrics";
    if app.keys.0.is_empty() {
        // A page of another origin can send requests without a preflight; CORS would only keep the answer from it.
        app.hosts.check_origin(headers)?;
        if let Some(ConnectInfo(peer)) = request.extensions().get::<ConnectInfo<SocketAddr>>() {
            peer.ip().hash(&mut hasher);
        }
    } else if !is_page {
        let key = app.keys.find(headers).ok_or_else(ApiError::wrong_key)?;
        key.hash(&mut hasher);
        // With a single key there are no clients to keep apart.
        if app.keys.0.len() > 1 {
            tenant = Tenant(key as u32 + 1);
        }
    }
    Ok((hasher.finish(), tenant))
}

fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let plain = |id: &&str| {
        (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    match given.filter(plain) {
        Some(id) => id.to_string(),
        None => new_id("req"),
    }
}

/// A unique id.
pub(super) fn new_id(prefix: &str) -> String {
    static IDS: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}-{:x}{:08x}", unix_seconds(), IDS.fetch_add(1, Relaxed))
}
