//! SIGHUP: the log file was moved away, or the terminal is gone.
#![allow(unsafe_code)] // a terminal

use std::fs::File;
use std::io::Read;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;

use super::child::{Server, completion, sentence, wait_for};
use super::common::checkpoint::moebius;

fn log_of(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn start(cache: &Path, options: &[&str]) -> Server {
    Server::start("demo", cache, options, |command| {
        command.stderr(Stdio::null());
    })
    .ready()
}

/// A request whose answer takes a while, once it runs.
fn running_answer(server: &Server) -> TcpStream {
    let socket = server.send("POST", "/v1/completions", &completion(2000)).unwrap();
    wait_for("the request runs", || {
        server.ask("GET", "/metrics", "").contains("\nmoebius_requests_running 1\n").then_some(())
    });
    socket
}

/// The rest of an answer of 2,000 tokens.
fn is_whole(mut answer: TcpStream) {
    let mut text = String::new();
    answer.read_to_string(&mut text).unwrap();
    assert!(
        text.starts_with("HTTP/1.1 200") && text.contains("\"completion_tokens\":2000"),
        "{}",
        &text[..text.len().min(300)]
    );
}

#[test]
fn a_log_that_was_moved_away_is_opened_again_and_answers_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let (path, old) = (dir.path().join("log"), dir.path().join("log.1"));
    std::fs::write(&path, "from before\n").unwrap();
    let server = start(&dir.path().join("cache"), &["--log-file", path.to_str().unwrap()]);
    server.ask("GET", "/v1/first", "");
    wait_for("the first line", || log_of(&path).contains("/v1/first").then_some(()));
    assert!(log_of(&path).starts_with("from before\n"), "appended");

    let answer = running_answer(&server);
    std::fs::rename(&path, &old).unwrap();
    server.process.signal(libc::SIGHUP);
    wait_for("the new file", || log_of(&path).contains("SIGHUP").then_some(()));
    server.ask("GET", "/v1/second", "");
    is_whole(answer);
    wait_for("the second line", || log_of(&path).contains("/v1/second").then_some(()));
    assert!(!log_of(&old).contains("/v1/second") && !log_of(&path).contains("/v1/first"));
    assert_eq!(server.stop().code(), Some(0));
    assert!(log_of(&path).contains("stopping"), "the last line is there: {}", log_of(&path));
}

#[test]
fn a_log_that_cannot_be_opened_again_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, kept) = (dir.path().join("logs"), dir.path().join("kept"));
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("log");
    let server = start(&dir.path().join("cache"), &["--log-file", path.to_str().unwrap()]);
    std::fs::hard_link(&path, &kept).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    server.process.signal(libc::SIGHUP);
    wait_for("words about it", || log_of(&kept).contains("cannot be reopened").then_some(()));
    server.ask("GET", "/v1/later", "");
    wait_for("later lines", || log_of(&kept).contains("/v1/later").then_some(()));
    assert_eq!(server.stop().code(), Some(0));
}

#[test]
fn without_a_log_file_nothing_happens() {
    let cache = tempfile::tempdir().unwrap();
    let server = start(cache.path(), &[]);
    let answer = running_answer(&server);
    server.process.signal(libc::SIGHUP);
    is_whole(answer);
    assert!(server.complete(1).starts_with("HTTP/1.1 200"));
    assert_eq!(server.stop().code(), Some(0));
}

/// A terminal: the side of the person and that of the program.
fn terminal() -> (OwnedFd, OwnedFd) {
    // SAFETY: a new descriptor is ours.
    let person = unsafe { OwnedFd::from_raw_fd(libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC)) };
    let mut name = [0; 128];
    // SAFETY: the name is shorter than its room.
    let made = unsafe {
        libc::grantpt(person.as_raw_fd()) == 0
            && libc::unlockpt(person.as_raw_fd()) == 0
            && libc::ptsname_r(person.as_raw_fd(), name.as_mut_ptr(), name.len()) == 0
    };
    assert!(made);
    // SAFETY: the call has written a name that ends with a zero.
    let path = unsafe { std::ffi::CStr::from_ptr(name.as_ptr()) }.to_str().unwrap();
    (person, File::options().read(true).write(true).open(path).unwrap().into())
}

#[test]
fn a_server_ends_with_its_terminal_and_answers_may_end() {
    // SAFETY: no handler. Under `nohup` the tests ignore the signal, and their children would.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
    let cache = tempfile::tempdir().unwrap();
    let (person, program) = terminal();
    let log = cache.path().join("log");
    let mut server = Server::start("demo", cache.path(), &["--log-file", log.to_str().unwrap()], |command| {
        command.stderr(program);
    })
    .ready();
    let answer = running_answer(&server);
    drop(person);
    // The shell sends it and the system does; that it comes twice is no impatience.
    server.process.signal(libc::SIGHUP);
    wait_for("the server stops", || log_of(&log).contains("stopping").then_some(()));
    server.process.signal(libc::SIGHUP);
    is_whole(answer);
    assert_eq!(server.process.end().code(), Some(0));
}

#[test]
fn a_log_file_that_cannot_be_opened_is_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    super::places::make_pipe(&pipe);
    for path in ["/nowhere/log", dir.path().to_str().unwrap(), pipe.to_str().unwrap()] {
        let words = sentence(moebius(dir.path(), &["serve", "demo", "--port", "0", "--log-file", path]));
        assert!(words.contains(path) && words.contains("choose another --log-file"), "{words}");
    }
}
