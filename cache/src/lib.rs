//! The packed expert cache of Moebius: a checkpoint goes in, one memory-mappable file of experts comes out.
//!
//! This crate knows formats, not architectures: its caller says which tensors are experts, and what GGUF files of an
//! architecture call them.
//!
//! - [`checkpoint`]: named tensors of safetensors or GGUF files, memory-mapped.
//! - [`codec`]: how each is stored, and its bytes to f32, or to the codes and scales it keeps.
//! - [`quantize`]: rows of f32 to codes and scales.
//! - [`pack`]: codes and scales to the order in which the kernels read them.
//! - [`mod@format`]: the cache file, opened and checked.
//! - [`convert`]: all of it, streaming, from a checkpoint to a cache file.
//! - [`limits`], [`threads`]: what this process may take.
//! - [`mod@file`], [`cut`]: plain files, mapped; what becomes of a process when one of them is cut off.
#![doc = include_str!("../FORMAT.md")]

pub mod checkpoint;
pub mod codec;
pub mod convert;
pub mod cut;
mod error;
pub mod file;
pub mod format;
pub mod limits;
pub mod pack;
pub mod quantize;
mod simd;
pub mod threads;

pub use checkpoint::{Checkpoint, Dtype, TensorView};
pub use error::{Error, Result, said_of_file, said_of_writing, user_id};
pub use format::{Contents, ExpertCache, Header};
pub use pack::{ExpertKind, ExpertLayout, MatrixLayout, Precision, ScaleType};
