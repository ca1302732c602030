//! Every form of calls: a reply with thoughts, a word to the user and two calls is read, wherever it is cut.

use moebius::text::reply::{Calls, ReplyStart, Syntax, ToolChoice};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Answer, read, tools};

/// What a template has, and a reply as its model writes it: it thinks "Hm.", says "Let me see." and calls
/// `get_weather` with [`weather`] and `now` with nothing.
pub(crate) struct Form {
    pub(crate) template: &'static str,
    pub(crate) reply: &'static str,
}

#[rustfmt::skip]
pub(crate) const FORMS: &[Form] = &[
    // DeepSeek V3.2 and V4.
    Form { template: "'｜DSML｜' + 'function_calls>' <think>", reply: "<think>Hm.</think>Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">São \"Paulo\"</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>" },
    Form { template: "'｜DSML｜' + 'tool_calls>' <think>", reply: "<think>Hm.</think>Let me see.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">São \"Paulo\"</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>" },
    // Kimi K3.
    Form { template: "'<|open|>' + tag open_tag('tools') open_tag('think') open_tag('response')", reply: "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Let me see.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"get_weather\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>São \"Paulo\"<|close|>argument<|sep|><|open|>argument key=\"days\" type=\"number\"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool=\"now\" index=\"2\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>" },
    // MiniMax-M3 and M1.
    Form { template: "']<]minimax[>[' '<mm:think>' <tool_call>", reply: "<mm:think>Hm.</mm:think>Let me see.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"get_weather\">]<]minimax[>[<city>São \"Paulo\"]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name=\"now\">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>" },
    Form { template: "<tool_calls>\n <think>", reply: "<think>Hm.</think>Let me see.\n<tool_calls>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}\n{\"name\": \"now\", \"arguments\": {}}\n</tool_calls>" },
    // Hy3.
    Form { template: "':opensource' '<think{}>' '<tool_sep{}>'", reply: "<think:opensource>Hm.</think:opensource>Let me see.<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>São \"Paulo\"</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>2</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>" },
    // Solar.
    Form { template: "assistant<|think|> <|tool_call:begin|>", reply: "<|think|>Hm.<|end|><|begin|>assistant<|content|>Let me see.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>{\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}<|tool_call:end|><|tool_call:begin|>b2<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>" },
    // Gemma 4.
    Form { template: "<|tool_call>call: <|channel>thought", reply: "<|channel>thought\nHm.\n<channel|>Let me see.<|tool_call>call:get_weather{city:<|\"|>São \"Paulo\"<|\"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>" },
    // Command.
    Form { template: "<|START_ACTION|> <|START_THINKING|>", reply: "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Let me see.<|END_TEXT|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {}}\n]<|END_ACTION|>" },
    Form { template: "followed by a json-formatted list of actions <think>", reply: "<think>Hm.</think>Let me see.\nAction:\n```json\n[\n    {\n        \"tool_name\": \"get_weather\",\n        \"parameters\": {\n            \"city\": \"São \\\"Paulo\\\"\",\n            \"days\": 2\n        }\n    },\n    {\n        \"tool_name\": \"now\",\n        \"parameters\": {}\n    }\n]```" },
    // Mistral: all three.
    Form { template: "[TOOL_CALLS] [ARGS] [THINK]", reply: "[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS]get_weather[ARGS]{\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}[TOOL_CALLS]now[ARGS]{}" },
    Form { template: "[TOOL_CALLS] [ARGS] [THINK]", reply: "[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}[TOOL_CALLS]now[CALL_ID]abc123deg[ARGS]{}" },
    Form { template: "[TOOL_CALLS] [THINK]", reply: "[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}, \"id\": \"abc123def\"}, {\"name\": \"now\", \"arguments\": {}, \"id\": \"abc123deg\"}]" },
    Form { template: "[TOOL_CALLS] [ARGS] [THINK]", reply: "[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}, {\"name\": \"now\", \"arguments\": {}}]" },
    // LFM2.
    Form { template: "List of tools:  <think>", reply: "<think>Hm.</think>Let me see.<|tool_call_start|>[get_weather(city='São \"Paulo\"', days=2), now()]<|tool_call_end|>" },
    // Seed-OSS.
    Form { template: "<seed:tool_call> <seed:think>", reply: "<seed:think>Hm.</seed:think>Let me see.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>São \"Paulo\"</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>" },
    // GigaChat 3 and 3.1.
    Form { template: "<|role_sep|> <|message_sep|> <think>", reply: "<think>Hm.</think>Let me see.<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"now\", \"arguments\": {}}" },
    Form { template: "<|role_sep|> <|message_sep|> <|function_call|> <think>", reply: "<think>Hm.</think>Let me see.<|function_call|>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}<|function_call|>{\"name\": \"now\", \"arguments\": {}}" },
    // Apertus, Apriel, Nemotron Nano 2, Granite 3.
    Form { template: "<|inner_prefix|> <|tools_prefix|>", reply: "<|inner_prefix|>Hm.<|inner_suffix|>Let me see.<|tools_prefix|>[{\"get_weather\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}, {\"now\": {}}]<|tools_suffix|>" },
    Form { template: "<tool_calls>[ [BEGIN FINAL RESPONSE]", reply: "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nLet me see.\n<tool_calls>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}, \"id\": \"x\"}, {\"name\": \"now\", \"arguments\": {}, \"id\": \"y\"}]</tool_calls>" },
    Form { template: "<TOOLCALL> <think>", reply: "<think>\nHm.\n</think>\nLet me see.\n<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}, {\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>" },
    Form { template: "<|tool_call|> <think>", reply: "<think>Hm.</think>Let me see.<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}, {\"name\": \"now\", \"arguments\": {}}]" },
    // Functionary, MiniCPM5.
    Form { template: "<function= <think>", reply: "<think>Hm.</think>Let me see.<function=get_weather>{\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}</function><function=now>{}</function>" },
    Form { template: "<function name= <param name= <think>", reply: "<think>Hm.</think>Let me see.\n<function name=\"get_weather\"><param name=\"city\"><![CDATA[São \"Paulo\"]]></param><param name=\"days\">2</param></function>\n<function name=\"now\"></function>" },
    // Those of tests/reply/main.rs.
    Form { template: "<tool_call> <think>", reply: "<think>Hm.</think>Let me see.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>" },
    Form { template: "<tool_call> <function= <think>", reply: "<think>Hm.</think>Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão \"Paulo\"\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>" },
    Form { template: "<tool_call> <arg_key> <think>", reply: "<think>Hm.</think>Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São \"Paulo\"</arg_value><arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n\n</tool_call>" },
    Form { template: "<minimax:tool_call> <think>", reply: "<think>Hm.</think>Let me see.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">São \"Paulo\"</parameter>\n<parameter name=\"days\">2</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>" },
    Form { template: "<|tool_calls_section_begin|> <think>", reply: "<think>Hm.</think>Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>" },
];

