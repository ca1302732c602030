//! What Python makes of values where a template treats them as text.

use std::fmt::{self, Write};

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, Output, State};

/// Writes what `{{ value }}` prints.
pub(super) fn print(out: &mut Output, state: &State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => Ok(repr(value, out)?),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// `str(value)`.
pub(super) fn text(value: &Value) -> String {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => repr(value, &mut out).expect("a string takes all"),
        _ => out = value.to_string(),
    }
    out
}

/// Writes `repr(value)`.
fn repr(value: &Value, out: &mut impl Write) -> fmt::Result {
    let items = || value.try_iter().into_iter().flatten().enumerate();
    let between = |i: usize| if i > 0 { ", " } else { "" };
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => repr_of_text(text, out),
        (ValueKind::Map, _) => {
            out.write_char('{')?;
            for (i, key) in items() {
                out.write_str(between(i))?;
                repr(&key, out)?;
                out.write_str(": ")?;
                repr(&value.get_item(&key).unwrap_or_default(), out)?;
            }
            out.write_char('}')
        }
        (ValueKind::Seq, _) => {
            out.write_char('[')?;
            for (i, item) in items() {
                out.write_str(between(i))?;
                repr(&item, out)?;
            }
            out.write_char(']')
        }
        _ => write!(out, "{value}"),
    }
}

/// In single quotes, or in double quotes where the text has single ones and no double ones.
fn repr_of_text(text: &str, out: &mut impl Write) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote || c == '\\' => write!(out, "\\{c}")?,
            c if c.is_control() => write!(out, "\\x{:02x}", c as u32)?,
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}
