//! Replies as models write them, read whole, character by character and cut anywhere.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod forms;

use moebius::text::reply::{Part, ReplyStart, Syntax, Tool};
use proptest::prelude::*;
use serde_json::{Value, json};

/// What tells the templates apart: excerpts of how they write an assistant's calls.
const HERMES: &str =
    r#"<think> {{- '<tool_call>\n{"name": "' }}{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}"#;
const FUNCTION: &str = r#"{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
{% for k, v in tool_call.arguments|items %}<parameter= </think>"#;
const DEEPSEEK_R1: &str = "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '```json' + \
                           tool['function']['arguments'] + '```' </think>";
const DEEPSEEK_V31: &str = "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + \
                            '<｜tool▁sep｜>' + tool['function']['arguments'] + </think>";
const KIMI: &str = "<|tool_calls_section_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|> <think></think>";
const GLM: &str =
    "{{ '\\n<tool_call>' + tc.name }}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key> <think></think>";
const GLM_47: &str = "{{- '<tool_call>' + tc.name -}}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>\
                      <arg_value>{{ v }} <think>";
const MINIMAX: &str = "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{% for k, v in _args.items() %} <think>";
const HARMONY: &str = "<|start|>assistant<|channel|>analysis<|message|> tool_call.arguments|tojson";

fn tools() -> Vec<Tool> {
    let tool = |name: &str, parameters: Value| Tool { name: name.into(), description: None, parameters, strict: false };
    vec![
        tool(
            "get_weather",
            json!({"type": "object", "required": ["city"], "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"},
                    "at": {"type": ["string", "null"]}
            }}),
        ),
        tool(
            "write_file",
            json!({"type": "object", "properties": {
                "path": {"type": "string"}, "content": {"type": "string"}, "lines": {"type": "array",
                    "items": {"type": "integer"}}
            }}),
        ),
        tool("now", json!({"type": "object", "properties": {}})),
    ]
}

/// What a client puts together.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
    ids: Vec<String>,
}

impl Answer {
    /// The same with ids of another, which are random.
    fn with_ids_of(self, other: &Self) -> Self {
        Self { ids: other.ids.clone(), ..self }
    }

    fn of(parts: &[Part]) -> Self {
        let mut answer = Answer::default();
        for part in parts {
            match part {
                Part::Reasoning(text) => answer.reasoning += text,
                Part::Content(text) => answer.content += text,
                Part::Call { index, id, name } => {
                    assert_eq!(*index, answer.calls.len());
                    answer.ids.push(id.clone());
                    answer.calls.push((name.clone(), String::new()));
                }
                Part::Arguments { index, json } => {
                    assert_eq!(*index + 1, answer.calls.len(), "arguments belong to the last call");
                    answer.calls[*index].1 += json;
                }
            }
        }
        answer
    }
}

/// Reads `text` cut at these places, of which those inside a character are passed over.
fn read(template: &str, in_reasoning: bool, text: &str, cuts: &[usize]) -> Answer {
    let start = if in_reasoning { ReplyStart::Reasoning } else { ReplyStart::Answer };
    let mut parser = Syntax::of(template).parser(tools(), start);
    let mut parts = Vec::new();
    let mut start = 0;
    for &cut in cuts {
        if cut > start && cut < text.len() && text.is_char_boundary(cut) {
            parser.push(&text[start..cut], &mut parts);
            start = cut;
        }
    }
    parser.push(&text[start..], &mut parts);
    parser.finish(&mut parts);
    let answer = Answer::of(&parts);
    assert_eq!(parser.called(), !answer.calls.is_empty());
    answer
}

/// Reads `text` whole and by characters, and compares with what is expected.
fn check(template: &str, in_reasoning: bool, text: &str, reasoning: &str, content: &str, calls: &[(&str, &str)]) {
    let calls = calls.iter().map(|(name, json)| (name.to_string(), json.to_string())).collect();
    let want = Answer { reasoning: reasoning.into(), content: content.into(), calls, ids: Vec::new() };
    for cuts in [Vec::new(), (0..text.len()).collect(), (0..text.len()).step_by(7).collect()] {
        let got = read(template, in_reasoning, text, &cuts);
        assert_eq!(Answer { ids: Vec::new(), ..got }, want, "{text}\ncut {cuts:?}");
    }
}

