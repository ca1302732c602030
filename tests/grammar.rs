//! Constrained output: whatever a model's logits are, what comes out is what was asked for.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::path::Path;
use std::time::Instant;

use moebius::engine::sampler::Constraint;
use moebius::kernel::random::Random;
use moebius::text::grammar::{Grammar, Grammars};
use moebius::text::reply::{Calls, Part, ReplyStart, Syntax, Tool, ToolChoice};
use moebius::text::tokenizer::Tokenizer;
use serde_json::{Value, json};

const TOKENIZERS: &[&str] = &["demo/moe-gqa", "tests/fixtures/_tokenizer"];

fn tokenizer(dir: &str) -> Tokenizer {
    Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir)).unwrap()
}

/// What ends free text in the replies of a template, where there are no quotes to close.
fn closers(template: &str) -> Vec<&'static str> {
    let all = [
        ("<seed:tool_call>", &["</parameter>", "</seed:think>"][..]),
        ("<function=", &["\n</parameter>"]),
        ("<minimax:tool_call>", &["</parameter>"]),
        ("<arg_key>", &["</arg_value>"]),
        ("<|channel|>", &["<|end|>"]),
        ("｜DSML｜", &["</｜DSML｜parameter>"]),
        ("<|open|>", &["<|close|>argument<|sep|>", "<|close|>think<|sep|>"]),
        ("]<]minimax[>[", &["]<]minimax[>[</city>", "</mm:think>"]),
        ("<tool_sep{}>", &["</arg_value:opensource>", "</think:opensource>"]),
        ("<|tool_call:begin|>", &["<|end|>"]),
        ("<|tool_call>call:", &["<|\"|>", "<channel|>"]),
        ("<|START_ACTION|>", &["<|END_THINKING|>"]),
        ("[TOOL_CALLS]", &["[/THINK]"]),
        ("<|tools_prefix|>", &["<|inner_suffix|>"]),
        ("<param name=", &["</param>"]),
    ];
    let format = all.iter().find(|(marker, _)| template.contains(marker)).map_or(&[][..], |(_, closers)| closers);
    std::iter::once("</think>").chain(format.iter().copied()).collect()
}

/// What `text` still needs to end with `closer`.
fn rest<'c>(text: &[u8], closer: &'c str) -> &'c [u8] {
    let closer = closer.as_bytes();
    let begun = (1..closer.len()).rev().find(|&n| text.ends_with(&closer[..n])).unwrap_or(0);
    &closer[begun..]
}

