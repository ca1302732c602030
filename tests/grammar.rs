//! Constrained output: whatever a model's logits are, what comes out is what was asked for.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::path::Path;
use std::time::Instant;

use moebius::grammar::{Grammar, Grammars};
use moebius::random::Random;
use moebius::sampler::Constraint;
use moebius::tokenizer::Tokenizer;
use serde_json::{Value, json};

const TOKENIZERS: [&str; 2] = ["demo/moe-gqa", "tests/fixtures/_tokenizer"];

fn tokenizer(dir: &str) -> Tokenizer {
    Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir)).unwrap()
}

/// The answer of a model with random logits; `None` when it is not complete after `limit` tokens.
fn walk(tokenizer: &Tokenizer, constraint: &mut dyn Constraint, seed: u64, limit: usize) -> Option<String> {
    let mut random = Random(seed);
    let mut bytes = Vec::new();
    for step in 0..limit {
        if constraint.is_complete() {
            return Some(String::from_utf8(bytes).expect("whole characters"));
        }
        let mut logits: Vec<f32> = (0..tokenizer.vocab_size() as u32).map(|_| 4.0 * random.uniform() as f32).collect();
        // A tired model: the longer the answer, the better it likes to close what is open.
        for id in 0..tokenizer.vocab_size() as u32 {
            let closes = tokenizer.eos_ids().contains(&id) || tokenizer.token_bytes(id).iter().any(|byte| b"\"}]".contains(byte));
            let blank = tokenizer.token_bytes(id).iter().all(u8::is_ascii_whitespace);
            logits[id as usize] += if closes { step as f32 / 20.0 } else { 0.0 } + if blank { 2.0 } else { 0.0 };
        }
        constraint.mask(&mut logits).unwrap();
        let best = moebius::sampler::argmax(&logits);
        assert!(logits[best].is_finite(), "nothing may follow {:?}", String::from_utf8_lossy(&bytes));
        constraint.accept(best as u32).unwrap();
        if tokenizer.eos_ids().contains(&(best as u32)) {
            return Some(String::from_utf8(bytes).expect("whole characters"));
        }
        bytes.extend_from_slice(tokenizer.token_bytes(best as u32));
    }
    None
}

fn schemas() -> Vec<(String, Value)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/schemas.json");
    let list: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    list.into_iter().map(|case| (case["name"].as_str().unwrap().to_string(), case["schema"].clone())).collect()
}

#[test]
fn every_answer_follows_its_schema() {
    let schemas = schemas();
    assert!(schemas.len() >= 40);
    let (mut walks, mut unfinished) = (0, Vec::new());
    for dir in TOKENIZERS {
        let tokenizer = tokenizer(dir);
        let grammars = Grammars::new(&tokenizer).unwrap();
        for (name, schema) in &schemas {
            let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
            for seed in 0..5 {
                let mut constraint = grammars.compile(&Grammar::JsonSchema(schema.clone())).unwrap_or_else(|e| panic!("{name}: {e}"));
                walks += 1;
                let Some(text) = walk(&tokenizer, &mut *constraint, seed, 400) else {
                    unfinished.push(name);
                    continue;
                };
                let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}: {text}"));
                // A leap second, which RFC 3339 has, is one at midnight only for the validator.
                let valid = validator.is_valid(&value) || (name.contains("time") && text.contains(":60"));
                assert!(valid, "{name}: {text}: {}", validator.iter_errors(&value).next().unwrap());
            }
        }
    }
    assert!(unfinished.len() * 50 < walks, "{} of {walks} never end: {unfinished:?}", unfinished.len());
}