const TRANSCRIPTS: &[(&str, bool, &str)] = &[
    (
        HERMES,
        false,
        "<think>\nThe user wants weather.\n</think>\n\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": \
         {\"city\": \"São Paulo\", \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": \
         {}}\n</tool_call>",
    ),
    (HERMES, true, "Hmm, <tool_call> is a tag.\n</think>\n\nIt is {sunny} <today> 😀.\n"),
    (
        HERMES,
        false,
        "Let me see.\n\n<tool_call>{\"arguments\": {\"city\": \"a </tool_call> b\"}, \"name\": \
         \"get_weather\"}</tool_call> done <tool_call>\n{\"name\": \"nope\", \"arguments\": {}}\n</tool_call>",
    ),
    (
        HERMES,
        false,
        "<tool_call>\n{\"name\": \"write_file\", \"arguments\": {\"path\": \"a\", \"content\": \
         \"</tool_call>{}[\\\"\\\\\"}}}\n</tool_call>x",
    ),
    (
        FUNCTION,
        false,
        "I'll write \
         it.\n<tool_call>\n<function=write_file>\n<parameter=path>\n/tmp/a.rs\n</parameter>\n<parameter=content>\nfn \
         main() {\n    println!(\"<b>é\\n</b>\");\n}\n\n</parameter>\n<parameter=lines>\n[1, \
         2]\n</parameter>\n</function>\n</tool_call>\n",
    ),
    (
        FUNCTION,
        true,
        "ok</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n\
         three\n</parameter>\n<parameter=metric>\nTrue\n</parameter> \
         stray\n</function>\n</tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        DEEPSEEK_R1,
        true,
        "I should call.\n</think>\n\nSure.\
         <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \
         \"Tokyo\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n\
         ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        DEEPSEEK_V31,
        false,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \
         \"北京\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜> \
         after",
    ),
    (
        KIMI,
        false,
        "<think>hm</think>Looking.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:\
         0<|tool_call_argument_begin|>{\"city\": \
         \"Beijing\"}<|tool_call_end|><|tool_call_begin|>functions.write_file:1 <|tool_call_argument_begin|>\"{path: \
         a}\"<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        GLM,
        false,
        "\n<think>let me</think>\nChecking.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>New \
         York</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</\
         tool_call>",
    ),
    (
        MINIMAX,
        true,
        "thinking\n</think>\n\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter \
         name=\"city\">Sydney</parameter>\n<parameter name=\"at\">null</parameter>\n</invoke>\n<invoke \
         name=\"now\">\n</invoke>\n</minimax:tool_call>\nbye",
    ),
    (
        HARMONY,
        false,
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>One \
         moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather \
         <|constrain|>json<|message|>{\"city\":\"Oslo\"}<|call|>",
    ),
    (
        HARMONY,
        false,
        "<|channel|>analysis<|message|>Easy <|x.<|end|><|start|>assistant<|channel|>final<|message|>It is 4 < \
         5.<|return|>",
    ),
    (HARMONY, false, " to=functions.nope<|channel|>commentary json<|message|>{}<|call|>"),
];

#[test]
fn hermes() {
    check(
        TRANSCRIPTS[0].0,
        false,
        TRANSCRIPTS[0].2,
        "The user wants weather.",
        "",
        &[("get_weather", r#"{"city": "São Paulo", "days": 2}"#), ("now", "{}")],
    );
    check(HERMES, true, TRANSCRIPTS[1].2, "Hmm, <tool_call> is a tag.", "It is {sunny} <today> 😀.\n", &[]);
    check(HERMES, false, "  plain\n text <tool", "", "  plain\n text <tool", &[]);
    check(HERMES, false, "\n<think>\n\n</think>\n\nYes.", "", "Yes.", &[]);
    check(HERMES, false, "A tag: <think>.", "", "A tag: <think>.", &[]);
    // The arguments first, or as text; spaces as they come.
    check(
        HERMES,
        false,
        r#"<tool_call>{"arguments": {"city": "X"}, "name": "get_weather"}</tool_call>"#,
        "",
        "",
        &[("get_weather", r#"{"city":"X"}"#)],
    );
    check(
        HERMES,
        false,
        r#"<tool_call>{"name":"get_weather","arguments":"{\"city\":1}"}</tool_call>"#,
        "",
        "",
        &[("get_weather", r#"{"city":1}"#)],
    );
    check(HERMES, false, r#"<tool_call>{"name":"now","parameters":{ }}}</tool_call>"#, "", "", &[("now", "{ }")]);
    check(HERMES, false, r#"a <tool_call>{"name":"now"}</tool_call> b"#, "", "ab", &[("now", "{}")]);
    check(
        HERMES,
        false,
        TRANSCRIPTS[3].2,
        "",
        "x",
        &[("write_file", r#"{"path": "a", "content": "</tool_call>{}[\"\\"}"#)],
    );
}

#[test]
fn broken_calls_are_not_lost() {
    for text in [
        "Hi <tool_call>\n{\"name\": \"nope\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>not json</tool_call>",
        "<tool_call>",
        " <tool_call>\n{\"name\": ",
        "x\n\n<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>\n",
        "<tool_call>[1]</tool_call>",
    ] {
        check(HERMES, false, text, "", text, &[]);
    }
    check(
        HERMES,
        false,
        "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": [1, ",
        "",
        "",
        &[("now", "{\"a\": [1, ")],
    );
    check(
        HERMES,
        false,
        "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": </tool_call> b",
        "",
        "b",
        &[("now", "{\"a\": ")],
    );
    check(
        HERMES,
        false,
        "<tool_call>{\"name\": \"now\", \"arguments\": {}} and more",
        "",
        "and more",
        &[("now", "{}")],
    );
    check(HERMES, false, "<tool_call>{\"name\": \"now\", \"arguments\": {}}\n</tool_c", "", "", &[("now", "{}")]);
    let text = "<tool_call>\n<function=nope>\n</function>\n</tool_call>";
    check(FUNCTION, false, text, "", text, &[]);
    check(
        FUNCTION,
        false,
        "<tool_call>\n<function=write_file>\n<parameter=path>\n/a",
        "",
        "",
        &[("write_file", "{\"path\": \"/a")],
    );
    check(
        FUNCTION,
        false,
        "<tool_call>\n<function=write_file>\n<parameter=lines>\n[1,",
        "",
        "",
        &[("write_file", "{\"lines\": [1,")],
    );
    let text = "<|tool_calls_section_begin|><|tool_call_begin|>tool_1<|tool_call_argument_begin|>{}<|tool_call_end|>";
    check(KIMI, false, text, "", text, &[]);
    let text = "<minimax:tool_call>\n<invoke name=\"nope\">\n</invoke>";
    check(MINIMAX, false, text, "", text, &[]);
    check(HARMONY, false, TRANSCRIPTS[13].2, "", " to=functions.nope<|channel|>commentary json<|message|>{}", &[]);
    check(HARMONY, false, "Hello <|there", "", "Hello <|there", &[]);
}

#[test]
fn functions_with_parameters() {
    check(
        FUNCTION,
        false,
        TRANSCRIPTS[4].2,
        "",
        "I'll write it.",
        &[(
            "write_file",
            r#"{"path": "/tmp/a.rs", "content": "fn main() {\n    println!(\"<b>é\\n</b>\");\n}\n", "lines": [1, 2]}"#,
        )],
    );
    check(
        FUNCTION,
        true,
        TRANSCRIPTS[5].2,
        "ok",
        "stray",
        &[("get_weather", r#"{"city": "Paris", "days": "three", "metric": true}"#), ("now", "{}")],
    );
}

#[test]
fn deepseek() {
    check(
        DEEPSEEK_R1,
        true,
        TRANSCRIPTS[6].2,
        "I should call.",
        "Sure.",
        &[("get_weather", r#"{"city": "Tokyo"}"#), ("now", "{}")],
    );
    check(DEEPSEEK_V31, false, TRANSCRIPTS[7].2, "", "after", &[("get_weather", r#"{"city": "北京"}"#), ("now", "{}")]);
}

#[test]
fn kimi() {
    check(
        KIMI,
        false,
        TRANSCRIPTS[8].2,
        "hm",
        "Looking.",
        &[("get_weather", r#"{"city": "Beijing"}"#), ("write_file", "\"{path: a}\"")],
    );
    let ids = read(KIMI, false, TRANSCRIPTS[8].2, &[]).ids;
    assert_eq!(ids, ["functions.get_weather:0", "functions.write_file:1"]);
    // A section ends the reasoning that was not closed.
    let text = "so<|tool_calls_section_begin|><|tool_call_begin|>functions.now:\
                0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    check(KIMI, true, text, "so", "", &[("now", "{}")]);
}

#[test]
fn glm() {
    check(
        GLM,
        false,
        TRANSCRIPTS[9].2,
        "let me",
        "Checking.",
        &[("get_weather", r#"{"city": "New York", "days": 3}"#), ("now", "{}")],
    );
    let text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a\nb</arg_value></tool_call>";
    check(GLM, false, text, "", "", &[("get_weather", r#"{"city": "a\nb"}"#)]);
    let text = "let me</think>Checking.<tool_call>get_weather<arg_key>city</arg_key><arg_value>a\nb</arg_value>\
                <arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>";
    let calls = [("get_weather", r#"{"city": "a\nb", "days": 3}"#), ("now", "{}")];
    check(GLM_47, true, text, "let me", "Checking.", &calls);
}

#[test]
fn minimax() {
    check(
        MINIMAX,
        true,
        TRANSCRIPTS[10].2,
        "thinking",
        "bye",
        &[("get_weather", r#"{"city": "Sydney", "at": null}"#), ("now", "{}")],
    );
}

#[test]
fn harmony() {
    check(HARMONY, false, TRANSCRIPTS[11].2, "Need weather.", "One moment.", &[("get_weather", r#"{"city":"Oslo"}"#)]);
    check(HARMONY, false, TRANSCRIPTS[12].2, "Easy <|x.", "It is 4 < 5.", &[]);
    check(HARMONY, false, " to=functions.now<|channel|>commentary json<|message|>{}", "", "", &[("now", "{}")]);
    check(HARMONY, true, "so<|end|><|start|>assistant<|channel|>final<|message|>x", "so", "x", &[]);
}

#[test]
fn arguments_stream() {
    let mut parser = Syntax::of(HERMES).parser(tools(), ReplyStart::Answer);
    let mut parts = Vec::new();
    parser.push("<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"ci", &mut parts);
    assert!(matches!(&parts[..], [Part::Call { index: 0, name, .. }, Part::Arguments { index: 0,
            json }] if name == "get_weather" && json == "{\"ci"));
    let mut parser = Syntax::of(FUNCTION).parser(tools(), ReplyStart::Answer);
    let mut parts = Vec::new();
    parser.push("<tool_call>\n<function=write_file>\n<parameter=content>\nline 1\nli", &mut parts);
    assert_eq!(Answer::of(&parts).calls[0].1, "{\"content\": \"line 1\\nli");
    let mut parser = Syntax::of(HERMES).parser(tools(), ReplyStart::Answer);
    let mut parts = Vec::new();
    parser.push("Hello <", &mut parts);
    assert_eq!(parts, [Part::Content("Hello".into())], "a space and `<` may belong to a call");
    parser.push("b", &mut parts);
    assert_eq!(parts, [Part::Content("Hello <b".into())], "pieces of one kind join");
}

#[test]
fn ids_differ() {
    let text = "<tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>".repeat(500);
    let mut ids = read(HERMES, false, &text, &[]).ids;
    assert!(ids.iter().all(|id| id.len() == 29
        && id.starts_with("call_")
        && id[5..].bytes().all(|byte| byte.is_ascii_alphanumeric())));
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 500);
}

#[test]
fn without_tools_or_markers_text_is_content() {
    let text = " <tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call><|tool";
    for template in ["plain", HERMES, KIMI] {
        let syntax = Syntax::of(template);
        let tools = if template == "plain" { tools() } else { Vec::new() };
        let mut parser = syntax.parser(&tools[..], ReplyStart::Answer);
        let mut parts = Vec::new();
        for c in text.chars() {
            parser.push(&c.to_string(), &mut parts);
        }
        parser.finish(&mut parts);
        assert_eq!(Answer::of(&parts).content, text);
    }
    assert!(
        !Syntax::of("plain").calls_tools()
            && !Syntax::of("plain").thinks()
            && !Syntax::of("plain").needs_special_tokens()
    );
}

#[test]
fn prompts_open_reasoning() {
    for (template, prompt, start) in [
        (HERMES, "<|im_start|>assistant\n<think>\n", ReplyStart::Reasoning),
        (HERMES, "<|im_start|>assistant\n<think>\n\n</think>\n\n", ReplyStart::Thought),
        (HERMES, "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", ReplyStart::Answer),
        (DEEPSEEK_V31, "<｜Assistant｜><think>", ReplyStart::Reasoning),
        (DEEPSEEK_V31, "<｜Assistant｜></think>", ReplyStart::Thought),
        (HARMONY, "<|start|>assistant", ReplyStart::Answer),
        (HARMONY, "<|start|>assistant<|channel|>analysis<|message|>", ReplyStart::Reasoning),
        ("plain", "<think>", ReplyStart::Answer),
    ] {
        assert_eq!(Syntax::of(template).start(prompt), start, "{prompt}");
    }
}

fn pieces() -> impl Strategy<Value = String> {
    let pieces = vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"now\", \"arguments\": ",
        "{\"name\": \"get_weather\", \"arguments\": {",
        "}",
        "{}",
        "\"city\": ",
        "\"a\\\"b\"",
        "<function=now>",
        "<function=write_file>",
        "<parameter=path>",
        "<parameter=lines>",
        "</parameter>",
        "</function>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function",
        "<｜tool▁sep｜>",
        "now",
        "\n```json\n",
        "\n```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.now:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<arg_key>",
        "city",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<minimax:tool_call>",
        "<invoke name=\"now\">",
        "<parameter name=\"a\">",
        "</invoke>",
        "</minimax:tool_call>",
        "<|channel|>",
        "analysis",
        "final",
        "commentary to=functions.now ",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|start|>",
        "assistant",
        " ",
        "\n",
        "\n\n",
        "é😀",
        "x",
        "<",
        "<|",
        "\"",
        "[1",
    ];
    prop::collection::vec(prop::sample::select(pieces), 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cuts_make_no_difference(text in pieces(), template in 0usize..9, in_reasoning in any::<bool>(),
        cuts in prop::collection::vec(0usize..400, 0..12)) {
        let template = [HERMES, FUNCTION, DEEPSEEK_R1, DEEPSEEK_V31, KIMI, GLM, GLM_47, MINIMAX, HARMONY][template];
        let mut cuts = cuts;
        cuts.sort_unstable();
        let whole = Answer { ids: Vec::new(), ..read(template, in_reasoning, &text, &[]) };
        let cut = Answer { ids: Vec::new(), ..read(template, in_reasoning, &text, &cuts) };
        prop_assert_eq!(&whole, &cut);
        let single = Answer { ids: Vec::new(), ..read(template, in_reasoning, &text,
            &(0..text.len()).collect::<Vec<_>>()) };
        prop_assert_eq!(whole, single);
    }

    #[test]
    fn transcripts_can_be_cut_anywhere(which in 0..TRANSCRIPTS.len(), cuts in prop::collection::vec(0usize..600,
        0..16)) {
        let (template, in_reasoning, text) = TRANSCRIPTS[which];
        let mut cuts = cuts;
        cuts.sort_unstable();
        let whole = Answer { ids: Vec::new(), ..read(template, in_reasoning, text, &[]) };
        prop_assert_eq!(whole, Answer { ids: Vec::new(), ..read(template, in_reasoning, text, &cuts) });
    }
}

/// A reply that is continued after its thoughts has the mark that ends them, so that what follows is the answer.
#[test]
fn what_ends_thoughts_is_read_as_their_end() {
    for template in ["<think>", "[THINK]", "<|START_THINKING|>", "<|channel>thought", "<|channel|>analysis<|message|>"]
    {
        let syntax = Syntax::of(template);
        let start = syntax.start(template);
        assert_eq!(start, ReplyStart::Reasoning, "{template}");
        let answer = read(template, true, &format!("why{}so", syntax.after_thoughts()), &[]);
        assert_eq!((answer.reasoning.trim(), answer.content.as_str()), ("why", "so"), "{template}");
    }
    assert_eq!(Syntax::of("no marks").after_thoughts(), "");
}
