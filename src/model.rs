//! What a model is, as plain data: `config.json` in, [`ModelConfig`] out.
//!
//! ```text
//! attention, ffn, rope    the parts of a layer
//! streams                 several residual streams, and n-grams
//! config                  a model: its layers, and what its tensors are called
//! share, stage            what one of several devices has of it: a part of its width, or a run of its layers
//! families                one file for each family of architectures, and their registry
//! ```
//!
//! Imports no other room. Read `config` first.

mod attention;
mod config;
pub mod families;
mod ffn;
mod rope;
mod share;
mod stage;
mod streams;

pub use attention::*;
pub use config::{LayerConfig, ModelConfig, Names, Norm, Residual};
pub use ffn::{Activation, Ffn, GroupScore, Groups, Mlp, Moe, Router, Scoring, SharedExpert};
pub use rope::{Llama3, Rope, RopeScaling, Yarn};
pub use share::Share;
pub use stage::Stage;
pub use streams::{Connections, Hash, LastRead, Mixer, Ngrams, StreamShape};
