//! Moebius: a hybrid inference engine for mixture-of-experts models larger than the GPU.
//!
//! The crate's map, from the bottom up; a file imports only from lines above its own.
//!
//! ```text
//! error, config                      what can fail, what a user can choose
//! ```

pub mod attention;
pub mod backend;
pub mod batch;
pub mod bench;
pub mod capture;
pub mod config;
pub mod engine;
pub mod error;
pub mod experts;
pub mod forward;
pub mod kernel;
pub mod kv_cache;
pub mod load;
pub mod memory;
pub mod model;
pub mod models;
pub mod sampler;
pub mod scheduler;
pub mod synthetic;
pub mod tensor;
pub mod topology;
pub mod weights;
pub mod workers;

pub use error::{Error, Result};
