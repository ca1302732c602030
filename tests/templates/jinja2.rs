//! Templates of models against Jinja as Hugging Face transformers sets it up: equal text, or the same refusal.
//!
//! The templates are llama.cpp's collection, which `.ci/run` gets. Python renders what is expected.

use std::io::Write;
use std::process::{Command, Stdio};

use moebius::text::chat_template::RenderOptions;
use moebius::text::history::History;
use moebius::text::reply::{Part, ReplyStart, Syntax, Tool};
use serde_json::{Map, Value, json};

use super::common::{root, say_skipped};
use super::{SPECIAL_TOKENS, collection, compile};

/// Errors of Python where there is something to render: a loop over none, and a list that is not one yet.
const MENDED: [&str; 2] = ["'NoneType' object is not iterable", "Object of type generator is not JSON serializable"];

/// Adds `"…"|safe` to JSON, which Python then escapes as HTML: no model has learnt to read that.
const ESCAPES: &str = "meetkai-functionary-medium-v3.1";

/// Python's answer for each template and each conversation. Errors: why there is none.
fn expected(sources: &[String], variables: &[Value]) -> Result<Vec<Vec<Value>>, &'static str> {
    let python = root().join("target/python/bin/python");
    let has_jinja = |python: &_| Command::new(python).args(["-c", "import jinja2"]).stderr(Stdio::null()).status();
    if !has_jinja(&python).is_ok_and(|status| status.success()) {
        return Err("no jinja2 in target/python (`target/python/bin/python -m pip install jinja2`)");
    }
    let mut child = Command::new(python)
        .arg(root().join("tests/templates/jinja2_reference.py"))
        .env("TZ", "UTC")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let asked = json!({"templates": sources, "variables": variables}).to_string();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(asked.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success());
    Ok(serde_json::from_slice(&output.stdout).unwrap())
}

fn call(id: &str, name: &str, arguments: Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Named conversations: messages, and what else a template gets.
fn conversations() -> Vec<(&'static str, Value, RenderOptions)> {
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Today's <weather> & more, é.\nLine.",
            "parameters": {"type": "object", "required": ["city"], "properties": {
                "city": {"type": "string", "description": "The city", "enum": ["Paris", "Tōkyō"]},
                "days": {"type": "integer", "description": "How many", "default": 1},
                "at": {"type": ["string", "null"]},
                "units": {"type": "object", "properties": {"wind": {"type": "string"}}, "required": ["wind"]},
                "list": {"type": "array", "items": {"type": "number"}, "description": "All"}}}}},
        {"type": "function", "function": {"name": "now", "description": "The time",
            "parameters": {"type": "object", "properties": {}}}},
    ]);
    let [system, user] = [("system", "Be <brief>, \"é\"."), ("user", "How are you?\n")]
        .map(|(role, content)| json!({"role": role, "content": content}));
    let again = json!({"role": "user", "content": "  And now? "});
    let plain = json!({"role": "assistant", "content": "Fine, 'thanks'."});
    let thinking = json!({"role": "assistant", "content": "Fine.", "reasoning_content": "They ask.\nI answer."});
    let in_tags = json!({"role": "assistant", "content": "<think>\nThey ask.\n</think>\n\nFine."});
    let arguments = json!({"city": "Paris \"<é>\"\n", "days": 3, "at": null, "units": {"wind": "km/h"},
        "list": [1, 2.5, true, "x"]});
    let text = Value::from(arguments.to_string());
    let calls =
        |content: Value, calls: Vec<Value>| json!({"role": "assistant", "content": content, "tool_calls": calls});
    let result = |id: &str, name: &str, content: &str| {
        json!({"role": "tool", "tool_call_id": id, "name": name,
            "content": content})
    };
    let first = |arguments: &Value| call("abc123def", "get_weather", arguments.clone());
    let clear = result("abc123def", "get_weather", "{\"sky\": \"clear\"}");
    let second = call("ghi456jkl", "now", json!({}));
    let noon = result("ghi456jkl", "now", "noon");
    let with_tools = RenderOptions { add_generation_prompt: true, tools: Some(tools), ..RenderOptions::default() };
    let without = RenderOptions { tools: None, ..with_tools.clone() };
    let with = |name: &str, value: bool, options: &RenderOptions| RenderOptions {
        kwargs: Map::from_iter([(name.to_string(), json!(value))]),
        ..options.clone()
    };
    let closed = RenderOptions { add_generation_prompt: false, ..without.clone() };
    vec![
        ("a question", json!([user]), without.clone()),
        ("no generation prompt", json!([user, plain]), closed),
        ("system", json!([system, user]), without.clone()),
        ("turns", json!([system, user, plain, again, plain, again]), without.clone()),
        ("thoughts", json!([user, thinking, again]), without.clone()),
        ("thoughts in tags", json!([user, in_tags, again]), without.clone()),
        ("thinking", json!([user]), with("enable_thinking", true, &without)),
        ("no thinking", json!([user]), with("enable_thinking", false, &without)),
        ("thinking, by its other name", json!([user]), with("thinking", true, &without)),
        ("tools", json!([user]), with_tools.clone()),
        ("tools and system", json!([system, user]), with_tools.clone()),
        ("a call with an object", json!([user, calls("".into(), vec![first(&arguments)]), clear]), with_tools.clone()),
        ("a call with text", json!([user, calls("".into(), vec![first(&text)]), clear]), with_tools.clone()),
        (
            "a call beside no content",
            json!([user, calls(Value::Null, vec![first(&arguments)]), clear]),
            with_tools.clone(),
        ),
        (
            "calls beside content",
            json!([
                system,
                user,
                calls("Let me see.".into(), vec![first(&arguments), second]),
                clear,
                noon,
                plain,
                again
            ]),
            with_tools.clone(),
        ),
        (
            "an answer after a call",
            json!([user, calls("".into(), vec![first(&text)]), clear, plain, again]),
            with("enable_thinking", true, &with_tools),
        ),
        ("parts", json!([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]), without),
    ]
}

