//! Which syntax of thinking and of calls a chat template speaks, told by the markers it writes.

use std::sync::Arc;

use super::history::{self, History};
use super::{Parser, Tool, ToolChoice, calls};
use crate::Result;
use crate::text::grammar::Grammar;

/// How the calls of a model look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Hermes,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.
    Function,
    /// `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5 and later.
    Pairs,
    /// `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and fenced JSON in a section: DeepSeek-V3 and R1.
    DeepSeekFenced,
    /// `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}` in a section: DeepSeek-V3.1.
    DeepSeek,
    /// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{..}` in a section: Kimi K2.
    Kimi,
    /// `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section: MiniMax-M2.
    Invoke,
    /// Messages on channels, of which some have a tool as recipient: gpt-oss.
    Harmony,
}

/// The syntax of a model's replies.
#[derive(Clone, Debug, PartialEq)]
pub struct Syntax {
    format: Option<Format>,
    thinks: bool,
    history: History,
}

impl Syntax {
    /// The syntax of this chat template. A template without any known marker has none: all text is content.
    pub fn of(template_source: &str) -> Self {
        let has = |marker: &str| template_source.contains(marker);
        let format = if has("<|channel|>") && has("<|message|>") {
            Some(Format::Harmony)
        } else if has("<｜tool▁calls▁begin｜>") {
            Some(if has("```json") { Format::DeepSeekFenced } else { Format::DeepSeek })
        } else if has("<|tool_calls_section_begin|>") {
            Some(Format::Kimi)
        } else if has("<minimax:tool_call>") {
            Some(Format::Invoke)
        } else if has("<tool_call>") && has("<arg_key>") {
            Some(Format::Pairs)
        } else if has("<tool_call>") && has("<function=") {
            Some(Format::Function)
        } else if has("<tool_call>") {
            Some(Format::Hermes)
        } else {
            None
        };
        let thinks = format == Some(Format::Harmony) || has("<think>") || has("</think>");
        Self { format, thinks, history: History::of(template_source) }
    }

    /// Whether the model can call tools.
    pub fn calls_tools(&self) -> bool {
        self.format.is_some()
    }

    /// Whether a reply may begin with reasoning.
    pub fn thinks(&self) -> bool {
        self.thinks
    }

    /// Whether text must be decoded with special tokens spelled out: a marker may be one. End tokens are no part of the
    /// text.
    pub fn needs_special_tokens(&self) -> bool {
        self.format.is_some() || self.thinks
    }

    /// Whether the prompt that the template rendered leaves the reply inside its reasoning.
    pub fn opens_reasoning(&self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        match self.format {
            Some(Format::Harmony) => prompt.ends_with("<|channel|>analysis<|message|>"),
            _ => self.thinks && prompt.ends_with("<think>"),
        }
    }

    /// What reads a reply. Without `tools`, nothing is a call.
    pub fn parser(&self, tools: impl Into<Arc<[Tool]>>, in_reasoning: bool) -> Parser {
        Parser::new(self.format, self.thinks, tools.into(), in_reasoning)
    }

    /// The grammar of a whole reply that calls tools as `choice` demands; `None`: anything goes.
    ///
    /// With `Auto` and a strict tool, text is free, but every call follows its schema. Tools that are not strict follow
    /// theirs as far as it can be enforced.
    ///
    /// Errors: `Error::Invalid` when the model cannot call tools, when there are none, or none of that name.
    pub fn grammar(
        &self,
        tools: &[Tool],
        choice: &ToolChoice,
        parallel: bool,
        in_reasoning: bool,
    ) -> Result<Option<Grammar>> {
        calls::grammar(self.format, self.thinks, tools, choice, parallel, in_reasoning)
    }

    /// For the format of a response: the model thinks as it likes, then answers in `grammar`.
    pub fn after_reasoning(&self, grammar: Grammar, in_reasoning: bool) -> Result<Grammar> {
        Ok(calls::after_reasoning(self.format, self.thinks, grammar, in_reasoning))
    }

    /// Brings past messages into the form that the template reads: arguments of calls as objects or as text, no content
    /// as null or as empty text. `messages` are as clients send them.
    pub fn adapt_history(&self, messages: &mut [serde_json::Value]) {
        history::adapt(self.history, messages);
    }
}
