//! Clients with keys of their own: what one asked and stored, another cannot find out, use or take away.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::Path;

use moebius::config::EngineConfig;
use moebius::engine::Tenant;
use moebius::server::{Server, ServerOptions};
use moebius::text::model::TextModel;
use serde_json::{Value, json};

use crate::fixture::*;

const ANNA: &str = "annas-key";
const BERT: &str = "berts-key";
const VECTOR: [f32; 8] = [0.5, -1.0, 2.0, 0.0, 0.25, 1.0, -0.125, 3.0];

fn keyed() -> ServerOptions {
    ServerOptions { api_keys: vec![ANNA.into(), BERT.into()], ..ServerOptions::default() }
}

/// Status and body; with an empty `key` none is given.
fn ask(address: SocketAddr, key: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let key = if key.is_empty() { String::new() } else { format!("x-api-key: {key}\r\n") };
    let mut stream = connect(address);
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{key}Content-Length: \
         {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
}

/// How many tokens of the same prompt were cached when Anna asks, asks again, and Bert asks.
fn cached(model: &TextModel, options: ServerOptions, seed: u32) -> [u64; 3] {
    let (anna, bert) = if options.api_keys.is_empty() { ("", "") } else { (ANNA, BERT) };
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
    let address = server.address();
    let running = server.start().unwrap();
    running.set_model(model.clone());
    let prompt: Vec<u32> = (0..200).map(|i| 7 + (i * 37 + seed * 101) % 300).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1});
    let counts = [anna, anna, bert].map(|key| {
        let (status, told) = ask(address, key, "POST", "/v1/completions", &body);
        assert_eq!(status, 200, "{told}");
        told["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    });
    drop(running);
    counts
}

#[test]
fn nobody_learns_what_another_asked() {
    let cache_dir = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    let config = EngineConfig { cache_dir, threads: Some(1), max_context: Some(512), ..EngineConfig::default() };
    let model = TextModel::open("demo", &config, &|_| {}).unwrap();
    assert_eq!(cached(&model, keyed(), 1), [0, 192, 0]);
    assert_eq!(cached(&model, ServerOptions { share_prefixes: true, ..keyed() }, 2), [0, 192, 192]);
    assert_eq!(cached(&model, ServerOptions::default(), 3), [0, 192, 192], "without keys all are one");
}

#[test]
fn every_endpoint_says_for_whom_it_asks() {
    let dir = with_template(TEMPLATE);
    for (options, tenants) in [
        (keyed(), [Tenant(1), Tenant(2)]),
        (ServerOptions { share_prefixes: true, ..keyed() }, [Tenant::default(); 2]),
        (ServerOptions::default(), [Tenant::default(); 2]),
    ] {
        let has_keys = !options.api_keys.is_empty();
        let mut server = start_in(dir.path(), options);
        for (path, body) in every_endpoint() {
            for (key, tenant) in [ANNA, BERT].into_iter().zip(tenants) {
                let address = server.address;
                let body = body.clone();
                let key = if has_keys { key } else { "" };
                let client = std::thread::spawn(move || ask(address, key, "POST", path, &body));
                let submission = server.next();
                assert_eq!(submission.request.tenant, tenant, "{path} of {key}");
                drop(submission);
                let _ = client.join();
            }
        }
    }
}

#[test]
fn vectors_belong_to_the_key_that_put_them() {
    let mut server = start_with(ServerOptions { share_prefixes: true, ..keyed() });
    let address = server.address;
    let put = |key: &str, name: &str, vector: &[f32]| {
        ask(address, key, "PUT", &format!("/v1/vectors/{name}"), &json!({"vector": vector})).0
    };
    let get = |key: &str| ask(address, key, "GET", "/v1/vectors/calm", &Value::Null);
    let names = |key: &str| ask(address, key, "GET", "/v1/vectors", &Value::Null).1["data"].as_array().unwrap().len();
    assert_eq!(put(ANNA, "calm", &VECTOR), 200);

    assert_eq!((names(ANNA), names(BERT)), (1, 0));
    assert_eq!(get(BERT).0, 404);
    assert_eq!(ask(address, BERT, "DELETE", "/v1/vectors/calm", &Value::Null).0, 404);
    let steered = with(hello(), json!({"steer": [{"layer": 1, "vector": "calm"}]}));
    let (status, told) = ask(address, BERT, "POST", "/v1/chat/completions", &steered);
    assert!(status == 400 && told["error"]["message"].as_str().unwrap().contains("no vector 'calm'"), "{told}");
    let nines = [9.0; 8];
    assert_eq!(put(BERT, "calm", &nines), 200, "a name of his own");
    assert_eq!((get(ANNA).1["vector"].clone(), get(BERT).1["vector"].clone()), (json!(VECTOR), json!(nines)));
    let asking = std::thread::spawn(move || ask(address, ANNA, "POST", "/v1/chat/completions", &steered));
    assert_eq!(server.next().request.steer[0].vector[..], VECTOR);
    let _ = asking.join();

    for i in 1..256 {
        assert_eq!(put(BERT, &format!("v{i}"), &VECTOR), 200);
    }
    assert_eq!((put(BERT, "one-more", &VECTOR), put(ANNA, "one-more", &VECTOR)), (429, 200));
    assert_eq!(ask(address, BERT, "DELETE", "/v1/vectors/calm", &Value::Null).0, 200);
    assert_eq!((get(BERT).0, get(ANNA).0), (404, 200));
}
