//! What a process is given by its system: signals and limits.
#![allow(unsafe_code)] // signals

use std::io::IsTerminal;

use crate::{Error, Result};

/// Descriptors below which what we run on panics.
const LEAST_FILES: libc::rlim_t = 64;

/// What every command needs before it begins. Errors: `Error::Resources` for too few open files.
pub(super) fn prepare() -> Result<()> {
    // A file that would exceed `ulimit -f` is an error of the write then, with words, instead of the end.
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    moebius_cache::cut::end_in_words();
    let mut files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `files` has room for the answer.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut files) } {
        0 if files.rlim_cur < LEAST_FILES => Err(Error::Resources(format!(
            "this process may open {} files, and needs {LEAST_FILES}: raise `ulimit -n`",
            files.rlim_cur
        ))),
        _ => Ok(()),
    }
}

/// Whether SIGHUP says that our terminal is gone: we have one, and nobody (`nohup`) has said to stay.
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

/// Sends SIGTERM to ourselves.
pub(super) fn terminate() {
    // SAFETY: it changes no memory.
    unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
}
