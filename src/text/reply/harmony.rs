//! Replies of gpt-oss: messages on channels. Their marks, their parser and their grammar.
//!
//! ```text
//! <|channel|>analysis<|message|>..<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
//!
//! <|channel|>final<|message|>..<|return|>
//! ```
//! The prompt ends with `<|start|>assistant`. What is on the channel `analysis` is reasoning; a message to a tool is a
//! call; everything else is content. The recipient may stand before the channel too.
//!
//! Source: the "OpenAI harmony response format" guide.

use super::pipe::{Input, ReplyOutput, first};
use super::{ReplyStart, Tool, schema};
use crate::text::grammar::Grammar;

/// A chat template with these texts writes messages on channels.
pub(super) const MARKS: [&str; 2] = ["<|channel|>", MESSAGE];

/// The head of a message that is reasoning.
pub(super) const ANALYSIS: &str = "<|channel|>analysis<|message|>";

/// The head of the answer.
pub(super) const FINAL: &str = "<|channel|>final<|message|>";

const MESSAGE: &str = "<|message|>";
const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"];

/// Bytes that a message's header may have.
const MAX_HEADER: usize = 512;

/// The parser of a reply.
#[derive(Debug)]
pub(super) struct Harmony {
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
    pub(super) fn new(start: ReplyStart) -> Self {
        let state = match start {
            ReplyStart::Reasoning => State::Body(Kind::Reasoning),
            ReplyStart::Answer | ReplyStart::Thought => State::Header,
        };
        Self { state }
    }

    pub(super) fn read(&mut self, input: &mut Input, output: &mut ReplyOutput) {
        while match self.state {
            State::Header => self.header(input, output),
            State::Body(kind) => self.body(kind, input, output),
        } {}
    }

    /// Reads a header; whether another step may follow.
    fn header(&mut self, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let text = &input.text;
        match text.find(MESSAGE).filter(|&at| at <= MAX_HEADER) {
            Some(at) if begins_header(text) => {
                self.state = State::Body(kind(&text[..at], output));
                input.skip(at + MESSAGE.len());
                return true;
            }
            None if !input.ended && text.len() < MAX_HEADER + MESSAGE.len() && begins_header(text) => return false,
            _ => {}
        }
        // A reply without channels, or one that ends within a header.
        if input.ended && ["<|start|>", "<|channel|>"].iter().any(|start| text.starts_with(start)) {
            input.text.clear();
        }
        self.state = State::Body(Kind::Content);
        !input.text.is_empty()
    }

    /// Reads a message; whether another step may follow.
    fn body(&mut self, kind: Kind, input: &mut Input, output: &mut ReplyOutput) -> bool {
        let found = first(&input.text, &ENDS);
        let length = found.map_or(input.text.len() - input.held(&ENDS), |(at, _)| at);
        let text = &input.text[..length];
        match kind {
            Kind::Reasoning => output.reasoning(text),
            Kind::Content => output.content(text),
            Kind::Arguments => output.arguments(text),
        }
        input.skip(length + found.map_or(0, |(_, end)| end.len()));
        if found.is_some() {
            self.state = State::Header;
        }
        found.is_some() && !input.text.is_empty()
    }
}

/// What the message behind a header is. Begins a call, if it is one.
fn kind(header: &str, output: &mut ReplyOutput) -> Kind {
    let word = |after: &str| -> Option<String> {
        let rest = header.split_once(after)?.1;
        Some(rest.chars().take_while(|c| !c.is_whitespace() && *c != '<').collect())
    };
    let recipient = word("to=").unwrap_or_default();
    let channel = word("<|channel|>").unwrap_or_default();
    let name = recipient.strip_prefix("functions.").unwrap_or(&recipient);
    if !name.is_empty() && output.tool(name).is_some() {
        output.call(name, None);
        return Kind::Arguments;
    }
    if channel == "analysis" {
        return Kind::Reasoning;
    }
    if !name.is_empty() {
        // A call of a tool that the request does not have.
        output.content(header);
        output.content(MESSAGE);
    }
    Kind::Content
}

/// Whether `text` may become a header: between messages, the next one's role, recipient or channel.
fn begins_header(text: &str) -> bool {
    let text = text.trim_start();
    let starts = ["<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, "assistant", "to="];
    starts.iter().any(|start| start.starts_with(text) || text.starts_with(start))
}

/// The grammar of a call of one of `tools`. A call ends the reply, so there is one at most.
pub(super) fn call(tools: &[&Tool]) -> Grammar {
    let call = |tool: &&Tool| {
        let head = Grammar::Literal(format!("functions.{} <|constrain|>json<|message|>", tool.name));
        Grammar::sequence([head, schema::object(tool)])
    };
    let calls = tools.iter().map(call).collect();
    Grammar::sequence([Grammar::literal("<|channel|>commentary to="), Grammar::Either(calls)])
}

/// The grammar of a word to the user, if the model likes, and then a call of one of `tools` or the answer.
pub(super) fn call_or_answer(tools: &[&Tool]) -> Grammar {
    let preamble = Grammar::sequence([Grammar::literal("<|channel|>commentary<|message|>"), message_end()]);
    let answer = Grammar::sequence([Grammar::literal(FINAL), Grammar::Without("<|start|>".into())]);
    Grammar::sequence([preamble.optional(), Grammar::Either(vec![call(tools), answer])])
}

/// The grammar of analysis, if the model likes, and then `rest`.
pub(super) fn analysis_then(rest: Grammar, start: ReplyStart) -> Grammar {
    match start {
        ReplyStart::Reasoning => Grammar::sequence([message_end(), rest]),
        ReplyStart::Answer | ReplyStart::Thought => {
            let analysis = Grammar::sequence([Grammar::literal(ANALYSIS), message_end()]);
            Grammar::sequence([analysis.optional(), rest])
        }
    }
}

/// The grammar of a message's text and of what stands between it and the next message's header.
fn message_end() -> Grammar {
    Grammar::sequence([Grammar::Until("<|end|>".into()), Grammar::literal("<|start|>assistant")])
}
