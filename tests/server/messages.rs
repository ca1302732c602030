//! Anthropic's messages and OpenAI's responses, as clients see them.

use serde_json::{Value, json};

use crate::fixture::*;

/// The events of a stream: name and data.
fn events(server: &Fixture, path: &str, body: Value) -> Vec<(String, Value)> {
    let (status, text) = raw(server.address, "POST", path, body.to_string().as_bytes());
    assert_eq!(status, 200, "{text}");
    let mut events = Vec::new();
    let mut kind = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("event: ") {
            kind = name.into();
        } else if let Some(data) = line.strip_prefix("data: ") {
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["type"], kind.as_str());
            events.push((kind.clone(), data));
        }
    }
    events
}

fn kinds(events: &[(String, Value)]) -> Vec<&str> {
    let mut kinds: Vec<&str> = events.iter().map(|(kind, _)| kind.as_str()).collect();
    kinds.dedup();
    kinds
}

fn message() -> Value {
    json!({"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello!"}]})
}

const THOUGHT_AND_CALL: &str =
    "hm\n</think>\n\nOn it.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";

#[test]
fn a_message_is_answered() {
    let server = saying("naïve 😀 yes");
    let (status, body) = post(server.address, "/v1/messages", message());
    assert_eq!(
        (status, &body["type"], &body["role"], &body["model"]),
        (200, &json!("message"), &json!("assistant"), &json!("models/tiny"))
    );
    assert_eq!(body["content"], json!([{"type": "text", "text": "naïve 😀 yes"}]));
    assert_eq!(
        (&body["stop_reason"], &body["stop_sequence"], &body["usage"]["input_tokens"]),
        (&json!("end_turn"), &Value::Null, &json!(10))
    );
    let (_, body) = post(server.address, "/v1/messages", with(message(), json!({"stop_sequences": ["😀", "zzz"]})));
    assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!("stop_sequence"), &json!("😀")));
    let (_, body) = post(server.address, "/v1/messages", with(message(), json!({"max_tokens": 1})));
    assert_eq!(body["stop_reason"], "max_tokens");
    let (status, mut refusal) = post(server.address, "/v1/messages/count_tokens", message());
    assert!(refusal.as_object_mut().unwrap().remove("request_id").unwrap().as_str().unwrap().starts_with("req-"));
    let error =
        json!({"type": "invalid_request_error", "message": "Unrecognized request argument supplied: max_tokens"});
    assert_eq!((status, refusal), (400, json!({"type": "error", "error": error})));
    let mut counted = message();
    counted.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(post(server.address, "/v1/messages/count_tokens", counted), (200, json!({"input_tokens": 10})));
}

#[test]
fn a_message_streams_block_by_block() {
    let server = saying_in(TEMPLATE, THOUGHT_AND_CALL);
    let tools =
        json!([{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]);
    let body = with(
        message(),
        json!({"stream": true, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    );
    let events = events(&server, "/v1/messages", body.clone());
    assert_eq!(
        kinds(&events),
        [
            "message_start",
            "ping", // thoughts, words, call
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    let starts: Vec<&Value> = events
        .iter()
        .filter(|(kind, _)| kind == "content_block_start")
        .map(|(_, data)| &data["content_block"]["type"])
        .collect();
    assert_eq!(starts, ["thinking", "text", "tool_use"]);
    let joined = |kind: &str, field: &str| {
        let deltas = events.iter().map(|(_, data)| &data["delta"]).filter(|delta| delta["type"] == kind);
        deltas.map(|delta| delta[field].as_str().unwrap()).collect::<String>()
    };
    assert_eq!(
        (joined("thinking_delta", "thinking").as_str(), joined("text_delta", "text").as_str()),
        ("hm", "On it.")
    );
    assert_eq!(
        serde_json::from_str::<Value>(&joined("input_json_delta", "partial_json")).unwrap(),
        json!({"city": "Oslo"})
    );
    let delta = &events[events.len() - 2].1;
    assert_eq!(delta["delta"]["stop_reason"], "tool_use");
    assert!(delta["usage"]["output_tokens"].as_u64().unwrap() > 10);

    let (_, whole) = post(server.address, "/v1/messages", with(body, json!({"stream": false})));
    let content = whole["content"].as_array().unwrap();
    assert_eq!(
        (&content[0]["thinking"], &content[1]["text"], &content[2]["input"]),
        (&json!("hm"), &json!("On it."), &json!({"city": "Oslo"}))
    );

    // What was said and done goes back in, as the template has it.
    let turn = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "Oslo?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": content[2]["id"],
            "content": [{"type": "text", "text": "rain"}]}]}
    ], "system": [{"type": "text", "text": "Be kind."}]});
    let (status, counted) = post(server.address, "/v1/messages/count_tokens", turn);
    assert_eq!(status, 200, "{counted}");
}

