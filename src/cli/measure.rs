//! What the commands `bench` and `doctor` measure.
//!
//! ```text
//! bench     an engine in this process: `moebius bench`
//! server    any OpenAI-compatible server under load: `moebius bench serve`
//! doctor    this machine: `moebius doctor`
//! ```

pub mod bench;
pub mod doctor;
pub mod server;
