//! `Backend`: every device op of the forward pass, with its shapes. Activations stay on the device between ops.
//!
//! The ops are eleven traits. Each has a file of its own here, and a file of the same name for the CPU and for CUDA
//! with the code; an op has one name in all of them and in the names of its CUDA kernels.
//!
//! ```text
//! tensor      activations and weights on the host
//! shortlist   the largest logits of a row
//! batch       a ragged batch of tokens
//! source      resident weights by their Hugging Face names
//! memory      batches and activations on the device
//! load        weights of every kind
//! dense       ops on rows: embedding, norms, products, gates, logits
//! attend      attention over cached keys and values
//! select      the positions that queries attend to, where these are not all
//! recur       recurrent state: gated DeltaNet, KDA, short convolutions, Mamba-2
//! compress    entries of several positions, and attention over them and a window
//! streams     several residual streams, and what n-grams add to them
//! route       experts for each token
//! rank        sums over several devices
//! record      recorded passes, steering, times
//! cpu         the ops on a team of threads
//! cuda        the ops on a GPU
//! ```
//!
//! Each op is a function of single rows in a fixed order of arithmetic: a token's bits do not depend on what else is in
//! the batch.
//!
//! Imports machine, kernel, cuda, config and model. Read [`Backend`] first.

mod attend;
pub mod batch;
mod compress;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dense;
mod load;
mod memory;
mod rank;
mod record;
mod recur;
mod route;
mod select;
pub mod shortlist;
pub mod source;
mod streams;
pub mod tensor;

pub use attend::{Attend, Choice, Heads, KV_GROUP, LatentQueries, Rotary, Softmax};
pub use compress::{Compress, CompressRule, Seen};
pub use dense::Dense;
pub use load::{DeltaRule, Load, RouterTensors};
pub use memory::Memory;
pub use rank::Rank;
pub use record::{Addition, DecodeShape, Hooks, OpTime, Rates, Record};
pub use recur::{DeltaInputs, KdaInputs, KdaRule, Mamba2Inputs, Mamba2Rule, Recur};
pub use route::{Route, Routing};
pub use select::{IndexQueries, KeyNorm, KeyPool, Select};
pub use streams::{ConnectWeights, NgramInputs, NgramNorms, ReadBy, Streams};

/// A device that runs the model: it does all of these.
pub trait Backend: Memory + Load + Dense + Attend + Compress + Streams + Route + Rank + Record {}

impl<T: Memory + Load + Dense + Attend + Compress + Streams + Route + Rank + Record> Backend for T {}