/// Calls that are the whole answer: Llama 3 and 4.
#[rustfmt::skip]
const WHOLE: &[Form] = &[
    Form { template: LLAMA, reply: "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}; {\"name\": \"now\", \"parameters\": {}}" },
    Form { template: LLAMA, reply: "<|python_tag|>{\"type\": \"function\", \"name\": \"get_weather\", \"parameters\": {\"city\": \"São \\\"Paulo\\\"\", \"days\": 2}}<|python_tag|>now.call()" },
    Form { template: LLAMA, reply: "<|python_tag|>get_weather.call(city=\"São \\\"Paulo\\\"\", days=2)\n{\"name\": \"now\", \"parameters\": {}}" },
    Form { template: LLAMA_4, reply: "[get_weather(city=\"São \\\"Paulo\\\"\", days=2), now()]" },
];

const LLAMA: &str = "{\"name\": function name, \"parameters\": dictionary of argument name and its value}";
const LLAMA_4: &str = "[func_name1(params_name1=params_value1)]";

fn weather() -> Value {
    json!({"city": "São \"Paulo\"", "days": 2})
}

/// What was called with what.
fn calls(answer: &Answer) -> Vec<(&str, Value)> {
    let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    answer.calls.iter().map(|(name, arguments)| (name.as_str(), value(arguments))).collect()
}

