//! Other people's clients against the built server: the official Python packages of OpenAI and Anthropic, and curl.
//!
//! The packages come from the package index into `target/`, once, in the versions that `tests/clients/requirements.txt`
//! names. Where that cannot be, their tests are skipped by name.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use common::served::Served;
use common::{cache_dir, demo_dir, root, say_skipped};
use serde_json::Value;

fn clients_dir() -> PathBuf {
    root().join("tests/clients")
}

/// A Python with the packages. Errors: why there is none.
fn python() -> Result<&'static Path, &'static str> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PYTHON.get_or_init(make_python).as_deref().map_err(String::as_str)
}

fn make_python() -> Result<PathBuf, String> {
    let (venv, requirements) = (cache_dir().with_file_name("clients"), clients_dir().join("requirements.txt"));
    let (python, installed) = (venv.join("bin/python"), venv.join("requirements.txt"));
    let wanted = std::fs::read(&requirements).unwrap();
    if std::fs::read(&installed).is_ok_and(|present| present == wanted) {
        return Ok(python);
    }
    let _ = std::fs::remove_dir_all(&venv);
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    let pip =
        ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20", "-r"];
    run(Command::new(&python).args(pip).arg(&requirements))?;
    std::fs::write(installed, wanted).unwrap();
    Ok(python)
}

/// Runs a command to its end. Errors: the last thing it said.
fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|e| format!("{name} cannot run: {e}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{name} fails: {}", said.trim().lines().last().unwrap_or("it says nothing"))),
    }
}

/// Runs one of the files in `tests/clients` with servers of its own.
fn runs(test: &str, file: &str, args: &[&Path]) {
    let python = match python() {
        Ok(python) => python,
        Err(why) => return say_skipped(test, why),
    };
    let tools = with_template(&clients_dir().join("hermes.jinja"));
    let tools_dir = tools.path().join("tools");
    let demo = Served::start("demo", &["--threads", "1"]);
    let tooled = Served::start(tools_dir.to_str().unwrap(), &["--threads", "1"]);
    let keyed =
        Served::start("demo", &["--threads", "1", "--api-key", "sesame", "--max-sequences", "1", "--max-queue", "1"]);
    let urls = [("MOEBIUS_URL", &demo.url), ("MOEBIUS_TOOLS_URL", &tooled.url), ("MOEBIUS_KEYED_URL", &keyed.url)];
    passes(Command::new(python).arg(clients_dir().join(file)).args(args).envs(urls));
}

/// Runs a file of `tests/clients`, which says what failed.
fn passes(command: &mut Command) {
    let output =
        command.env("NO_PROXY", "127.0.0.1").env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null()).output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {said}\n{complained}");
    println!("{said}");
}

/// The demo's checkpoint with another chat template.
fn with_template(template: &Path) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("tools");
    std::fs::create_dir(&dir).unwrap();
    for entry in std::fs::read_dir(demo_dir("moe-gqa")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
    }
    std::fs::copy(template, dir.join("chat_template.jinja")).unwrap();
    root
}

/// Templates of models that the demo can be asked through: they let it call without a thought.
const TEMPLATES: [&str; 12] = [
    "Qwen-Qwen3-0.6B",
    "GLM-4.6",
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V3.2",
    "deepseek-ai-DeepSeek-V4",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "google-gemma-4-31B-it",
    "ibm-granite-granite-4.0",
    "meetkai-functionary-medium-v3.1",
    "unsloth-mistral-Devstral-Small-2507",
];

#[test]
fn turns_with_tools() {
    let collection = root().join("target/vocabularies/templates");
    if !collection.is_dir() {
        return say_skipped("turns_with_tools", "no target/vocabularies/templates (.ci/run gets them)");
    }
    let python = match python() {
        Ok(python) => python,
        Err(why) => return say_skipped("turns_with_tools", why),
    };
    let models = TEMPLATES.map(|name| (name, with_template(&collection.join(format!("{name}.jinja")))));
    let start = |dir: &Path| Served::start(dir.join("tools").to_str().unwrap(), &["--threads", "1"]);
    let servers: Vec<(&str, Served)> = models.iter().map(|(name, dir)| (*name, start(dir.path()))).collect();
    let urls: Value =
        servers.iter().map(|(name, server)| (name.to_string(), Value::from(server.url.as_str()))).collect();
    let script = clients_dir().join("tool_turns.py");
    let url = servers[0].1.url.as_str(); // which the files' common part wants
    let unused = [("MOEBIUS_URL", url), ("MOEBIUS_TOOLS_URL", url), ("MOEBIUS_KEYED_URL", url)];
    passes(Command::new(python).arg(script).envs(unused).env("MOEBIUS_TEMPLATES", urls.to_string()));
}

