//! Text to parts as it comes. What may be the beginning of a marker waits; all other text goes out at once.

use super::Part;
use super::harmony::Harmony;
use super::pipe::{Input, ReplyOutput};
use super::tags::Tags;

/// Reads one reply.
#[derive(Debug)]
pub struct Parser {
    input: Input,
    machine: ReplyMachine,
    output: ReplyOutput,
}

/// What reads the input.
#[derive(Debug)]
pub(super) enum ReplyMachine {
    /// All text is content.
    Plain,
    Tags(Box<Tags>),
    Harmony(Box<Harmony>),
}

impl Parser {
    pub(super) fn new(machine: ReplyMachine, output: ReplyOutput) -> Self {
        Self { input: Input::default(), machine, output }
    }

    /// Reads more text and adds the parts that are certain to `parts`. Joined, the parts do not depend on how the text
    /// was cut.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        self.input.text.push_str(text);
        self.read(parts);
    }

    /// Ends the text: adds what was held back.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        self.input.ended = true;
        self.read(parts);
    }

    /// Whether a call has begun.
    pub fn called(&self) -> bool {
        self.output.called()
    }

    fn read(&mut self, parts: &mut Vec<Part>) {
        self.output.parts = std::mem::take(parts);
        match &mut self.machine {
            ReplyMachine::Plain => self.output.content(&std::mem::take(&mut self.input.text)),
            ReplyMachine::Tags(tags) => tags.read(&mut self.input, &mut self.output),
            ReplyMachine::Harmony(harmony) => harmony.read(&mut self.input, &mut self.output),
        }
        *parts = std::mem::take(&mut self.output.parts);
    }
}
