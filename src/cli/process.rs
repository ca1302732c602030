//! Signals and limits of the process.
#![allow(unsafe_code)] // signals

use std::io::IsTerminal;

use crate::{Error, Result};

/// Below this limit of open files the async runtime panics.
const LEAST_FILES: libc::rlim_t = 64;

/// Prepares the process for any command. Errors: `Error::Resources` for too few open files.
pub(super) fn prepare() -> Result<()> {
    // Without SIGXFSZ a write beyond `ulimit -f` fails with an error instead of ending the process.
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    moebius_cache::cut::end_in_words();
    let mut files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `files` has room for the answer.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut files) } {
        0 if files.rlim_cur < LEAST_FILES => Err(Error::Resources(format!(
            "this process may open only {} files and needs {LEAST_FILES}: raise `ulimit -n`",
            files.rlim_cur
        ))),
        _ => Ok(()),
    }
}

/// Whether SIGHUP means that the terminal is gone: the process has one and does not ignore the signal (`nohup`).
pub(super) fn ends_with_terminal() -> bool {
    (std::io::stdin().is_terminal() || std::io::stderr().is_terminal()) && !hangup_is_ignored()
}

fn hangup_is_ignored() -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action the call only writes the old one to `action`, which has room for it.
    let known = unsafe { libc::sigaction(libc::SIGHUP, std::ptr::null(), action.as_mut_ptr()) } == 0;
    // SAFETY: the call succeeded, so it filled `action`.
    known && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}

/// Sends SIGTERM to this process.
pub(super) fn terminate() {
    // SAFETY: it changes no memory.
    unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
}
