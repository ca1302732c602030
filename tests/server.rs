//! The server over a real socket: bytes in, bytes out, with an engine that says what the test tells it to.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use moebius::engine::{EngineHandle, EngineInfo, Event, FinishReason, RequestStats, Submission, Token};
use moebius::kernel::Simd;
use moebius::text_model::{TextModel, TextSide};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A server on a free port, and the engine's end of its requests.
struct Fixture {
    address: SocketAddr,
    requests: UnboundedReceiver<Submission>,
    _runtime: tokio::runtime::Runtime,
}

fn start() -> Fixture {
    let (sender, requests) = unbounded_channel();
    let info = EngineInfo {
        model: "models/tiny".into(),
        architecture: "qwen3_moe".into(),
        experts: "int4-g128".into(),
        dense: "bf16".into(),
        kv: "bf16".into(),
        max_context: 64,
        max_queue: 8,
        threads: 1,
        simd: Simd::Scalar,
        device: "cpu".into(),
        ready_s: 0.0,
    };
    let text = TextSide::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/_tokenizer")).unwrap();
    let model = TextModel::new(EngineHandle::from_parts(info, sender), text);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(async move { axum::serve(listener, moebius::server::router(model)).await });
    Fixture { address, requests, _runtime: runtime }
}

fn token(id: u32) -> Event {
    Event::Token(Token { id, logprobs: None, stats: RequestStats::default() })
}

/// An engine that answers every request with `text`, a token at a time.
fn saying(text: &'static str) -> Fixture {
    let mut fixture = start();
    let (_, replacement) = unbounded_channel();
    let mut requests = std::mem::replace(&mut fixture.requests, replacement);
    let tokenizer = moebius::tokenizer::Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/_tokenizer")).unwrap();
    std::thread::spawn(move || {
        while let Some(Submission { request, events, .. }) = requests.blocking_recv() {
            let ids = tokenizer.encode(text, false).unwrap();
            let n = ids.len().min(request.max_tokens.unwrap_or(usize::MAX));
            for &id in &ids[..n] {
                let _ = events.send(token(id));
            }
            let reason = if n < ids.len() { FinishReason::Length } else { FinishReason::Stop };
            let stats = RequestStats { prompt_tokens: request.prompt.len(), completion_tokens: n, ..Default::default() };
            let _ = events.send(Event::Done(reason, stats));
        }
    });
    fixture
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn send(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> TcpStream {
    let mut stream = connect(address);
    let length = body.len();
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n").unwrap();
    stream.write_all(body).unwrap();
    stream
}

/// Status and body.
fn raw(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> (u16, String) {
    let mut text = String::new();
    send(address, method, path, body).read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    (status, text.split_once("\r\n\r\n").unwrap().1.to_string())
}

fn post(address: SocketAddr, path: &str, body: Value) -> (u16, Value) {
    let (status, text) = raw(address, "POST", path, body.to_string().as_bytes());
    (status, serde_json::from_str(&text).unwrap())
}

fn hello() -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}]})
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// The `data:` payloads of a stream, chunked transfer undone.
fn sse(address: SocketAddr, path: &str, body: Value) -> Vec<String> {
    let (status, text) = raw(address, "POST", path, body.to_string().as_bytes());
    assert_eq!(status, 200, "{text}");
    text.lines().filter_map(|line| line.strip_prefix("data: ")).map(String::from).collect()
}

#[test]
fn a_chat_is_answered() {
    let server = saying("naïve 😀 yes");
    let (status, body) = post(server.address, "/v1/chat/completions", hello());
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "models/tiny");
    assert_eq!(body["choices"][0]["message"], json!({"role": "assistant", "content": "naïve 😀 yes"}));
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let completion = body["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!(body["usage"]["prompt_tokens"], 10); // <|bos|><|user|>Hello!<|end|>\n<|assistant|>
    assert_eq!(body["usage"]["total_tokens"], 10 + completion);

    let (_, body) = post(server.address, "/v1/chat/completions", with(hello(), json!({"max_completion_tokens": 1})));
    assert_eq!((&body["choices"][0]["finish_reason"], &body["usage"]["completion_tokens"]), (&json!("length"), &json!(1)));
    let (_, body) = post(server.address, "/v1/chat/completions", with(hello(), json!({"stop": ["😀", " yes"]})));
    assert_eq!((&body["choices"][0]["message"]["content"], &body["choices"][0]["finish_reason"]), (&json!("naïve "), &json!("stop")));
}

