//! The limit of open files: every socket is one.

use super::places::RESERVE;

/// Open files besides connections: the model's, the log's, the runtime's, and sockets that are about to close.
const OTHERS: u64 = 128;

/// Raises the limit for `sockets` as far as the system allows. Returns how many fit.
pub(in crate::server) fn fit(sockets: usize) -> usize {
    let beside = RESERVE as u64 + OTHERS;
    let limit = raise(sockets as u64 + beside);
    let fitting = limit.saturating_sub(beside).max(limit / 4).max(1);
    if fitting < sockets as u64 {
        tracing::warn!(
            "{limit} files may be open, so {fitting} connections are served at a time, not {sockets}: raise ulimit -n"
        );
    }
    sockets.min(fitting as usize)
}

/// Raises the limit to `wanted`, or as far as possible. Returns the new limit.
#[allow(unsafe_code)]
fn raise(wanted: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours, and of the type that is filled in.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return wanted; // an unknown limit shows itself when a socket is refused
    }
    let raised = libc::rlimit { rlim_cur: wanted.min(limit.rlim_max), ..limit };
    // SAFETY: `raised` is ours, and read only.
    if raised.rlim_cur > limit.rlim_cur && unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } == 0 {
        return raised.rlim_cur;
    }
    limit.rlim_cur
}
