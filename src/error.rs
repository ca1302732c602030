//! The error of the engine. Its text is one sentence that names the remedy.

use std::path::{Path, PathBuf};

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure of the outside world. Bugs panic instead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A checkpoint or cache file is missing, broken or does not fit.
    #[error(transparent)]
    Cache(#[from] moebius_cache::Error),
    /// A file cannot be read, or cannot be written for another reason than its owner.
    #[error("{}", moebius_cache::said_of_file(path, source))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The model cannot run: unknown architecture, missing or misshapen tensor, unusable config or tokenizer.
    #[error("{0}")]
    Model(String),
    /// The request is impossible: a flag, a field, a prompt longer than the context.
    #[error("{0}")]
    Invalid(String),
    /// Too many requests at the same time. The text says when to try again.
    #[error("{0}")]
    Busy(String),
    /// Not enough memory or disk. The text says what is needed, what there is, and which flag helps.
    #[error("{0}")]
    Resources(String),
    /// The GPU cannot be used, or failed. The text says what to do.
    #[error("{0}")]
    Device(String),
    /// The engine's thread has ended.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

impl Error {
    /// Attaches a path to an error of reading it: `.map_err(Error::io(path))`.
    pub fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }

    /// Attaches a path to an error of writing it: `.map_err(Error::unwritable(path))`.
    pub fn unwritable(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| match source.kind() {
            std::io::ErrorKind::PermissionDenied => {
                Error::Resources(format!("{}: {}", path.display(), moebius_cache::said_of_writing(&source)))
            }
            _ => Error::Io { path, source },
        }
    }
}