#[test]
fn a_stream_has_role_text_reason_usage_and_done() {
    let server = saying("café 😀");
    let body = with(hello(), json!({"stream": true, "stream_options": {"include_usage": true}}));
    let events = sse(server.address, "/v1/chat/completions", body);
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<Value> = events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String = chunks[1..].iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "café 😀");
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"]));
    let n = chunks.len();
    assert_eq!(chunks[n - 2]["choices"][0]["finish_reason"], "stop");
    assert_eq!((&chunks[n - 1]["choices"], &chunks[n - 1]["usage"]["prompt_tokens"]), (&json!([]), &json!(10)));
    assert!(chunks[..n - 1].iter().all(|chunk| chunk["usage"].is_null()));

    let plain = sse(server.address, "/v1/chat/completions", with(hello(), json!({"stream": true})));
    assert!(!plain.iter().any(|event| event.contains("usage")));
}

#[test]
fn plain_text_is_completed() {
    let server = saying("abc def");
    let (status, body) = post(server.address, "/v1/completions", json!({"prompt": "Hello", "max_tokens": 100}));
    assert_eq!((status, &body["object"], &body["choices"][0]["text"]), (200, &json!("text_completion"), &json!("abc def")));
    let (status, body) = post(server.address, "/v1/completions", json!({"prompt": [[1, 2, 3]]}));
    assert_eq!((status, &body["usage"]["prompt_tokens"]), (200, &json!(3)));
    let events = sse(server.address, "/v1/completions", json!({"prompt": ["x"], "stream": true, "max_tokens": 100}));
    assert!(events[0].contains("\"text\":") && events.last().unwrap() == "[DONE]");
    for prompt in [json!(null), json!([]), json!(["a", "b"]), json!([512]), json!([-1]), json!({}), json!([1.5])] {
        let (status, body) = post(server.address, "/v1/completions", json!({ "prompt": prompt }));
        assert_eq!(status, 400, "{prompt}: {body}");
    }
}

#[test]
fn requests_reach_the_engine_as_asked() {
    let mut server = start();
    let body =
        with(hello(), json!({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 42, "max_tokens": 9, "ignore_eos": true}));
    let _stream = send(server.address, "POST", "/v1/chat/completions", body.to_string().as_bytes());
    let Submission { request, events: _events, .. } = server.requests.blocking_recv().unwrap();
    assert_eq!(request.prompt, [505, 509, 39, 68, 438, 78, 0, 511, 198, 510]);
    assert_eq!((request.max_tokens, request.ignore_eos), (Some(9), true));
    let s = request.sampling;
    assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p, s.seed), (0.5, 0.9, 7, 0.1, Some(42)));
}

#[test]
fn what_would_change_the_answer_is_refused_by_name() {
    let server = saying("x");
    for (fields, param) in [
        (json!({"n": 2}), "n"),
        (json!({"tools": [{"type": "function"}]}), "tools"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"logprobs": true}), "logprobs"),
        (json!({"logit_bias": {"1": 5}}), "logit_bias"),
        (json!({"presence_penalty": 0.5}), "presence_penalty"),
        (json!({"nonsense": 1}), "nonsense"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"seed": 1e30}), "seed"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": vec!["x"; 10_000]}), "stop"),
        (json!({"stop": [1]}), "stop"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": [1]}), "messages[0]"),
        (json!({"messages": [{"role": "king", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}), "messages[0].tool_calls"),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs"),
    ] {
        let (status, body) = post(server.address, "/v1/chat/completions", with(hello(), fields.clone()));
        assert_eq!((status, &body["error"]["param"]), (400, &json!(param)), "{fields}");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert!(body["error"]["message"].is_string() && body["error"].get("code").is_some());
    }
    let neutral = json!({"n": 1, "user": "me", "tools": null, "presence_penalty": 0, "logprobs": false, "metadata": {}, "store": false});
    assert_eq!(post(server.address, "/v1/chat/completions", with(hello(), neutral)).0, 200);
    let parts = json!({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]});
    assert_eq!(post(server.address, "/v1/chat/completions", with(hello(), parts)).0, 200);
}

