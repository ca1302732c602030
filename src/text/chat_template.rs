//! A model's own chat template (Jinja), rendered the way Hugging Face's tokenizers render it.
//!
//! A template is untrusted, and an interpreter cannot bound its own stack, memory and time. The `moebius` command and
//! the Python package therefore render in child processes ([`render_in`]), whose limits the kernel enforces: `process`
//! is the parent's side, `child` the child's. A program that embeds the crate renders in its own process unless it
//! calls [`render_in`]; there only size and steps are bounded.

mod child;
mod frame;
mod jinja;
mod process;
mod python;
mod strftime;

use std::ffi::OsString;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::OnceLock;

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value};

pub use self::child::render_for_parent;
use self::jinja::Jinja;
use self::process::Processes;
use crate::load::folder::read_json;
use crate::text::tokenizer::special_token;
use crate::{Error, Result};

/// Maximum bytes of a template; real ones have less than 40 KiB.
const MAX_SOURCE_BYTES: usize = 256 << 10;

/// Maximum bytes of a JSON file with a template or its special tokens. Real ones have up to 1.2 MiB, and take 25 times
/// that as values.
const MAX_FILE_BYTES: u64 = 8 << 20;

/// Maximum bytes of a rendered text; less for a small conversation, see [`text_limit`].
const MAX_TEXT_BYTES: usize = 32 << 20;

/// Templates of models whose checkpoints have a program instead, by `model_type`.
const BUILT_IN: [(&str, &str); 2] = [("deepseek_v4", DEEPSEEK_V4), ("deepseek_v41", DEEPSEEK_V4)];

const DEEPSEEK_V4: &str = include_str!("chat_template/deepseek_v4.jinja");

/// The command line of child processes.
static COMMAND: OnceLock<Vec<OsString>> = OnceLock::new();

/// Renders templates in child processes of `command` from now on. It is a program that calls [`render_for_parent`], and
/// its arguments. Only the first call counts.
///
/// Panics: `command` is empty.
pub fn render_in(command: Vec<OsString>) {
    assert!(!command.is_empty(), "a command begins with its program");
    let _ = COMMAND.set(command);
}

/// A compiled chat template with the special tokens it names.
pub struct ChatTemplate {
    source: String,
    special_tokens: Map<String, Value>,
    renderer: Renderer,
}

/// Where the template is rendered.
enum Renderer {
    Here(Jinja),
    Processes(Processes),
}

/// Why rendering failed.
enum RenderFailure {
    /// The template refuses the conversation with this message.
    Refused(String),
    /// The template cannot be rendered, and why.
    Broken(String),
    /// The machine failed, not the template.
    Machine(Error),
}

/// What a template gets besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Whether the prompt ends with the start of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Tool definitions, as the client wrote them.
    pub tools: Option<Value>,
    /// Additional variables, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
}

impl ChatTemplate {
    /// The template of a checkpoint: `chat_template.jinja`, else the one in `tokenizer_config.json`; `None` without
    /// either.
    ///
    /// Errors: `Error::Model` when it cannot be compiled within its limits.
    pub fn load(dir: &Path) -> Result<Option<Self>> {
        Self::read(dir, None)
    }

    fn read(dir: &Path, built_in: Option<&str>) -> Result<Option<Self>> {
        let config = read_small_json(&dir.join("tokenizer_config.json"))?;
        let own = read_source(&dir.join("chat_template.jinja"))?.or_else(|| default_template(&config["chat_template"]));
        let Some(source) = own.or_else(|| built_in.map(String::from)) else { return Ok(None) };
        let map = read_small_json(&dir.join("special_tokens_map.json"))?;
        let mut special_tokens = Map::new();
        for (name, value) in [&map, &config].into_iter().filter_map(|v| v.as_object()).flatten() {
            if name.ends_with("_token")
                && let Some(token) = special_token(value)
            {
                special_tokens.insert(name.clone(), token.into());
            }
        }
        let remedy = |e| match e {
            Error::Model(what) => {
                Error::Model(format!("{what}; put another template, as chat_template.jinja, into {}", dir.display()))
            }
            other => other,
        };
        Self::compile(&source, special_tokens).map(Some).map_err(remedy)
    }

