//! The child process that renders one template: it sets its own limits, compiles, and answers until its stdin ends.
//!
//! A child that exceeds a limit is killed: by SIGPROF for time, by SIGSEGV or SIGABRT for stack and memory. The parent
//! sees the signal.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use super::frame::{self, Rendered};
use super::jinja::Jinja;
use super::{MAX_SOURCE_BYTES, RenderFailure, text_limit};

/// Address space for compiling or rendering above that of the process at its start: stack, heap, the conversation.
pub(super) const MAX_GROWTH_BYTES: u64 = 192 << 20;

/// A process that keeps more than this exits, because the next rendering would have less left.
const MAX_KEPT_BYTES: u64 = 32 << 20;

/// Processor time of one compilation or rendering.
pub(super) const MAX_CPU_SECONDS: u64 = 2;

/// Maximum bytes of variables: twice the largest body that the server accepts.
pub(super) const MAX_VARIABLES_BYTES: usize = 32 << 20;

/// From <sys/time.h>; the libc crate has it for other systems only.
const ITIMER_PROF: libc::c_int = 2;

/// Renders chat templates for the process that started this one and holds the other end of stdin, a socket. Returns
/// when that is closed.
pub fn render_for_parent() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve() -> io::Result<()> {
    // The message of a panic is of no use, and a backtrace takes memory.
    std::panic::set_hook(Box::new(|_| {}));
    leave_descriptors();
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let start = limit()?;

    restart_clock()?;
    let Some(source) = frame::read(&mut socket, MAX_SOURCE_BYTES)? else { return Ok(()) };
    let source = String::from_utf8(source).map_err(|_| ErrorKind::InvalidData)?;
    let jinja = match Jinja::compile(&source) {
        Ok(jinja) => jinja,
        Err(why) => return Rendered { text: Err(why), leaves: true }.write(&mut socket),
    };
    Rendered { text: Ok(String::new()), leaves: false }.write(&mut socket)?;

    loop {
        restart_clock()?;
        let Some(variables) = frame::read(&mut socket, MAX_VARIABLES_BYTES)? else { return Ok(()) };
        let limit = text_limit(variables.len());
        let parsed = serde_json::from_slice(&variables).map_err(|e| RenderFailure::Broken(e.to_string()));
        drop(variables);
        let text = parsed.and_then(|variables| jinja.render(variables, limit));
        let leaves = address_space()? > start + MAX_KEPT_BYTES;
        Rendered { text, leaves }.write(&mut socket)?;
        if leaves {
            return Ok(());
        }
    }
}

/// Closes descriptors inherited from the parent, such as a lock.
fn leave_descriptors() {
    // SAFETY: nothing in this process has opened a descriptor yet. An old kernel without the call leaves them open,
    // which is no more than untidy.
    #[allow(unsafe_code)]
    unsafe {
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
    }
}

/// Bounds the address space and forbids core dumps. Returns the address space that the process has now.
fn limit() -> io::Result<u64> {
    // SAFETY: takes numbers. Without it a core dump that goes to a program would be made in spite of its limit.
    #[allow(unsafe_code)]
    succeed(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) })?;
    lower(libc::RLIMIT_CORE, 0)?;
    let start = address_space()?;
    lower(libc::RLIMIT_AS, start + MAX_GROWTH_BYTES)?;
    Ok(start)
}

/// Lowers a limit of this process, for good.
fn lower(resource: libc::__rlimit_resource_t, most: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a limit to be written.
    #[allow(unsafe_code)]
    succeed(unsafe { libc::getrlimit(resource, &mut limit) })?;
    let most = most.min(limit.rlim_max);
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: `limit` is a limit to be read.
    #[allow(unsafe_code)]
    succeed(unsafe { libc::setrlimit(resource, &limit) })
}

/// Processor time counts from here: after [`MAX_CPU_SECONDS`] of it SIGPROF ends the process.
fn restart_clock() -> io::Result<()> {
    let most = libc::timeval { tv_sec: MAX_CPU_SECONDS as libc::time_t, tv_usec: 0 };
    let timer = libc::itimerval { it_interval: most, it_value: most };
    // SAFETY: the default is no function of ours; `timer` is a timer to be read, and the old one is not asked for.
    #[allow(unsafe_code)]
    unsafe {
        libc::signal(libc::SIGPROF, libc::SIG_DFL);
        succeed(libc::setitimer(ITIMER_PROF, &timer, std::ptr::null_mut()))
    }
}

/// Bytes of address space of this process.
fn address_space() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.ok_or(ErrorKind::InvalidData)? << 10)
}

fn succeed(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