#[test]
fn every_form_is_read_wherever_it_is_cut() {
    for (Form { template, reply }, reasoning, content) in
        FORMS.iter().map(|form| (form, "Hm.", "Let me see.")).chain(WHOLE.iter().map(|form| (form, "", "")))
    {
        let cuts = (0..reply.len()).map(|at| vec![at]).chain([Vec::new(), (0..reply.len()).collect()]);
        for cuts in cuts {
            let answer = read(template, false, reply, &cuts);
            assert_eq!(calls(&answer), [("get_weather", weather()), ("now", json!({}))], "{reply} cut {cuts:?}");
            assert_eq!(answer.reasoning.trim(), reasoning, "{reply} cut {cuts:?}");
            assert_eq!(answer.content, content, "{reply} cut {cuts:?}");
        }
    }
}

#[test]
fn ids_of_calls_are_kept() {
    for (template, id) in
        [("[TOOL_CALLS] [ARGS] [THINK]", "abc123def"), ("assistant<|think|> <|tool_call:begin|>", "a1")]
    {
        let with_id = FORMS.iter().find(|form| form.template == template && form.reply.contains(id)).unwrap();
        assert_eq!(read(template, false, with_id.reply, &[]).ids[0], id);
    }
}

/// A reply that is cut off, has other names, or calls within calls: no text is lost, and none is called that is no
/// tool.
#[test]
fn broken_replies_are_not_lost() {
    for Form { template, reply } in FORMS.iter().chain(WHOLE) {
        for end in (0..reply.len()).filter(|&end| reply.is_char_boundary(end)) {
            let cut = &reply[..end];
            let answer = read(template, false, cut, &[]);
            assert_eq!(answer, read(template, false, cut, &(0..end).collect::<Vec<_>>()).with_ids_of(&answer));
            // The words are there as soon as they are said.
            for word in ["Let me see.", "Paulo"] {
                let all = [answer.content.as_str(), &answer.reasoning]
                    .into_iter()
                    .chain(answer.calls.iter().map(|(_, arguments)| arguments.as_str()))
                    .collect::<String>();
                assert!(!cut.contains(word) || all.contains(word), "{cut:?} loses {word:?}: {answer:?}");
            }
        }
        let other = reply.replace("get_weather", "no_such_tool");
        let answer = read(template, false, &other, &[]);
        assert!(answer.calls.iter().all(|(name, _)| name == "now"), "{other}: {answer:?}");
        assert!(answer.content.contains("no_such_tool") && answer.content.contains("Paulo"), "{other}: {answer:?}");
        let nested = reply.replace("São", reply);
        let answer = read(template, false, &nested, &[]);
        let all = format!("{}{}{:?}", answer.content, answer.reasoning, answer.calls);
        assert!(all.contains("Paulo"), "{nested}: {answer:?}");
    }
}

/// A megabyte of arguments takes the time that it takes to read it, in pieces as a model writes them.
#[test]
fn long_arguments_take_linear_time() {
    for Form { template, reply } in FORMS.iter().chain(WHOLE) {
        let long = reply.replace("São", &"ab c\\\\ ".repeat(150_000));
        let start = std::time::Instant::now();
        let pieces: Vec<usize> = (0..long.len()).step_by(5).collect();
        let answer = read(template, false, &long, &pieces);
        assert!(start.elapsed().as_secs() < 20, "{template}: {:?}", start.elapsed());
        assert!(answer.calls.first().is_some_and(|(_, arguments)| arguments.len() > 900_000), "{template}");
    }
}

