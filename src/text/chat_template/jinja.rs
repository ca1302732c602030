//! The template engine: minijinja with the extensions of Hugging Face's tokenizers. It bounds steps and text. Its
//! caller bounds stack, memory and time.

use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, ErrorKind};

use super::strftime::strftime_now;
use super::{RenderFailure, python};

/// Maximum steps of a template: far above any real conversation, far below a hang.
const FUEL: u64 = 20_000_000;

/// Maximum characters of an error, which a template may write.
const MAX_WORDS: usize = 200;

type Result<T> = std::result::Result<T, RenderFailure>;

/// A compiled chat template.
pub(super) struct Jinja(Environment<'static>);

impl Jinja {
    pub(super) fn compile(source: &str) -> Result<Self> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_fuel(Some(FUEL));
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(python::print);
        env.add_filter("tojson", tojson);
        env.add_filter(
            "string",
            |value: Value| if value.kind() == ValueKind::String { value } else { python::text(&value).into() },
        );
        env.add_filter("upper", |value: Value| python::text(&value).to_uppercase());
        env.add_filter("lower", |value: Value| python::text(&value).to_lowercase());
        env.add_filter("trim", |value: Value, chars: Option<String>| match chars {
            Some(chars) => python::text(&value).trim_matches(|c| chars.contains(c)).to_string(),
            None => python::text(&value).trim().to_string(),
        });
        env.add_filter("join", join);
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        env.add_test("sequence", is_sequence);
        env.add_function("raise_exception", raise_exception);
        env.add_function("strftime_now", strftime_now);
        caught(|| env.add_template_owned("chat_template", without_generation_tags(source)).map_err(|e| broken(&e)))?;
        Ok(Self(env))
    }

    /// Renders `variables` to a text of at most `limit` bytes.
    pub(super) fn render(&self, variables: Value, limit: usize) -> Result<String> {
        let template = self.0.get_template("chat_template").expect("compile() added it");
        let mut text = Bounded { bytes: Vec::new(), limit, full: false };
        let rendered = caught(|| match template.render_captured_to(variables, &mut text) {
            Ok(_) => Ok(()),
            Err(e) => Err(raised(&e).map_or_else(|| broken(&e), |message| RenderFailure::Refused(words(message)))),
        });
        if text.full {
            return Err(RenderFailure::Broken(format!("it writes more than {limit} bytes")));
        }
        rendered?;
        Ok(String::from_utf8(text.bytes).expect("minijinja writes UTF-8"))
    }
}

/// Catches panics of minijinja.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(RenderFailure::Broken("it breaks the template engine".into())))
}

/// A text that stops growing.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
    full: bool,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            self.full = true;
            return Err(std::io::ErrorKind::OutOfMemory.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// `{% generation %}` marks the assistant's text for training masks. A condition that always holds replaces it, which
/// changes nothing else, whitespace control included.
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

/// The message of a template that refuses a conversation, passed through the engine as the source of an error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> std::result::Result<Value, minijinja::Error> {
    // Formatted once: the message may be as long as memory allows.
    Err(minijinja::Error::from(ErrorKind::InvalidOperation).with_source(Raised(message)))
}

fn raised(error: &minijinja::Error) -> Option<&str> {
    let mut source = std::error::Error::source(error);
    while let Some(e) = source {
        if let Some(Raised(message)) = e.downcast_ref() {
            return Some(message);
        }
        source = e.source();
    }
    None
}

fn broken(error: &minijinja::Error) -> RenderFailure {
    RenderFailure::Broken(words(&error.to_string()))
}

/// The error message of a template or of the engine, on one line of bounded length.
fn words(text: &str) -> String {
    let mut chars = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut line: String = chars.by_ref().take(MAX_WORDS).collect();
    if chars.next().is_some() {
        line.push('…');
    }
    line
}

/// What has a length and items by their place or key, as text and objects do.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
}

/// The texts of all items.
fn join(items: Value, between: Option<Value>) -> std::result::Result<String, minijinja::Error> {
    let texts: Vec<String> = items.try_iter()?.map(|item| python::text(&item)).collect();
    Ok(texts.join(&between.as_ref().map(python::text).unwrap_or_default()))
}

/// `json.dumps(value, ensure_ascii=False)`: no HTML escapes, a space after each comma and colon. Separators of its own
/// are not known.
fn tojson(value: Value, kwargs: Kwargs) -> std::result::Result<Value, minijinja::Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.get::<Option<Value>>("separators")?;
    kwargs.assert_all_used()?;
    let failed = |e: serde_json::Error| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("cannot serialize to JSON: {e}"))
    };
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
        None => {
            serde::Serialize::serialize(&value, &mut serde_json::Serializer::with_formatter(&mut out, PythonFormatter))
        }
    };
    written.map_err(failed)?;
    let text = String::from_utf8(out).expect("serde_json writes UTF-8");
    Ok(if ensure_ascii == Some(true) { ascii(&text) } else { text }.into())
}

/// JSON with escapes for all other characters.
fn ascii(json: &str) -> String {
    let escaped = |c: char| c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
    json.chars().map(|c| if c.is_ascii() { c.to_string() } else { escaped(c) }).collect()
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
