//! While a model is loaded, and when the server is told to stop.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moebius::engine::{Event, FinishReason, RequestStats};
use moebius::server::{Running, Server, ServerOptions};
use serde_json::json;

use crate::fixture::*;

/// Tells a server to stop, as SIGTERM does; the thread ends when it has.
fn stop(running: Running) -> JoinHandle<Duration> {
    let (tell, told) = tokio::sync::oneshot::channel::<()>();
    let waiting = std::thread::spawn(move || {
        let started = Instant::now();
        running.wait_until(async {
            let _ = told.await;
            None::<std::future::Pending<()>>
        });
        started.elapsed()
    });
    tell.send(()).unwrap();
    waiting
}

#[test]
fn while_loading_the_server_says_so() {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), ServerOptions::default()).unwrap();
    let address = server.address();
    let _running = server.start().unwrap();
    assert_eq!(raw(address, "GET", "/health", b""), (200, r#"{"status":"loading"}"#.into()));
    let (status, text) = raw(address, "GET", "/ready", b"");
    assert!(status == 503 && text.contains("still being loaded"), "{text}");
    assert_eq!(post(address, "/v1/chat/completions", hello()).0, 503);
}

#[test]
fn told_to_stop_it_lets_running_answers_end_and_takes_nothing_new() {
    let mut server = start();
    let stream = send(
        server.address,
        "POST",
        "/v1/chat/completions",
        with(hello(), json!({"stream": true})).to_string().as_bytes(),
    );
    let submission = server.next();
    submission.events.send(token(39)).unwrap();
    let mut second = connect(server.address); // a connection from before
    let mut half = connect(server.address);
    write!(half, "GET /health HTTP/1.1\r\nHo").unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let address = server.address;
    let waiting = stop(server.running);
    std::thread::sleep(Duration::from_millis(200));
    assert!(TcpStream::connect(address).is_err(), "nobody new");
    assert_eq!(half.read(&mut [0; 8]).unwrap_or(0), 0, "half a head is not waited for, whoever else is");
    let _ = write!(second, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}");
    let mut text = String::new();
    let _ = second.read_to_string(&mut text);
    assert!(text.is_empty() || text.contains("503"), "{text}");
    std::thread::sleep(Duration::from_millis(1500)); // longer than anything but an answer is waited for
    assert!(!waiting.is_finished());
    submission.events.send(token(39)).unwrap();
    submission.events.send(Event::Done(FinishReason::Stop, RequestStats::default())).unwrap();
    let lines: Vec<String> = BufReader::new(stream).lines().map_while(Result::ok).collect();
    assert!(lines.iter().any(|line| line == "data: [DONE]"), "{lines:?}");
    waiting.join().unwrap();
}

const HALVES: [&str; 6] = [
    "",
    "G",
    "GET /health HTTP/1.1\r\nHo",
    "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", // answered, and idle since
    "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
];

#[test]
fn half_a_request_does_not_hold_up_the_end() {
    let server = saying("x");
    let _open = HALVES.map(|half| {
        let mut socket = connect(server.address);
        socket.write_all(half.as_bytes()).unwrap();
        socket
    });
    std::thread::sleep(Duration::from_millis(200));
    let took = stop(server.running).join().unwrap();
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn half_a_handshake_does_not_hold_up_the_end() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls");
    let server = start_with(ServerOptions {
        tls: Some((dir.join("cert.pem"), dir.join("key.pem"))),
        ..ServerOptions::default()
    });
    let mut half = connect(server.address);
    half.write_all(b"\x16\x03\x01\x02\x00\x01").unwrap();
    let _silent = connect(server.address);
    std::thread::sleep(Duration::from_millis(200));
    let took = stop(server.running).join().unwrap();
    assert!(took < Duration::from_secs(2), "{took:?}");
}
