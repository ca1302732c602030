//! The threads that convert and load: as many as this process may use, whatever the environment tells rayon.

use std::sync::OnceLock;

use crate::error::readable_bytes;
use crate::{Error, Result, limits};

/// Address space below which even their stacks and heaps do not fit.
const LEAST_BYTES: u64 = 256 << 20;

/// Starts them at the first call; rayon would start as many as `RAYON_NUM_THREADS` says. A program that uses rayon
/// itself keeps its own.
///
/// Errors: `Error::Invalid` when the system gives no more threads, or no memory for them.
pub fn start() -> Result<()> {
    static STARTED: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    STARTED.get_or_init(start_rayon).clone().map_err(Error::Invalid)
}

fn start_rayon() -> std::result::Result<(), String> {
    if let Some(left) = limits::address_space_bytes().filter(|&left| left < LEAST_BYTES) {
        let [left, least] = [left, LEAST_BYTES].map(readable_bytes);
        return Err(format!(
            "this process may take {left} more of address space, and needs {least} to begin with: raise `ulimit -v`"
        ));
    }
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let built = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    match built.as_ref().err().and_then(std::error::Error::source) {
        Some(e) => Err(refusal(&e)),
        None => Ok(()),
    }
}

/// Whether `count` more threads can run at once: for runtimes that panic when theirs do not start. Errors: as
/// [`start`].
pub fn probe(count: usize) -> Result<()> {
    std::thread::scope(|scope| {
        let (hold, held) = (0..count).map(|_| std::sync::mpsc::channel::<()>()).collect::<(Vec<_>, Vec<_>)>();
        let threads = held.into_iter().map(|held| std::thread::Builder::new().spawn_scoped(scope, move || held.recv()));
        let started = threads.collect::<std::io::Result<Vec<_>>>();
        drop(hold);
        started.map(drop).map_err(refused)
    })
}

/// The error of a thread that does not start.
pub(crate) fn refused(e: std::io::Error) -> Error {
    Error::Invalid(refusal(&e))
}

fn refusal(e: &dyn std::fmt::Display) -> String {
    format!(
        "the system gives no more threads ({e}): raise the limits on them (`ulimit -u`) and on memory (`ulimit -v`)"
    )
}
