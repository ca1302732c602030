//! Bodies that anyone may send: read without a panic, whatever is in them.

use moebius::server::read_request;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::fixture::*;

/// Fields of all endpoints, each with values that it takes.
fn fields() -> Vec<(&'static str, Vec<Value>)> {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    vec![
        (
            "messages",
            vec![
                json!([{"role": "user", "content": "hi"}]),
                json!([{"role": "system", "content": [{"type": "text", "text": "s"}]}, {"role": "user",
                    "content": "u"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c",
                        "content": "r"}]),
                json!([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "y"}]},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "n", "input": {}}]}]),
            ],
        ),
        (
            "input",
            vec![
                json!("hi"),
                json!([{"role": "user", "content": "u"}, {"type": "function_call", "call_id": "c", "name": "f",
                    "arguments": "{}"}, {"type": "reasoning", "content": [{"text": "t"}]}]),
            ],
        ),
        ("prompt", vec![json!("x"), json!([1, 2]), json!(["a", [3]])]),
        ("max_tokens", vec![json!(5), json!(u64::MAX)]),
        (
            "tools",
            vec![
                json!([{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": true}}]),
                json!([{"name": "f", "input_schema": parameters}]),
                json!([{"type": "function", "name": "f"}]),
            ],
        ),
        (
            "tool_choice",
            vec![
                json!("auto"),
                json!("required"),
                json!({"type": "function", "function": {"name": "f"}}),
                json!({"type": "any"}),
            ],
        ),
        (
            "response_format",
            vec![json!({"type": "json_object"}), json!({"type": "json_schema", "json_schema": {"schema": parameters}})],
        ),
        ("text", vec![json!({"format": {"type": "json_schema", "schema": {"type": "integer"}}})]),
        ("stop", vec![json!("a"), json!(["b", "c"])]),
        ("n", vec![json!(3)]),
        ("logprobs", vec![json!(true), json!(2)]),
        ("logit_bias", vec![json!({"7": 1})]),
        ("temperature", vec![json!(0.5)]),
        ("seed", vec![json!(-1), json!(u64::MAX)]),
        ("stream", vec![json!(true)]),
        ("stream_options", vec![json!({"include_usage": true})]),
        ("thinking", vec![json!({"type": "enabled", "budget_tokens": 1}), json!({"type": "disabled"})]),
        ("chat_template_kwargs", vec![json!({"enable_thinking": true})]),
        ("continue_final_message", vec![json!(true)]),
        ("guided_regex", vec![json!("[ab]+")]),
        ("system", vec![json!("s"), json!([{"type": "text", "text": "s"}])]),
        ("echo", vec![json!(true)]),
        (
            "steer",
            vec![
                json!([{"layer": 1, "vector": "name", "coefficient": -1e30, "positions": [[0, 5], [7, null]]}]),
                json!([{"layer": 0, "vector": [1, 2, 3, 4, 5, 6, 7, 8], "positions": "generated"}]),
            ],
        ),
        ("layers", vec![json!("all"), json!([0, 3]), json!([u64::MAX])]),
        ("positions", vec![json!("prompt"), json!([[0, u64::MAX]]), json!([[3, 1]])]),
        ("logits", vec![json!(true)]),
        ("encoding_format", vec![json!("float"), json!("safetensors")]),
    ]
}

fn body() -> impl Strategy<Value = Value> {
    let odd = proptest::sample::select(vec![
        json!(null),
        json!(0),
        json!(-1),
        json!(1e300),
        json!(""),
        json!("\u{0}\u{fffd}"),
        json!([]),
        json!({}),
        json!([[[]]]),
        json!(true),
        json!({"type": "x"}),
    ]);
    let field = proptest::sample::select(fields()).prop_flat_map(move |(name, values)| {
        let value = prop_oneof![8 => proptest::sample::select(values), 1 => odd.clone()];
        (Just(name.to_string()), value)
    });
    proptest::collection::vec(field, 0..9).prop_map(|fields| Value::Object(fields.into_iter().collect()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn any_fields_are_read_or_refused(bodies in proptest::collection::vec(body(), 5), cut in 0usize..400) {
        let dir = with_template(TEMPLATE);
        for text_side in [dir.path().to_path_buf(), tokenizer_dir()] {
            let (model, _requests) = model_in(&text_side);
            let paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/capture"];
            for (body, path) in bodies.iter().zip(paths) {
                let text = body.to_string();
                for bytes in [text.as_bytes(), &text.as_bytes()[..cut.min(text.len())]] {
                    if let Err(refusal) = read_request(&model, path, bytes) {
                        let refusal: Value = serde_json::from_str(&refusal).unwrap();
                        prop_assert!(refusal["error"]["message"].as_str().is_some_and(|message| !message.contains(
                            "failed on this request")), "{}", refusal);
                    }
                }
            }
        }
    }
}
