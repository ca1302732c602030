//! Text in, text out: everything between a conversation and token ids.
//!
//! ```text
//! tokenizer        text to tokens and back
//! chat_template    a conversation to a prompt
//! content          whose words are whose in a prompt
//! grammar          what an answer may look like
//! reply            what the text of an answer means: thoughts, words, calls
//! stream           tokens to text, as they come
//! model            an engine with its text side
//! ```
//!
//! Imports config, load, engine and hub. Read `model` first.

pub mod chat_template;
pub mod content;
pub mod grammar;
pub mod model;
pub mod reply;
pub mod stream;
pub mod tokenizer;

pub use model::TextModel;
pub use tokenizer::Tokenizer;