#[test]
fn openai_chat() {
    runs("openai_chat", "openai_chat.py", &[]);
}

#[test]
fn openai_responses() {
    runs("openai_responses", "openai_responses.py", &[]);
}

#[test]
fn anthropic_messages() {
    runs("anthropic_messages", "anthropic_messages.py", &[]);
}

#[test]
fn schemas() {
    runs("schemas", "schemas.py", &[&root().join("tests/data/schemas.json")]);
}

/// What curl prints.
fn curl(args: &[&str], stdin: &[u8]) -> String {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--noproxy", "*", "--max-time", "60"]).args(args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let _ = child.stdin.take().unwrap().write_all(stdin);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "curl {args:?}: {}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn curl_as_in_everybodys_examples() {
    if Command::new("curl").arg("--version").output().is_err() {
        return say_skipped("curl_as_in_everybodys_examples", "there is no curl");
    }
    let server = Served::start("demo", &["--threads", "1"]);
    let (chat, models) = (format!("{}/v1/chat/completions", server.url), format!("{}/v1/models", server.url));
    let body = r#"{"model": "demo", "messages": [{"role": "user", "content": "What is 2+2?"}]}"#;
    let said = |text: &str| -> Option<String> {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        value["choices"][0]["message"]["content"].as_str().map(String::from)
    };
    let is_right =
        |args: &[&str]| assert_eq!(said(&curl(args, body.as_bytes())).as_deref(), Some("2 + 2 = 4"), "{args:?}");
    let json = ["-H", "Content-Type: application/json"];
    is_right(&[&json[..], &[&chat, "-d", body]].concat());
    is_right(&[&chat, "-d", body]); // as a form, by its header
    is_right(&[&chat, "-d", body, "-H", "Authorization: Bearer none", "--compressed"]);
    is_right(&[&chat, "--http1.0", "-d", body]);
    is_right(&[&chat, "-H", "Expect: 100-continue", "-d", body]);
    is_right(&[&chat, "-H", "Transfer-Encoding: chunked", "--data-binary", "@-"]);

    let streamed = curl(&["-N", &chat, "-d", &body.replace("\"model\"", "\"stream\": true, \"model\"")], b"");
    assert!(streamed.starts_with("data: {") && streamed.ends_with("data: [DONE]\n\n"), "{streamed}");
    let both = curl(&[&models, &models], b""); // on one connection
    assert_eq!(both.matches("\"id\":\"demo\"").count(), 2, "{both}");
    assert!(curl(&["-I", &format!("{}/health", server.url)], b"").starts_with("HTTP/1.1 200"));

    let status = ["-o", "/dev/null", "-w", "%{http_code}"];
    for (args, want) in [
        (&[&chat[..], "-d", "{"][..], "400"),
        (&[&chat], "405"),
        (&[&models, "-d", "{}"], "405"),
        (&[&format!("{models}/other")], "404"),
        (&[&chat, "-d", &body.replace("demo", "other")], "404"),
        // Larger than what curl sends without being asked to go on.
        (&[&chat, "--data-binary", "@-"], "400"),
    ] {
        let long = format!(r#"{{"messages": [{{"role": "user", "content": "{}"}}]}}"#, "word ".repeat(500_000));
        assert_eq!(curl(&[&status, args].concat(), long.as_bytes()), want, "{args:?}");
    }
    let refused = curl(&[&chat, "-i", "-d", "{}"], b"");
    assert!(refused.starts_with("HTTP/1.1 400") && refused.contains("x-request-id: req-"), "{refused}");
}
