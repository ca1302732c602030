//! Replies of gpt-oss: messages on channels.
//!
//! ```text
//! <|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
//! <|channel|>final<|message|>..<|return|>
//! ```
//! The prompt ends with `<|start|>assistant`. What is on the channel `analysis` is reasoning; a message to a tool is a
//! call; everything else is content. The recipient may stand before the channel too.
//!
//! Source: the "OpenAI harmony response format" guide.

use super::Part;
use super::parser::{Output, content, first, overlap, reasoning};

/// Bytes that a message's header may have.
const MAX_HEADER: usize = 512;

const MESSAGE: &str = "<|message|>";
const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"];

#[derive(Debug)]
pub(super) struct Harmony {
    text: String, // not yet said
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Header,
    Body(Kind),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Reasoning,
    Content,
    Arguments,
}

impl Harmony {
    pub(super) fn new(in_reasoning: bool) -> Self {
        let state = if in_reasoning { State::Body(Kind::Reasoning) } else { State::Header };
        Self { text: String::new(), state }
    }

    pub(super) fn push(&mut self, text: &str, output: &mut Output, parts: &mut Vec<Part>) {
        self.text.push_str(text);
        while self.step(false, output, parts) {}
    }

    pub(super) fn finish(&mut self, output: &mut Output, parts: &mut Vec<Part>) {
        while self.step(true, output, parts) {}
    }

    fn step(&mut self, end: bool, output: &mut Output, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::Header => self.header(end, output, parts),
            State::Body(kind) => self.body(kind, end, output, parts),
        }
    }

    fn header(&mut self, end: bool, output: &mut Output, parts: &mut Vec<Part>) -> bool {
        match self.text.find(MESSAGE).filter(|&at| at <= MAX_HEADER) {
            Some(at) if begins_header(&self.text) => {
                let header = self.text[..at].to_string();
                self.text.drain(..at + MESSAGE.len());
                self.state = State::Body(self.kind(&header, output, parts));
                return true;
            }
            None if !end && self.text.len() < MAX_HEADER + MESSAGE.len() && begins_header(&self.text) => return false,
            _ => {}
        }
        // A reply without channels, or one that ends within a header.
        if end && ["<|start|>", "<|channel|>"].iter().any(|start| self.text.starts_with(start)) {
            self.text.clear();
        }
        self.state = State::Body(Kind::Content);
        !self.text.is_empty()
    }

    fn kind(&self, header: &str, output: &mut Output, parts: &mut Vec<Part>) -> Kind {
        let word = |after: &str| -> Option<String> {
            let rest = header.split_once(after)?.1;
            Some(rest.chars().take_while(|c| !c.is_whitespace() && *c != '<').collect())
        };
        let recipient = word("to=").unwrap_or_default();
        let channel = word("<|channel|>").unwrap_or_default();
        let name = recipient.strip_prefix("functions.").unwrap_or(&recipient);
        if !name.is_empty() && output.tool(name).is_some() {
            output.call(name, None, parts);
            return Kind::Arguments;
        }
        if channel == "analysis" {
            return Kind::Reasoning;
        }
        if !name.is_empty() {
            // A call that nobody could answer.
            content(header, parts);
            content(MESSAGE, parts);
        }
        Kind::Content
    }

    fn body(&mut self, kind: Kind, end: bool, output: &Output, parts: &mut Vec<Part>) -> bool {
        let found = first(&self.text, &ENDS);
        let held = ENDS.iter().map(|marker| overlap(&self.text, marker)).max().unwrap_or(0);
        let said = match found {
            Some((at, _)) => at,
            None if end => self.text.len(),
            None => self.text.len() - held,
        };
        let text = &self.text[..said];
        match kind {
            Kind::Reasoning => reasoning(text, parts),
            Kind::Content => content(text, parts),
            Kind::Arguments => output.arguments(text, parts),
        }
        let length = said + found.map_or(0, |(_, marker)| marker.len());
        self.text.drain(..length);
        if found.is_some() {
            self.state = State::Header;
        }
        found.is_some() && !self.text.is_empty()
    }
}

/// Whether `text` may become a header: between messages, the next one's role, recipient or channel.
fn begins_header(text: &str) -> bool {
    let text = text.trim_start();
    let starts = ["<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, "assistant", "to="];
    starts.iter().any(|start| start.starts_with(text) || text.starts_with(start))
}