#[test]
fn turns_of_one_role_are_one() {
    let server = saying("x");
    let count = |turns: &[(&str, &str)]| {
        let messages: Vec<Value> = turns.iter().map(|(role, text)| json!({"role": role, "content": text})).collect();
        post(server.address, "/v1/messages/count_tokens", json!({ "messages": messages })).1["input_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(count(&[("user", "a"), ("user", "b")]), count(&[("user", "a\n\nb")]));
    let end = ("user", "c");
    assert_eq!(count(&[end, ("assistant", "a"), ("assistant", "b"), end]), count(&[end, ("assistant", "a\n\nb"), end]));
}

#[test]
fn the_form_of_a_message_is_kept_to() {
    let mut server = start();
    let form = |schema: Value| {
        with(message(), json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}}))
    };
    let socket = send(server.address, "POST", "/v1/messages", form(json!({"type": "integer"})).to_string().as_bytes());
    assert!(server.next().request.constraint.is_some());
    drop(socket);
    for (body, word) in [
        (form(json!({"type": "x"})), "enforced"),
        (with(message(), json!({"output_config": {"format": {"type": "xml"}}})), "output_config.format"),
        (with(message(), json!({"output_config": {"effort": "low"}})), "output_config.effort"),
        (with(message(), json!({"output_config": {"nonsense": 1}})), "output_config.nonsense"),
    ] {
        let (status, refusal) = post(server.address, "/v1/messages", body);
        assert_eq!(status, 400);
        assert!(refusal["error"]["message"].as_str().unwrap().contains(word), "{refusal}");
    }
}

#[test]
fn messages_are_refused_in_anthropics_shape() {
    let server = saying("x");
    for (fields, word) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "king", "content": "x"}]}), "role"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
            "messages[0].content[0] has a part of type 'image'",
        ),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice"),
        (json!({"thinking": {"type": "enabled"}}), "thinking"),
        (json!({"mcp_servers": []}), "mcp_servers"),
        (json!({"temperature": 7}), "temperature"),
    ] {
        let (status, body) = post(server.address, "/v1/messages", with(message(), fields.clone()));
        assert_eq!(
            (status, &body["type"], &body["error"]["type"]),
            (400, &json!("error"), &json!("invalid_request_error")),
            "{fields}: {body}"
        );
        assert!(body["error"]["message"].as_str().unwrap().contains(word), "{body}");
    }
    let (status, body) = post(server.address, "/v1/messages", with(message(), json!({"model": "claude"})));
    assert_eq!((status, &body["error"]["type"]), (404, &json!("not_found_error")));
}

#[test]
fn a_response_is_answered() {
    let server = saying("naïve 😀 yes");
    let (status, body) = post(server.address, "/v1/responses", json!({"model": "tiny", "input": "Hello!"}));
    assert_eq!((status, &body["object"], &body["status"]), (200, &json!("response"), &json!("completed")), "{body}");
    assert_eq!(
        body["output"][0]["content"],
        json!([{"type": "output_text", "text": "naïve 😀 yes", "annotations": [], "logprobs": []}])
    );
    assert_eq!(body["usage"]["input_tokens"], 10);
    let (_, cut) = post(
        server.address,
        "/v1/responses",
        json!({"input": [{"role": "user", "content": "Hello!"}], "max_output_tokens": 1}),
    );
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    for (fields, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"n": 2}), "n"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({"input": 5}), "input"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}), "text.format"),
        (json!({"nonsense": 1}), "nonsense"),
    ] {
        let (status, body) = post(server.address, "/v1/responses", with(json!({"input": "x"}), fields));
        assert_eq!((status, &body["error"]["param"]), (400, &json!(param)), "{body}");
    }
}

#[test]
fn a_response_streams_item_by_item() {
    let server = saying_in(TEMPLATE, THOUGHT_AND_CALL);
    let tools = json!([{"type": "function", "name": "weather", "parameters": {"type": "object",
        "properties": {"city": {"type": "string"}}}}]);
    let body =
        json!({"input": "Oslo?", "tools": tools, "stream": true, "chat_template_kwargs": {"enable_thinking": true}});
    let events = events(&server, "/v1/responses", body.clone());
    assert_eq!(
        kinds(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    assert!(events.iter().enumerate().all(|(i, (_, data))| data["sequence_number"] == i));
    let response = &events.last().unwrap().1["response"];
    let output = response["output"].as_array().unwrap();
    let done: Vec<&Value> =
        events.iter().filter(|(kind, _)| kind == "response.output_item.done").map(|(_, data)| &data["item"]).collect();
    assert_eq!(done, output.iter().collect::<Vec<_>>());
    assert_eq!((&output[0]["content"][0]["text"], &output[1]["content"][0]["text"]), (&json!("hm"), &json!("On it.")));
    assert_eq!(
        serde_json::from_str::<Value>(output[2]["arguments"].as_str().unwrap()).unwrap(),
        json!({"city": "Oslo"})
    );

    // A client sends back what was said, and what came of the call.
    let mut input = vec![json!({"role": "user", "content": "Oslo?"})];
    input.extend(output.iter().cloned());
    input.push(json!({"type": "function_call_output", "call_id": output[2]["call_id"], "output": "rain"}));
    let (status, body) = post(server.address, "/v1/responses", json!({"input": input, "instructions": "Be kind."}));
    assert_eq!(status, 200, "{body}");
}
