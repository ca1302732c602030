//! The threads that convert and load: as many as this process may use, whatever the environment tells rayon.

use std::sync::OnceLock;

use crate::{Error, Result, limits};

/// Address space below which even their stacks and heaps do not fit.
const LEAST_BYTES: u64 = 256 << 20;

/// Starts them at the first call; rayon would start as many as `RAYON_NUM_THREADS` says. A program that has started rayon's before keeps them.
///
/// Errors: `Error::Invalid` when the system gives no more threads.
pub fn start() -> Result<()> {
    static STARTED: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let started = STARTED.get_or_init(|| {
        if limits::address_space_bytes().is_some_and(|left| left < LEAST_BYTES) {
            return Err("their memory would be beyond a limit".into());
        }
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let built = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
        match built.as_ref().err().and_then(std::error::Error::source) {
            Some(e) => Err(e.to_string()),
            None => Ok(()),
        }
    });
    started.clone().map_err(refused)
}

/// The error of a thread that does not start.
pub(crate) fn refused(e: impl std::fmt::Display) -> Error {
    Error::Invalid(format!("the system gives no more threads ({e}): raise the limits on them (`ulimit -u`) and on memory (`ulimit -v`)"))
}
