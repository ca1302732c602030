//! The packed expert cache of Moebius: a checkpoint goes in, one memory-mappable file of experts comes out.
//!
//! This crate knows formats, not architectures: which tensors are experts is said by its caller.
//!
//! - [`checkpoint`]: named tensors of a folder of safetensors, memory-mapped.
//! - [`codec`]: their bytes to f32.
//! - [`quantize`]: rows of f32 to codes and scales.
//! - [`pack`]: codes and scales to the order in which the kernels read them.
//! - [`mod@format`]: the cache file, opened and checked.
//! - [`convert`]: all of it, streaming, from a checkpoint to a cache file.
//!
#![doc = include_str!("../FORMAT.md")]

pub mod checkpoint;
pub mod codec;
pub mod convert;
mod error;
pub mod format;
pub mod pack;
pub mod quantize;
mod simd;

pub use checkpoint::{Checkpoint, Dtype, TensorView};
pub use error::{Error, Result};
pub use format::{Contents, ExpertCache, Header};
pub use pack::{ExpertLayout, MatrixLayout, Precision, ScaleType};
