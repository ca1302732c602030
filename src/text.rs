//! Text in, text out: everything between a conversation and token ids.
//!
//! ```text
//! tokenizer        text to tokens and back
//! chat_template    a conversation to a prompt
//! history          past turns, as a template reads them
//! content          which text of a prompt is the template's
//! grammar          constraints of an answer's text
//! reply            reasoning, content and calls in an answer's text
//! stream           an answer's tokens as text, as they come
//! model            an engine with its text side
//! ```
//!
//! Imports config, load, engine and hub. Read `model` first.

pub mod chat_template;
pub mod content;
pub mod grammar;
pub mod history;
pub mod model;
pub mod reply;
pub mod stream;
pub mod tokenizer;

pub use model::TextModel;
pub use tokenizer::Tokenizer;
