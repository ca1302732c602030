//! A model's own chat template (Jinja), rendered the way Hugging Face's tokenizers render it.

mod strftime;

use std::path::Path;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, ErrorKind};
use serde_json::Map;

use self::strftime::strftime_now;
use crate::generation_config::read_json;
use crate::tokenizer::special_token;
use crate::{Error, Result};

/// Steps a template may take: far above any real conversation, far below a hang.
const FUEL: u64 = 20_000_000;

/// A compiled chat template with the special tokens it names.
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    special_tokens: Map<String, serde_json::Value>,
}

/// What a template sees beside the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Tool definitions, as the client wrote them.
    pub tools: Option<serde_json::Value>,
    /// Further variables, such as `enable_thinking`.
    pub kwargs: Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// The template of a checkpoint: `chat_template.jinja`, else the one in `tokenizer_config.json`; `None` without either.
    pub fn load(dir: &Path) -> Result<Option<Self>> {
        let config = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let path = dir.join("chat_template.jinja");
        let source = match moebius_cache::file::read_text(&path) {
            Ok(source) => Some(source),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => default_template(&config["chat_template"]),
            Err(e) => return Err(Error::io(&path)(e)),
        };
        let Some(source) = source else { return Ok(None) };

        let map = read_json(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
        let mut special_tokens = Map::new();
        for (name, value) in [&map, &config].into_iter().filter_map(|v| v.as_object()).flatten() {
            if name.ends_with("_token")
                && let Some(token) = special_token(value)
            {
                special_tokens.insert(name.clone(), token.into());
            }
        }
        Self::compile(&source, special_tokens).map(Some)
    }

    /// The template with this text. Errors: `Error::Model` when it is not one.
    pub fn compile(source: &str, special_tokens: Map<String, serde_json::Value>) -> Result<Self> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_fuel(Some(FUEL));
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", raise_exception);
        env.add_function("strftime_now", strftime_now);
        env.add_template_owned("chat_template", without_generation_tags(source))
            .map_err(|e| Error::Model(format!("the model's chat template cannot be used: {}", one_line(&e))))?;
        Ok(Self { env, source: source.into(), special_tokens })
    }

    /// Its text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for `messages`, special tokens spelled out.
    ///
    /// Errors: `Error::Invalid` with the template's own words when it refuses the conversation.
    pub fn render(&self, messages: &[serde_json::Value], options: &RenderOptions) -> Result<String> {
        let mut variables = self.special_tokens.clone();
        variables.extend(options.kwargs.clone());
        variables.insert("messages".into(), messages.into());
        variables.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        if let Some(tools) = &options.tools {
            variables.insert("tools".into(), tools.clone());
        }
        let template = self.env.get_template("chat_template").expect("compile() added it");
        template.render(Value::from_serialize(&variables)).map_err(|e| match raised(&e) {
            Some(message) => Error::Invalid(message),
            None => Error::Invalid(format!("the model's chat template failed on this conversation: {}", one_line(&e))),
        })
    }
}

/// A single template, or the one named `default` of a list.
fn default_template(value: &serde_json::Value) -> Option<String> {
    let named = |name: &str| value.as_array()?.iter().find(|entry| entry["name"] == name)?["template"].as_str();
    value.as_str().or_else(|| named("default")).map(String::from)
}

/// `{% generation %}` marks the assistant's words for training masks. As a condition that always holds it changes nothing else,
/// whitespace control included.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start + 2..].find("%}") else { break };
        let end = start + 2 + length + 2;
        let tag = &rest[start..end];
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']).trim();
        out.push_str(&rest[..start]);
        match inner {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[end..];
    }
    out + rest
}

/// What a template says when it refuses a conversation; carried through the renderer as an error's source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn raised(error: &minijinja::Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(e) = source {
        if let Some(Raised(message)) = e.downcast_ref() {
            return Some(message.clone());
        }
        source = e.source();
    }
    None
}

