//! Requests that would take more memory than others can spare: refused, in words that reach whoever sent them, before
//! they take it.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use moebius::engine::{Captured, Event, FinishReason, HookPoint, RequestStats};
use moebius::server::ServerOptions;
use serde_json::{Value, json};

use crate::fixture::*;

const SEA: &str = "the sea ";

fn refused(server: &Fixture, path: &str, body: &Value) -> String {
    let started = Instant::now();
    let (status, told) = post(server.address, path, body.clone());
    assert_eq!(status, 400, "{path}: {told}");
    assert!(started.elapsed() < Duration::from_secs(10), "{path} took {:?}", started.elapsed());
    let error = &told["error"];
    format!("{} {}", error["code"].as_str().unwrap_or_default(), error["message"].as_str().unwrap())
}

#[test]
fn a_text_that_cannot_fit_is_not_tokenized_to_its_end() {
    let server = saying_in(TEMPLATE, "x");
    let text = SEA.repeat(1_500_000);
    let messages = json!([{"role": "user", "content": text}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": text})),
        ("/v1/completions", json!({"prompt": ["Hello!", text]})),
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/responses", json!({"input": text})),
        ("/v1/capture", json!({"prompt": text, "logits": true})),
        ("/tokenize", json!({"messages": messages})),
    ] {
        let told = refused(&server, path, &body);
        assert!(told.starts_with("context_length_exceeded") && told.contains("more than"), "{path}: {told}");
    }
    for (path, body) in [
        ("/v1/messages", json!({"messages": messages, "max_tokens": 5})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
    ] {
        let told = refused(&server, path, &body);
        assert!(told.contains("more than"), "{path}: {told}");
    }
    let told = refused(&server, "/tokenize", &json!({"prompt": text}));
    assert!(told.contains("the limit is 1048576"), "{told}");
    // What is longer than the context and still short is tokenized exactly.
    let (status, told) =
        post(server.address, "/tokenize", json!({"prompt": SEA.repeat(1000), "return_token_strs": true}));
    assert_eq!((status, told["count"].as_u64()), (200, Some(told["tokens"].as_array().unwrap().len() as u64)));
    let spelled: String = told["token_strs"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert!(spelled.contains(&SEA.repeat(1000)), "{}", &spelled[..100]);
}

#[test]
fn values_are_counted_before_they_are_made() {
    let server = saying("x");
    let many = |one: &str| format!("{{\"messages\":[{}1]}}", one.repeat((15 << 20) / one.len()));
    for one in [r#"{"":0},"#, "[],", "{},", r#"{"a":{"b":[]}},"#, "[[[[1]]]],", "1,"] {
        let (status, text) = raw(server.address, "POST", "/v1/chat/completions", many(one).as_bytes());
        assert!(status == 400 && text.contains("too many objects"), "{one}: {status} {text}");
    }
    let messages = vec![r#"{"role":"user","content":"x"}"#; 20_000].join(",");
    let (status, text) =
        raw(server.address, "POST", "/v1/chat/completions", format!("{{\"messages\":[{messages}]}}").as_bytes());
    assert!(status == 400 && text.contains("more than 10000 messages"), "{text}");
    let call = r#"{"function":{"name":"a","arguments":""}}"#;
    let calls = format!(r#"{{"messages":[{{"role":"assistant","tool_calls":[{}]}}]}}"#, vec![call; 20_000].join(","));
    let (status, text) = raw(server.address, "POST", "/v1/chat/completions", calls.as_bytes());
    assert!(status == 400 && text.contains("tool_calls"), "{text}");
    // A million token ids are an honest prompt of another model; here they are only too many.
    let ids = format!("{{\"prompt\":[{}5]}}", "500,".repeat(1_000_000));
    let (status, text) = raw(server.address, "POST", "/v1/completions", ids.as_bytes());
    assert!(status == 400 && text.contains("1000001 tokens"), "{text}");
    let variables = with(hello(), json!({"chat_template_kwargs": {"documents": "x".repeat(2 << 20)}}));
    assert!(refused(&server, "/v1/chat/completions", &variables).contains("chat_template_kwargs"));
    let metadata = json!({"input": "Hi", "metadata": {"a": "x".repeat(100_000)}});
    assert!(refused(&server, "/v1/responses", &metadata).contains("metadata"));
    assert_eq!(post(server.address, "/v1/chat/completions", hello()).0, 200);
}

/// As Python's http.client does: all of the request first, then the answer.
fn write_all_then_read(server: &Fixture, head: &str, body: &[u8]) -> String {
    let mut stream = connect(server.address);
    write!(stream, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n").unwrap();
    stream.write_all(body).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn who_writes_too_much_first_is_still_told() {
    let server = saying("x");
    let large = vec![b'x'; 20 << 20];
    for _ in 0..5 {
        let text = write_all_then_read(&server, &format!("Content-Length: {}\r\n", large.len()), &large);
        assert!(text.starts_with("HTTP/1.1 413") && text.contains("the limit is 16777216 bytes"), "{text}");
    }
    let mut chunked = Vec::new();
    for part in large.chunks(1 << 20) {
        chunked.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
        chunked.extend_from_slice(part);
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    let text = write_all_then_read(&server, "Transfer-Encoding: chunked\r\n", &chunked);
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
}

#[test]
fn a_body_without_a_length_is_read_whole() {
    let server = saying("x y z");
    let body = json!({"prompt": "Hello!", "max_tokens": 5, "user": "u".repeat(300_000)}).to_string();
    let mut chunked = Vec::new();
    for part in body.as_bytes().chunks(7777) {
        chunked.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
        chunked.extend_from_slice(part);
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    let text = write_all_then_read(&server, "Transfer-Encoding: chunked\r\n", &chunked);
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[test]
fn many_choices_are_counted_first_and_share_one_grammar() {
    let mut server = start();
    // This would compile for seconds each, and eight may wait.
    let body = json!({"prompt": vec!["Hi"; 64], "n": 16, "guided_regex": "(a|b){0,200}[0-9]{1,300}"});
    let told = refused(&server, "/v1/completions", &body);
    assert!(told.contains("1024 answers") && told.contains("the queue holds 8"), "{told}");
    let body = json!({"prompt": ["Hi", "Ho"], "n": 3, "guided_choice": ["a", "b"]}).to_string();
    let _socket = send(server.address, "POST", "/v1/completions", body.as_bytes());
    let mut constraints: Vec<_> = (0..6).map(|_| server.next().request.constraint.unwrap()).collect();
    let open = |constraint: &mut Box<dyn moebius::engine::Constraint>| {
        let mut logits = [0.0; 512];
        constraint.mask(&mut logits).unwrap();
        logits.iter().enumerate().filter(|(_, logit)| logit.is_finite()).map(|(id, _)| id as u32).collect::<Vec<_>>()
    };
    let first = open(&mut constraints[0]);
    assert!(first.len() >= 2, "{first:?}");
    constraints[0].accept(first[0]).unwrap();
    assert!(constraints[0].is_complete());
    for constraint in &mut constraints[1..] {
        assert!(
            !constraint.is_complete() && open(constraint) == first,
            "what one answer says is nothing to the others"
        );
    }
}

#[test]
fn a_capture_that_nobody_takes_breaks_off() {
    let mut server =
        start_with(ServerOptions { client_timeout: Duration::from_millis(300), ..ServerOptions::default() });
    let body = json!({"prompt": [5, 6, 7], "layers": [2], "encoding_format": "float"}).to_string();
    let mut socket = send(server.address, "POST", "/v1/capture", body.as_bytes());
    let submission = server.next();
    let rows = vec![0.12345678; 40 << 20 >> 2];
    let captured = Captured { what: HookPoint::Hidden(2), position: 0, count: 3, rows, experts: Vec::new() };
    submission.events.send(Event::Captured(captured)).unwrap();
    let stats = RequestStats { prompt_tokens: 3, ..RequestStats::default() };
    submission.events.send(Event::Done(FinishReason::Stop, stats)).unwrap();
    // The buffers between us fill; a byte from time to time does not keep its place.
    for _ in 0..30 {
        let _ = socket.read(&mut [0]);
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut rest = Vec::new();
    let _ = socket.read_to_end(&mut rest);
    assert!(!rest.ends_with(b"0\r\n\r\n"), "all {} bytes were kept for who did not take them", rest.len());
    assert!(rest.len() < 100 << 20, "{}", rest.len());
}
