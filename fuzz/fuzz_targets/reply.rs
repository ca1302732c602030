//! Any text, cut in two: the same parts as uncut, for every syntax.
#![no_main]

use moebius::text::reply::{Part, ReplyStart, Syntax, Tool};

const TEMPLATES: [&str; 31] = [
    "<tool_call> <think>",
    "<tool_call> <function= </think>",
    "<tool_call> <arg_key> <think>",
    "<tool_call> </arg_key><arg_value> <think>",
    "<｜tool▁calls▁begin｜> ```json <think>",
    "<｜tool▁calls▁begin｜> <think>",
    "<|tool_calls_section_begin|> <think>",
    "<minimax:tool_call> <think>",
    "<|channel|> <|message|>",
    "｜DSML｜ function_calls> <think>",
    "｜DSML｜ <think>",
    "<|open|> open_tag('tools') open_tag('think')",
    "]<]minimax[>[ <mm:think>",
    "<tool_calls> <think>",
    "<tool_calls>[ [BEGIN FINAL RESPONSE]",
    "<tool_sep{}> ':opensource' <think{}>",
    "<|tool_call:begin|> assistant<|think|>",
    "<|tool_call>call: <|channel>thought",
    "<|START_ACTION|> <|START_THINKING|>",
    "[TOOL_CALLS] [ARGS] [THINK]",
    "[TOOL_CALLS] [THINK]",
    "List of tools: ",
    "<seed:tool_call> <seed:think>",
    "<|role_sep|> <|message_sep|>",
    "<|function_call|>",
    "<|tools_prefix|> <|inner_prefix|>",
    "<TOOLCALL> <think>",
    "<|tool_call|>",
    "<function name= <param name=",
    "\"parameters\": dictionary of argument name",
    "[func_name1(",
];

/// Parts, those that belong together joined, without ids.
fn read(template: &str, pieces: &[&str]) -> Vec<(u8, usize, String)> {
    let parameters = serde_json::json!({"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}});
    let tools = [Tool { name: "f".into(), description: None, parameters, strict: false }];
    let mut parser = Syntax::of(template).parser(&tools[..], ReplyStart::Answer);
    let mut parts = Vec::new();
    pieces.iter().for_each(|piece| parser.push(piece, &mut parts));
    parser.finish(&mut parts);
    let mut joined: Vec<(u8, usize, String)> = Vec::new();
    for part in parts {
        let (kind, index, text) = match part {
            Part::Reasoning(text) => (0, 0, text),
            Part::Content(text) => (1, 0, text),
            Part::Call { index, name, .. } => (2, index, name),
            Part::Arguments { index, json } => (3, index, json),
        };
        match joined.last_mut() {
            Some(last) if last.0 == kind && last.1 == index => last.2 += &text,
            _ => joined.push((kind, index, text)),
        }
    }
    joined
}

libfuzzer_sys::fuzz_target!(|input: (u8, u16, &str)| {
    let (which, cut, text) = input;
    let template = TEMPLATES[which as usize % TEMPLATES.len()];
    let cut = (cut as usize).min(text.len());
    if text.is_char_boundary(cut) {
        assert_eq!(read(template, &[text]), read(template, &[&text[..cut], &text[cut..]]));
    }
});
