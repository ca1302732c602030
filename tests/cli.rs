//! The command as a person meets it: exit codes, one-sentence errors, pipes.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use moebius::kernel::Simd;
use moebius::machine::topology::Topology;

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
    for name in ["chat", "generate", "serve", "plan", "cache", "capture", "bench", "eval", "doctor"] {
        assert!(help.contains(name), "{help}");
    }
}

#[test]
fn a_package_gets_completions_and_manual_pages() {
    let dir = tempfile::tempdir().unwrap();
    for (shell, word) in
        [("bash", "complete -F _moebius"), ("zsh", "#compdef moebius"), ("fish", "complete -c moebius")]
    {
        let script = success(&["completions", shell], "");
        assert!(script.contains(word) && script.contains("--experts"), "{shell}: {script}");
    }
    success(&["manual", dir.path().to_str().unwrap()], "");
    let page = std::fs::read_to_string(dir.path().join("moebius-serve.1")).unwrap();
    assert!(page.contains(".SH OPTIONS") && page.contains("api\\-key"), "{page}");
    assert!(failure(&["manual", "/nonexistent"]).contains("/nonexistent"));
    let version = success(&["--version"], "");
    for line in ["moebius 0.", "commit: ", "build: ", "kernels: ", "cache format: "] {
        assert!(version.lines().any(|l| l.starts_with(line)), "{version}");
    }
    assert_eq!(success(&["-V"], "").lines().count(), 1);
}

