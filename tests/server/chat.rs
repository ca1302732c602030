//! Chat and text completions, as clients see them.

use moebius::engine::Submission;
use serde_json::{Value, json};

use crate::fixture::*;

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
    assert_eq!(
        (&body["choices"][0]["finish_reason"], &body["usage"]["completion_tokens"]),
        (&json!("length"), &json!(1))
    );
    let (_, body) = post(server.address, "/v1/chat/completions", with(hello(), json!({"stop": ["😀", " yes"]})));
    assert_eq!(
        (&body["choices"][0]["message"]["content"], &body["choices"][0]["finish_reason"]),
        (&json!("naïve "), &json!("stop"))
    );
}

#[test]
fn a_stream_has_role_text_reason_usage_and_done() {
    let server = saying("café 😀");
    let body = with(hello(), json!({"stream": true, "stream_options": {"include_usage": true}}));
    let events = sse(server.address, "/v1/chat/completions", body);
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String =
        chunks[1..].iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
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
    assert_eq!(
        (status, &body["object"], &body["choices"][0]["text"]),
        (200, &json!("text_completion"), &json!("abc def"))
    );
    let (status, body) = post(server.address, "/v1/completions", json!({"prompt": [[1, 2, 3]]}));
    assert_eq!((status, &body["usage"]["prompt_tokens"]), (200, &json!(3)));
    let events = sse(server.address, "/v1/completions", json!({"prompt": ["x"], "stream": true, "max_tokens": 100}));
    assert!(events[0].contains("\"text\":") && events.last().unwrap() == "[DONE]");
    for prompt in
        [json!(null), json!([]), json!(["a", ""]), json!([["a"]]), json!([512]), json!([-1]), json!({}), json!([1.5])]
    {
        let (status, body) = post(server.address, "/v1/completions", json!({ "prompt": prompt }));
        assert_eq!(status, 400, "{prompt}: {body}");
    }
}

#[test]
fn requests_reach_the_engine_as_asked() {
    let mut server = start();
    let body = with(
        hello(),
        json!({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 42, "max_tokens": 9,
            "ignore_eos": true}),
    );
    let _stream = send(server.address, "POST", "/v1/chat/completions", body.to_string().as_bytes());
    let Submission { request, events: _events, .. } = server.next();
    assert_eq!(request.prompt, [505, 509, 39, 68, 438, 78, 0, 511, 198, 510]);
    assert_eq!((request.max_tokens, request.ignore_eos), (Some(9), true));
    let s = request.sampling;
    assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p, s.seed), (0.5, 0.9, 7, 0.1, Some(42)));
}

#[test]
fn several_choices_and_prompts_stand_beside_each_other() {
    let server = saying("yes no");
    let (status, body) = post(server.address, "/v1/chat/completions", with(hello(), json!({"n": 3})));
    let choices = body["choices"].as_array().unwrap();
    assert_eq!((status, choices.len()), (200, 3), "{body}");
    assert!(
        choices
            .iter()
            .enumerate()
            .all(|(i, c)| c["index"] == i && c["message"]["content"] == "yes no" && c["finish_reason"] == "stop")
    );
    let usage = &body["usage"];
    assert_eq!(usage["prompt_tokens"], 10, "the prompt counts once");
    assert_eq!(usage["completion_tokens"].as_u64().unwrap() % 3, 0);
    let chunks = chunks(server.address, "/v1/chat/completions", with(hello(), json!({"n": 2, "stream": true})));
    for i in 0..2 {
        let own: Vec<&Value> =
            chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == i).collect();
        assert_eq!(own[0]["delta"], json!({"role": "assistant", "content": ""}));
        let text: String = own[1..].iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!((text.as_str(), &own.last().unwrap()["finish_reason"]), ("yes no", &json!("stop")));
    }
    let (_, body) =
        post(server.address, "/v1/completions", json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 50, "echo": true}));
    let texts: Vec<&str> =
        body["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["ayes no", "ayes no", "byes no", "byes no"]);
}

#[test]
fn choices_have_seeds_of_their_own_and_the_first_the_given_one() {
    let mut server = start();
    let _stream = send(
        server.address,
        "POST",
        "/v1/chat/completions",
        with(hello(), json!({"n": 2, "seed": 5})).to_string().as_bytes(),
    );
    let seeds: Vec<_> = (0..2).map(|_| server.next().request.sampling.seed).collect();
    assert_eq!(seeds, [Some(5), Some(6)]);
}

