//! The built command as a server, on a port of its own.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Stdio};

use super::cache_dir;
use super::checkpoint::moebius;
use super::group::Group;

/// A server that runs until it is dropped.
pub struct Served {
    child: Child,
    _stdout: BufReader<ChildStdout>, // open, so that it can be written to
    /// What stands before the paths.
    pub url: String,
}

impl Served {
    /// `moebius serve MODEL` on the CPU with `options`, once it has said where it listens.
    pub fn start(model: &str, options: &[&str]) -> Self {
        Self::start_in(None, model, options)
    }

    /// The same in a control group.
    pub fn start_in(group: Option<&Group>, model: &str, options: &[&str]) -> Self {
        let own = ["serve", model, "--port", "0", "--device", "cpu", "--log", "off"];
        let mut command = moebius(&cache_dir(), &[&own, options].concat());
        if let Some(group) = group {
            command = group.within(&command);
            command.stdin(Stdio::null());
        }
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let url = line.split_once(" at ").and_then(|(_, rest)| rest.split_once("/v1 ")).map(|(url, _)| url.to_string());
        let Some(url) = url else {
            let _ = child.kill();
            panic!("the server says no address: {line:?}, {:?}", child.wait());
        };
        Self { child, _stdout: stdout, url }
    }

    pub fn address(&self) -> SocketAddr {
        self.url.trim_start_matches("http://").parse().unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
