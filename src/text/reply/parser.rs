//! Text to parts as it comes. What may be the beginning of a marker waits, everything else goes out at once.

use std::sync::Arc;

use super::harmony::Harmony;
use super::id::call_id;
use super::syntax::Format;
use super::tags::Tags;
use super::{Part, Tool};

/// Reads one reply.
#[derive(Debug)]
pub struct Parser {
    machine: Machine,
    output: Output,
}

#[derive(Debug)]
enum Machine {
    Plain,
    Tags(Box<Tags>),
    Harmony(Box<Harmony>),
}

impl Parser {
    pub(super) fn new(format: Option<Format>, thinks: bool, tools: Arc<[Tool]>, in_reasoning: bool) -> Self {
        let machine = match format {
            Some(Format::Harmony) => Machine::Harmony(Box::new(Harmony::new(in_reasoning))),
            None if !thinks => Machine::Plain,
            _ if !thinks && tools.is_empty() => Machine::Plain,
            _ => Machine::Tags(Box::new(Tags::new(format, thinks, !tools.is_empty(), in_reasoning))),
        };
        Self { machine, output: Output::of(tools) }
    }

    /// Takes in more text and adds what it makes certain to `parts`. All parts joined do not depend on how the text was
    /// cut.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        match &mut self.machine {
            Machine::Plain => content(text, parts),
            Machine::Tags(tags) => tags.push(text, &mut self.output, parts),
            Machine::Harmony(harmony) => harmony.push(text, &mut self.output, parts),
        }
    }

    /// The end of the text: adds what was held back.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        match &mut self.machine {
            Machine::Plain => {}
            Machine::Tags(tags) => tags.finish(&mut self.output, parts),
            Machine::Harmony(harmony) => harmony.finish(&mut self.output, parts),
        }
    }

    /// Whether a call has begun.
    pub fn called(&self) -> bool {
        self.output.calls > 0
    }
}

/// The calls made, and those that may be made.
#[derive(Debug)]
pub(super) struct Output {
    tools: Arc<[Tool]>, // of all choices of a request
    calls: usize,
}

impl Output {
    pub(super) fn of(tools: Arc<[Tool]>) -> Self {
        Self { tools, calls: 0 }
    }

    pub(super) fn tool(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }

    pub(super) fn call(&mut self, name: &str, id: Option<String>, parts: &mut Vec<Part>) {
        parts.push(Part::Call { index: self.calls, id: id.unwrap_or_else(call_id), name: name.into() });
        self.calls += 1;
    }

    /// More arguments of the last call.
    pub(super) fn arguments(&self, more: &str, parts: &mut Vec<Part>) {
        let last = self.calls.saturating_sub(1);
        match parts.last_mut() {
            _ if more.is_empty() => {}
            Some(Part::Arguments { index, json }) if *index == last => json.push_str(more),
            _ => parts.push(Part::Arguments { index: last, json: more.into() }),
        }
    }
}

pub(super) fn content(more: &str, parts: &mut Vec<Part>) {
    match parts.last_mut() {
        _ if more.is_empty() => {}
        Some(Part::Content(text)) => text.push_str(more),
        _ => parts.push(Part::Content(more.into())),
    }
}

pub(super) fn reasoning(more: &str, parts: &mut Vec<Part>) {
    match parts.last_mut() {
        _ if more.is_empty() => {}
        Some(Part::Reasoning(text)) => text.push_str(more),
        _ => parts.push(Part::Reasoning(more.into())),
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

/// Bytes of `text` that no marker can reclaim, nor the white space that is dropped before one.
pub(super) fn settled(text: &str, markers: &[&str]) -> usize {
    let held = markers.iter().map(|marker| overlap(text, marker)).max().unwrap_or(0);
    text[..text.len() - held].trim_end().len()
}
