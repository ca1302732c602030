//! Moebius: a hybrid inference engine for mixture-of-experts models larger than the GPU.
//!
//! The crate's map, from the bottom up; a file imports only from lines above its own.
//!
//! ```text
//! error, config, topology, workers                what can fail, what a user can choose, what there is
//! kernel, tensor, backend                         arithmetic
//! model, models, weights, experts, kv_cache       what a checkpoint says, and what it holds
//! attention, batch, forward, capture              one pass
//! sampler, scheduler, load, engine                one owner thread, `EngineHandle`
//! demo, hub                                       from a model's name to its directory
//! generation_config, tokenizer, chat_template     a checkpoint's text side
//! text_stream, text_model                         tokens to text, an engine with its text side
//! server                                          HTTP
//! ```

pub mod attention;
pub mod backend;
pub mod batch;
pub mod bench;
pub mod capture;
pub mod chat_template;
pub mod config;
pub mod demo;
pub mod doctor;
pub mod engine;
pub mod error;
pub mod experts;
pub mod forward;
pub mod generation_config;
pub mod hub;
pub mod kernel;
pub mod kv_cache;
pub mod load;
pub mod memory;
pub mod model;
pub mod models;
pub mod sampler;
pub mod scheduler;
pub mod server;
pub mod synthetic;
pub mod tensor;
pub mod text_model;
pub mod text_stream;
pub mod tokenizer;
pub mod topology;
pub mod weights;
pub mod workers;

pub use error::{Error, Result};
