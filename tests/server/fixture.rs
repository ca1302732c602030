//! A server over a real socket, with an engine that says what the test tells it to.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use moebius::engine::{EngineHandle, EngineInfo, Event, FinishReason, Logprobs, RequestStats, Submission, Token};
use moebius::kernel::Simd;
use moebius::server::{Running, Server, ServerOptions};
use moebius::text::model::{TextModel, TextSide};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A server on a free port, and the engine's end of its requests.
pub(crate) struct Fixture {
    pub(crate) address: SocketAddr,
    pub(crate) requests: UnboundedReceiver<Submission>,
    pub(crate) running: Running,
}

impl Fixture {
    /// The next request that reaches the engine.
    pub(crate) fn next(&mut self) -> Submission {
        for _ in 0..2000 {
            if let Ok(submission) = self.requests.try_recv() {
                return submission;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no request reaches the engine")
    }
}

pub(crate) fn start() -> Fixture {
    start_with(ServerOptions::default())
}

/// With the options that are given.
pub(crate) fn start_with(options: ServerOptions) -> Fixture {
    start_in(&tokenizer_dir(), options)
}

/// A model with the text side of a directory, and the engine's end of its requests.
pub(crate) fn model_in(dir: &Path) -> (TextModel, UnboundedReceiver<Submission>) {
    let (sender, requests) = unbounded_channel();
    let info = EngineInfo {
        model: "models/tiny".into(),
        architecture: "qwen3_moe".into(),
        experts: "int4-g128".into(),
        dense: "bf16".into(),
        kv: "bf16".into(),
        activations: "8".into(),
        layers: 4,
        hidden_size: 8,
        streams: 1,
        vocab_size: 512,
        choices: 6,
        max_context: 256,
        max_queue: 8,
        threads: 1,
        simd: Simd::Scalar,
        device: "cpu".into(),
        ready_s: 0.0,
    };
    let text = TextSide::load(dir).unwrap();
    let model = TextModel::new(EngineHandle::from_parts(info, sender), text);
    (model, requests)
}

/// With the text side of a directory.
pub(crate) fn start_in(dir: &Path, options: ServerOptions) -> Fixture {
    let (model, requests) = model_in(dir);
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
    let address = server.address();
    let running = server.start().unwrap();
    running.set_model(model);
    Fixture { address, requests, running }
}

pub(crate) fn token(id: u32) -> Event {
    Event::Token(Token { id, logprobs: None, stats: RequestStats::default() })
}

pub(crate) fn tokenizer_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/_tokenizer")
}

/// An engine that answers every request with `text`, a token at a time.
pub(crate) fn saying(text: &'static str) -> Fixture {
    saying_with(ServerOptions::default(), text)
}

/// The same, with the options that are given.
pub(crate) fn saying_with(options: ServerOptions, text: &'static str) -> Fixture {
    answering(start_with(options), text)
}

/// The same for a model whose chat template is `template`.
pub(crate) fn saying_in(template: &str, text: &'static str) -> Fixture {
    let dir = with_template(template);
    answering(start_in(dir.path(), ServerOptions::default()), text)
}

/// A server whose requests wait for the test, for a model with [`TEMPLATE`].
pub(crate) fn start_in_template() -> Fixture {
    let dir = with_template(TEMPLATE);
    start_in(dir.path(), ServerOptions::default())
}

pub(crate) fn with_template(template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
        std::fs::copy(tokenizer_dir().join(name), dir.path().join(name)).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

/// A template in the manner of Qwen: tools as JSON, calls in tags, thoughts if asked for.
pub(crate) const TEMPLATE: &str = "{% if tools %}TOOLS{% for tool in tools %}{{ tool | tojson }}{% endfor \
                                   %}<tool_call>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for \
                                   c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% \
                                   endfor %}{% endfor %}[assistant]{% if enable_thinking %}<think>\n{% else \
                                   %}<think>\n\n</think>\n\n{% endif %}";

fn answering(mut fixture: Fixture, text: &'static str) -> Fixture {
    let (_, replacement) = unbounded_channel();
    let mut requests = std::mem::replace(&mut fixture.requests, replacement);
    let tokenizer = moebius::text::tokenizer::Tokenizer::load(&tokenizer_dir()).unwrap();
    std::thread::spawn(move || {
        while let Some(Submission { request, events, .. }) = requests.blocking_recv() {
            let ids = tokenizer.encode(text, false).unwrap();
            let n = ids.len().min(request.max_tokens.unwrap_or(usize::MAX));
            for (i, &id) in ids[..n].iter().enumerate() {
                let stats = RequestStats {
                    prompt_tokens: request.prompt.len(),
                    completion_tokens: i + 1,
                    ..Default::default()
                };
                let logprobs = request.logprobs.map(|_| Box::new(Logprobs { logprob: -0.5, top: vec![(id, -0.5)] }));
                let _ = events.send(Event::Token(Token { id, logprobs, stats }));
            }
            let reason = if n < ids.len() { FinishReason::Length } else { FinishReason::Stop };
            let stats =
                RequestStats { prompt_tokens: request.prompt.len(), completion_tokens: n, ..Default::default() };
            let _ = events.send(Event::Done(reason, stats));
        }
    });
    fixture
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

pub(crate) fn send(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> TcpStream {
    let mut stream = connect(address);
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )
    .unwrap();
    stream.write_all(body).unwrap();
    stream
}

/// Status and body.
pub(crate) fn raw(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> (u16, String) {
    let mut text = String::new();
    send(address, method, path, body).read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    match head.contains("transfer-encoding: chunked") {
        true => (status, String::from_utf8(joined(body.as_bytes())).unwrap()),
        false => (status, body.to_string()),
    }
}

/// A body that came in chunks, as a whole.
pub(crate) fn joined(mut chunks: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    loop {
        let end = chunks.windows(2).position(|pair| pair == b"\r\n").unwrap();
        let length = usize::from_str_radix(std::str::from_utf8(&chunks[..end]).unwrap(), 16).unwrap();
        if length == 0 {
            return whole;
        }
        whole.extend_from_slice(&chunks[end + 2..end + 2 + length]);
        chunks = &chunks[end + 2 + length + 2..];
    }
}

pub(crate) fn post(address: SocketAddr, path: &str, body: Value) -> (u16, Value) {
    let (status, text) = raw(address, "POST", path, body.to_string().as_bytes());
    (status, serde_json::from_str(&text).unwrap())
}

pub(crate) fn hello() -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}]})
}

/// A body for every endpoint that asks the engine.
pub(crate) fn every_endpoint() -> [(&'static str, Value); 5] {
    let hi = json!([{"role": "user", "content": "Hello!"}]);
    [
        ("/v1/chat/completions", json!({"messages": hi})),
        ("/v1/completions", json!({"prompt": "Hello!"})),
        ("/v1/responses", json!({"input": "Hello!"})),
        ("/v1/messages", json!({"messages": hi, "max_tokens": 5})),
        ("/v1/capture", json!({"prompt": "Hello!", "layers": "all"})),
    ]
}

pub(crate) fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// The `data:` payloads of a stream, chunked transfer undone.
pub(crate) fn sse(address: SocketAddr, path: &str, body: Value) -> Vec<String> {
    let (status, text) = raw(address, "POST", path, body.to_string().as_bytes());
    assert_eq!(status, 200, "{text}");
    text.lines().filter_map(|line| line.strip_prefix("data: ")).map(String::from).collect()
}

/// The chunks of a stream that ends well.
pub(crate) fn chunks(address: SocketAddr, path: &str, body: Value) -> Vec<Value> {
    let events = sse(address, path, body);
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    chunks.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}
