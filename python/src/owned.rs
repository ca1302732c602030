//! Values of one process: a fork has their bytes, but not the threads that serve them.

use std::sync::{Mutex, OnceLock, PoisonError};

use pyo3::PyResult;

use crate::error::Error;

/// A value that can be closed early, and that is neither used nor dropped in a fork: threads that do not exist there
/// may hold its locks.
pub(crate) struct Owned<T> {
    value: Mutex<Option<T>>,
    process: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Mutex::new(Some(value)), process: std::process::id() }
    }

    /// Lends the value to one thread at a time. Errors: it is closed, or belongs to another process.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        same_process(self.process)?;
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        value
            .as_mut()
            .map(f)
            .ok_or_else(|| Error::new_err("it is closed: start another request, or open another moebius.LLM"))
    }

    /// Takes the value out. `None`: it is closed, or belongs to another process.
    pub(crate) fn take(&self) -> Option<T> {
        same_process(self.process).ok()?;
        self.value.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if same_process(self.process).is_err() {
            std::mem::forget(self.value.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// Refuses to start an engine in a fork of a process that has started one: it would wait for thread pools that exist
/// only in the parent.
pub(crate) fn check_start() -> PyResult<()> {
    static FIRST: OnceLock<u32> = OnceLock::new();
    same_process(*FIRST.get_or_init(std::process::id))
}

fn same_process(process: u32) -> PyResult<()> {
    match std::process::id() == process {
        true => Ok(()),
        false => Err(Error::new_err(
            "an engine does not survive a fork: start processes by multiprocessing's 'spawn', or open the first \
             moebius.LLM after the fork",
        )),
    }
}