#[test]
fn values_of_other_types_are_read() {
    let lines = |template: &str, reply: &str| {
        let answer = read(template, false, reply, &[]);
        assert_eq!(answer, read(template, false, reply, &(0..reply.len()).collect::<Vec<_>>()).with_ids_of(&answer));
        assert_eq!(answer.calls.len(), 1, "{reply}: {answer:?}");
        calls(&answer).remove(0).1
    };
    let python = "<|tool_call_start|>[write_file(path=\"a'b\\n\\x41\\u00e9\\q\", lines=[1, -2.5e3, True, None, 'x', {'k': (1,)}],\
                  content='<|tool_call_end|>')]<|tool_call_end|>";
    assert_eq!(
        lines("List of tools: ", python),
        json!({"path": "a'b\nAé\\q", "lines": [1, -2.5e3, true, null, "x", {"k": [1]}], "content": "<|tool_call_end|>"})
    );
    let gemma = "<|tool_call>call:write_file{content:<|\"|>{a:[\\n]}<|\"|>,lines:[1,{k:<|\"|>v<|\"|>,l:[]}],path:plain}<tool_call|>";
    assert_eq!(
        lines("<|tool_call>call:", gemma),
        json!({"content": "{a:[\\n]}", "lines": [1, {"k": "v", "l": []}], "path": "plain"})
    );
    let nested = "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"write_file\">]<]minimax[>[<lines>]<]minimax[>[<item>1\
                  ]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<k>a b]<]minimax[>[</k>]<]minimax[>[</item>\
                  ]<]minimax[>[</lines>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>";
    assert_eq!(lines("]<]minimax[>[", nested), json!({"lines": [1, {"k": "a b"}]}));
    let seed = "<seed:tool_call>\n<function=write_file>\n<parameter=lines>[1, 2]</parameter>\n<parameter=path> a\n</parameter>\n\
                </function>\n</seed:tool_call>";
    assert_eq!(lines("<seed:tool_call>", seed), json!({"lines": [1, 2], "path": " a\n"}));
}

#[test]
fn an_answer_that_begins_like_a_call_is_text() {
    for (template, text) in [
        (LLAMA, "{\"answer\": 42, \"list\": [1, {\"a\": \"b\"}]}"),
        (LLAMA, "Hello {\"name\": \"now\", \"parameters\": {}}"),
        (LLAMA, "<|python_tag|>print('x')\nnow.call()"),
        (LLAMA_4, "[1] is a source, now() a call."),
        (LLAMA_4, "[link](http://x)"),
        ("[TOOL_CALLS] [ARGS]", "[TOOL_CALLS] is a token, [ARGS] too."),
        ("<|tool_call>call:", "a <|tool_call> b {c}"),
        ("<function=", "Write <function=x> to call."),
    ] {
        let answer = read(template, false, text, &(0..text.len()).collect::<Vec<_>>());
        assert_eq!((answer.calls.len(), answer.content.as_str()), (0, text));
    }
}

/// What a grammar enforces is what the parser reads; `tests/grammar.rs` walks them.
#[test]
fn every_form_has_a_grammar() {
    for Form { template, .. } in FORMS.iter().chain(WHOLE) {
        for choice in [ToolChoice::Required, ToolChoice::Named("now".into())] {
            let grammar = Syntax::of(template).grammar(&tools(), &choice, Calls::Several, ReplyStart::Answer);
            assert!(grammar.unwrap().is_some(), "{template}");
        }
    }
}

/// A reply in pieces: a marker, a quote or a word each.
fn pieces(reply: &str) -> Vec<&str> {
    let mut cuts: Vec<usize> = reply
        .match_indices(['<', '>', '[', ']', '{', '}', '(', ')', '"', ',', '|', ' ', '\n'])
        .map(|(at, _)| at)
        .collect();
    cuts.push(reply.len());
    let mut start = 0;
    cuts.into_iter()
        .map(|cut| &reply[std::mem::replace(&mut start, cut)..cut])
        .filter(|piece| !piece.is_empty())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Pieces of a reply in any order, and runs of it.
    #[test]
    fn cuts_make_no_difference(which in 0..FORMS.len() + WHOLE.len(), runs in prop::collection::vec((0usize..80, 1usize..12), 0..8),
        cuts in prop::collection::vec(0usize..400, 0..12)) {
        let Form { template, reply } = FORMS.iter().chain(WHOLE).nth(which).unwrap();
        let pieces = pieces(reply);
        let run = |(start, length): &(usize, usize)| {
            let start = start % pieces.len();
            pieces[start..(start + length).min(pieces.len())].concat()
        };
        let text: String = runs.iter().map(run).collect();
        let whole = read(template, false, &text, &[]);
        let mut cuts = cuts;
        cuts.sort_unstable();
        let cut = read(template, false, &text, &cuts).with_ids_of(&whole);
        prop_assert_eq!(&whole, &cut, "{}", text);
        let single = read(template, false, &text, &(0..text.len()).collect::<Vec<_>>()).with_ids_of(&whole);
        prop_assert_eq!(whole, single, "{}", text);
    }
}