#[test]
fn wrong_models_routes_methods_and_bodies_get_openais_shape() {
    let server = saying("x");
    let (status, body) = post(server.address, "/v1/chat/completions", with(hello(), json!({"model": "gpt-4"})));
    assert_eq!((status, &body["error"]["code"]), (404, &json!("model_not_found")));
    for (method, path, body, want) in [
        ("GET", "/nothing", &b""[..], 404),
        ("GET", "/v1/chat/completions", b"", 405),
        ("GET", "/v1/models/other", b"", 404),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"{\"messages\": [", 400),
        ("POST", "/v1/chat/completions", b"{\"messages\": \"\xff\"}", 400),
    ] {
        let (status, text) = raw(server.address, method, path, body);
        assert_eq!(status, want, "{method} {path}: {text}");
        let body: Value = serde_json::from_str(&text).unwrap();
        assert!(body["error"]["message"].is_string(), "{text}");
    }
    let long = with(hello(), json!({"messages": [{"role": "user", "content": "word ".repeat(200)}]}));
    let (status, body) = post(server.address, "/v1/chat/completions", long);
    assert_eq!((status, &body["error"]["code"]), (400, &json!("context_length_exceeded")));
    let (status, body) = post(server.address, "/v1/chat/completions", json!({"messages": [{"role": "assistant", "content": "hi"}]}));
    assert_eq!(status, 400);
    assert!(body["error"]["message"].as_str().unwrap().contains("roles must alternate"));
}

#[test]
fn a_huge_body_is_refused_without_reading_it() {
    let server = saying("x");
    let mut stream = connect(server.address);
    write!(stream, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{{").unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    assert!(line.contains("413"), "{line}");
}

#[test]
fn health_and_models_are_told() {
    let server = saying("x");
    assert_eq!(raw(server.address, "GET", "/health", b""), (200, r#"{"status":"ok"}"#.into()));
    let (status, text) = raw(server.address, "GET", "/v1/models", b"");
    let body: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &body["data"][0]["id"], &body["data"][0]["experts"]), (200, &json!("models/tiny"), &json!("int4-g128")));
    assert_eq!(raw(server.address, "GET", "/v1/models/models/tiny", b"").0, 200);
}

/// Waits until the engine's side sees that nobody listens any more.
fn assert_cancelled(events: &UnboundedSender<Event>) {
    for _ in 0..500 {
        if events.is_closed() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the request goes on without its client");
}

#[test]
fn a_client_that_goes_away_cancels_its_request() {
    let mut server = start();
    for stream in [true, false] {
        let body = with(hello(), json!({ "stream": stream }));
        let socket = send(server.address, "POST", "/v1/chat/completions", body.to_string().as_bytes());
        let Submission { events, .. } = server.requests.blocking_recv().unwrap();
        events.send(token(39)).unwrap();
        assert!(!events.is_closed());
        drop(socket);
        assert_cancelled(&events);
    }
}

#[test]
fn a_failing_engine_is_told_before_and_within_a_stream() {
    let mut server = start();
    let socket = send(server.address, "POST", "/v1/chat/completions", hello().to_string().as_bytes());
    let Submission { events, .. } = server.requests.blocking_recv().unwrap();
    events.send(Event::Failed(moebius::Error::Resources("no memory".into()))).unwrap();
    let mut lines = BufReader::new(socket).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().contains("503"));
    assert!(lines.any(|line| line.contains("no memory")));

    let socket = send(server.address, "POST", "/v1/chat/completions", with(hello(), json!({"stream": true})).to_string().as_bytes());
    let Submission { events, .. } = server.requests.blocking_recv().unwrap();
    events.send(token(39)).unwrap();
    drop(events);
    let mut text = String::new();
    BufReader::new(socket).read_to_string(&mut text).unwrap();
    assert!(text.contains("\"error\":{") && !text.contains("[DONE]"), "{text}");
}
