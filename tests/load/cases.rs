//! What is asked, and what the answer is when nobody else asks.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::common::root;
use super::wire::Wire;

/// A request with its one right answer.
pub(crate) struct Case {
    pub(crate) path: &'static str,
    /// Without `stream`.
    pub(crate) body: Value,
    pub(crate) answer: String,
}

pub(crate) const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// The text of an answer as a whole.
pub(crate) fn said(path: &str, body: &Value) -> String {
    let text = match path {
        CHAT => &body["choices"][0]["message"]["content"],
        COMPLETIONS => &body["choices"][0]["text"],
        MESSAGES => &body["content"][0]["text"],
        _ => &body["output"][0]["content"][0]["text"],
    };
    text.as_str().unwrap_or_default().to_string()
}

/// The text of a stream's events. Panics: the stream does not end as its API has it.
pub(crate) fn streamed(path: &str, events: &[String]) -> String {
    let mut text = String::new();
    let mut last = Value::Null;
    for event in events.iter().filter(|event| *event != "[DONE]") {
        last = serde_json::from_str(event).unwrap();
        let delta = match (path, last["type"].as_str()) {
            (CHAT, _) => &last["choices"][0]["delta"]["content"],
            (COMPLETIONS, _) => &last["choices"][0]["text"],
            (MESSAGES, Some("content_block_delta")) => &last["delta"]["text"],
            (RESPONSES, Some("response.output_text.delta")) => &last["delta"],
            _ => &Value::Null,
        };
        text += delta.as_str().unwrap_or_default();
    }
    let ended = match path {
        CHAT | COMPLETIONS => events.last().is_some_and(|event| event == "[DONE]"),
        MESSAGES => last["type"] == "message_stop",
        _ => last["type"] == "response.completed" || last["type"] == "response.incomplete",
    };
    assert!(ended, "{path} ends with {last}");
    text
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// All cases, each asked alone, one after the other.
pub(crate) async fn answered_alone(address: SocketAddr) -> Vec<Case> {
    let mut wire = Wire::open(address).await.unwrap();
    let mut cases = Vec::new();
    let mut longest = 0;
    let text = std::fs::read_to_string(root().join("tests/data/questions.tsv")).unwrap();
    let questions: Vec<&str> = text.lines().map(|line| line.split('\t').next().unwrap()).collect();
    for (path, body) in bodies(&questions) {
        let reply = wire.ask(path, &body).await.unwrap();
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        let reply = reply.json();
        longest = longest.max(reply["usage"]["prompt_tokens"].as_u64().unwrap_or(0));
        cases.push(Case { path, body, answer: said(path, &reply) });
    }
    assert!((1200..1900).contains(&longest), "the longest prompt has {longest} tokens");
    // Conversations of several turns: each answer is part of the next prompt.
    for start in questions.iter().step_by(8) {
        let mut messages = Vec::new();
        for next in questions.iter().cycle().skip_while(|q| *q != start).take(4) {
            messages.push(user(next));
            let body = json!({"messages": messages, "temperature": 0, "max_tokens": 60});
            let answer = said(CHAT, &wire.ask(CHAT, &body).await.unwrap().json());
            messages.push(json!({"role": "assistant", "content": answer}));
            cases.push(Case { path: CHAT, body, answer });
        }
    }
    assert!(cases.iter().filter(|case| case.answer.is_empty()).count() < cases.len() / 10);
    cases
}

fn bodies(questions: &[&str]) -> Vec<(&'static str, Value)> {
    let greedy = |messages: Value| json!({"messages": messages, "temperature": 0, "max_tokens": 60});
    let mut all = Vec::new();
    for (i, question) in questions.iter().enumerate() {
        all.push((CHAT, greedy(json!([user(question)]))));
        match i % 3 {
            0 => all.push((MESSAGES, greedy(json!([user(question), {"role": "assistant", "content": "The"}])))),
            1 => all.push((RESPONSES, json!({"input": question, "temperature": 0, "max_output_tokens": 60}))),
            _ => all
                .push((COMPLETIONS, json!({"prompt": question, "temperature": 0, "max_tokens": 40, "stop": ["\n\n"]}))),
        }
    }
    // The same long beginning, and beginnings that part early.
    let text = |from: usize, n: usize| -> String {
        questions.iter().cycle().skip(from).take(n).copied().collect::<Vec<_>>().join(" ")
    };
    let rules = json!({"role": "system", "content": text(0, 60)});
    for question in &questions[..8] {
        all.push((CHAT, greedy(json!([rules, user(question)]))));
    }
    for i in 0..6 {
        all.push((CHAT, greedy(json!([user(&text(i * 5, 150 + 10 * i))]))));
    }
    // At random, but by seed; with penalties, which look at all that was said; and held to a form.
    for seed in 0..5 {
        let fields = json!({"messages": [user("Tell me something.")], "temperature": 1.2, "top_p": 0.95, "seed": seed,
            "max_tokens": 50});
        all.push((CHAT, fields));
        let fields =
            json!({"messages": [user(questions[seed])], "temperature": 0, "frequency_penalty": 1.0, "max_tokens": 50});
        all.push((CHAT, fields));
    }
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Tokyo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}});
    for question in &questions[..3] {
        all.push((CHAT, json!({"messages": [user(question)], "temperature": 0, "response_format": format})));
    }
    all
}
