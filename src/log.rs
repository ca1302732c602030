//! Lines on stderr and in the log. A reader that is gone or stuck neither ends nor slows the writer: lines that do not
//! fit a queue are dropped and counted, and the next line that gets through reports their number.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::{Error, Result};

/// Bytes of a queue. An empty queue takes a longer line too.
const QUEUE_BYTES: usize = 1 << 20;
/// How long the end of the process waits for readers.
const PATIENCE: Duration = Duration::from_secs(1);

// Of the process, as stderr is.
static STDERR: OnceLock<Arc<LogQueue>> = OnceLock::new();
static FILE: OnceLock<Arc<LogQueue>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);
static REPORTED: AtomicU64 = AtomicU64::new(0);

/// Prints a line on stderr, if something reads it.
pub(crate) fn print(line: &str) {
    let line = format!("{line}\n");
    match STDERR.get() {
        Some(queue) => queue.push(line.as_bytes()),
        None => drop(io::stderr().write_all(line.as_bytes())),
    }
}

/// Queues stderr: from now on no writer waits for its reader. Errors: `Error::Resources`.
pub(crate) fn queue_stderr() -> Result<Arc<LogQueue>> {
    let queue = Arc::new(LogQueue::start(io::stderr())?);
    Ok(STDERR.get_or_init(|| queue).clone())
}

/// Logs to a file. Setting the flag makes the next line reopen it, after the file was moved away.
///
/// Errors: `Error::Invalid` when the file cannot be opened, else as [`queue_stderr`].
pub(crate) fn queue_file(path: &Path) -> Result<(Arc<LogQueue>, Arc<AtomicBool>)> {
    let file = LogFile::open(path)?;
    let moved = file.moved.clone();
    let queue = Arc::new(LogQueue::to(file)?);
    Ok((FILE.get_or_init(|| queue).clone(), moved))
}

/// Waits a moment for the last lines, before the process ends.
pub(crate) fn finish() {
    [&STDERR, &FILE].into_iter().filter_map(OnceLock::get).for_each(|queue| queue.finish(PATIENCE));
}

/// Lines that were not read or could not be written.
pub(crate) fn dropped_lines() -> u64 {
    DROPPED.load(Relaxed)
}

/// Lines that wait for a reader, and the thread that writes them. When the queue is dropped, the thread ends after the
/// last line.
pub struct LogQueue(Arc<LogShared>);

#[derive(Default)]
struct LogShared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>, // whole lines
    writing: bool,
    closed: bool,
}

impl LogQueue {
    /// A queue for `out`. Errors: `Error::Resources` when there is no descriptor or thread for it.
    pub fn start(out: impl AsFd) -> Result<Self> {
        let out = out.as_fd().try_clone_to_owned().map_err(refused)?;
        Self::to(File::from(out))
    }

    fn to(mut out: impl Write + Send + 'static) -> Result<Self> {
        let shared = Arc::<LogShared>::default();
        let lines = shared.clone();
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || while lines.write_next(&mut out) {})
            .map_err(refused)?;
        Ok(Self(shared))
    }

    /// Takes whole lines, or drops them.
    pub fn push(&self, lines: &[u8]) {
        let mut state = self.0.lock();
        if !state.waiting.is_empty() && state.waiting.len() + lines.len() > QUEUE_BYTES {
            count_dropped(lines);
            return;
        }
        state.waiting.extend_from_slice(lines);
        self.0.changed.notify_all();
    }

    /// Waits until all lines are written, but no longer than `patience`.
    pub fn finish(&self, patience: Duration) {
        let busy = |state: &mut State| state.writing || !state.waiting.is_empty();
        drop(self.0.changed.wait_timeout_while(self.0.lock(), patience, busy));
    }
}

impl Drop for LogQueue {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

/// For `tracing`.
impl Write for &LogQueue {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.push(lines);
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LogShared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for lines and writes them; false at the end.
    fn write_next(&self, out: &mut impl Write) -> bool {
        let idle = |state: &mut State| state.waiting.is_empty() && !state.closed;
        let mut state = self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        let lines = std::mem::take(&mut state.waiting);
        if lines.is_empty() {
            return false;
        }
        state.writing = true;
        drop(state);
        match write_patiently(out, &lines) {
            Ok(()) => report_dropped(),
            Err(_) => count_dropped(&lines),
        }
        self.lock().writing = false;
        self.changed.notify_all();
        true
    }
}

/// As `write_all`, but retries on a descriptor that another process has made non-blocking.
fn write_patiently(out: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(10)),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn count_dropped(lines: &[u8]) {
    DROPPED.fetch_add(lines.iter().filter(|&&byte| byte == b'\n').count() as u64, Relaxed);
}

/// Lines are read again: logs once how many were dropped.
fn report_dropped() {
    let dropped = dropped_lines();
    if REPORTED.fetch_max(dropped, Relaxed) < dropped {
        tracing::warn!(
            dropped,
            "lines of the log were dropped since the start: they were not read, or could not be written"
        );
    }
}

fn refused(e: io::Error) -> Error {
    Error::Resources(format!(
        "the log cannot be written ({e}): raise the limits on threads (`ulimit -u`) and open files (`ulimit -n`)"
    ))
}

/// A file to append to, reopened after it was moved away.
struct LogFile {
    path: PathBuf,
    file: File,
    moved: Arc<AtomicBool>,
}

impl LogFile {
    fn open(path: &Path) -> Result<Self> {
        let file = append(path).map_err(|e| {
            Error::Invalid(format!("the log cannot be written to {} ({e}): choose another --log-file", path.display()))
        })?;
        Ok(Self { path: path.into(), file, moved: Arc::default() })
    }
}

/// A pipe without a reader is an error here, and later writes do not wait for the reader.
fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(libc::O_NONBLOCK).open(path)
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.moved.swap(false, Relaxed) {
            match append(&self.path) {
                Ok(file) => self.file = file,
                Err(e) => {
                    tracing::error!(
                        "{} cannot be reopened ({e}): the log continues in the open file",
                        self.path.display()
                    )
                }
            }
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
