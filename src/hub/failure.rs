//! Why a file of a hub could not be had.

use std::path::PathBuf;

pub(super) type Result<T> = std::result::Result<T, FetchFailure>;

/// Why there is no file.
#[derive(Debug)]
pub(super) enum FetchFailure {
    /// The hub says no, with this HTTP status.
    Status(u16),
    /// The hub's answer is not to be used, and why.
    Refused(String),
    /// The connection broke: another attempt may go further.
    Broken(String),
    /// No authority that is trusted here knows the host: which one, and why.
    Untrusted(String),
    /// Another process has this lock.
    Locked(PathBuf),
    /// This machine cannot keep the file: why, and what helps.
    Local(String),
}
