//! What a model's text means: reasoning, content and calls of tools, in the syntax that its own chat template speaks.
//!
//! A format of calls is one row of `format`. Detection (`syntax`), the grammar (`calls`) and the parser (`tags`) read
//! it.
//!
//! ```text
//! id, json, format     ids of calls; how far JSON reaches; the rows
//! schema               what a tool's schema says of its arguments
//! pipe                 text in, parts out
//! nested               tags within tags as JSON
//! head                 the first half of a call
//! parameters, literals the other half
//! tags, harmony        the parsers
//! parser               one reply
//! calls                the grammar of calls
//! syntax               a chat template's syntax
//! ```

use serde_json::Value;

mod calls;
mod format;
mod harmony;
mod head;
mod id;
mod json;
mod literals;
mod nested;
mod parameters;
mod parser;
mod pipe;
mod schema;
mod syntax;
mod tags;

pub(crate) use json::Strings;
pub use parser::Parser;
pub(crate) use pipe::overlap;
pub use syntax::Syntax;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Its description for the model.
    pub description: Option<String>,
    /// The JSON schema of its arguments.
    pub parameters: Value,
    /// Whether the arguments must follow the schema.
    pub strict: bool,
}

/// Which tools an answer may or must call.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolChoice {
    /// No tool.
    None,
    /// Those that the model chooses.
    Auto,
    /// At least one tool.
    Required,
    /// This tool, once.
    Named(String),
}

/// How many calls an answer may make.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Calls {
    /// One call.
    One,
    /// Any number of calls, in parallel.
    Several,
}

/// Where the prompt leaves a reply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReplyStart {
    /// Inside its reasoning, which the prompt has opened.
    Reasoning,
    /// Before anything.
    Answer,
    /// Behind its reasoning, which the prompt has closed.
    Thought,
}

/// A piece of an answer. Consecutive pieces of one kind belong together.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// More reasoning before the answer.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// The beginning of a call.
    Call {
        /// The number of the call, from 0.
        index: usize,
        /// The model's own id if its syntax has one, else a unique one.
        id: String,
        /// The name of the tool.
        name: String,
    },
    /// More of a call's arguments. Joined they are JSON, unless the model made a mistake.
    Arguments {
        /// The number of the call.
        index: usize,
        /// A piece of JSON.
        json: String,
    },
}