/// Whether `grammar` takes `text` to its end, token by token.
fn takes(tokenizer: &Tokenizer, grammars: &Grammars, grammar: &Grammar, text: &str) -> bool {
    let mut constraint = grammars.compile(grammar).unwrap_or_else(|e| panic!("{grammar:?}: {e}"));
    for id in tokenizer.encode(text, false).unwrap() {
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        constraint.mask(&mut logits).unwrap();
        if logits[id as usize] != 0.0 {
            return false;
        }
        constraint.accept(id).unwrap();
    }
    let mut logits = vec![0.0; tokenizer.vocab_size()];
    constraint.mask(&mut logits).unwrap();
    let may_end = logits[tokenizer.eos_ids()[0] as usize] == 0.0;
    assert!(may_end || !constraint.is_complete());
    may_end
}

#[test]
fn grammars_take_what_they_say_and_nothing_else() {
    let tokenizer = tokenizer(TOKENIZERS[0]);
    let grammars = Grammars::new(&tokenizer).unwrap();
    let text = |text: &str| Grammar::Literal(text.into());
    let cases = [
        (Grammar::Regex("^[a-z]+@[a-z]+\\.de$".into()), vec!["me@home.de"], vec!["me@home", "me@home.dex", "ME@home.de"]),
        (Grammar::Regex("a|b\\$".into()), vec!["a", "b$"], vec!["", "ab", "b"]),
        (Grammar::Choice(vec!["yes".into(), "no, \"é\"\n".into()]), vec!["yes", "no, \"é\"\n"], vec!["", "ye", "yes no"]),
        (Grammar::Lark("start: A+ B?\nA: \"a\"\nB: \"b\"".into()), vec!["a", "aab"], vec!["b", "abb"]),
        (Grammar::Json, vec!["{}", "{\"a\": [1, {\"b\": null}]}", "{\n    \"a\": 1\n}"], vec!["[]", "1", "{\"a\"}", "{\"a\": 1,}", " {}", "{  }"]),
        (Grammar::Until("</t>".into()), vec!["</t>", "a < b </t>"], vec!["a", "</t>b", "a</t>b</t>"]),
        (Grammar::Without("<t>".into()), vec!["", "a <t b"], vec!["a<t>", "<t>b"]),
        (Grammar::Sequence(vec![Grammar::Until("#".into()), Grammar::Json, text("!")]), vec!["think#{}!", "#{\"a\": 1}!"], vec!["{}", "x#{}", "##{}!"]),
        (
            Grammar::Sequence(vec![
                Grammar::Repeated(Box::new(Grammar::Sequence(vec![Grammar::Until("<c>".into()), Grammar::Json, text("</c>")]))),
                Grammar::Without("<c>".into()),
            ]),
            vec!["", "hello", "a <c>{}</c> b", "<c>{}</c><c>{\"x\": 1}</c>", "a < c> <"],
            vec!["<c>", "a <c>1</c>", "<c>{}</c", "<c>{}</c> <c>"],
        ),
        (Grammar::Either(vec![text("a"), text("ab")]).optional(), vec!["", "a", "ab"], vec!["b", "abb"]),
    ];
    for (grammar, good, bad) in cases {
        for text in good {
            assert!(takes(&tokenizer, &grammars, &grammar, text), "{grammar:?} {text:?}");
        }
        for text in bad {
            assert!(!takes(&tokenizer, &grammars, &grammar, text), "{grammar:?} {text:?}");
        }
    }
}

#[test]
fn special_tokens_come_as_themselves_and_never_in_text() {
    let tokenizer = tokenizer(TOKENIZERS[0]);
    let grammars = Grammars::new(&tokenizer).unwrap();
    let grammar = Grammar::Sequence(vec![Grammar::Until("<|user|>".into()), Grammar::literal("ok <|system|>!")]);
    assert!(takes(&tokenizer, &grammars, &grammar, "x y<|user|>ok <|system|>!"));
    assert!(!takes(&tokenizer, &grammars, &grammar, "x y<|system|>"));
    let mut constraint = grammars.compile(&Grammar::Regex("(?s:.*)".into())).unwrap();
    let mut logits = vec![0.0; tokenizer.vocab_size()];
    constraint.mask(&mut logits).unwrap();
    for id in tokenizer.special_ids() {
        assert_eq!(logits[id as usize] == 0.0, tokenizer.eos_ids().contains(&id), "{id}");
    }
    // A row that is wider than the vocabulary, as padded embeddings have it.
    let mut logits = vec![0.0; tokenizer.vocab_size() + 100];
    constraint.mask(&mut logits).unwrap();
    assert!(logits[tokenizer.vocab_size()..].iter().all(|&logit| logit == f32::NEG_INFINITY));
}