fn one_line(error: &minijinja::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

/// `json.dumps(value, ensure_ascii=False)`: nothing escaped for HTML, a space after each comma and colon.
fn tojson(value: Value, kwargs: Kwargs) -> std::result::Result<Value, minijinja::Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    for accepted in ["ensure_ascii", "separators"] {
        kwargs.get::<Option<Value>>(accepted)?;
    }
    kwargs.assert_all_used()?;
    let failed = |e: serde_json::Error| minijinja::Error::new(ErrorKind::InvalidOperation, format!("cannot serialize to JSON: {e}"));
    let mut value = serde_json::to_value(&value).map_err(failed)?;
    if sort_keys == Some(true) {
        value.sort_all_objects();
    }
    let mut out = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = " ".repeat(width.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            serde::Serialize::serialize(&value, &mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => serde::Serialize::serialize(&value, &mut serde_json::Serializer::with_formatter(&mut out, PythonFormatter)),
    };
    written.map_err(failed)?;
    Ok(Value::from_safe_string(String::from_utf8(out).expect("serde_json writes UTF-8")))
}

/// The separators of Python's `json.dumps`.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;
    use crate::tokenizer::tests::{fixture_dir, ids, reference};
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
        let error = template.render(&[json!({"role": "assistant", "content": "hi"})], &RenderOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), "Conversation roles must alternate user/assistant/user/assistant/...");
    }

    #[test]
    fn tojson_is_pythons() {
        let options = RenderOptions { tools: Some(json!([{"z": "<é'&>", "a": [1, 2.5, null, true], "e": {}}])), ..Default::default() };
        let got = render("{{ tools | tojson }}", json!([]), options.clone()).unwrap();
        assert_eq!(got, r#"[{"z": "<é'&>", "a": [1, 2.5, null, true], "e": {}}]"#);
        let got = render("{{ tools[0].a | tojson(indent=2) }}", json!([]), options).unwrap();
        assert_eq!(got, "[\n  1,\n  2.5,\n  null,\n  true\n]");
    }

    #[test]
    fn python_methods_slices_and_kwargs_work() {
        let options = RenderOptions { kwargs: Map::from_iter([("enable_thinking".to_string(), json!(false))]), ..Default::default() };
        let source = "{{ bos_token }}{% for m in messages[::-1] %}{{ m.content.strip().upper() }}{% if not loop.last %},{% endif %}{% endfor %}\
                      {% if enable_thinking is defined and not enable_thinking %}|{% endif %}{{ messages[0].get('x', 'd') }}";
        let messages = json!([{"content": " a "}, {"content": "b"}]);
        assert_eq!(render(source, messages, options).unwrap(), "<s>B,A|d");
    }

    #[test]
    fn generation_tags_leave_no_trace() {
        let source = "x\n{% generation %}\ny{%- generation -%} z {%- endgeneration -%}\n{% endgeneration %}\nw {% if true %}{% endif %}";
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
            r#"{"chat_template": [{"name":"rag","template":"r"},{"name":"default","template":"d{{ eos_token }}"}], "eos_token": {"content": "</s>"}}"#,
        );
        assert_eq!(shown(), "d</s>");
        write("chat_template.jinja", "file {{ bos_token is defined }}");
        assert_eq!(shown(), "file False");
        write("chat_template.jinja", "{% for %}");
        let error = ChatTemplate::load(dir.path()).err().unwrap().to_string();
        assert!(error.contains("chat template cannot be used") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn broken_tags_are_no_panic() {
        for source in ["{%}", "{%", "{%%}", "{%}%}", "{%-%}", "{%é%}", "{% generation", "x{%}{% generation %}", "{{}}", "{#}", "%}{%"] {
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
                "{%", "%}", "{{", "}}", "-", "+", "{#", "#}", " ", "\n", "generation", "endgeneration", "if true", "endif", "for m in messages",
                "endfor", "m", ".content", "[0]", "[::-1]", "messages", "|", "tojson", "(indent=99)", "raise_exception('é')", "strftime_now('%')",
                ".strip()", "é", "'", "set x =", "namespace()", "1", "/", "0",
            ]), 0..24),
        ) {
            let messages = json!([{"role": "user", "content": "é"}, {"role": "user", "content": null}]);
            let _ = render(&pieces.concat(), messages, RenderOptions::default());
        }
    }

    #[test]
    fn endless_templates_end() {
        let error = render(
            "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
            json!([]),
            RenderOptions::default(),
        );
        assert!(error.unwrap_err().to_string().contains("failed on this conversation"));
        assert!(render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", json!([]), RenderOptions::default()).is_err());
    }
}
