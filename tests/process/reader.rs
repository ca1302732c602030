//! Who reads stdout and stderr may be gone, or stuck.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Stdio;

use super::child::{Running, Server, ended, pipe, unread, wait_for};
use super::common::checkpoint::{files, moebius};

/// Makes a pipe's end take no more, and writes wait.
#[allow(unsafe_code)] // fcntl
fn fill(end: &OwnedFd) {
    let blocking = |wanted: bool| {
        let flags = if wanted { 0 } else { libc::O_NONBLOCK };
        // SAFETY: the descriptor is open; this changes no memory.
        assert_eq!(unsafe { libc::fcntl(end.as_raw_fd(), libc::F_SETFL, flags) }, 0);
    };
    blocking(false);
    let mut file = File::from(end.try_clone().unwrap());
    while file.write(&[b'.'; 4096]).is_ok() {}
    blocking(true);
}

/// Requests whose lines in the log are 30 KB long each.
fn ask_at_length(server: &Server, requests: usize) {
    for _ in 0..requests {
        let answer = server.ask("GET", &format!("/v1/{}", "x".repeat(30_000)), "");
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    }
}

/// What `/metrics` says.
fn dropped(server: &Server) -> u64 {
    let metrics = server.ask("GET", "/metrics", "");
    let line = metrics.lines().find(|line| line.starts_with("moebius_log_lines_dropped_total ")).expect("a counter");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_server_whose_stderr_is_full_answers_counts_and_tells() {
    let cache = tempfile::tempdir().unwrap();
    for (form, count) in [("text", "dropped="), ("json", "\"dropped\":")] {
        // A cache to be replaced is a line on stderr while the model is loaded.
        assert_eq!(ended(moebius(cache.path(), &["cache", "build", "demo"])).0, Some(0));
        let name = files(cache.path()).into_iter().find(|name| name.ends_with(".moebius")).unwrap();
        File::options().write(true).open(cache.path().join(name)).unwrap().set_len(4096).unwrap();

        let (reader, stderr) = pipe();
        fill(&stderr);
        let server = Server::start("demo", cache.path(), &["--log", form], |command| {
            command.stderr(stderr);
        })
        .ready();
        ask_at_length(&server, 100);
        let before = dropped(&server);
        assert!((10..=100).contains(&before), "{before} lines");
        let read = std::thread::spawn(move || {
            let mut text = String::new();
            File::from(reader).read_to_string(&mut text).unwrap();
            text
        });
        ask_at_length(&server, 1);
        let all = dropped(&server);
        assert_eq!(server.stop().code(), Some(0));
        let text = read.join().unwrap();
        assert!(
            text.contains(&format!("{count}{all}"))
                && text.contains("stopping")
                && text.contains("replacing the cache"),
            "{all}"
        );
        let ours = text.trim_start_matches('.').lines().filter(|line| line.contains("/v1/xxx")).count() as u64;
        assert_eq!(ours + all, 101, "a line is written or counted");
        if form == "json" {
            let lines = text.lines().filter(|line| line.contains(count));
            lines.for_each(|line| assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "{line}"));
        }
    }
}

#[test]
fn a_server_whose_stderr_is_never_read_works_and_ends() {
    for form in ["text", "json", "off"] {
        let cache = tempfile::tempdir().unwrap();
        let (reader, stderr) = pipe();
        fill(&stderr);
        let server = Server::start("demo", cache.path(), &["--log", form], |command| {
            command.stdout(stderr.try_clone().unwrap()).stderr(stderr);
        })
        .ready();
        ask_at_length(&server, 100);
        assert!(server.complete(4).starts_with("HTTP/1.1 200"));
        assert_eq!(server.stop().code(), Some(0));
        drop(reader);
    }
}

#[test]
fn a_server_whose_streams_are_gone_stays() {
    for form in ["text", "json", "off"] {
        let cache = tempfile::tempdir().unwrap();
        let server = Server::start("demo", cache.path(), &["--log", form], |command| {
            command.stdout(unread()).stderr(unread());
        })
        .ready();
        for _ in 0..3 {
            assert!(server.complete(4).starts_with("HTTP/1.1 200"));
        }
        ask_at_length(&server, 3);
        // A thread of its own writes the lines, and counts those that it could not write.
        wait_for("three lines are counted", || (form == "off" || dropped(&server) >= 3).then_some(()));
        assert_eq!(server.stop().code(), Some(0));
    }
}

#[test]
fn an_error_that_nobody_reads_is_an_error_still() {
    let cache = tempfile::tempdir().unwrap();
    let code = |args: &[&str]| {
        let mut command = moebius(cache.path(), args);
        command.stdout(Stdio::null()).stderr(unread());
        Running::start(command).end().code()
    };
    assert_eq!(code(&["generate", "./nowhere", "x"]), Some(1));
    assert_eq!(code(&["serve", "./nowhere", "--port", "0"]), Some(1));
    assert_eq!(code(&["serve", "demo", "--port", "0", "--log-file", "/nowhere/log"]), Some(1));
    // It has words for stderr too.
    assert_eq!(code(&["cache", "build", "demo"]), Some(0));
}

#[test]
fn a_reader_that_leaves_is_none_of_a_full_disk() {
    let cache = tempfile::tempdir().unwrap();
    let run = |stdout: Stdio| {
        let mut command = moebius(cache.path(), &["generate", "demo", "One", "--ignore-eos", "--max-tokens", "200"]);
        command.stdout(stdout).stderr(Stdio::piped());
        let mut running = Running::start(command);
        let code = running.end().code();
        let mut stderr = String::new();
        running.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (code, stderr)
    };
    assert_eq!(run(unread().into()), (Some(0), String::new()));
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (code, stderr) = run(full.into());
    assert!(code == Some(1) && stderr.starts_with("error: stdout: No space"), "{code:?} {stderr}");
}
