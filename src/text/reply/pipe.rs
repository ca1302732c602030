//! The two ends of a parser: the text that it has not read yet, and the parts that it has made.

use std::sync::Arc;

use super::id::call_id;
use super::{Part, Tool};

/// Text of a reply, as it comes.
#[derive(Debug, Default)]
pub(super) struct Input {
    pub(super) text: String, // not read yet
    pub(super) ended: bool,  // nothing follows it
}

impl Input {
    /// Drops the first `length` bytes.
    pub(super) fn skip(&mut self, length: usize) {
        self.text.drain(..length);
    }

    /// Drops white space at the beginning.
    pub(super) fn skip_blank(&mut self) {
        self.skip(self.text.len() - self.text.trim_start().len());
    }

    /// Bytes that are certain to stand before the first of `markers` and the white space in front of it, when none of
    /// them has come yet.
    pub(super) fn settled(&self, markers: &[&str]) -> usize {
        if self.ended || markers.is_empty() {
            return self.text.len();
        }
        self.text[..self.text.len() - self.held(markers)].trim_end().len()
    }

    /// Bytes at the end that may be the beginning of one of `markers`.
    pub(super) fn held(&self, markers: &[&str]) -> usize {
        if self.ended {
            return 0;
        }
        markers.iter().map(|marker| overlap(&self.text, marker)).max().unwrap_or(0)
    }
}

/// Parts of a reply, and the tools that it may call.
#[derive(Debug)]
pub(super) struct ReplyOutput {
    pub(super) parts: Vec<Part>,
    tools: Arc<[Tool]>, // of all choices of a request
    calls: usize,
}

impl ReplyOutput {
    pub(super) fn new(tools: Arc<[Tool]>) -> Self {
        Self { parts: Vec::new(), tools, calls: 0 }
    }

    /// The tool of this name.
    pub(super) fn tool(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }

    /// Whether a call has begun.
    pub(super) fn called(&self) -> bool {
        self.calls > 0
    }

    pub(super) fn reasoning(&mut self, more: &str) {
        match self.parts.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::Reasoning(text)) => text.push_str(more),
            _ => self.parts.push(Part::Reasoning(more.into())),
        }
    }

    pub(super) fn content(&mut self, more: &str) {
        match self.parts.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::Content(text)) => text.push_str(more),
            _ => self.parts.push(Part::Content(more.into())),
        }
    }

    /// Begins a call. Without an `id` it gets one.
    pub(super) fn call(&mut self, name: &str, id: Option<String>) {
        self.parts.push(Part::Call { index: self.calls, id: id.unwrap_or_else(call_id), name: name.into() });
        self.calls += 1;
    }

    /// More arguments of the last call.
    pub(super) fn arguments(&mut self, more: &str) {
        let last = self.calls.saturating_sub(1);
        match self.parts.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::Arguments { index, json }) if *index == last => json.push_str(more),
            _ => self.parts.push(Part::Arguments { index: last, json: more.into() }),
        }
    }
}

/// Bytes of the longest end of `text` that begins `marker` without completing it. Both are UTF-8, so a match of bytes
/// is one of characters.
pub(crate) fn overlap(text: &str, marker: &str) -> usize {
    let longest = text.len().min(marker.len() - 1);
    (1..=longest).rev().find(|&n| marker.as_bytes().starts_with(&text.as_bytes()[text.len() - n..])).unwrap_or(0)
}

/// Where the first of `markers` stands.
pub(super) fn first<'m>(text: &str, markers: &[&'m str]) -> Option<(usize, &'m str)> {
    markers.iter().filter_map(|marker| Some((text.find(marker)?, *marker))).min_by_key(|(at, _)| *at)
}
