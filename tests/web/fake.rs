//! The server with a chat that says what a test wants, at the pace that a test wants, so that every turn of a page can
//! be seen.

use std::net::SocketAddr;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use moebius::config::EngineConfig;
use moebius::server::{Running, ServerOptions};
use moebius::text::model::TextModel;
use serde_json::{Value, json};
use tokio_stream::{StreamExt, iter, pending};

/// What the fake answers to one request.
#[derive(Clone)]
pub struct Reply {
    status: StatusCode,
    deltas: Vec<Value>,
    pace: Duration,
    end: End,
}

#[derive(Clone)]
enum End {
    Finished(&'static str),
    Broken,
    Open,
    Refused(Value),
}

impl Reply {
    /// `text`, a few characters at a time.
    pub fn text(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let deltas = chars.chunks(3).map(|piece| json!({"content": piece.iter().collect::<String>()})).collect();
        Self { status: StatusCode::OK, deltas, pace: Duration::ZERO, end: End::Finished("stop") }
    }

    /// An error in OpenAI's shape.
    pub fn refused(status: u16, message: &str, code: &str) -> Self {
        let error =
            json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": code}});
        Self {
            status: StatusCode::from_u16(status).unwrap(),
            deltas: vec![],
            pace: Duration::ZERO,
            end: End::Refused(error),
        }
    }

    /// This much time between pieces.
    pub fn every(mut self, ms: u64) -> Self {
        self.pace = Duration::from_millis(ms);
        self
    }

    /// Thinks first.
    pub fn after(mut self, reasoning: &str) -> Self {
        let thoughts = reasoning.split_inclusive(' ').map(|word| json!({"reasoning_content": word}));
        self.deltas = thoughts.chain(std::mem::take(&mut self.deltas)).collect();
        self
    }

    /// Then the connection breaks.
    pub fn broken(self) -> Self {
        Self { end: End::Broken, ..self }
    }

    /// Then nothing more comes.
    pub fn open(self) -> Self {
        Self { end: End::Open, ..self }
    }

    /// For as many tokens as were allowed.
    pub fn cut(self) -> Self {
        Self { end: End::Finished("length"), ..self }
    }

    fn into_response(self) -> Response {
        let refusal = match &self.end {
            End::Refused(error) => return (self.status, Json(error.clone())).into_response(),
            End::Finished(reason) => Some(*reason),
            _ => None,
        };
        let tokens = self.deltas.len();
        let chunk = |delta: &Value, reason: Option<&str>| {
            json!({"choices": [{"index": 0, "delta": delta,
            "finish_reason": reason}]})
        };
        let mut events: Vec<String> = self.deltas.iter().map(|delta| chunk(delta, None).to_string()).collect();
        if let Some(reason) = refusal {
            events.push(chunk(&json!({}), Some(reason)).to_string());
            let usage = json!({"prompt_tokens": 1000, "completion_tokens": tokens, "total_tokens": 1000 + tokens});
            events.push(json!({"choices": [], "usage": usage}).to_string());
            events.push("[DONE]".into());
        }
        let lines =
            iter(events.into_iter().map(|event| Ok(Bytes::from(format!("data: {event}\n\n"))))).throttle(self.pace);
        let broken = iter(matches!(self.end, End::Broken).then(|| Err(std::io::Error::other("broken"))));
        let body = match self.end {
            End::Open => Body::from_stream(lines.chain(pending::<std::io::Result<Bytes>>())),
            _ => Body::from_stream(lines.chain(broken)),
        };
        ([("content-type", "text/event-stream")], body).into_response()
    }
}

/// A request's body, with the key it came with as `key`.
type Say = dyn Fn(&Value) -> Reply + Send + Sync;

pub struct Server {
    pub address: SocketAddr,
    requests: Arc<Mutex<Vec<Value>>>,
    fake: Option<Router>,
    runtime: Option<tokio::runtime::Runtime>,
    _real: Running,
}

/// The demo model; one for all tests.
fn demo() -> TextModel {
    static DEMO: LazyLock<TextModel> = LazyLock::new(|| {
        let cache = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache");
        let config = EngineConfig { cache_dir: Some(cache), threads: Some(1), ..EngineConfig::default() };
        TextModel::open("demo", &config, &|_| {}).unwrap()
    });
    DEMO.clone()
}

impl Server {
    /// The real server over the demo model.
    pub fn real() -> Self {
        let server =
            moebius::server::Server::bind(SocketAddr::from(([127, 0, 0, 1], 0)), ServerOptions::default()).unwrap();
        let address = server.address();
        let running = server.start().unwrap();
        running.set_model(demo());
        Self { address, requests: Arc::default(), fake: None, runtime: None, _real: running }
    }

    /// The real server, but `say` answers chats.
    pub fn saying(say: impl Fn(&Value) -> Reply + Send + Sync + 'static) -> Self {
        let mut server = Self::real();
        let (seen, say): (_, Arc<Say>) = (server.requests.clone(), Arc::new(say));
        let chat = async move |headers: HeaderMap, Json(mut body): Json<Value>| {
            body["key"] = headers.get("authorization").and_then(|value| value.to_str().ok()).into();
            let reply = say(&body);
            seen.lock().unwrap().push(body);
            reply.into_response()
        };
        let real = server.address;
        let pass_on = async move |uri: Uri| tokio::task::spawn_blocking(move || get(real, &uri)).await.unwrap();
        server.fake = Some(Router::new().route("/v1/chat/completions", post(chat)).fallback(pass_on));
        server.address.set_port(0);
        server.come_back();
        server
    }

    /// Listens, at the same address as before.
    pub fn come_back(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = self.fake.clone().expect("only a fake comes and goes");
        runtime.spawn(async move { axum::serve(listener, router).await });
        self.runtime = Some(runtime);
    }

    /// Goes away with all its connections.
    pub fn go_away(&mut self) {
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
    }

    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Chat requests so far.
    pub fn requests(&self) -> Vec<Value> {
        self.requests.lock().unwrap().clone()
    }
}

/// What the real server gives.
fn get(real: SocketAddr, uri: &Uri) -> Response {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let mut got = agent.get(format!("http://{real}{uri}")).call().unwrap();
    let mut response = Response::new(Body::from(got.body_mut().read_to_vec().unwrap()));
    *response.status_mut() = got.status();
    for name in ["content-type", "content-security-policy", "x-content-type-options", "cache-control"] {
        if let Some(value) = got.headers().get(name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    response
}

/// The last thing the user said in a request.
pub fn asked(body: &Value) -> &str {
    let messages = body["messages"].as_array().unwrap();
    messages.iter().rfind(|m| m["role"] == "user").and_then(|m| m["content"].as_str()).unwrap()
}
