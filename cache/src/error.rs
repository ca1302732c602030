//! What can go wrong with a checkpoint or a cache file; each text names the remedy.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// One error for the crate. A variant carries what its reader needs to act.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused to read a file.
    #[error("{}", said_of_file(path, source))]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
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
    /// Attaches a path to an error of reading it: `.map_err(Error::io(path))`.
    pub fn io(path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    }
}

/// What the system said of a file that was to be read; of one that is missing, which is most often a wrong name, or
/// another user's, what to do.
pub fn said_of_file(path: &Path, source: &io::Error) -> String {
    match source.kind() {
        ErrorKind::NotFound => format!("there is no {}: check the name", path.display()),
        ErrorKind::PermissionDenied => format!("{}: {}", path.display(), may_not_read()),
        _ => format!("{}: {source}", path.display()),
    }
}

/// What the system said of a place that was to be written; of another user's, what to do.
pub fn said_of_writing(source: &io::Error) -> String {
    match source.kind() {
        ErrorKind::PermissionDenied => format!("user {} may not write there: change the folder's owner", user_id()),
        _ => source.to_string(),
    }
}

/// The system does not tell whether it refused the file or a folder above it.
pub(crate) fn may_not_read() -> String {
    format!("user {} may not read it: change its owner or mode, or those of the folders above it", user_id())
}

/// The user whose rights the system checks when this process opens a file.
#[allow(unsafe_code)]
pub fn user_id() -> u32 {
    // SAFETY: the call takes nothing, changes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Bytes for people: "41.20 GiB", or MiB below one.
pub(crate) fn readable_bytes(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_user_owns_names_the_user_and_the_remedy() {
        let (denied, user) = (|| io::Error::from(ErrorKind::PermissionDenied), user_id());
        assert_eq!(
            Error::io(Path::new("/a/b"))(denied()).to_string(),
            format!("/a/b: user {user} may not read it: change its owner or mode, or those of the folders above it")
        );
        let written = format!("user {user} may not write there: change the folder's owner");
        assert_eq!(said_of_writing(&denied()), written);
        assert_eq!(
            said_of_writing(&ErrorKind::StorageFull.into()),
            io::Error::from(ErrorKind::StorageFull).to_string()
        );
    }
}
