//! What a model's text means: reasoning, content and calls of tools, in the syntax that its own chat template speaks.

use serde_json::Value;

mod calls;
mod harmony;
mod header;
mod history;
mod id;
mod json;
mod parser;
mod syntax;
mod tags;
mod xml;

pub(crate) use json::Strings;
pub use parser::Parser;
pub(crate) use parser::overlap;
pub use syntax::Syntax;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// What the model calls it by.
    pub name: String,
    /// What the model is told about it.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// Whether arguments must follow the schema.
    pub strict: bool,
}

/// Which tools an answer calls.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolChoice {
    /// None.
    None,
    /// As the model likes.
    Auto,
    /// At least one.
    Required,
    /// This one, once.
    Named(String),
}

/// A piece of an answer. Pieces of one kind that follow each other belong together.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// More of what the model thinks before it answers.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A call begins.
    Call {
        /// Counts the calls of an answer from 0.
        index: usize,
        /// The model's own id where its syntax has one, else one that no other call has.
        id: String,
        /// The tool.
        name: String,
    },
    /// More of a call's arguments, which joined are JSON if the model wrote it well.
    Arguments {
        /// The call.
        index: usize,
        /// A piece of JSON.
        json: String,
    },
}
