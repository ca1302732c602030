//! What the commands `bench`, `eval` and `doctor` measure.
//!
//! ```text
//! bench     an engine in this process: `moebius bench`
//! server    any OpenAI-compatible server under load: `moebius bench serve`
//! eval      what a model makes of a text: `moebius eval`
//! doctor    this machine: `moebius doctor`
//! ```

pub mod bench;
pub mod doctor;
pub mod eval;
pub mod server;
