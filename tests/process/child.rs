//! A process under test that never outlives its test, and a server of it that is asked over a socket.
#![allow(unsafe_code)] // pipes and signals

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::common::checkpoint::moebius;

/// Long enough for a busy machine of two cores; what hangs takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Ends with the test.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// How it ends. Panics: it does not.
    pub(crate) fn end(&mut self) -> ExitStatus {
        wait_for("the process ends", || self.0.try_wait().unwrap())
    }

    pub(crate) fn signal(&self, signal: libc::c_int) {
        // SAFETY: the process is not waited for yet, so its number is its own.
        assert_eq!(unsafe { libc::kill(self.0.id() as libc::pid_t, signal) }, 0);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Asks again and again until there is an answer. Panics: there is none.
pub(crate) fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The exit code and stderr of a command that must end by itself.
pub(crate) fn ended(mut command: Command) -> (Option<i32>, String) {
    let mut running = Running::start({
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    });
    let status = running.end();
    let mut stderr = String::new();
    running.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (status.code(), stderr)
}

/// One sentence of a command that must fail.
pub(crate) fn sentence(command: Command) -> String {
    let (code, stderr) = ended(command);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1, "{stderr}");
    stderr
}

/// The ends of a pipe: to read and to write.
pub(crate) fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: there is room for two descriptors, which are ours afterwards.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    }
}

/// The end of a pipe that nobody reads any more.
pub(crate) fn unread() -> OwnedFd {
    pipe().1
}

/// `moebius serve` on a port that was free a moment ago.
pub(crate) struct Server {
    pub(crate) process: Running,
    port: u16,
}

impl Server {
    pub(crate) fn start(model: &str, cache: &Path, options: &[&str], streams: impl FnOnce(&mut Command)) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let own = ["serve", model, "--port", &port.to_string(), "--device", "cpu", "--threads", "1"];
        let mut command = moebius(cache, &[&own, options].concat());
        command.stdout(Stdio::null());
        streams(&mut command);
        Self { process: Running::start(command), port }
    }

    /// Once it has a model.
    pub(crate) fn ready(mut self) -> Self {
        wait_for("the server is ready", || {
            assert!(self.process.0.try_wait().unwrap().is_none(), "the server has ended");
            self.try_ask("GET", "/ready", "").filter(|answer| answer.starts_with("HTTP/1.1 200"))
        });
        self
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> String {
        self.try_ask(method, path, body).expect("an answer")
    }

    /// Some text of the model.
    pub(crate) fn complete(&self, tokens: usize) -> String {
        self.ask("POST", "/v1/completions", &completion(tokens))
    }

    pub(crate) fn try_ask(&self, method: &str, path: &str, body: &str) -> Option<String> {
        let mut socket = self.send(method, path, body)?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).ok()?;
        Some(answer).filter(|answer| !answer.is_empty())
    }

    /// The socket on which the answer comes.
    pub(crate) fn send(&self, method: &str, path: &str, body: &str) -> Option<TcpStream> {
        let mut socket = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json";
        write!(socket, "{method} {path} HTTP/1.1\r\n{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).ok()?;
        Some(socket)
    }

    /// SIGTERM, and how it ends then.
    pub(crate) fn stop(mut self) -> ExitStatus {
        self.process.signal(libc::SIGTERM);
        self.process.end()
    }
}

/// The body of a request for so many tokens.
pub(crate) fn completion(tokens: usize) -> String {
    format!(r#"{{"prompt": "Once", "max_tokens": {tokens}, "ignore_eos": true}}"#)
}
