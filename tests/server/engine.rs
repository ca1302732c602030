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
    assert_eq!(
        (status, &body["data"][0]["id"], &body["data"][0]["experts"]),
        (200, &json!("models/tiny"), &json!("int4-g128"))
    );
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
