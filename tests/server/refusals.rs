//! What is refused, and how.

use std::io::{BufRead, BufReader, Write};

use serde_json::{Value, json};

use crate::fixture::*;

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

#[test]
fn what_would_change_the_answer_is_refused_by_name() {
    let server = saying("x");
    for (fields, param) in [
        (json!({"n": 0}), "n"),
        (json!({"n": 17}), "n"),
        (json!({"tools": {}}), "tools"),
        (json!({"tools": [1]}), "tools[0]"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tools": [tool("a b")]}), "tools[0].function"),
        (json!({"tools": [tool("a"), tool("a")]}), "tools"),
        (json!({"tools": [tool("a")]}), "tools"), // this model's template has none
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": "always"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "b"}}, "tools": [tool("a")]}), "tool_choice"),
        (json!({"functions": [{}]}), "functions"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {}}), "response_format"),
        (json!({"response_format": {"type": "json_schema", "json_schema": {}}}), "response_format"),
        (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
        (json!({"guided_choice": [1]}), "guided_choice"),
        (json!({"structured_outputs": {"magic": 1}}), "structured_outputs.magic"),
        (json!({"reasoning_effort": "high"}), "reasoning_effort"), // nor this
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logit_bias": {"x": 5}}), "logit_bias"),
        (json!({"logit_bias": {"1": 500}}), "logit_bias"),
        (json!({"logit_bias": {"512": 5}}), "logit_bias"),
        (json!({"presence_penalty": 2.5}), "presence_penalty"),
        (json!({"frequency_penalty": "x"}), "frequency_penalty"),
        (json!({"continue_final_message": true}), "continue_final_message"),
        (json!({"modalities": ["audio"]}), "modalities"),
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
        (json!({"messages": [{"role": "assistant", "tool_calls": [1]}]}), "messages[0].tool_calls[0]"),
        (json!({"messages": [{"role": "function", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": "x", "king": 1}]}), "messages[0].king"),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs"),
    ] {
        let (status, body) = post(server.address, "/v1/chat/completions", with(hello(), fields.clone()));
        assert_eq!((status, &body["error"]["param"]), (400, &json!(param)), "{fields}");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert!(body["error"]["message"].is_string() && body["error"].get("code").is_some());
    }
    let image =
        json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]});
    let (_, body) = post(server.address, "/v1/chat/completions", with(hello(), image));
    let message = "messages[0].content has a part of type 'image_url': this server reads text alone";
    assert_eq!(body["error"]["message"], message);
    let neutral = json!({"n": 1, "user": "me", "tools": null, "presence_penalty": 0, "logprobs": false, "metadata": {},
        "store": false});
    assert_eq!(post(server.address, "/v1/chat/completions", with(hello(), neutral)).0, 200);
    let parts = json!({"messages": [{"role": "developer", "content": "s"}, {"role": "user",
        "content": [{"type": "text", "text": "a"}]}]});
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
    let long = with(hello(), json!({"messages": [{"role": "user", "content": "word ".repeat(500)}]}));
    let (status, body) = post(server.address, "/v1/chat/completions", long);
    assert_eq!((status, &body["error"]["code"]), (400, &json!("context_length_exceeded")));
    let (status, body) =
        post(server.address, "/v1/chat/completions", json!({"messages": [{"role": "assistant", "content": "hi"}]}));
    assert_eq!(status, 400);
    assert!(body["error"]["message"].as_str().unwrap().contains("roles must alternate"));
}

#[test]
fn a_huge_body_is_refused_without_reading_it() {
    let server = saying("x");
    let mut stream = connect(server.address);
    write!(stream, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{{")
        .unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    assert!(line.contains("413"), "{line}");
}