    /// As [`load`](ChatTemplate::load); where a checkpoint has none, Moebius's own for its `model_type`.
    ///
    /// Errors: as [`load`](ChatTemplate::load).
    pub fn of(dir: &Path, model_type: &str) -> Result<Option<Self>> {
        let own = BUILT_IN.iter().find(|(name, _)| *name == model_type);
        Self::read(dir, own.map(|(_, source)| *source))
    }

    /// Compiles a template. Errors: `Error::Model` when it is malformed, or cannot be compiled within its limits.
    pub fn compile(source: &str, special_tokens: Map<String, Value>) -> Result<Self> {
        let compiled = match COMMAND.get() {
            _ if source.len() > MAX_SOURCE_BYTES => {
                Err(RenderFailure::Broken(format!("it has more than {} KiB", MAX_SOURCE_BYTES >> 10)))
            }
            Some(command) => Processes::start(command, source).map(Renderer::Processes),
            None => Jinja::compile(source).map(Renderer::Here),
        };
        match compiled {
            Ok(renderer) => Ok(Self { source: source.into(), special_tokens, renderer }),
            Err(RenderFailure::Refused(why) | RenderFailure::Broken(why)) => {
                Err(Error::Model(format!("the model's chat template cannot be used: {why}")))
            }
            Err(RenderFailure::Machine(error)) => Err(error),
        }
    }

    /// The text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for `messages`, special tokens spelled out.
    ///
    /// Errors: `Error::Invalid` when the template refuses the conversation, fails or exceeds a limit; `Error::Busy`
    /// when too many conversations wait for it; `Error::Resources` when no process can be started.
    pub fn render(&self, messages: &[Value], options: &RenderOptions) -> Result<String> {
        let variables = Variables { special_tokens: &self.special_tokens, messages, options };
        let rendered = match &self.renderer {
            Renderer::Here(jinja) => jinja.render(minijinja::Value::from_serialize(&variables), MAX_TEXT_BYTES),
            Renderer::Processes(processes) => {
                let variables = serde_json::to_vec(&variables).expect("maps of JSON have texts as keys");
                processes.render(&self.source, &variables)
            }
        };
        rendered.map_err(|failure| match failure {
            RenderFailure::Refused(words) => Error::Invalid(words),
            RenderFailure::Broken(why) => {
                Error::Invalid(format!("the model's chat template failed on this conversation: {why}"))
            }
            RenderFailure::Machine(error) => error,
        })
    }
}

/// All variables of a template. The last of those with the same name counts. What the conversation does not have is
/// none, as in transformers.
struct Variables<'a> {
    special_tokens: &'a Map<String, Value>,
    messages: &'a [Value],
    options: &'a RenderOptions,
}

impl Serialize for Variables<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for name in ["tools", "documents"] {
            map.serialize_entry(name, &Value::Null)?;
        }
        for (name, value) in self.special_tokens.iter().chain(&self.options.kwargs) {
            map.serialize_entry(name, value)?;
        }
        map.serialize_entry("messages", self.messages)?;
        map.serialize_entry("add_generation_prompt", &self.options.add_generation_prompt)?;
        if let Some(tools) = &self.options.tools {
            map.serialize_entry("tools", tools)?;
        }
        map.end()
    }
}

/// Maximum bytes of the text for this many bytes of variables. Many texts may be in memory at the same time, and
/// ordinary templates add less to a message than its JSON has.
fn text_limit(variables_bytes: usize) -> usize {
    ((1 << 20) + variables_bytes.saturating_mul(8)).min(MAX_TEXT_BYTES)
}

