//! The parent's side of the processes that render a template: their number, their time, and what their end means.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::child::{MAX_CPU_SECONDS, MAX_GROWTH_BYTES, MAX_VARIABLES_BYTES};
use super::frame::{self, Rendered};
use super::{RenderFailure, text_limit};
use crate::Error;

/// Maximum processes of one template. A rendering takes a millisecond, and each process up to [`MAX_GROWTH_BYTES`].
const MAX_PROCESSES: usize = 2;

/// Timeout of one rendering, and of the wait for a process. It is long because CPU time is bounded, and the machine may
/// be busy.
const PATIENCE: Duration = Duration::from_secs(20);

type Result<T> = std::result::Result<T, RenderFailure>;

/// The processes of one template. They are kept because starting one takes longer than rendering. A process that
/// exceeds a limit is replaced.
pub(super) struct Processes {
    command: &'static [OsString],
    pool: Mutex<ProcessPool>,
    freed: Condvar,
}

struct ProcessPool {
    free: usize,
    idle: Vec<Process>,
}

impl Processes {
    /// Starts the first process. Errors: the template cannot be compiled.
    pub(super) fn start(command: &'static [OsString], source: &str) -> Result<Self> {
        let first = Process::start(command, source)?;
        Ok(Self {
            command,
            pool: Mutex::new(ProcessPool { free: MAX_PROCESSES, idle: vec![first] }),
            freed: Condvar::new(),
        })
    }

    /// Renders variables, given as JSON.
    pub(super) fn render(&self, source: &str, variables: &[u8]) -> Result<String> {
        if variables.len() > MAX_VARIABLES_BYTES {
            return Err(RenderFailure::Broken(format!("it has more than {} MiB", MAX_VARIABLES_BYTES >> 20)));
        }
        let mut pooled = self.checkout()?;
        let mut process = match pooled.idle.take() {
            Some(process) => process,
            None => Process::start(self.command, source)?,
        };
        let answer = process.ask(variables, text_limit(variables.len()))?;
        if !answer.leaves {
            pooled.idle = Some(process);
        }
        answer.text
    }

    /// The right to render, with an idle process if there is one.
    fn checkout(&self) -> Result<PooledProcess<'_>> {
        let wait = self.freed.wait_timeout_while(self.lock(), PATIENCE, |pool| pool.free == 0);
        let (mut pool, waited) = wait.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            let message = "the model's chat template is slow, and too many conversations wait for it: try again later";
            return Err(RenderFailure::Machine(Error::Busy(message.into())));
        }
        pool.free -= 1;
        // A process that was killed is replaced.
        let idle =
            std::iter::from_fn(|| pool.idle.pop()).find_map(|mut process| process.is_running().then_some(process));
        Ok(PooledProcess { of: self, idle })
    }

    fn lock(&self) -> MutexGuard<'_, ProcessPool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to one rendering. Its process returns to the pool when it is dropped.
struct PooledProcess<'a> {
    of: &'a Processes,
    idle: Option<Process>,
}

impl Drop for PooledProcess<'_> {
    fn drop(&mut self) {
        let mut pool = self.of.lock();
        pool.free += 1;
        pool.idle.extend(self.idle.take());
        self.of.freed.notify_one();
    }
}

/// A process with the template, killed and reaped when it is dropped.
struct Process {
    child: Child,
    socket: UnixStream,
}

impl Process {
    fn start(command: &[OsString], source: &str) -> Result<Self> {
        let cannot = |e: io::Error| {
            let message = format!(
                "cannot start {}, which renders chat templates: {e}; free memory, or allow more processes (ulimit -u)",
                command[0].display()
            );
            RenderFailure::Machine(Error::Resources(message))
        };
        let (socket, theirs) = UnixStream::pair().map_err(cannot)?;
        let child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A backtrace would not be read, and takes long.
            .env("RUST_BACKTRACE", "0")
            // In its own process group, so that Ctrl-C in a terminal does not reach it. It ends with the socket,
            // however this process ends.
            .process_group(0)
            .spawn()
            .map_err(cannot)?;
        let mut process = Self { child, socket };
        process.ask(source.as_bytes(), 0)?.text?;
        Ok(process)
    }

    /// Sends one frame and waits for the answer.
    fn ask(&mut self, frame: &[u8], text_limit: usize) -> Result<Rendered> {
        let mut socket = Timed { socket: &self.socket, until: Instant::now() + PATIENCE };
        let answer = frame::write(&mut socket, &[frame]).and_then(|()| Rendered::read(&mut socket, text_limit));
        answer.map_err(|e| self.end(&e))
    }

    /// Why the process failed, after an error on its socket.
    fn end(&mut self, failure: &io::Error) -> RenderFailure {
        // A process that has closed its socket is already ending, so its exit status counts.
        let _ = self.child.kill();
        let status = self.child.wait();
        let closed =
            matches!(failure.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
        let late = matches!(failure.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        match status.as_ref().ok().and_then(ExitStatusExt::signal) {
            _ if late => RenderFailure::Broken(format!("it does not finish within {} seconds", PATIENCE.as_secs())),
            Some(libc::SIGPROF) if closed => {
                RenderFailure::Broken(format!("it takes more than {MAX_CPU_SECONDS} seconds"))
            }
            Some(_) if closed => RenderFailure::Broken(format!(
                "it nests too deeply, or takes more than {} MiB of memory",
                MAX_GROWTH_BYTES >> 20
            )),
            _ => {
                let status = status.map_or_else(|e| e.to_string(), |status| status.to_string());
                let message = format!(
                    "the process that renders chat templates does not work ({failure}; {status}): install moebius \
                     again"
                );
                RenderFailure::Machine(Error::Resources(message))
            }
        }
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A socket whose uses together have one deadline.
struct Timed<'a> {
    socket: &'a UnixStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_render_is_named() {
        for (program, words) in [
            ("/nonexistent/moebius", "cannot start /nonexistent/moebius"),
            ("/bin/true", "does not work"),
            ("/bin/false", "exit status: 1"),
        ] {
            let command = vec![OsString::from(program)].leak();
            match Processes::start(command, "x").err() {
                Some(RenderFailure::Machine(Error::Resources(message))) => {
                    assert!(message.contains(words), "{message}")
                }
                _ => panic!("{program} is taken"),
            }
        }
    }
}
