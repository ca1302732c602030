//! The command: against our own server, over TLS, stopped in the middle, and when nothing works.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::{Fake, Reply, chat};
use crate::tls;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
    command.args(["bench", "serve"]).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn bench(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn failure(args: &[&str]) -> String {
    let output = bench(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
    assert!(stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1, "{args:?}: {stderr}");
    stderr
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A server that ends with the test.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Our own server with the demo model, and its URL.
fn serve(args: &[&str]) -> (Serving, String) {
    let cache = tempfile::tempdir().unwrap();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_moebius"));
    serve
        .args(["serve", "demo", "--port", "0", "--threads", "1", "--device", "cpu"])
        .args(args)
        .env("XDG_CACHE_HOME", cache.path());
    let mut server = Serving(serve.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let url = line.split_whitespace().find(|word| word.starts_with("http")).unwrap().to_string();
    (server, url)
}

#[test]
fn our_own_server_speaks_https_to_those_who_have_a_key() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls");
    let (cert, key) = (dir.join("cert.pem"), dir.join("key.pem"));
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "# ours\nsecret-1\n\nsecret-2\n").unwrap();
    let args = [
        "--tls-cert",
        cert.to_str().unwrap(),
        "--tls-key",
        key.to_str().unwrap(),
        "--api-key-file",
        keys.path().to_str().unwrap(),
    ];
    let (_server, url) = serve(&args);
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    let asked = |args: &[&str]| {
        let all = [
            &["--url", &url, "--concurrency", "2", "--requests", "4", "--output-tokens", "4", "--prompt-tokens", "20"]
                [..],
            args,
        ]
        .concat();
        command(&all).env("SSL_CERT_FILE", &cert).output().unwrap()
    };
    let answered = asked(&["--api-key", "secret-2", "--json"]);
    assert!(answered.status.success(), "{}", text(&answered.stderr));
    assert_eq!(serde_json::from_slice::<Value>(&answered.stdout).unwrap()["levels"][0]["completed"], 4);
    assert!(text(&asked(&["--api-key", "secret-3"]).stderr).contains("401"));
    let plain = failure(&["--url", &url.replace("https", "http"), "--requests", "1"]);
    assert!(!plain.is_empty(), "not without TLS");
    let swapped =
        ["serve", "demo", "--port", "0", "--tls-cert", key.to_str().unwrap(), "--tls-key", cert.to_str().unwrap()];
    let refused = Command::new(env!("CARGO_BIN_EXE_moebius")).args(swapped).output().unwrap();
    assert!(text(&refused.stderr).contains("cannot be used for TLS"), "{}", text(&refused.stderr));
}

#[test]
fn our_own_server_gives_what_is_asked() {
    let (_server, url) = serve(&[]);
    let url = url.as_str();
    for endpoint in ["chat", "completions"] {
        let args = ["--url", url, "--endpoint", endpoint, "--concurrency", "1,2,4", "--requests", "6", "--json"];
        let output = bench(&[&args[..], &["--prompt-tokens", "200", "--output-tokens", "12", "--seed", "5"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["model"], &report["notes"], &report["seed"]), (&json!("demo"), &json!([]), &json!(5)));
        let levels = report["levels"].as_array().unwrap();
        assert_eq!(levels.iter().map(|level| level["clients"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 4]);
        for level in levels {
            assert_eq!((&level["completed"], &level["failed"]), (&json!(6), &json!(0)), "{level}");
            assert_eq!(
                (&level["output_tokens"]["min"], &level["output_tokens"]["max"]),
                (&json!(12.0), &json!(12.0)),
                "{level}"
            );
            let prompt = level["prompt_tokens"]["mean"].as_f64().unwrap();
            assert!((150.0..250.0).contains(&prompt), "{level}");
            for field in ["first_token_ms", "inter_token_ms", "gap_ms", "latency_ms"] {
                assert!(level[field]["p50"].as_f64().unwrap() > 0.0, "{level}");
            }
            assert!(level["latency_ms"]["min"].as_f64() >= level["first_token_ms"]["min"].as_f64());
        }
    }
    assert!(failure(&["--url", url, "--model", "other"]).contains("--model"));
}

#[test]
fn https_is_spoken_to_servers_that_are_trusted() {
    let certificate = tls::certificate();
    let server = Fake::with_tls(Some(tls::config().into()), |body, _| Reply::Events(chat(body, 5, 1)));
    let url = format!("https://{}/v1", server.address);
    let args = ["--url", &url, "--concurrency", "2", "--requests", "4", "--output-tokens", "4", "--json"];
    let output = command(&args).env("SSL_CERT_FILE", &certificate).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["levels"][0]["completed"], &report["levels"][0]["failed"]), (&json!(4), &json!(0)));

    // Another name than the certificate's, and authorities that do not know it.
    let elsewhere = url.replace("127.0.0.1", "127.0.0.2");
    let output = command(&["--url", &elsewhere]).env("SSL_CERT_FILE", &certificate).output().unwrap();
    assert!(text(&output.stderr).contains("certificate"), "{}", text(&output.stderr));
    let empty = tempfile::NamedTempFile::new().unwrap();
    let output = command(&args).env("SSL_CERT_FILE", empty.path()).env_remove("SSL_CERT_DIR").output().unwrap();
    assert!(text(&output.stderr).contains("SSL_CERT_FILE"), "{}", text(&output.stderr));
}

#[test]
fn stopped_it_prints_what_it_has() {
    let server = Fake::new(|body, number| Reply::Events(chat(body, if number < 6 { 5 } else { 60_000 }, 1)));
    let child = command(&[
        "--url",
        &server.url(),
        "--concurrency",
        "1",
        "--requests",
        "50",
        "--warmup",
        "0",
        "--output-tokens",
        "4",
    ]);
    let mut child = { child }.spawn().unwrap();
    let waiting = || server.log.seen.lock().unwrap().len() > 6;
    for _ in 0..1000 {
        if waiting() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(waiting() && child.try_wait().unwrap().is_none());
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("1 client: 4 answers") && stdout.contains("stopped early"), "{stdout}");
}

#[test]
fn when_all_fail_so_does_the_command() {
    let server = Fake::new(|body, number| match number {
        0 | 1 => Reply::Events(chat(body, 1, 0)),
        _ => Reply::Json(500, json!({"error": {"message": "broken"}})),
    });
    let output = bench(&["--url", &server.url(), "--concurrency", "2", "--requests", "4"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("4 x HTTP 500: broken"), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("no request was answered"), "{}", text(&output.stderr));
}

#[test]
fn wrong_usage_is_named() {
    for args in [
        &["--concurrency", "x"][..],
        &["--concurrency", "1", "--rate", "2"],
        &["--requests", "1", "--duration", "5s"],
        &["--duration", "5 parsecs"],
        &["--duration", "-1s"],
        &["--duration", "."],
        &["--timeout", "1e999h"],
        &["--endpoint", "responses"],
        &["--prompts", "x", "--prompt-tokens", "4"],
        &["--api-key", "x", "--api-key-file", "y"],
        &["demo"],
    ] {
        assert_eq!(bench(args).status.code(), Some(2), "{args:?}");
    }
    assert!(failure(&["--concurrency", "0"]).contains("--concurrency is 0"));
    assert!(failure(&["--rate", "-1"]).contains("--rate is -1"));
    assert!(failure(&["--prompts", "/nowhere"]).contains("/nowhere"));
    assert!(failure(&["--api-key-file", "/nowhere"]).contains("/nowhere"));
    assert!(failure(&["--url", "http://127.0.0.1:1/v1"]).contains("start the server"));
    let help = text(&bench(&["--help"]).stdout);
    for flag in ["--url", "--concurrency", "--rate", "--shared-prefix-tokens", "Ctrl-C", "SSL_CERT_FILE"] {
        assert!(help.contains(flag), "{help}");
    }
}
