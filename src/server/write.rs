//! JSON that is written piece by piece, because as values it would take ten times the memory.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value};

/// Writes an answer as a whole, with the lists of logprobs that `logprobs` writes for each choice.
pub(super) fn write_whole(
    out: &mut dyn Write,
    mut object: Map<String, Value>,
    logprobs: impl Fn(usize, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let Some(Value::Array(choices)) = object.remove("choices") else { return Err(io::ErrorKind::InvalidData.into()) };
    open_object(out, Value::Object(object))?;
    out.write_all(b",\"choices\":[")?;
    for (i, mut choice) in choices.into_iter().enumerate() {
        choice.as_object_mut().map(|choice| choice.remove("logprobs"));
        out.write_all(if i > 0 { b"," } else { b"" })?;
        open_object(out, choice)?;
        out.write_all(b",\"logprobs\":")?;
        logprobs(i, out)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"]}")
}

/// Writes an object that has members, so that more can follow.
pub(super) fn open_object(out: &mut dyn Write, object: Value) -> io::Result<()> {
    let text = object.to_string();
    out.write_all(text.strip_suffix('}').unwrap_or(&text).as_bytes())
}

/// Writes a list entry by entry.
pub(super) fn write_list<T: Serialize>(out: &mut dyn Write, entries: impl Iterator<Item = T>) -> io::Result<()> {
    out.write_all(b"[")?;
    for (i, entry) in entries.enumerate() {
        out.write_all(if i > 0 { b"," } else { b"" })?;
        serde_json::to_writer(&mut *out, &entry)?;
    }
    out.write_all(b"]")
}