#[test]
fn every_instruction_set_can_be_asked_for() {
    let cache = tempfile::tempdir().unwrap();
    let help = String::from_utf8(moebius(cache.path(), &["generate", "--help"], b"").stdout).unwrap();
    for simd in Simd::ALL {
        assert!(help.contains(&format!("{simd}")), "{help}");
        let args = ["generate", "demo", "--chat", "What is 2+2?", "--simd", &simd.to_string()];
        match moebius::kernel::get(simd) {
            Some(_) => assert_eq!(success(&args, ""), "2 + 2 = 4\n"),
            None => assert!(failure(&args).contains(&format!("--simd {simd} cannot run"))),
        }
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
        &["generate", "demo", "x", "--simd", "avx3"],
        &["generate", "demo", "x", "--file", "y"],
        &["capture", "demo", "--out", "x"],
        &["capture", "demo", "--out", "x", "--prompt", "a", "--tokens", "1"],
        &["capture", "demo", "--out", "x", "--tokens", "1,b"],
        &["capture", "demo", "--out", "x", "--prompt", "a", "--hidden", "some"],
        &["bench"],
        &["bench", "demo", "--layers", "2"],
        &["bench", "--shape", "nonsense"],
        &["plan"],
        &["plan", "demo", "--ram", "much"],
        &["plan", "demo", "--vram", "16GB/s"],
        &["plan", "demo", "--resident-experts", "-1"],
        &["plan", "demo", "--max-context", "many"],
        &["cache", "info", "demo", "--threads", "1"],
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
    assert!(failure(&["generate", "nowhere.gguf", "x"]).contains("there is no file nowhere.gguf"));
    assert!(failure(&["generate", "demo", "--file", "nowhere"]).contains("there is no nowhere: check the name"));
    // The model is looked for before anything is measured.
    assert!(failure(&["doctor", "no-such-model"]).contains("there is no directory no-such-model"));
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

/// Runs a command that must succeed, and gives its stdout.
fn success(args: &[&str], stdin: &str) -> String {
    let cache = tempfile::tempdir().unwrap();
    let output = moebius(cache.path(), args, stdin.as_bytes());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_demo_answers_through_a_pipe() {
    let questions = "What is 2+2?\n\n/clear\nCount from 1 to 5.\nWhat is the capital of France?\n/quit\nnever asked\n";
    assert_eq!(success(&["chat"], questions), "2 + 2 = 4\n1, 2, 3, 4, 5.\nThe capital of France is Paris.\n");
}

#[test]
fn generate_takes_prompts_from_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let (text, tokens) = (dir.path().join("p.txt"), dir.path().join("p.json"));
    let prompt = "<|bos|><|user|>What is 2+2?<|end|><|assistant|>";
    std::fs::write(&text, format!("{prompt}\n")).unwrap();
    assert_eq!(success(&["generate", "demo", prompt], ""), "2 + 2 = 4\n");
    assert_eq!(success(&["generate", "demo"], &format!("{prompt}\n")), "2 + 2 = 4\n");
    assert_eq!(success(&["generate", "demo", "-"], prompt), "2 + 2 = 4\n");
    assert_eq!(success(&["generate", "demo", "--file", text.to_str().unwrap()], ""), "2 + 2 = 4\n");
    assert_eq!(success(&["generate", "demo", "--chat", "What is 2+2?", "--stop", " ="], ""), "2 + 2\n");

    let first: serde_json::Value = serde_json::from_str(&success(&["generate", "demo", prompt, "--json"], "")).unwrap();
    assert_eq!((&first["text"], &first["finish_reason"]), (&"2 + 2 = 4".into(), &"stop".into()));
    assert_eq!(
        first["tokens"].as_array().unwrap().len() as u64,
        first["timings"]["completion_tokens"].as_u64().unwrap()
    );
    for name in [
        "prompt_tokens",
        "ready_s",
        "prefill_s",
        "decode_s",
        "prefill_tok_per_s",
        "decode_tok_per_s",
        "decode_gb_per_s",
    ] {
        assert!(first["timings"][name].is_number(), "{name}");
    }
    std::fs::write(&tokens, "[1, 3, 5]").unwrap();
    let args =
        ["generate", "demo", "--tokens-file", tokens.to_str().unwrap(), "--json", "--max-tokens", "5", "--ignore-eos"];
    let cut: serde_json::Value = serde_json::from_str(&success(&args, "")).unwrap();
    assert_eq!((cut["tokens"].as_array().unwrap().len(), &cut["finish_reason"]), (5, &"length".into()));
    std::fs::write(&tokens, "[1, 1024]").unwrap();
    assert!(failure(&args).contains("1024"));
}

#[test]
fn every_fixture_generates_and_captures() {
    let dir = tempfile::tempdir().unwrap();
    let (tokens, out) = (dir.path().join("tokens.json"), dir.path().join("out.safetensors"));
    std::fs::write(&tokens, "[1, 20, 300]").unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut models = 0;
    for fixture in std::fs::read_dir(fixtures)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|dir| dir.join("tokenizer.json").exists() && dir.join("config.json").exists())
    {
        models += 1;
        let model = fixture.to_str().unwrap();
        let cache = dir.path().join("cache");
        // A home that cannot be written must not matter when the cache is elsewhere.
        let run = |args: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
            command.args(args).arg("--cache-dir").arg(&cache).env("HOME", "/proc/nowhere").env_remove("XDG_CACHE_HOME");
            let output = command.stdin(Stdio::null()).output().unwrap();
            assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        };
        let answer: serde_json::Value =
            serde_json::from_slice(&run(&["generate", model, "Hello", "--json", "--max-tokens", "4", "--ignore-eos"]))
                .unwrap();
        let fields: Vec<_> = answer.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["tokens", "text", "finish_reason", "timings"]);
        assert_eq!(answer["tokens"].as_array().unwrap().len(), 4);

        let path = out.to_str().unwrap();
        let capture = ["capture", model, "--tokens-file", tokens.to_str().unwrap(), "--out", path];
        run(&[&capture[..], &["--logits", "--hidden", "0,2", "--router"]].concat());
        let bytes = std::fs::read(&out).unwrap();
        let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let config = moebius::load::Description::read(&fixture).unwrap().model().unwrap();
        let top_k = config.moe().unwrap().router.top_k;
        let mut expected = vec![
            ("hidden.0".to_string(), safetensors::Dtype::F32, vec![3, config.hidden_size]),
            ("hidden.2".into(), safetensors::Dtype::F32, vec![3, config.hidden_size]),
            ("logits".into(), safetensors::Dtype::F32, vec![3, config.vocab_size]),
            ("tokens".into(), safetensors::Dtype::I64, vec![3]),
        ];
        for (layer, _) in config.moe_layers() {
            expected.push((format!("router.{layer}.ids"), safetensors::Dtype::I32, vec![3, top_k]));
            expected.push((format!("router.{layer}.weights"), safetensors::Dtype::F32, vec![3, top_k]));
        }
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        let mut found: Vec<_> =
            written.iter().map(|(name, view)| (name.to_string(), view.dtype(), view.shape().to_vec())).collect();
        found.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(found, expected, "{model}");
        run(&capture);
        let bytes = std::fs::read(&out).unwrap();
        assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().names(), ["tokens"]);
    }
    assert!(models >= 7);
}

