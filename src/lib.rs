//! Moebius: a hybrid inference engine for mixture-of-experts models larger than the GPU.
//!
//! The crate's map, from the bottom up; a file imports only from lines above its own.
//!
//! ```text
//! error, config                      what can fail, what a user can choose
//! ```

pub mod config;
pub mod doctor;
pub mod engine;
pub mod error;
pub mod experts;
pub mod kernel;
pub mod memory;
pub mod topology;
pub mod workers;

pub use error::{Error, Result};
