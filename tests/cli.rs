//! The command as a person meets it: exit codes, one-sentence errors, pipes.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn moebius(cache: &Path, args: &[&str], stdin: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_moebius"))
        .args(args)
        .env("XDG_CACHE_HOME", cache)
        .env("HF_HOME", cache.join("hf"))
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that fails before it reads closes the pipe; that is its right.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    child.wait_with_output().unwrap()
}

/// Runs a command that must fail with one sentence, and gives it.
fn failure(args: &[&str]) -> String {
    let cache = tempfile::tempdir().unwrap();
    let output = moebius(cache.path(), args, b"");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
    assert!(stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1, "{args:?}: {stderr}");
    assert!(output.stdout.is_empty());
    stderr
}

#[test]
fn help_names_every_subcommand() {
    let cache = tempfile::tempdir().unwrap();
    let output = moebius(cache.path(), &["--help"], b"");
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for name in ["chat", "generate", "serve", "cache", "capture", "bench", "doctor"] {
        assert!(help.contains(name), "{help}");
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    let cache = tempfile::tempdir().unwrap();
    for args in [
        &[][..],
        &["nonsense"],
        &["generate"],
        &["generate", "demo", "x", "--experts", "int3"],
        &["generate", "demo", "x", "--group-size", "48"],
        &["generate", "demo", "x", "--file", "y"],
        &["capture", "demo", "--out", "x"],
        &["capture", "demo", "--out", "x", "--prompt", "a", "--tokens", "1"],
        &["capture", "demo", "--out", "x", "--tokens", "1,b"],
        &["capture", "demo", "--out", "x", "--prompt", "a", "--hidden", "some"],
        &["bench"],
        &["bench", "demo", "--layers", "2"],
        &["serve", "demo", "--port", "99999"],
    ] {
        let output = moebius(cache.path(), args, b"");
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn models_that_are_not_there() {
    assert!(failure(&["generate", "no-such-model", "x"]).contains("there is no directory no-such-model"));
    assert!(failure(&["generate", "./nowhere", "x"]).contains("there is no directory ./nowhere"));
    let offline = failure(&["generate", "org/name", "x"]);
    assert!(offline.contains("http://127.0.0.1:1") && offline.contains("directory"), "{offline}");

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    assert!(failure(&["generate", path, "x"]).contains("has no config.json"));
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    assert!(failure(&["generate", path, "x"]).contains("has no tokenizer.json"));
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    failure(&["generate", path, "x"]);
}

#[test]
fn prompts_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens.json");
    let path = file.to_str().unwrap();
    assert!(failure(&["generate", "demo", "--tokens-file", path]).contains("tokens.json"));
    for text in ["", "{}", "[1, -2]", "[1.5]", "[4294967296]", "[\"a\"]"] {
        std::fs::write(&file, text).unwrap();
        assert!(failure(&["generate", "demo", "--tokens-file", path]).contains("token ids"), "{text}");
    }
    std::fs::write(&file, b"\xff").unwrap();
    assert!(failure(&["generate", "demo", "--file", path]).contains("UTF-8"));
    assert!(failure(&["generate", "demo", "x", "--threads", "0"]).contains("--threads"));
}

#[test]
fn places_that_cannot_be_used() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let below = file.path().join("cache");
    assert!(failure(&["generate", "demo", "x", "--cache-dir", below.to_str().unwrap()]).contains("--cache-dir"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    assert!(failure(&["serve", "demo", "--port", &port]).contains("in use"));
}