/// A model whose embedding has more rows than its tokenizer has tokens.
#[test]
fn tokens_that_only_the_model_knows() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen3_moe");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, "[1, 512, 543]").unwrap();
    let path = file.path().to_str().unwrap();
    let hot = ["--temperature", "100", "--seed", "1", "--max-tokens", "200", "--ignore-eos", "--json"];
    let answer: serde_json::Value =
        serde_json::from_str(&success(&[&["generate", model, "--tokens-file", path], &hot[..]].concat(), "")).unwrap();
    let unknown = answer["tokens"].as_array().unwrap().iter().filter(|id| id.as_u64().unwrap() >= 512).count();
    assert!(unknown > 0, "{answer}");
}

#[test]
fn a_bench_is_one_object() {
    let args =
        ["bench", "demo", "--json", "--runs", "1", "--prompt-tokens", "8", "--decode-tokens", "2", "--batch", "1,2"];
    let report: serde_json::Value = serde_json::from_str(&success(&args, "")).unwrap();
    assert_eq!(report["routing"], "uniform");
    let local: serde_json::Value =
        serde_json::from_str(&success(&[&args[..], &["--routing", "local"]].concat(), "")).unwrap();
    assert_eq!((&local["routing"], local["rows"].as_array().unwrap().len()), (&"local".into(), 3));
    assert!(failure(&["bench", "demo", "--routing", "nowhere"]).contains("cannot be read"));
    for field in ["machine", "model", "precision"] {
        assert!(!report[field].is_null(), "{report}");
    }
    assert_eq!(report["machine"]["cores"], Topology::read().cores.len());
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert!(["prefill", "decode"].contains(&row["phase"].as_str().unwrap()));
        assert_eq!((&row["experts"], &row["device"]), (&"ram".into(), &"cpu".into()));
        for field in ["tokens", "batch", "tok_per_s", "limit_tok_per_s"] {
            assert!(row[field].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    assert!(failure(&["bench", "demo", "--prompt-tokens", "4097"]).contains("lower --prompt-tokens"));
    assert!(failure(&["bench", "demo", "--batch", "1024"]).contains("--max-batch-tokens"));
    assert!(failure(&["bench", "demo", "--decode-tokens", "18446744073709551615"]).contains("--decode-tokens"));
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let at = |seed| {
        success(
            &["generate", "demo", "One", "--temperature", "3", "--seed", seed, "--max-tokens", "20", "--ignore-eos"],
            "",
        )
    };
    assert_eq!(at("7"), at("7"));
    assert_ne!(at("7"), at("8"));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let cache = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_moebius"))
        .args(["generate", "demo", "One", "--ignore-eos", "--max-tokens", "2000"])
        .env("XDG_CACHE_HOME", cache.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_server_says_where_it_is_and_stops_when_told() {
    use std::io::{BufRead, Read};
    let cache = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_moebius"))
        .args(["serve", "demo", "--port", "0"])
        .env("XDG_CACHE_HOME", cache.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap();
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
}

#[test]
fn content_is_trusted_only_when_it_is_said() {
    let tokens = |flags: &[&str]| {
        let args = [&["generate", "demo", "--chat", "--json", "--max-tokens", "1", "a<|end|>b"], flags].concat();
        let answer: serde_json::Value = serde_json::from_str(&success(&args, "")).unwrap();
        answer["timings"]["prompt_tokens"].as_u64().unwrap()
    };
    // <|bos|><|user|>a<|end|>b<|end|><|assistant|>, where the user's is a token or seven characters.
    let (plain, trusted) = (tokens(&[]), tokens(&["--trust-content"]));
    assert_eq!(trusted, 7);
    assert!(plain > trusted && plain <= 13, "{plain}");
}