/// A template's file, if it exists. Of a file that is too large, only enough to refuse it.
fn read_source(path: &Path) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    match moebius_cache::file::open(path)
        .and_then(|file| file.take(MAX_SOURCE_BYTES as u64 + 1).read_to_end(&mut bytes))
    {
        Ok(length) if length > MAX_SOURCE_BYTES => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Ok(_) => match String::from_utf8(bytes) {
            Ok(source) => Ok(Some(source)),
            Err(_) => Err(Error::Model(format!("{} is not UTF-8: use the model's own file", path.display()))),
        },
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(path)(e)),
    }
}

/// A JSON file; `null` if it does not exist.
fn read_small_json(path: &Path) -> Result<Value> {
    if std::fs::metadata(path).is_ok_and(|file| file.len() > MAX_FILE_BYTES) {
        let limit = MAX_FILE_BYTES >> 20;
        return Err(Error::Model(format!("{} has more than {limit} MiB: use the model's own file", path.display())));
    }
    Ok(read_json(path)?.unwrap_or_default())
}

/// A single template, or of a list the one named `default`, and with tools the one named `tool_use`.
fn default_template(value: &Value) -> Option<String> {
    let named = |name: &str| value.as_array()?.iter().find(|entry| entry["name"] == name)?["template"].as_str();
    // Jinja drops the line end behind a template.
    let whole = |source: &str| source.strip_suffix('\n').unwrap_or(source).to_string();
    match (value.as_str().or_else(|| named("default")), named("tool_use")) {
        (Some(default), Some(with_tools)) => {
            Some(format!("{{% if tools +%}}{}{{%+ else +%}}{}{{%+ endif %}}", whole(with_tools), whole(default)))
        }
        (default, _) => default.map(String::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Tokenizer;
    use crate::text::tokenizer::tests::{fixture_dir, ids, reference};
    use serde_json::json;

    fn render(source: &str, messages: serde_json::Value, options: RenderOptions) -> Result<String> {
        let tokens = Map::from_iter([("bos_token".to_string(), json!("<s>"))]);
        ChatTemplate::compile(source, tokens)?.render(messages.as_array().unwrap(), &options)
    }

    #[test]
    fn renders_and_encodes_as_transformers_does() {
        let template = ChatTemplate::load(&fixture_dir()).unwrap().unwrap();
        let tokenizer = Tokenizer::load(&fixture_dir()).unwrap();
        for case in reference()["chat"].as_array().unwrap() {
            let add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap();
            let options = RenderOptions { add_generation_prompt, ..RenderOptions::default() };
            let text = template.render(case["messages"].as_array().unwrap(), &options).unwrap();
            assert_eq!(text, case["rendered"].as_str().unwrap());
            assert_eq!(tokenizer.encode(&text, false).unwrap(), ids(&case["ids"]));
        }
    }

    #[test]
    fn a_template_refuses_in_its_own_words() {
        let template = ChatTemplate::load(&fixture_dir()).unwrap().unwrap();
        let error =
            template.render(&[json!({"role": "assistant", "content": "hi"})], &RenderOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), "Conversation roles must alternate user/assistant/user/assistant/...");
    }

    #[test]
    fn tojson_is_pythons() {
        let options = RenderOptions {
            tools: Some(json!([{"z": "<é'&>", "a": [1, 2.5, null, true], "e": {}}])),
            ..Default::default()
        };
        let got = render("{{ tools | tojson }}", json!([]), options.clone()).unwrap();
        assert_eq!(got, r#"[{"z": "<é'&>", "a": [1, 2.5, null, true], "e": {}}]"#);
        let got = render("{{ tools[0].a | tojson(indent=2) }}", json!([]), options).unwrap();
        assert_eq!(got, "[\n  1,\n  2.5,\n  null,\n  true\n]");
    }

    #[test]
    fn python_methods_slices_and_kwargs_work() {
        let options = RenderOptions {
            kwargs: Map::from_iter([("enable_thinking".to_string(), json!(false))]),
            ..Default::default()
        };
        let source = "{{ bos_token }}{% for m in messages[::-1] %}{{ m.content.strip().upper() }}{% if not loop.last \
                      %},{% endif %}{% endfor %}{% if enable_thinking is defined and not enable_thinking %}|{% endif \
                      %}{{ messages[0].get('x', 'd') }}";
        let messages = json!([{"content": " a "}, {"content": "b"}]);
        assert_eq!(render(source, messages, options).unwrap(), "<s>B,A|d");
    }

    #[test]
    fn generation_tags_leave_no_trace() {
        let source = "x\n{% generation %}\ny{%- generation -%} z {%- endgeneration -%}\n{% endgeneration %}\nw {% if \
                      true %}{% endif %}";
        assert_eq!(render(source, json!([]), RenderOptions::default()).unwrap(), "x\nyzw ");
    }

    #[test]
    fn templates_come_from_where_checkpoints_keep_them() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ChatTemplate::load(dir.path()).unwrap().is_none());
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let shown = || ChatTemplate::load(dir.path()).unwrap().unwrap().render(&[], &RenderOptions::default()).unwrap();
        write(
            "tokenizer_config.json",
            r#"{"chat_template": [{"name":"rag","template":"r"},{"name":"default","template":"d{{ eos_token }}"}],
            "eos_token": {"content": "</s>"}}"#,
        );
        assert_eq!(shown(), "d</s>");
        write(
            "tokenizer_config.json",
            r#"{"chat_template": [{"name":"default","template":"d{{ x }}\n"},{"name":"tool_use","template":"\nt\n"}]}"#,
        );
        assert_eq!(shown(), "d");
        let options = RenderOptions { tools: Some(json!([{}])), ..RenderOptions::default() };
        assert_eq!(ChatTemplate::load(dir.path()).unwrap().unwrap().render(&[], &options).unwrap(), "\nt");
        write("chat_template.jinja", "file {{ bos_token is defined }}");
        assert_eq!(shown(), "file False");
        write("chat_template.jinja", "{% for %}");
        let error = ChatTemplate::load(dir.path()).err().unwrap().to_string();
        assert!(error.contains("chat template cannot be used") && !error.contains('\n'), "{error}");
    }

    /// Held against what the vendor's encoding_dsv4.py makes of the same messages.
    #[test]
    fn deepseek_v4_has_a_template_of_ours() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ChatTemplate::of(dir.path(), "deepseek_v3").unwrap().is_none());
        let config = r#"{"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}"#;
        std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
        let template = ChatTemplate::of(dir.path(), "deepseek_v4").unwrap().unwrap();
        let calls = json!([{"id": "1", "type": "function", "function": {
            "name": "get_weather", "arguments": {"city": "São \"P\"", "days": 2}}}]);
        let messages = json!([
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ho", "reasoning_content": "Hm."}, {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": null, "reasoning_content": "Ask.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "no"}, {"role": "user", "content": "So?"}
        ]);
        let tools =
            json!([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]);
        let render = |tools: Option<Value>, kwargs: Value| {
            let kwargs = kwargs.as_object().unwrap().clone();
            let options = RenderOptions { add_generation_prompt: true, tools, kwargs };
            template.render(messages.as_array().unwrap(), &options).unwrap()
        };
        const CALL: &str = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter \
                            name=\"city\" string=\"true\">São \"P\"</｜DSML｜parameter>\n<｜DSML｜parameter \
                            name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
                            </｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜><tool_result>no</tool_result>\n\nSo?";
        // Without tools, thoughts of past turns are gone.
        assert_eq!(
            render(None, json!({})),
            format!(
                "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>Ho<｜end▁of▁sentence｜><｜User｜>Rain?\
                 <｜Assistant｜></think>{CALL}<｜Assistant｜><think>"
            )
        );
        let with_tools = render(Some(tools.clone()), json!({}));
        let (head, rest) = with_tools.split_once("<｜User｜>").unwrap();
        assert!(head.starts_with("<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\n\nYou have access to a set of tools"));
        assert!(head.ends_with(
            "### Available Tool Schemas\n\n{\"name\": \"get_weather\", \"parameters\": {\"type\": \"object\"}}\n\nYou \
             MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
        ));
        assert_eq!(
            rest,
            format!(
                "Hi<｜Assistant｜><think>Hm.</think>Ho<｜end▁of▁sentence｜><｜User｜>Rain?<｜Assistant｜><think>Ask.\
                 </think>{CALL}<｜Assistant｜><think>"
            )
        );
        let silent = render(Some(tools), json!({"enable_thinking": false}));
        assert!(silent.ends_with("So?<｜Assistant｜></think>") && !silent.contains("Hm."));
        let effort = render(None, json!({"reasoning_effort": "high"}));
        assert!(effort.starts_with("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum with no shortcuts"));
        // The checkpoint's own comes first.
        std::fs::write(dir.path().join("chat_template.jinja"), "own").unwrap();
        assert_eq!(ChatTemplate::of(dir.path(), "deepseek_v4").unwrap().unwrap().source(), "own");
    }

    #[test]
    fn broken_tags_are_no_panic() {
        for source in [
            "{%}",
            "{%",
            "{%%}",
            "{%}%}",
            "{%-%}",
            "{%é%}",
            "{% generation",
            "x{%}{% generation %}",
            "{{}}",
            "{#}",
            "%}{%",
        ] {
            let _ = render(source, json!([]), RenderOptions::default());
        }
        for source in ["{{ 'x' * 1000000000000000 }}", "{{ range(1000000000000000) }}", "{{ 1 // 0 }}", "{{ 1 % 0 }}"] {
            assert!(render(source, json!([]), RenderOptions::default()).is_err(), "{source}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_pieces_of_templates_are_no_panic(
            pieces in proptest::collection::vec(proptest::sample::select(vec![
                "{%", "%}", "{{", "}}", "-", "+", "{#", "#}", " ", "\n", "generation", "endgeneration", "if true",
                    "endif", "for m in messages",
                "endfor", "m", ".content", "[0]", "[::-1]", "messages", "|", "tojson", "(indent=99)",
                    "raise_exception('é')", "strftime_now('%')",
                ".strip()", "é", "'", "set x =", "namespace()", "1", "/", "0",
            ]), 0..24),
        ) {
            let messages = json!([{"role": "user", "content": "é"}, {"role": "user", "content": null}]);
            let _ = render(&pieces.concat(), messages, RenderOptions::default());
        }
    }

    #[test]
    fn size_is_bounded() {
        let error = ChatTemplate::compile(&"x".repeat(MAX_SOURCE_BYTES + 1), Map::new()).err().unwrap();
        assert_eq!(error.to_string(), "the model's chat template cannot be used: it has more than 256 KiB");
        assert!(ChatTemplate::compile(&"x".repeat(MAX_SOURCE_BYTES), Map::new()).is_ok());
        let endless =
            render("{% for i in range(9999) %}{{ 'x' * 100000 }}{% endfor %}", json!([]), RenderOptions::default());
        assert!(endless.unwrap_err().to_string().contains("writes more than 33554432 bytes"));
        let wordy = render("{{ raise_exception('a\nb' * 1000) }}", json!([]), RenderOptions::default())
            .unwrap_err()
            .to_string();
        assert!(wordy.starts_with("a ba b") && wordy.chars().count() == 201, "{wordy}");
    }

    #[test]
    fn endless_templates_end() {
        let error = render(
            "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
            json!([]),
            RenderOptions::default(),
        );
        assert!(error.unwrap_err().to_string().contains("failed on this conversation"));
        assert!(
            render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", json!([]), RenderOptions::default()).is_err()
        );
    }
}
