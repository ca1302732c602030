//! Moebius: a hybrid inference engine for mixture-of-experts models larger than the GPU.
//!
//! The crate's map, from the bottom up; a file imports only from modules that stand before its own.
//!
//! ```text
//! error, log                                      what can fail, what is said
//! topology, batch, model, tensor, random          what there is, what a model and its data are
//! workers, memory, kernel, cuda, config           threads, huge pages, arithmetic, a GPU; what a user can choose
//! models, backend, weights, synthetic             config.json to data; every op; what a checkpoint holds
//! experts, kv_cache, attention, tap, forward      one pass, and what it adds to the residual stream or tells of it
//! load, plan, capture, bench, doctor              a model in memory, foretold, looked into and measured
//! sampler, generation_config                      how tokens are chosen, and what a checkpoint says about it
//! scheduler, pace, metrics, engine                one owner thread, `EngineHandle`
//! demo, gguf, hub                                 from a model's name to its directory
//! tokenizer, chat_template, content               a checkpoint's text side, and whose words are whose
//! grammar, reply                                  what a model may say, and what its text means
//! text_stream, text_model                         tokens to text, an engine with its text side
//! server                                          HTTP
//! cli                                             the `moebius` command, which the Python package has too
//! ```
//!
//! As a library:
//!
//! ```no_run
//! use moebius::config::EngineConfig;
//! use moebius::engine::{Request, SamplingParams};
//! use moebius::text_model::TextModel;
//!
//! let model = TextModel::open("demo", &EngineConfig::default(), &|_| {})?;
//! let prompt = model.tokenizer().encode("Once", true)?;
//! let request = Request { prompt, max_tokens: Some(16), sampling: SamplingParams::default(), ..Request::default() };
//! let mut answer = model.complete(request, vec![])?;
//! while let Some(delta) = answer.next_blocking() {
//!     print!("{:?}", delta?);
//! }
//! # Ok::<(), moebius::Error>(())
//! ```

pub mod attention;
pub mod backend;
pub mod batch;
pub mod bench;
pub mod capture;
pub mod chat_template;
pub mod cli;
pub mod config;
pub mod content;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod demo;
pub mod doctor;
pub mod engine;
pub mod error;
pub mod experts;
pub mod forward;
pub mod generation_config;
pub mod gguf;
pub mod grammar;
pub mod hub;
pub mod kernel;
pub mod kv_cache;
pub mod load;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod models;
pub mod pace;
pub mod plan;
pub mod random;
pub mod reply;
pub mod sampler;
pub mod scheduler;
pub mod server;
pub mod synthetic;
pub mod tap;
pub mod tensor;
pub mod text_model;
pub mod text_stream;
pub mod tokenizer;
pub mod topology;
pub mod weights;
pub mod workers;

pub use error::{Error, Result};