#[test]
fn blanks_are_bounded() {
    let tokenizer = tokenizer(TOKENIZERS[0]);
    let grammars = Grammars::new(&tokenizer).unwrap();
    for blank in [" ", "\n", "\t"] {
        let mut constraint = grammars.compile(&Grammar::Json).unwrap();
        let mut steps = 0;
        for id in tokenizer.encode("{", false).unwrap() {
            constraint.accept(id).unwrap();
        }
        loop {
            let id = tokenizer.encode(blank, false).unwrap()[0] as usize;
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            constraint.mask(&mut logits).unwrap();
            if logits[id] != 0.0 {
                break;
            }
            constraint.accept(id as u32).unwrap();
            steps += 1;
            assert!(steps < 50, "{blank:?} can be repeated forever");
        }
    }
}

#[test]
fn a_token_that_was_not_allowed_is_an_error() {
    let tokenizer = tokenizer(TOKENIZERS[0]);
    let grammars = Grammars::new(&tokenizer).unwrap();
    let mut constraint = grammars.compile(&Grammar::Json).unwrap();
    let x = tokenizer.encode("x", false).unwrap()[0];
    let error = constraint.accept(x).unwrap_err().to_string();
    assert!(error.contains("does not follow the output format") && !error.contains('\n'), "{error}");
    assert!(!constraint.is_complete());
    assert!(grammars.compile(&Grammar::Json).unwrap().accept(u32::MAX).is_err());
}

fn nested(depth: usize, wrap: impl Fn(Value) -> Value) -> Value {
    (0..depth).fold(json!({"type": "integer"}), |inner, _| wrap(inner))
}

