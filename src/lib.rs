//! Moebius: a hybrid inference engine for mixture-of-experts models larger than the GPU.
//!
//! The crate's map, from the bottom up; a file imports only from lines above its own.
//!
//! ```text
//! error, config                      what can fail, what a user can choose
//! demo, hub                          from a model's name to its directory
//! generation_config, tokenizer, chat_template     a checkpoint's text side
//! engine                             one owner thread, EngineHandle
//! text_stream, text_model            tokens to text, an engine with its text side
//! server                             HTTP
//! ```

pub mod chat_template;
pub mod config;
pub mod demo;
pub mod engine;
pub mod error;
pub mod generation_config;
pub mod hub;
pub mod kernel;
pub mod server;
pub mod text_model;
pub mod text_stream;
pub mod tokenizer;

pub use error::{Error, Result};