/// What transformers gives a template.
fn variables(messages: &Value, options: &RenderOptions) -> Value {
    let mut all = Map::from_iter(SPECIAL_TOKENS.map(|(name, text)| (name.to_string(), json!(text))));
    all.extend(options.kwargs.clone());
    all.insert("messages".into(), messages.clone());
    all.insert("tools".into(), options.tools.clone().into());
    all.insert("documents".into(), Value::Null);
    all.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
    all.into()
}

/// Where two renderings part.
fn difference(got: &Result<String, String>, expected: &Value) -> String {
    let (Ok(got), Some(want)) = (got, expected["text"].as_str()) else {
        return format!("{got:.80?}, not {expected:.80}");
    };
    let same = got
        .char_indices()
        .zip(want.chars())
        .find(|((_, a), b)| a != b)
        .map_or(got.len().min(want.len()), |((at, _), _)| at);
    let part = |text: &str| text[same..].chars().take(60).collect::<String>();
    let before: String = got[..same].chars().rev().take(40).collect::<Vec<_>>().into_iter().rev().collect();
    format!("behind {before:?}: {:?}, not {:?}", part(got), part(want))
}

#[test]
fn templates_of_models_render_as_in_transformers() {
    let test = "templates_of_models_render_as_in_transformers";
    let Some(templates) = collection() else {
        return say_skipped(test, "no target/vocabularies/templates (.ci/run gets them)");
    };
    let conversations = conversations();
    let all: Vec<Value> = conversations.iter().map(|(_, messages, options)| variables(messages, options)).collect();
    let sources: Vec<String> = templates.iter().map(|(_, source)| source.clone()).collect();
    let expected = match expected(&sources, &all) {
        Ok(expected) => expected,
        Err(why) => return say_skipped(test, why),
    };
    let (mut count, mut wrong) = (0, Vec::new());
    for ((name, source), expected) in templates.iter().zip(&expected) {
        let template = compile(source).unwrap();
        for ((conversation, messages, options), expected) in conversations.iter().zip(expected) {
            count += 1;
            let got = template.render(messages.as_array().unwrap(), options).map_err(|e| e.to_string());
            let same = name == ESCAPES
                || match (&got, &expected["text"], &expected["refused"]) {
                    (Ok(got), Value::String(want), _) => got == want,
                    // Refusals are one line of bounded length.
                    (Err(got), _, Value::String(want)) => {
                        let line: String = want.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
                        line.starts_with(got.trim_end_matches('…'))
                    }
                    (Err(_), _, _) => expected["broken"].is_string(),
                    (Ok(_), _, _) => {
                        MENDED.iter().any(|end| expected["broken"].as_str().unwrap_or_default().ends_with(end))
                    }
                };
            if !same {
                wrong.push(format!("{name}, {conversation}: {}", difference(&got, expected)));
            }
        }
    }
    println!("{count} renderings of {} templates", templates.len());
    assert!(wrong.is_empty(), "{} of {count} renderings differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// Clients send arguments as text, and ids of any length.
#[test]
fn past_calls_come_in_the_form_that_a_template_reads() {
    let Some(templates) = collection() else {
        let why = "no target/vocabularies/templates (.ci/run gets them)";
        return say_skipped("past_calls_come_in_the_form_that_a_template_reads", why);
    };
    let mut without = Vec::new();
    for (name, source) in templates {
        let template = compile(&source).unwrap();
        let history = History::of(&template).unwrap();
        let arguments = json!({"place": "\"here\"", "days": 3}).to_string();
        let id = "call_Y7bNaUk1R5zsC4Ad9fRjGxQm";
        let mut messages = [
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": null, "tool_calls": [call(id, "get_weather", arguments.into())]}),
            json!({"role": "tool", "tool_call_id": id, "name": "get_weather", "content": "clear"}),
        ];
        history.adapt(&mut messages);
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let Ok(text) = template.render(&messages, &options) else {
            without.push(name);
            continue;
        };
        assert!(!text.contains("\\\"place") && !text.contains("'place'"), "{name}: {text}");
        assert!(!text.contains("None"), "{name}: {text}");
        if !text.contains("place") {
            without.push(name);
        }
    }
    assert!(without.len() <= 10, "past calls are lost: {without:?}");
}

/// Templates with tools whose calls are text.
const UNKNOWN: [&str; 3] = ["fireworks-ai-llama-3-firefunction-v2", "meetkai-functionary-medium-v3.2", "muse-glimmer"];

/// What a template makes of calls in the assistant's turn is what its model writes: the parser finds them again.
#[test]
fn calls_that_templates_write_are_read() {
    let Some(templates) = collection() else {
        let why = "no target/vocabularies/templates (.ci/run gets them)";
        return say_skipped("calls_that_templates_write_are_read", why);
    };
    let arguments = json!({"city": "São \"Paulo\"\n<b>", "days": 3, "list": [1, true, "x"], "place": {"k": "v"}});
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}, "list": {"type": "array"},
        "place": {"type": "object"}});
    let tool = |name: &str, properties: &Value| Tool {
        name: name.into(),
        description: Some("Does.".into()),
        parameters: json!({"type": "object", "properties": properties}),
        strict: false,
    };
    let tools = [tool("get_weather", &properties), tool("now", &json!({}))];
    let definitions: Vec<Value> = tools
        .iter()
        .map(|tool| {
            json!({"type": "function", "function": {"name": tool.name, "description": tool.description,
                "parameters": tool.parameters}})
        })
        .collect();
    let (mut unknown, mut unwritten) = (Vec::new(), Vec::new());
    for (name, source) in templates {
        let (template, syntax) = (compile(&source).unwrap(), Syntax::of(&source));
        if !syntax.calls_tools() {
            unknown.push(name);
            continue;
        }
        let history = History::of(&template).unwrap();
        for count in [2, 1] {
            let calls =
                [call("call_a", "get_weather", arguments.to_string().into()), call("call_b", "now", "{}".into())];
            let mut messages = [
                json!({"role": "user", "content": "Weather?!"}),
                json!({"role": "assistant", "content": null, "tool_calls": calls[..count]}),
            ];
            history.adapt(&mut messages);
            let options = RenderOptions { tools: Some(definitions.clone().into()), ..RenderOptions::default() };
            let Ok(text) = template.render(&messages, &options) else { continue };
            let reply = text.rsplit_once("Weather?!").unwrap().1;
            if !reply.contains("Paulo") {
                unwritten.push(name);
                break;
            }
            let mut parts = Vec::new();
            let mut parser = syntax.parser(&tools[..], ReplyStart::Answer);
            // What ends the user's turn comes before the answer.
            let begin = reply
                .find("assistant")
                .filter(|_| name.starts_with("meta-llama"))
                .map_or(0, |at| reply[at..].find("{\"name\"").unwrap() + at);
            parser.push(&reply[begin..], &mut parts);
            parser.finish(&mut parts);
            let mut read: Vec<(String, String)> = Vec::new();
            for part in parts {
                match part {
                    Part::Call { name, .. } => read.push((name, String::new())),
                    Part::Arguments { json, .. } => read.last_mut().unwrap().1 += &json,
                    _ => {}
                }
            }
            let value =
                |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|e| panic!("{name}: {e}: {text}"));
            let read: Vec<_> = read.iter().map(|(name, json)| (name.as_str(), value(json))).collect();
            let all = [("get_weather", arguments.clone()), ("now", json!({}))];
            // Some write the first call only.
            assert!(!read.is_empty() && read == all[..read.len()], "{name}: {reply}\n{read:?}");
            break;
        }
    }
    let without =
        ["HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct"];
    unknown.retain(|name| !without.contains(&name.as_str()));
    assert_eq!(unknown, UNKNOWN, "forms that are not known");
    assert_eq!(unwritten, ["LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"]);
}
