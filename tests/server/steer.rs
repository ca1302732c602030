//! Steering and capture over HTTP: what reaches the engine, what is refused, and how numbers are written.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use moebius::engine::{Captured, Event, FinishReason, HookPoint, Layers, Positions, RequestStats, Submission};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::fixture::*;

const VECTOR: [f32; 8] = [0.5, -1.0, 2.0, 0.0, 0.25, 1.0, -0.125, 3.0];

fn base64(numbers: &[f32]) -> String {
    BASE64_STANDARD.encode(numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn call(server: &Fixture, method: &str, path: &str, body: Value) -> (u16, Value) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let (status, text) = raw(server.address, method, path, body.as_bytes());
    (status, serde_json::from_str(&text).unwrap())
}

fn done(submission: &Submission) {
    let stats = RequestStats { prompt_tokens: submission.request.prompt.len(), ..RequestStats::default() };
    submission.events.send(Event::Done(FinishReason::Stop, stats)).unwrap();
}

#[test]
fn every_endpoint_steers() {
    let mut server = start_in_template();
    assert_eq!(call(&server, "PUT", "/v1/vectors/calm", json!({"vector": base64(&VECTOR)})).0, 200);
    let steer = json!([{"layer": 3, "vector": "calm", "coefficient": -2.5, "positions": "generated"},
        {"layer": 0, "vector": VECTOR, "positions": [[0, 2], [5, null]]}]);
    for (path, body) in every_endpoint() {
        let body = with(body, json!({"steer": steer})).to_string();
        let _socket = send(server.address, "POST", path, body.as_bytes());
        let submission = server.next();
        let [first, second] = &submission.request.steer[..] else { panic!("{path}: {:?}", submission.request.steer) };
        assert_eq!(
            (first.layer, &first.vector[..], first.coefficient, &first.positions),
            (3, &VECTOR[..], -2.5, &Positions::Generated)
        );
        let ranges = Positions::Some(vec![0..2, 5..usize::MAX]);
        assert_eq!(
            (second.layer, &second.vector[..], second.coefficient, &second.positions),
            (0, &VECTOR[..], 1.0, &ranges)
        );
        done(&submission);
    }
}

#[test]
fn vectors_have_names() {
    let server = start();
    let put = |name: &str, body: Value| call(&server, "PUT", &format!("/v1/vectors/{name}"), body);
    let (status, told) = put("a.b-c_1", json!({"vector": VECTOR}));
    assert_eq!((status, &told["id"], &told["size"]), (200, &json!("a.b-c_1"), &json!(8)));
    assert_eq!(call(&server, "GET", "/v1/vectors/a.b-c_1", Value::Null).1["vector"], json!(VECTOR));
    assert_eq!(call(&server, "GET", "/v1/vectors", Value::Null).1["data"][0]["id"], "a.b-c_1");
    assert_eq!(call(&server, "DELETE", "/v1/vectors/a.b-c_1", Value::Null).0, 200);
    for method in ["GET", "DELETE"] {
        assert_eq!(call(&server, method, "/v1/vectors/a.b-c_1", Value::Null).0, 404);
    }
    for (body, says) in [
        (json!({"vector": [1.0]}), "takes 8"),
        (json!({"vector": [1, 2, 3, 4, 5, 6, 7, "8"]}), "list of numbers"),
        (json!({"vector": [1e39, 0, 0, 0, 0, 0, 0, 0]}), "finite"),
        (json!({"vector": "AAAA"}), "list of numbers"),
        (json!({"vector": "???"}), "list of numbers"),
        (json!({}), "missing"),
        (json!({"vector": VECTOR, "scale": 2}), "scale"),
    ] {
        let (status, told) = put("x", body);
        assert!(status == 400 && told["error"]["message"].as_str().unwrap().contains(says), "{told}");
    }
    assert_eq!(put(&"x".repeat(65), json!({"vector": VECTOR})).0, 400);
    assert_eq!(put("a%20b", json!({"vector": VECTOR})).0, 400);
    for i in 0..256 {
        assert_eq!(put(&format!("v{i}"), json!({"vector": VECTOR})).0, 200);
    }
    assert_eq!(put("one-more", json!({"vector": VECTOR})).0, 429);
    assert_eq!(put("v7", json!({"vector": VECTOR})).0, 200, "in its place");
}

#[test]
fn what_cannot_be_steered_or_captured_is_refused_by_name() {
    let server = start();
    let good = json!({"layer": 1, "vector": VECTOR});
    for (steer, param) in [
        (json!("calm"), "steer"),
        (json!([1]), "steer"),
        (json!([{"vector": VECTOR}]), "steer"),
        (json!([{"layer": 1}]), "steer"),
        (json!([{"layer": 4, "vector": VECTOR}]), "steer"),
        (json!([{"layer": -1, "vector": VECTOR}]), "layer"),
        (json!([{"layer": 1, "vector": [1, 2]}]), "steer"),
        (json!([{"layer": 1, "vector": "nobody"}]), "steer"),
        (json!([{"layer": 1, "vector": {}}]), "vector"),
        (json!([with(good.clone(), json!({"coefficient": "x"}))]), "coefficient"),
        (json!([with(good.clone(), json!({"coefficient": 1e39}))]), "coefficient"),
        (json!([with(good.clone(), json!({"positions": "some"}))]), "positions"),
        (json!([with(good.clone(), json!({"positions": [[3, 2]]}))]), "positions"),
        (json!([with(good.clone(), json!({"positions": [[0, 2], [1, 3]]}))]), "positions"),
        (json!([with(good.clone(), json!({"positions": [[0]]}))]), "positions"),
        (json!([with(good.clone(), json!({"strength": 2}))]), "strength"),
        (Value::Array(vec![good.clone(); 257]), "steer"),
    ] {
        let (status, told) = post(server.address, "/v1/chat/completions", with(hello(), json!({"steer": steer})));
        assert_eq!((status, &told["error"]["param"]), (400, &json!(param)), "{steer} {told}");
    }
    for (fields, param) in [
        (json!({}), "layers"),
        (json!({"layers": []}), "layers"),
        (json!({"layers": [4]}), "layers"),
        (json!({"layers": "some"}), "layers"),
        (json!({"layers": [0], "positions": 5}), "positions"),
        (json!({"layers": [0], "logits": "yes"}), "logits"),
        (json!({"layers": [0], "router": 1}), "router"),
        (json!({"layers": [0], "encoding_format": "hex"}), "encoding_format"),
        (json!({"layers": [0], "n": 2}), "n"),
        (json!({"layers": [0], "stream": true}), "stream"),
        (json!({"layers": [0], "prompt": []}), "prompt"),
    ] {
        let (status, told) = post(server.address, "/v1/capture", with(json!({"prompt": "Hello!"}), fields.clone()));
        assert_eq!((status, &told["error"]["param"]), (400, &json!(param)), "{fields} {told}");
    }
}

/// Rows as the engine emits them, in parts; each number says where it belongs.
fn capture(submission: &Submission) {
    let n = submission.request.prompt.len();
    let number = |kind: usize, position: usize, column: usize| (kind * 1000 + position * 10 + column) as f32;
    let emit = |what: HookPoint, kind: usize, width: usize, positions: std::ops::Range<usize>| {
        let rows = positions.clone().flat_map(|p| (0..width).map(move |c| number(kind, p, c))).collect();
        let experts = match what {
            HookPoint::Router(_) => positions.clone().flat_map(|p| [p as i32, 7]).collect(),
            _ => Vec::new(),
        };
        let captured = Captured { what, position: positions.start, count: positions.len(), rows, experts };
        submission.events.send(Event::Captured(captured)).unwrap();
    };
    for part in [0..1, 1..n] {
        emit(HookPoint::Hidden(2), 2, 8, part.clone()); // the model's width
        emit(HookPoint::Router(1), 1, 2, part.clone());
        emit(HookPoint::Logits, 9, 3, part);
    }
    submission.events.send(token(39)).unwrap();
    done(submission);
}

#[test]
fn captured_rows_in_every_encoding() {
    let mut server = start();
    let body = |encoding: &str| {
        json!({"prompt": [5, 6, 7], "layers": [2], "logits": true, "router": true, "max_tokens": 1,
            "encoding_format": encoding})
    };
    let mut answer = |encoding: &str| {
        let socket = send(server.address, "POST", "/v1/capture", body(encoding).to_string().as_bytes());
        let submission = server.next();
        let wanted = submission.request.capture.as_ref().unwrap();
        assert_eq!((&wanted.layers, &wanted.positions), (&Layers::Some(vec![2]), &Positions::All));
        assert!(wanted.logits && wanted.router);
        assert_eq!(submission.request.max_tokens, Some(1));
        capture(&submission);
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut { socket }, &mut bytes).unwrap();
        let at = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
        (String::from_utf8(bytes[..at].to_vec()).unwrap(), joined(&bytes[at + 4..]))
    };
    let hidden: Vec<f32> = (0..24).map(|i| (2000 + i / 8 * 10 + i % 8) as f32).collect();
    let (ids, weights) = ([0, 7, 1, 7, 2, 7], [1000.0, 1001.0, 1010.0, 1011.0, 1020.0, 1021.0]);
    let logits: Vec<f32> = (0..9).map(|i| (9000 + i / 3 * 10 + i % 3) as f32).collect();

    let told: Value = serde_json::from_slice(&answer("float").1).unwrap();
    assert_eq!((&told["hidden"]["2"]["data"], &told["hidden"]["2"]["shape"]), (&json!(hidden), &json!([3, 8])));
    assert_eq!(
        (&told["logits"]["data"], &told["positions"], &told["tokens"]),
        (&json!(logits), &json!([0, 1, 2]), &json!([5, 6, 7, 39]))
    );
    let router = &told["router"]["1"];
    assert_eq!((&router["ids"]["data"], &router["ids"]["shape"]), (&json!(ids), &json!([3, 2])));
    assert_eq!((&router["weights"]["data"], &told["router"]["2"]), (&json!(weights), &Value::Null));
    assert_eq!((&told["finish_reason"], &told["usage"]["completion_tokens"]), (&json!("stop"), &json!(1)));

    let told: Value = serde_json::from_slice(&answer("base64").1).unwrap();
    assert_eq!(
        (&told["hidden"]["2"]["data"], &told["logits"]["data"]),
        (&json!(base64(&hidden)), &json!(base64(&logits)))
    );

    let (head, body) = answer("safetensors");
    assert!(head.contains("application/octet-stream"), "{head}");
    let file = SafeTensors::deserialize(&body).unwrap();
    assert_eq!(floats(file.tensor("hidden.2").unwrap().data()), hidden);
    let experts = file.tensor("router.1.ids").unwrap();
    assert_eq!((experts.dtype(), experts.shape()), (Dtype::I32, &[3, 2][..]));
    assert_eq!(experts.data(), ids.iter().flat_map(|id: &i32| id.to_le_bytes()).collect::<Vec<_>>());
    assert_eq!(floats(file.tensor("router.1.weights").unwrap().data()), weights);
    assert_eq!(
        (file.tensor("logits").unwrap().shape(), file.tensor("tokens").unwrap().shape()),
        (&[3, 3][..], &[4][..])
    );
    assert_eq!(file.tensor("positions").unwrap().data().len(), 24);
}