#[test]
fn hostile_formats_are_refused_or_cheap() {
    let tokenizer = tokenizer(TOKENIZERS[0]);
    let grammars = Grammars::new(&tokenizer).unwrap();
    let doubling: serde_json::Map<String, Value> = (0..40)
        .map(|i| (format!("d{i}"), json!({"allOf": [{"$ref": format!("#/$defs/d{}", i + 1)}, {"$ref": format!("#/$defs/d{}", i + 1)}]})))
        .collect();
    let properties: serde_json::Map<String, Value> = (0..3000).map(|i| (format!("p{i}"), json!({"type": "integer"}))).collect();
    let either = |n: usize| json!({"anyOf": (0..n).map(|i| json!({"type": "object", "properties": {"a": {"const": i}}})).collect::<Vec<_>>()});
    let schemas = [
        nested(500, |inner| json!({"type": "array", "items": inner})),
        nested(30, |inner| json!({"type": "object", "properties": {"a": inner.clone()}, "required": ["a"]})),
        nested(25, |inner| json!({"anyOf": [inner, {"type": "string"}]})),
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000u64}),
        json!({"type": "array", "items": {"type": "integer"}, "maxItems": 1_000_000_000u64}),
        json!({"type": "string", "minLength": 1_000_000_000u64}),
        json!({"type": "string", "maxLength": 1_000_000_000u64}),
        json!({"type": "string", "maxLength": 100_000}),
        json!({"type": "object", "minProperties": 1_000_000_000u64}),
        json!({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
        json!({"type": "string", "pattern": "(a|b)*a(a|b){300}"}),
        json!({"type": "string", "pattern": "("}),
        json!({"type": "string", "pattern": "(?=a)b"}),
        json!({"type": "integer", "multipleOf": 0.000000000001}),
        json!({"type": "integer", "multipleOf": 999_999_999_999u64}),
        json!({"type": "integer", "minimum": 1e300, "maximum": -1e300}),
        json!({"type": "number", "minimum": 1e-300, "maximum": 1e300}),
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"anyOf": [{"$ref": "#"}]}),
        json!({"$ref": "https://example.com/schema.json"}),
        json!({"$ref": "#/nowhere"}),
        json!({"$ref": "#/$defs/d0", "$defs": doubling}),
        json!({"type": "object", "properties": properties.clone()}),
        json!({"type": "object", "properties": properties, "minProperties": 2}),
        json!({"enum": (0..20_000).map(|i| format!("value {i}")).collect::<Vec<_>>()}),
        json!({"enum": []}),
        either(2000),
        json!({"allOf": (0..12).map(|i| json!({"anyOf": [{"required": [format!("a{i}")]}, {"required": [format!("b{i}")]}]})).collect::<Vec<_>>()}),
        json!({"not": {}}),
        json!({"if": {}, "then": {}}),
        json!({"type": "array", "uniqueItems": true}),
        json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        json!({"type": "object", "required": "é".repeat(99)}),
        json!({"minLength": "é".repeat(99)}),
        json!({"type": 5}),
        json!({"type": "nothing"}),
        json!({"x-guidance": {"whitespace_pattern": "[ ]*"}, "type": "object"}),
        json!(false),
        json!([]),
        json!("string"),
        json!(null),
        json!({"description": "x".repeat(1 << 20)}),
    ];
    let mut grammars_to_try: Vec<Grammar> = Vec::new();
    for schema in schemas {
        grammars_to_try.extend([Grammar::JsonSchema(schema.clone()), Grammar::LooseSchema(schema)]);
    }
    for regex in ["(", "[", "a{1000000}", "((a{1,1000}){1,1000}){1,1000}", "(?<=x)y", "\\", "a\nb", "/", "*"] {
        grammars_to_try.push(Grammar::Regex(regex.into()));
    }
    for lark in ["", "start", "start: start", "start: start start | ", "start: a\na: b\nb: a", "start: /(/", "start: %json {", "start: \"a\"{1,1000000000}", "%import x", "start: <nope>"] {
        grammars_to_try.push(Grammar::Lark(lark.into()));
    }
    grammars_to_try.push(Grammar::Lark(format!("start: {}", "(".repeat(100_000))));
    grammars_to_try.push(Grammar::Regex("(".repeat(200_000)));
    grammars_to_try.push(Grammar::Choice(Vec::new()));
    grammars_to_try.push(Grammar::Choice((0..20_000).map(|i| i.to_string()).collect()));
    for grammar in &grammars_to_try {
        let shown: String = format!("{grammar:?}").chars().take(120).collect();
        let start = Instant::now();
        let compiled = grammars.compile(grammar);
        let took = start.elapsed();
        eprintln!("{:6} ms {} {shown}", took.as_millis(), compiled.as_ref().err().map(|e| e.to_string()).unwrap_or_default());
        match compiled {
            Err(e) => assert!(!e.to_string().contains('\n') && e.to_string().len() < 500, "{e}"),
            Ok(mut constraint) => {
                for step in 0..10 {
                    let mut logits: Vec<f32> = (0..tokenizer.vocab_size()).map(|id| ((id * 31 + step * 17) % 97) as f32).collect();
                    let start = Instant::now();
                    if constraint.is_complete() || constraint.mask(&mut logits).is_err() {
                        break;
                    }
                    assert!(start.elapsed().as_secs() < 5, "a mask of {shown}");
                    let best = moebius::sampler::argmax(&logits) as u32;
                    constraint.accept(best).unwrap();
                    if tokenizer.eos_ids().contains(&best) {
                        break;
                    }
                }
            }
        }
        assert!(took.as_secs() < 10, "{shown} took {took:?}");
    }
}
