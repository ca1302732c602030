//! What can go wrong with a checkpoint or a cache file; each text names the remedy.

use std::path::{Path, PathBuf};

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// One error for the crate. A variant carries what its reader needs to act.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("{}", said_of_file(path, source))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The checkpoint cannot be used as it is.
    #[error("{path}: {what}", path = path.display())]
    Checkpoint {
        /// The file or directory at fault.
        path: PathBuf,
        /// What is wrong and what to do about it.
        what: String,
    },
    /// The cache file is not what it should be.
    #[error("{path}: {what}; run `moebius cache build --force` to make it again", path = path.display())]
    Cache {
        /// The cache file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The folder for caches cannot hold this one.
    #[error("{path}: {what}; choose another folder with --cache-dir", path = path.display())]
    CacheDir {
        /// The folder, or the file in it.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The request itself makes no sense for this model.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// Attaches a path to an I/O error: `.map_err(Error::io(path))`.
    pub fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}

/// What the system said of a file; of one that is missing, which is most often a wrong name, what to do.
pub fn said_of_file(path: &Path, source: &std::io::Error) -> String {
    match source.kind() {
        std::io::ErrorKind::NotFound => format!("there is no {}: check the name", path.display()),
        _ => format!("{}: {source}", path.display()),
    }
}

/// Bytes for people: "41.20 GiB", or MiB below one.
pub(crate) fn readable_bytes(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}
