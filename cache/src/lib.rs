//! The packed expert cache of Moebius: a checkpoint goes in, one memory-mappable file of experts comes out.
//!
//! This crate knows formats, not architectures: which tensors are experts is said by its caller.

mod error;
pub mod pack;

pub use error::{Error, Result};
pub use pack::Precision;