#[test]
fn penalties_biases_and_logprobs_reach_the_engine_and_come_back() {
    let server = saying("né 😀");
    let body = with(hello(), json!({"logprobs": true, "top_logprobs": 1}));
    let (_, whole) = post(server.address, "/v1/chat/completions", body.clone());
    let told = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u8> =
        told.iter().flat_map(|t| t["bytes"].as_array().unwrap()).map(|b| b.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), "né 😀", "bytes are exact where a token is half a character");
    assert!(told.iter().all(|t| t["logprob"] == -0.5 && t["top_logprobs"][0]["token"] == t["token"]));
    let streamed = chunks(server.address, "/v1/chat/completions", with(body, json!({"stream": true})));
    let streamed: Vec<&Value> =
        streamed.iter().filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array()).flatten().collect();
    assert_eq!(streamed.len(), told.len());
    let (_, text) = post(server.address, "/v1/completions", json!({"prompt": "x", "logprobs": 1, "max_tokens": 50}));
    let logprobs = &text["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), told.len());
    assert_eq!((&logprobs["text_offset"][0], &logprobs["token_logprobs"][0]), (&json!(0), &json!(-0.5)));

    let mut server = start();
    let body = with(
        hello(),
        json!({"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"7": -100}}),
    );
    let _stream = send(server.address, "POST", "/v1/chat/completions", body.to_string().as_bytes());
    let s = server.next().request.sampling;
    assert_eq!(
        (s.presence_penalty, s.frequency_penalty, s.repetition_penalty, s.logit_bias),
        (0.5, -1.0, 1.1, vec![(7, -100.0)])
    );
}

fn weather() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!({"tools": [{"type": "function", "function": {"name": "weather", "description": "of a city",
        "parameters": parameters}}]})
}

#[test]
fn calls_of_tools_are_told_apart_from_words() {
    let server = saying_in(
        TEMPLATE,
        "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
    );
    let (status, body) = post(server.address, "/v1/chat/completions", with(hello(), weather()));
    let choice = &body["choices"][0];
    assert_eq!(
        (status, &choice["finish_reason"], &choice["message"]["content"]),
        (200, &json!("tool_calls"), &json!("Let me see.")),
        "{body}"
    );
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("weather")));
    assert_eq!(
        serde_json::from_str::<Value>(call["function"]["arguments"].as_str().unwrap()).unwrap(),
        json!({"city": "Oslo"})
    );
    let id = call["id"].as_str().unwrap();

    let chunks =
        chunks(server.address, "/v1/chat/completions", with(with(hello(), weather()), json!({"stream": true})));
    let calls: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"][0])
        .filter(|call| !call.is_null())
        .collect();
    assert_eq!(
        (&calls[0]["function"]["name"], &calls[0]["type"], &calls[0]["index"]),
        (&json!("weather"), &json!("function"), &json!(0))
    );
    let arguments: String = calls.iter().map(|call| call["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({"city": "Oslo"}));
    assert!(calls.len() > 2, "arguments flow as they come");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // Without tools, or when none may be called, it is text.
    for fields in [json!({}), with(weather(), json!({"tool_choice": "none"}))] {
        let (_, body) = post(server.address, "/v1/chat/completions", with(hello(), fields));
        assert!(body["choices"][0]["message"]["content"].as_str().unwrap().contains("<tool_call>"), "{body}");
    }
    // And a conversation goes on with what was called and what came of it.
    let messages = json!([
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "rain"}
    ]);
    let (status, body) = post(server.address, "/tokenize", with(weather(), json!({ "messages": messages })));
    assert_eq!(status, 200, "{body}");
    let (_, text) = post(server.address, "/detokenize", json!({"tokens": body["tokens"]}));
    let text = text["prompt"].as_str().unwrap();
    for piece in [
        "TOOLS{\"type\": \"function\"",
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}",
        "[tool]rain[assistant]",
    ] {
        assert!(text.contains(piece), "{piece} in {text}");
    }
}

#[test]
fn a_form_of_calls_that_is_not_known_is_text() {
    let template = "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    let server = saying_in(template, "CALL weather(Oslo)");
    let (status, body) = post(server.address, "/v1/chat/completions", with(hello(), weather()));
    let choice = &body["choices"][0];
    assert_eq!((status, &choice["message"]["content"]), (200, &json!("CALL weather(Oslo)")), "{body}");
    let must = with(weather(), json!({"tool_choice": "required"}));
    let (status, body) = post(server.address, "/v1/chat/completions", with(hello(), must));
    assert_eq!(status, 400, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("leave out 'tool_choice'"), "{body}");
}

#[test]
fn thoughts_are_told_apart_from_words() {
    let server = saying_in(TEMPLATE, "2 and 2\n</think>\n\nFour.");
    let body = with(hello(), json!({"chat_template_kwargs": {"enable_thinking": true}}));
    let (_, whole) = post(server.address, "/v1/chat/completions", body.clone());
    let message = &whole["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("2 and 2"), &json!("Four.")), "{whole}");
    let reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!(0 < reasoning && reasoning < whole["usage"]["completion_tokens"].as_u64().unwrap());
    let chunks = chunks(server.address, "/v1/chat/completions", with(body, json!({"stream": true})));
    let all =
        |name: &str| chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][name].as_str()).collect::<String>();
    assert_eq!((all("reasoning_content").as_str(), all("content").as_str()), ("2 and 2", "Four."));
}

#[test]
fn an_answer_that_was_begun_is_continued() {
    let mut server = start_in_template();
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]);
    let body = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": false});
    let _stream = send(server.address, "POST", "/v1/chat/completions", body.to_string().as_bytes());
    let prompt = server.next().request.prompt;
    let (_, text) = post(server.address, "/detokenize", json!({"tokens": prompt}));
    assert!(text["prompt"].as_str().unwrap().ends_with("[assistant]<think>\n\n</think>\n\nHel"), "{text}");
}
