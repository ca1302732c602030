//! Which syntax of thinking and of calls a chat template speaks, told by the markers it writes.

use std::sync::Arc;

use super::format::{Markup, Thoughts};
use super::harmony::{self, Harmony};
use super::parser::{Parser, ReplyMachine};
use super::pipe::ReplyOutput;
use super::tags::Tags;
use super::{Calls, ReplyStart, Tool, ToolChoice, calls};
use crate::text::grammar::Grammar;
use crate::{Error, Result};

/// The syntax of a model's replies.
#[derive(Clone, Debug, PartialEq)]
pub struct Syntax {
    layout: Layout,
}

/// How a reply is laid out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    /// Thoughts, then text with calls in it, between tags.
    Tags(Markup),
    /// Messages on channels: gpt-oss.
    Harmony,
}

impl Syntax {
    /// The syntax of this chat template. In the replies of a template without any known marker, all text is content.
    pub fn of(template: &str) -> Self {
        let layout = match harmony::MARKS.iter().all(|mark| template.contains(mark)) {
            true => Layout::Harmony,
            false => Layout::Tags(Markup::of(template)),
        };
        Self { layout }
    }

    /// Whether the model can call tools.
    pub fn calls_tools(&self) -> bool {
        !matches!(self.layout, Layout::Tags(Markup { format: None, .. }))
    }

    /// Whether a reply may begin with reasoning.
    pub fn thinks(&self) -> bool {
        !matches!(self.layout, Layout::Tags(Markup { thoughts: None, .. }))
    }

    /// Whether text must be decoded with special tokens spelled out, because a marker may be one. End tokens are no
    /// part of the text.
    pub fn needs_special_tokens(&self) -> bool {
        self.calls_tools() || self.thinks()
    }

    /// Where the prompt that the template rendered leaves the reply.
    pub fn start(&self, prompt: &str) -> ReplyStart {
        let (open, close) = match self.layout {
            Layout::Harmony => (harmony::ANALYSIS, None),
            Layout::Tags(Markup { thoughts: Some(thoughts), .. }) => (thoughts.open.trim_end(), Some(thoughts.close)),
            Layout::Tags(_) => return ReplyStart::Answer,
        };
        let prompt = prompt.trim_end();
        match close.is_some_and(|close| prompt.ends_with(close)) {
            true => ReplyStart::Thought,
            false if prompt.ends_with(open) => ReplyStart::Reasoning,
            false => ReplyStart::Answer,
        }
    }

    /// What a model writes between its thoughts and its answer.
    pub fn after_thoughts(&self) -> String {
        match self.layout {
            Layout::Harmony => format!("<|end|><|start|>assistant{}", harmony::FINAL),
            Layout::Tags(Markup { thoughts: Some(Thoughts { close: "</think>", .. }), .. }) => "\n</think>\n\n".into(),
            Layout::Tags(Markup { thoughts: Some(thoughts), .. }) => format!("{}{}", thoughts.close, thoughts.then),
            Layout::Tags(_) => String::new(),
        }
    }

    /// A parser of one reply. Without `tools`, nothing is a call.
    pub fn parser(&self, tools: impl Into<Arc<[Tool]>>, start: ReplyStart) -> Parser {
        let tools = tools.into();
        let machine = match self.layout {
            Layout::Harmony => ReplyMachine::Harmony(Box::new(Harmony::new(start))),
            Layout::Tags(markup) => match markup.format.filter(|_| !tools.is_empty()) {
                None if markup.thoughts.is_none() => ReplyMachine::Plain,
                format => ReplyMachine::Tags(Box::new(Tags::new(Markup { format, ..markup }, start))),
            },
        };
        Parser::new(machine, ReplyOutput::new(tools))
    }

    /// The grammar of a whole reply that calls tools as `choice` demands. `None`: any text will do.
    ///
    /// With `Auto` and a strict tool, text is free, but every call follows its schema. Calls of tools that are not
    /// strict follow their schemas as far as those can be enforced.
    ///
    /// Errors: `Error::Invalid` when the model cannot call tools, when there are none, or none of that name.
    pub fn grammar(
        &self,
        tools: &[Tool],
        choice: &ToolChoice,
        calls: Calls,
        start: ReplyStart,
    ) -> Result<Option<Grammar>> {
        let is_free = || !self.calls_tools() || !tools.iter().any(|tool| tool.strict);
        let (tools, calls): (Vec<&Tool>, Calls) = match choice {
            ToolChoice::None => return Ok(None),
            ToolChoice::Auto if is_free() => return Ok(None),
            ToolChoice::Named(name) => (tools.iter().filter(|tool| tool.name == *name).collect(), Calls::One),
            ToolChoice::Auto | ToolChoice::Required => (tools.iter().collect(), calls),
        };
        let must_call = *choice != ToolChoice::Auto;
        let reply = match self.layout {
            Layout::Tags(Markup { format: None, .. }) => {
                return Err(Error::Invalid(
                    "this model's chat template has no syntax for tools: leave out 'tool_choice'".into(),
                ));
            }
            _ if tools.is_empty() => {
                return Err(Error::Invalid(match choice {
                    ToolChoice::Named(name) => {
                        format!("there is no tool '{name}' in 'tools': choose one that is there")
                    }
                    _ => "a tool must be called, but 'tools' is empty".into(),
                }));
            }
            Layout::Tags(Markup { format: Some(format), .. }) if must_call => calls::alone(format, &tools, calls)?,
            Layout::Tags(Markup { format: Some(format), .. }) => calls::among_text(format, &tools, calls)?,
            Layout::Harmony if must_call => harmony::call(&tools),
            Layout::Harmony => harmony::call_or_answer(&tools),
        };
        Ok(Some(self.thoughts_then(reply, start)))
    }

    /// The grammar of a whole reply: the model thinks as it likes, then answers in `grammar`.
    pub fn after_reasoning(&self, grammar: Grammar, start: ReplyStart) -> Grammar {
        let answer = match self.layout {
            Layout::Harmony => Grammar::sequence([Grammar::literal(harmony::FINAL), grammar]),
            Layout::Tags(_) => grammar,
        };
        self.thoughts_then(answer, start)
    }

    fn thoughts_then(&self, rest: Grammar, start: ReplyStart) -> Grammar {
        match self.layout {
            Layout::Harmony => harmony::analysis_then(rest, start),
            Layout::Tags(markup) => calls::thoughts_then(markup, rest, start),
        }
    }
}
