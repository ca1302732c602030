//! What the server does with its engine and its clients: cancellation, failure, health.

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use moebius::engine::{Event, Submission};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedSender;

use crate::fixture::*;

#[test]
fn health_and_models_are_told() {
    let server = saying("x");
    assert_eq!(raw(server.address, "GET", "/health", b""), (200, r#"{"status":"ok"}"#.into()));
    let (status, text) = raw(server.address, "GET", "/v1/models", b"");
    let body: Value = serde_json::from_str(&text).unwrap();
    let mut model = body["data"][0].clone();
    model["created"].take();
    let sampling = json!({"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0});
    let want = json!({
        "id": "models/tiny", "object": "model", "created": null, "owned_by": "moebius", "type": "model",
        "display_name": "models/tiny", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active",
        "max_input_tokens": 256, "max_model_len": 256, "num_hidden_layers": 4, "hidden_size": 8,
        "residual_streams": 1, "sampling": sampling,
        "architecture": "qwen3_moe", "experts": "int4-g128", "dense": "bf16", "kv": "bf16", "activations": "8",
        "device": "cpu", "simd": "scalar", "threads": 1,
    });
    assert_eq!((status, model), (200, want));
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
        let Submission { events, .. } = server.next();
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
    let Submission { events, .. } = server.next();
    events.send(Event::Failed(moebius::Error::Resources("no memory".into()))).unwrap();
    let mut lines = BufReader::new(socket).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().contains("503"));
    assert!(lines.any(|line| line.contains("no memory")));

    let socket = send(
        server.address,
        "POST",
        "/v1/chat/completions",
        with(hello(), json!({"stream": true})).to_string().as_bytes(),
    );
    let Submission { events, .. } = server.next();
    events.send(token(39)).unwrap();
    drop(events);
    let mut text = String::new();
    BufReader::new(socket).read_to_string(&mut text).unwrap();
    assert!(text.contains("\"error\":{") && !text.contains("[DONE]"), "{text}");
}
