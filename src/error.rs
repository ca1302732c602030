//! One error for the engine. Its text is one sentence that says the remedy.

use std::path::{Path, PathBuf};

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything of the outside world that can fail; our own bugs panic instead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A checkpoint or cache file is missing, broken or does not fit.
    #[error(transparent)]
    Cache(#[from] moebius_cache::Error),
    /// The operating system refused a file operation.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The model cannot be run: unknown architecture, missing or misshapen tensor, unusable config or tokenizer.
    #[error("{0}")]
    Model(String),
    /// The caller asked for something impossible: a flag, a field of a request, a prompt longer than the context.
    #[error("{0}")]
    Invalid(String),
    /// More is asked for at the same time than is taken; says when to try again.
    #[error("{0}")]
    Busy(String),
    /// Not enough memory or disk; says what is needed, what there is, and which flag helps.
    #[error("{0}")]
    Resources(String),
    /// The GPU cannot be used, or failed; says what to do without it.
    #[error("{0}")]
    Device(String),
    /// The engine thread is gone.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

impl Error {
    /// Attaches a path to an I/O error: `.map_err(Error::io(path))`.
    pub fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}