/// The answer of a model with random logits; `None` when it is not complete after `limit` tokens.
fn walk(
    tokenizer: &Tokenizer,
    constraint: &mut dyn Constraint,
    seed: u64,
    limit: usize,
    closers: &[&str],
) -> Option<String> {
    let mut random = Random(seed);
    let mut bytes = Vec::new();
    for step in 0..limit {
        if constraint.is_complete() {
            return Some(String::from_utf8(bytes).expect("whole characters"));
        }
        let mut logits: Vec<f32> = (0..tokenizer.vocab_size() as u32).map(|_| 4.0 * random.uniform() as f32).collect();
        let thought = String::from_utf8_lossy(&bytes).contains("</think>");
        let open = closers.iter().filter(|closer| !(thought && **closer == "</think>"));
        let rests: Vec<&[u8]> = open.map(|closer| rest(&bytes, closer)).collect();
        // A tired model: the longer the answer, the better it likes to close what is open.
        for id in 0..tokenizer.vocab_size() as u32 {
            let closes = tokenizer.eos_ids().contains(&id)
                || tokenizer.token_bytes(id).iter().any(|byte| b"\"}]".contains(byte));
            let blank = tokenizer.token_bytes(id).iter().all(u8::is_ascii_whitespace);
            logits[id as usize] += if closes { step as f32 / 20.0 } else { 0.0 } + if blank { 2.0 } else { 0.0 };
            // It remembers how to end what has no quotes.
            let token = tokenizer.token_bytes(id);
            let ends = step > 10 && !token.is_empty() && rests.iter().any(|rest| rest.starts_with(token));
            logits[id as usize] += if ends { 6.0 + step as f32 / 10.0 } else { 0.0 };
        }
        constraint.mask(&mut logits).unwrap();
        let best = moebius::engine::sampler::argmax(&logits);
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

/// Another program's idea of a schema.
struct Validator {
    schemas: boon::Schemas,
    schema: boon::SchemaIndex,
}

impl Validator {
    fn new(schema: &Value) -> Self {
        let (mut schemas, mut compiler) = (boon::Schemas::new(), boon::Compiler::new());
        compiler.enable_format_assertions();
        compiler.add_resource("schema.json", schema.clone()).unwrap();
        let schema = compiler.compile("schema.json", &mut schemas).unwrap();
        Self { schemas, schema }
    }

    fn check(&self, value: &Value) -> Result<(), String> {
        self.schemas.validate(value, self.schema).map_err(|e| e.to_string())
    }
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
            let validator = Validator::new(schema);
            for seed in 0..5 {
                let mut constraint =
                    grammars.compile(&Grammar::JsonSchema(schema.clone())).unwrap_or_else(|e| panic!("{name}: {e}"));
                walks += 1;
                let Some(text) = walk(&tokenizer, &mut *constraint, seed, 400, &[]) else {
                    unfinished.push(name);
                    continue;
                };
                let value: Value = match serde_json::from_str(&text) {
                    // JSON, but no number that a computer has.
                    Err(e) if e.to_string().contains("out of range") => continue,
                    value => value.unwrap_or_else(|e| panic!("{name}: {e}: {text}")),
                };
                // A leap second, which RFC 3339 has, is one at midnight only for the validator.
                let checked = validator.check(&value);
                let valid = checked.is_ok() || (name.contains("time") && text.contains(":60"));
                assert!(valid, "{name}: {text}: {checked:?}");
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
        (
            Grammar::Regex("^[a-z]+@[a-z]+\\.de$".into()),
            vec!["me@home.de"],
            vec!["me@home", "me@home.dex", "ME@home.de"],
        ),
        (Grammar::Regex("a|b\\$".into()), vec!["a", "b$"], vec!["", "ab", "b"]),
        (
            Grammar::Choice(vec!["yes".into(), "no, \"é\"\n".into()]),
            vec!["yes", "no, \"é\"\n"],
            vec!["", "ye", "yes no"],
        ),
        (Grammar::Lark("start: A+ B?\nA: \"a\"\nB: \"b\"".into()), vec!["a", "aab"], vec!["b", "abb"]),
        (
            Grammar::Json,
            vec!["{}", "{\"a\": [1, {\"b\": null}]}", "{\n    \"a\": 1\n}"],
            vec!["[]", "1", "{\"a\"}", "{\"a\": 1,}", " {}", "{  }"],
        ),
        (Grammar::Until("</t>".into()), vec!["</t>", "a < b </t>"], vec!["a", "</t>b", "a</t>b</t>"]),
        (Grammar::Without("<t>".into()), vec!["", "a <t b"], vec!["a<t>", "<t>b"]),
        (
            Grammar::Sequence(vec![Grammar::Until("#".into()), Grammar::Json, text("!")]),
            vec!["think#{}!", "#{\"a\": 1}!"],
            vec!["{}", "x#{}", "##{}!"],
        ),
        (
            Grammar::Sequence(vec![
                Grammar::Repeated(Box::new(Grammar::Sequence(vec![
                    Grammar::Until("<c>".into()),
                    Grammar::Json,
                    text("</c>"),
                ]))),
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
    let within = Grammar::Sequence(vec![Grammar::Until("</<|user|>x>".into()), Grammar::Without("<<|user|>".into())]);
    assert!(takes(&tokenizer, &grammars, &within, "a </b> </ c</<|user|>x> < </d>"));
    assert!(!takes(&tokenizer, &grammars, &within, "a<|user|>x>") && !takes(&tokenizer, &grammars, &within, "a </x>"));
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
    let doubling: serde_json::Map<String, Value> = (0..=40)
        .map(|i| {
            (
                format!("d{i}"),
                json!({"allOf": [{"$ref": format!("#/$defs/d{}", i + 1)}, {"$ref": format!("#/$defs/d{}", i + 1)}]}),
            )
        })
        .chain([("d41".to_string(), json!({"type": "integer"}))])
        .collect();
    let properties: serde_json::Map<String, Value> =
        (0..1000).map(|i| (format!("p{i}"), json!({"type": "integer"}))).collect();
    let either = |n: usize| {
        json!({"anyOf": (0..n).map(|i| json!({"type": "object",
        "properties": {"a": {"const": i}}})).collect::<Vec<_>>()})
    };
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
        json!({"enum": [(0..1001).map(|i| (i.to_string(), json!(i))).collect::<serde_json::Map<_, _>>()]}),
        json!({"type": "object", "properties": properties, "minProperties": 2}),
        json!({"enum": (0..20_000).map(|i| format!("value {i}")).collect::<Vec<_>>()}),
        json!({"enum": []}),
        either(2000),
        json!({"allOf": (0..12).map(|i| json!({"anyOf": [{"required": [format!("a{i}")]},
            {"required": [format!("b{i}")]}]})).collect::<Vec<_>>()}),
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
    for lark in [
        "",
        "start",
        "start: start",
        "start: start start | ",
        "start: a\na: b\nb: a",
        "start: /(/",
        "start: %json {",
        "start: \"a\"{1,1000000000}",
        "%import x",
        "start: <nope>",
    ] {
        grammars_to_try.push(Grammar::Lark(lark.into()));
    }
    grammars_to_try.push(Grammar::Lark(format!("start: {}", "(".repeat(100_000))));
    grammars_to_try.push(Grammar::Regex("(".repeat(200_000)));
    grammars_to_try.push(Grammar::Choice(Vec::new()));
    grammars_to_try.push(Grammar::Choice((0..4000).map(|i| i.to_string()).collect()));
    for grammar in &grammars_to_try {
        let shown: String = format!("{grammar:?}").chars().take(120).collect();
        let start = Instant::now();
        let compiled = grammars.compile(grammar);
        let took = start.elapsed();
        eprintln!(
            "{:6} ms {} {shown}",
            took.as_millis(),
            compiled.as_ref().err().map(|e| e.to_string()).unwrap_or_default()
        );
        match compiled {
            Err(e) => assert!(!e.to_string().contains('\n') && e.to_string().len() < 500, "{e}"),
            Ok(mut constraint) => {
                for step in 0..10 {
                    let mut logits: Vec<f32> =
                        (0..tokenizer.vocab_size()).map(|id| ((id * 31 + step * 17) % 97) as f32).collect();
                    let start = Instant::now();
                    // What is allowed but too complex is an error, never a hang.
                    if constraint.is_complete() || constraint.mask(&mut logits).is_err() {
                        break;
                    }
                    assert!(start.elapsed().as_secs() < 5, "a mask of {shown}");
                    let best = moebius::engine::sampler::argmax(&logits) as u32;
                    if constraint.accept(best).is_err() || tokenizer.eos_ids().contains(&best) {
                        break;
                    }
                }
            }
        }
        assert!(took.as_secs() < 10, "{shown} took {took:?}");
    }
}

/// Excerpts of templates, and the special tokens that their models have.
const SYNTAXES: &[(&str, &[&str])] = &[
    ("<tool_call> <think>", &[]),
    ("<tool_call> <function= <think>", &[]),
    (
        "<｜tool▁calls▁begin｜> ```json </think>",
        &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ],
    ),
    ("<｜tool▁calls▁begin｜> </think>", &[]),
    (
        "<|tool_calls_section_begin|> <think>",
        &[
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
            "<think>",
            "</think>",
        ],
    ),
    ("<tool_call> <arg_key> <think>", &["<tool_call>", "</tool_call>"]),
    ("<tool_call> </arg_key><arg_value> <think>", &["<tool_call>", "</tool_call>"]),
    ("<minimax:tool_call>", &[]),
    ("<|channel|> <|message|>", &["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"]),
];

/// The other forms, with the special tokens that matter for them.
const MORE_SYNTAXES: &[(&str, &[&str])] = &[
    ("｜DSML｜ function_calls> <think>", &[]),
    ("｜DSML｜ tool_calls> <think>", &[]),
    ("<|open|> open_tag('tools') open_tag('think')", &["<|open|>", "<|close|>", "<|sep|>"]),
    ("]<]minimax[>[ <mm:think>", &["]<]minimax[>["]),
    ("<tool_calls>", &[]),
    ("<tool_calls>[ [BEGIN FINAL RESPONSE]", &[]),
    ("<tool_sep{}> ':opensource' <think{}>", &["<tool_calls:opensource>", "<tool_sep:opensource>"]),
    (
        "<|tool_call:begin|> assistant<|think|>",
        &[
            "<|tool_calls|>",
            "<|tool_call:begin|>",
            "<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
            "<|calls|>",
            "<|think|>",
            "<|begin|>",
        ],
    ),
    ("<|tool_call>call: <|channel>thought", &["<|tool_call>", "<tool_call|>", "<|\"|>", "<channel|>"]),
    ("<|START_ACTION|> <|START_THINKING|>", &["<|START_ACTION|>", "<|END_ACTION|>", "<|END_THINKING|>"]),
    ("[TOOL_CALLS] [ARGS] [THINK]", &["[TOOL_CALLS]", "[ARGS]", "[/THINK]"]),
    ("followed by a json-formatted list of actions", &[]),
    ("[TOOL_CALLS]", &["[TOOL_CALLS]"]),
    ("List of tools: ", &["<|tool_call_start|>", "<|tool_call_end|>"]),
    ("<seed:tool_call> <seed:think>", &[]),
    ("<|role_sep|>", &["<|role_sep|>"]),
    ("<|function_call|>", &["<|function_call|>"]),
    ("<|tools_prefix|> <|inner_prefix|>", &["<|tools_prefix|>", "<|tools_suffix|>"]),
    ("<TOOLCALL>", &[]),
    ("<|tool_call|>", &["<|tool_call|>"]),
    ("<function name= <param name=", &[]),
    ("<function=", &[]),
    ("\"parameters\": dictionary of argument name", &["<|python_tag|>"]),
    ("[func_name1(", &[]),
];

/// The demo's tokenizer with more special tokens.
fn with_specials(specials: &[&str]) -> Tokenizer {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join(TOKENIZERS[0]);
    let mut file: Value = serde_json::from_slice(&std::fs::read(from.join("tokenizer.json")).unwrap()).unwrap();
    let added = file["added_tokens"].as_array_mut().unwrap();
    let taken: Vec<String> = added.iter().map(|token| token["content"].as_str().unwrap().to_string()).collect();
    for (i, special) in specials.iter().filter(|special| !taken.iter().any(|taken| taken == *special)).enumerate() {
        added.push(json!({"id": 1050 + i, "content": special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}));
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"eos_token": "<|eos|>"}"#).unwrap();
    std::fs::write(dir.path().join("config.json"), r#"{"vocab_size": 1100}"#).unwrap();
    Tokenizer::load(dir.path()).unwrap()
}

fn call_tools(strict: bool) -> Vec<Tool> {
    let tool = |name: &str, parameters: Value| Tool { name: name.into(), description: None, parameters, strict };
    let place = json!({"type": "object", "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}},
        "required": ["lat"], "additionalProperties": false});
    vec![
        tool("now", json!({"type": "object", "properties": {}, "additionalProperties": false})),
        tool(
            "get_weather",
            json!({"type": "object", "$defs": {"place": place}, "required": ["city", "days", "unit"],
                "additionalProperties": false, "properties": {
                "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"enum": ["c", "f"]},
                "at": {"$ref": "#/$defs/place"}, "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
            }}),
        ),
    ]
}

/// Joins a reply's parts: reasoning, content, and calls with their arguments.
fn parts_of(syntax: &Syntax, tools: &[Tool], start: ReplyStart, text: &str) -> (String, String, Vec<(String, String)>) {
    let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    let mut parser = syntax.parser(tools, start);
    let mut parts = Vec::new();
    parser.push(text, &mut parts);
    parser.finish(&mut parts);
    for part in parts {
        match part {
            Part::Reasoning(text) => reasoning += &text,
            Part::Content(text) => content += &text,
            Part::Call { name, .. } => calls.push((name, String::new())),
            Part::Arguments { index, json } => calls[index].1 += &json,
        }
    }
    (reasoning, content, calls)
}

#[test]
fn replies_that_must_call_a_tool_do() {
    let (mut finished, mut walks, mut kinds) = (0, 0, [0; 2]);
    for &(template, specials) in SYNTAXES.iter().chain(MORE_SYNTAXES) {
        let syntax = Syntax::of(template);
        let tokenizer = with_specials(specials);
        let grammars = Grammars::new(&tokenizer).unwrap();
        let before = finished;
        for (seed, choice, calls, start, strict) in [
            (1, ToolChoice::Required, Calls::Several, ReplyStart::Answer, true),
            (2, ToolChoice::Required, Calls::Several, ReplyStart::Reasoning, false),
            (3, ToolChoice::Required, Calls::One, ReplyStart::Answer, true),
            (4, ToolChoice::Named("get_weather".into()), Calls::Several, ReplyStart::Answer, true),
            (5, ToolChoice::Named("get_weather".into()), Calls::Several, ReplyStart::Reasoning, false),
            (6, ToolChoice::Named("now".into()), Calls::One, ReplyStart::Thought, true),
            (7, ToolChoice::Required, Calls::Several, ReplyStart::Answer, true),
            (8, ToolChoice::Required, Calls::Several, ReplyStart::Reasoning, true),
        ] {
            let tools = call_tools(strict);
            let start = if syntax.thinks() { start } else { ReplyStart::Answer };
            let grammar = syntax.grammar(&tools, &choice, calls, start).unwrap().unwrap();
            let mut constraint = grammars.compile(&grammar).unwrap_or_else(|e| panic!("{template}: {e}: {grammar:?}"));
            walks += 1;
            let Some(text) = walk(&tokenizer, &mut *constraint, seed, 600, &closers(template)) else { continue };
            finished += 1;
            let (_, content, calls) = parts_of(&syntax, &tools, start, &text);
            assert!(!calls.is_empty() && content.is_empty(), "{template} {choice:?}: {text:?} {content:?}");
            if let ToolChoice::Named(name) = &choice {
                assert!(calls.len() == 1 && calls[0].0 == *name, "{template}: {text:?}");
            }
            for (name, arguments) in &calls {
                kinds[usize::from(name == "now")] += 1;
                let schema = &tools.iter().find(|tool| tool.name == *name).unwrap().parameters;
                let value: Value = serde_json::from_str(arguments)
                    .unwrap_or_else(|e| panic!("{template}: {e}: {arguments}: {text:?}"));
                assert!(Validator::new(schema).check(&value).is_ok(), "{template}: {arguments}: {text:?}");
            }
        }
        eprintln!("{template}: {} walks end", finished - before);
    }
    assert!(finished * 3 > walks * 2 && kinds[0] > 10 && kinds[1] > 10, "{finished} of {walks} walks, {kinds:?} calls");
}

#[test]
fn free_text_may_call_strict_tools_only_well() {
    for &(template, specials) in SYNTAXES {
        let syntax = Syntax::of(template);
        let tokenizer = with_specials(specials);
        let grammars = Grammars::new(&tokenizer).unwrap();
        let loose = syntax.grammar(&call_tools(false), &ToolChoice::Auto, Calls::Several, ReplyStart::Answer).unwrap();
        assert_eq!(
            (loose, syntax.grammar(&call_tools(true), &ToolChoice::None, Calls::Several, ReplyStart::Answer).unwrap()),
            (None, None)
        );
        let tools = call_tools(true);
        let grammar = syntax.grammar(&tools, &ToolChoice::Auto, Calls::Several, ReplyStart::Answer).unwrap().unwrap();
        let calls = match template {
            t if t.contains("<|channel|>") => [
                "<|channel|>final<|message|>Just text {}.",
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.now \
                 <|constrain|>json<|message|>{}",
                "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{\"a\": 1}",
            ],
            t if t.contains("json") => [
                "Just text {}.",
                "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n\
                 ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>nope\n```json\n{}\n\
                 ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ],
            t if t.contains("calls▁begin") => [
                "Just text {}.",
                "<think>x</think>Sure.\
                 <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>[]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ],
            t if t.contains("section") => [
                "Just text {}.",
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:\
                 0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.then:\
                 0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            ],
            t if t.contains("minimax") => [
                "Just text {}.",
                "Ok\n<minimax:tool_call>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
                "Ok\n<minimax:tool_call>\n<invoke name=\"now\">\n<parameter \
                 name=\"x\">1</parameter>\n</invoke>\n</minimax:tool_call>",
            ],
            t if t.contains("function") => [
                "Just text {}.",
                "Ok <tool_call>\n<function=now>\n</function>\n</tool_call>",
                "Ok <tool_call>\n<function=get_weather>\n<parameter=city>\nX\n</parameter>\n</function>\n</tool_call>",
            ],
            t if t.contains("</arg_key><arg_value>") => [
                "Just text {}.",
                "Ok <tool_call>get_weather<arg_key>city</arg_key><arg_value>X</arg_value><arg_key>days</arg_key>\
                 <arg_value>3</arg_value><arg_key>unit</arg_key><arg_value>c</arg_value></tool_call>\
                 <tool_call>now</tool_call>",
                "Ok <tool_call>get_weather\n</tool_call>",
            ],
            t if t.contains("arg_key") => [
                "Just text {}.",
                "Ok <tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>X</arg_value>\n<arg_key>days</\
                 arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>c</arg_value>\n</tool_call>",
                "Ok <tool_call>get_weather\n</tool_call>",
            ],
            _ => [
                "Just text {}.",
                "<think>\nhm\n</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": \
                 {}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
                "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"x\": 1}}\n</tool_call>",
            ],
        };
        assert!(takes(&tokenizer, &grammars, &grammar, calls[0]), "{template}");
        assert!(takes(&tokenizer, &grammars, &grammar, calls[1]), "{template}");
        assert!(!takes(&tokenizer, &grammars, &grammar, calls[2]), "{template}");
    }
}

/// The same for the other forms: text, and what the grammar of a forced call writes behind it.
#[test]
fn free_text_of_other_forms_may_call_too() {
    for &(template, specials) in MORE_SYNTAXES {
        // Thoughts would come before.
        let thought =
            |word: &&str| ["hink", "THINK", "thought", "inner", "FINAL"].iter().any(|mark| word.contains(mark));
        let template: String = template.split_inclusive(' ').filter(|word| !thought(word)).collect();
        let syntax = Syntax::of(&template);
        let tokenizer = with_specials(specials);
        let grammars = Grammars::new(&tokenizer).unwrap();
        let tools = call_tools(true);
        let grammar = |choice| syntax.grammar(&tools, &choice, Calls::One, ReplyStart::Answer).unwrap().unwrap();
        let forced = grammar(ToolChoice::Named("now".into()));
        let mut forced = grammars.compile(&forced).unwrap();
        let call = walk(&tokenizer, &mut *forced, 1, 200, &[]).unwrap();
        let free = grammar(ToolChoice::Auto);
        let whole_only = template.contains("dictionary") || template.contains("func_name1");
        let with_text = if whole_only { call } else { format!("Ok {call}") };
        assert!(takes(&tokenizer, &grammars, &free, "Just text."), "{template}");
        assert!(takes(&tokenizer, &grammars, &free, &with_text), "{template}: {with_text}");
        assert!(!takes(&tokenizer, &grammars, &free, &with_text.replace("now", "then")), "{template}: {with_text}");
    }
}

#[test]
fn formats_come_after_the_reasoning() {
    for (template, start, good, bad) in [
        ("<think>", ReplyStart::Reasoning, "hm {} \n</think>\n\n{}", "{}"),
        ("<think>", ReplyStart::Answer, "<think>\nhm</think>{}", "hm</think>{}"),
        ("<think>", ReplyStart::Answer, "{\"a\": 1}", "x{}"),
        ("plain", ReplyStart::Answer, "{}", "<think></think>{}"),
        (
            "<|channel|> <|message|>",
            ReplyStart::Answer,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{}",
            "{}",
        ),
        (
            "<|channel|> <|message|>",
            ReplyStart::Reasoning,
            "hm<|end|><|start|>assistant<|channel|>final<|message|>{}",
            "<|channel|>final<|message|>{}",
        ),
    ] {
        for specials in
            [&[][..], &["<|channel|>", "<|message|>", "<|end|>", "<|start|>"][..], &["<think>", "</think>"][..]]
        {
            let tokenizer = with_specials(specials);
            let grammars = Grammars::new(&tokenizer).unwrap();
            let grammar = Syntax::of(template).after_reasoning(Grammar::Json, start);
            assert!(takes(&tokenizer, &grammars, &grammar, good), "{template} {good}");
            assert!(!takes(&tokenizer, &grammars, &grammar, bad), "{template} {bad}");
        }
    }
}

#[test]
fn tools_that_cannot_be_called_are_refused_in_words() {
    let refused = |template: &str, tools: &[Tool], choice: ToolChoice| {
        Syntax::of(template).grammar(tools, &choice, Calls::Several, ReplyStart::Answer).unwrap_err().to_string()
    };
    assert!(refused("plain", &call_tools(true), ToolChoice::Required).contains("no syntax for tools"));
    assert!(refused("<tool_call>", &[], ToolChoice::Required).contains("'tools' is empty"));
    assert!(refused("<tool_call>", &call_tools(true), ToolChoice::Named("nope".into())).contains("no tool 'nope'"));
    let tool = Tool {
        name: "f".into(),
        description: None,
        parameters: json!({"properties": {"a": {"type": "string", "pattern": "^x$"}}}),
        strict: true,
    };
    assert!(refused("<tool_call> <function=", &[tool], ToolChoice::Auto).contains("'pattern' of the argument 'a'"));
}
