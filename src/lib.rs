//! Moebius: a hybrid inference engine for mixture-of-experts models larger than the GPU.
//!
//! The crate's rooms, from the bottom up; a file imports only from rooms that stand before its own.
//!
//! ```text
//! error, log    what can fail, what is said
//! machine       cores, memory, the team of threads
//! kernel        arithmetic on the CPU, one file per instruction set
//! cuda          the GPU's driver
//! config        every choice of a user
//! model         what a model is, as data; one file per family
//! backend       every op of the forward pass, on the CPU and on a GPU
//! experts       the routed experts: who holds one, who computes it
//! forward       the layers, the KV cache, what is added to the residual stream or taken from it
//! load          what fits where, in which precision, how fast; then a model in memory
//! engine        the scheduler, the sampler, the thread that owns a model
//! hub           from a model's name to its folder
//! text          tokenizer, chat template, grammar, reply: a conversation in, words out
//! server        HTTP
//! cli           the `moebius` command, which the Python package has too
//! ```
//!
//! Each room opens with a page that says what stands in it.
//!
//! As a library:
//!
//! ```no_run
//! use moebius::config::EngineConfig;
//! use moebius::engine::{Request, SamplingParams};
//! use moebius::text::TextModel;
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

#[doc(hidden)]
pub mod backend;
#[doc(hidden)]
pub mod cli;
pub mod config;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod cuda;
pub mod engine;
mod error;
#[doc(hidden)]
pub mod experts;
#[doc(hidden)]
pub mod forward;
#[doc(hidden)]
pub mod hub;
#[doc(hidden)]
pub mod kernel;
#[doc(hidden)]
pub mod load;
mod log;
#[doc(hidden)]
pub mod machine;
#[doc(hidden)]
pub mod model;
pub mod server;
pub mod text;

pub use error::{Error, Result};
