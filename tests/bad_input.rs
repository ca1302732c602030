//! The command on input that cannot work: one sentence that names the fault and the remedy, and nothing half-written.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Output;

use common::checkpoint::{Checkpoint, files, moebius};
use common::{fixture_dir, say_skipped, tls};
use serde_json::{Value, json};
use tokio_rustls::rustls::{ServerConnection, StreamOwned};

const TOKENS: [&str; 4] = ["MODEL", "--tokens", "1,2,3", "--logits"];
const EXPERT: &str = "model.layers.1.mlp.experts.3.up_proj.weight";
const DENSE: &str = "model.layers.1.self_attn.o_proj.weight";
const WEIGHTS: &str = "model.safetensors";

fn qwen() -> Checkpoint {
    Checkpoint::copy_of(&fixture_dir("qwen3_moe"))
}

/// The sentence of a command that failed as it should.
fn sentence(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1, "{stderr}");
    assert!(!stderr.contains("panic") && !stderr.contains("internal error"), "{stderr}");
    stderr
}

/// A file under its temporary name, or a lock.
fn is_unfinished(name: &str) -> bool {
    [".partial", ".tmp", ".lock"].iter().any(|end| name.ends_with(end))
}

#[track_caller]
fn assert_says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

/// Runs a command that must fail, saying `words`, and leave nothing unfinished behind.
#[track_caller]
fn fails(checkpoint: &Checkpoint, args: &[&str], words: &[&str]) {
    let text = sentence(&checkpoint.run(args));
    assert_says(&text, words);
    let left: Vec<_> = files(&checkpoint.cache()).into_iter().filter(|name| is_unfinished(name)).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// `capture` and `cache build` read checkpoints their own ways: both must refuse, and `capture` write nothing.
#[track_caller]
fn refused(checkpoint: &Checkpoint, words: &[&str]) {
    let out = checkpoint.beside("out.safetensors");
    fails(checkpoint, &[&["capture", "--out", out.to_str().unwrap()], &TOKENS[..]].concat(), words);
    assert!(!out.exists());
    fails(checkpoint, &["cache", "build", "MODEL"], words);
}

fn of(header: &Value, name: &str) -> std::ops::Range<usize> {
    let offset = |i: usize| header[name]["data_offsets"][i].as_u64().unwrap() as usize;
    offset(0)..offset(1)
}

#[test]
fn files_that_are_missing() {
    refused(qwen().remove("config.json"), &["has no config.json"]);
    refused(qwen().remove(WEIGHTS), &["holds no *.safetensors"]);
    fails(qwen().remove("tokenizer.json"), &["generate", "MODEL", "x"], &["has no tokenizer.json", "save_pretrained"]);
    let sharded = || Checkpoint::copy_of(&fixture_dir("qwen3_moe_dense_layer_sharded"));
    refused(
        sharded().remove("model-00002-of-00003.safetensors"),
        &["model-00002-of-00003.safetensors", "missing", "download"],
    );
    let swapped = sharded();
    let (a, b, c) = (
        swapped.file("model-00001-of-00003.safetensors"),
        swapped.file("model-00002-of-00003.safetensors"),
        swapped.file("x"),
    );
    for (from, to) in [(&a, &c), (&b, &a), (&c, &b)] {
        std::fs::rename(from, to).unwrap();
    }
    refused(&swapped, &["is missing, although", "download"]);
}

#[test]
fn configs_that_cannot_be_run() {
    let named = [
        "`mamba9` is not supported",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
        "kimi_k25",
        "qwen3_moe",
        "glm4_moe",
        "gpt_oss",
        "qwen3_next",
    ];
    refused(qwen().config(json!({"model_type": "mamba9"})), &named);
    refused(
        qwen().config(json!({"quantization_config": {"quant_method": "bitsandbytes"}})),
        &["quantized with `bitsandbytes`", "another"],
    );
    refused(qwen().config(json!({"num_experts": 0})), &["config.json", "`num_experts`"]);
    refused(qwen().config(json!({"num_hidden_layers": 16_777_216})), &["config.json", "`num_hidden_layers`"]);
    refused(qwen().bytes("config.json", |bytes| bytes.truncate(100)), &["config.json", "JSON"]);
    refused(qwen().bytes("config.json", |bytes| bytes[3] = 0xff), &["config.json", "download"]);
    // One more layer and one more expert than there are.
    refused(qwen().config(json!({"num_hidden_layers": 4})), &["layers.3", "missing"]);
    refused(qwen().config(json!({"num_experts": 9})), &["experts.8", "missing"]);
}

#[test]
fn tensors_that_are_not_what_the_config_says() {
    let expert_gone = |h: &mut Value, _: &mut Vec<u8>| {
        let value = h.as_object_mut().unwrap().remove(EXPERT).unwrap();
        h["another"] = value;
    };
    refused(qwen().tensors(WEIGHTS, expert_gone), &[EXPERT, "missing"]);
    refused(qwen().tensors(WEIGHTS, |h, _| h[EXPERT]["shape"] = json!([128, 64])), &[EXPERT, "[128, 64]", "[64, 128]"]);
    refused(qwen().tensors(WEIGHTS, |h, _| h[EXPERT]["dtype"] = json!("I16")), &[EXPERT, "I16"]);
    let as_i64 = |h: &mut Value, _: &mut Vec<u8>| {
        h[EXPERT]["dtype"] = json!("I64");
        h[EXPERT]["shape"] = json!([64, 32]);
    };
    refused(qwen().tensors(WEIGHTS, as_i64), &[EXPERT]);
    refused(
        qwen().tensors(WEIGHTS, |h, data| data[of(h, EXPERT)][100..102].copy_from_slice(&[0xc0, 0x7f])),
        &[EXPERT, "NaN"],
    );
    refused(
        qwen().tensors(WEIGHTS, |h, data| data[of(h, EXPERT)][100..102].copy_from_slice(&[0x80, 0xff])),
        &[EXPERT, "inf"],
    );
}

#[test]
fn dense_tensors_that_are_not_what_the_config_says() {
    let refused = |checkpoint: &Checkpoint, words: &[&str]| {
        let out = checkpoint.beside("out.safetensors");
        fails(checkpoint, &[&["capture", "--out", out.to_str().unwrap()], &TOKENS[..]].concat(), words);
        assert!(!out.exists());
    };
    let gone = |h: &mut Value, _: &mut Vec<u8>| {
        let value = h.as_object_mut().unwrap().remove(DENSE).unwrap();
        h["another"] = value;
    };
    refused(qwen().tensors(WEIGHTS, gone), &[DENSE, "missing"]);
    refused(
        qwen().tensors(WEIGHTS, |h, _| h[DENSE]["shape"] = json!([192, 128])),
        &[DENSE, "[192, 128]", "[128, 192]"],
    );
    refused(qwen().tensors(WEIGHTS, |h, _| h[DENSE]["dtype"] = json!("I16")), &[DENSE, "I16"]);
    for name in
        [DENSE, "model.norm.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight", "model.embed_tokens.weight"]
    {
        refused(
            qwen().tensors(WEIGHTS, |h, data| data[of(h, name)][10..12].copy_from_slice(&[0xc0, 0x7f])),
            &[name, "NaN"],
        );
    }
}

#[test]
fn safetensors_that_lie() {
    refused(qwen().bytes(WEIGHTS, |bytes| bytes.truncate(bytes.len() - 1)), &[WEIGHTS, "cut off", "download"]);
    refused(qwen().bytes(WEIGHTS, |bytes| bytes.truncate(5)), &[WEIGHTS, "download"]);
    refused(qwen().bytes(WEIGHTS, Vec::clear), &[WEIGHTS, "download"]);
    for claimed in [1u64 << 60, 99_000_000, 7, u64::MAX] {
        refused(
            qwen().bytes(WEIGHTS, |bytes| bytes[..8].copy_from_slice(&claimed.to_le_bytes())),
            &[WEIGHTS, "header", "download"],
        );
    }
    refused(qwen().tensors(WEIGHTS, |h, _| h[DENSE]["data_offsets"] = json!([0, u64::MAX])), &[WEIGHTS, "download"]);
    refused(qwen().tensors(WEIGHTS, |h, _| h[DENSE]["shape"] = json!([u64::MAX, 192])), &[WEIGHTS, "download"]);
}

#[test]
fn models_that_do_not_fit_into_memory() {
    let huge = json!({"hidden_size": 1 << 20, "moe_intermediate_size": 1 << 20, "num_hidden_layers": 1000});
    let size = qwen();
    size.config(huge);
    for dense in ["bf16", "int8"] {
        fails(&size, &["generate", "MODEL", "x", "--dense", dense], &["GiB", "free"]);
    }
    fails(&size, &["generate", "MODEL", "x", "--experts", "bf16"], &["GiB", "free", "more memory"]);
    assert!(files(&size.cache()).is_empty());
    // The largest numbers that a config may hold, together.
    let max = 1 << 24;
    size.config(json!({"hidden_size": max, "moe_intermediate_size": max, "num_hidden_layers": 4096, "head_dim": max,
        "num_attention_heads": max, "num_key_value_heads": max, "vocab_size": max, "num_experts": 64}));
    fails(&size, &["generate", "MODEL", "x", "--experts", "bf16"], &["fits into no machine", "config.json"]);

    let context = qwen();
    context.config(
        json!({"max_position_embeddings": max, "num_attention_heads": 512, "num_key_value_heads": 512, "head_dim": 64}),
    );
    fails(&context, &["generate", "MODEL", "x", "--max-context", "16777216"], &["GiB", "free", "use --max-context "]);
}

#[test]
fn contexts_and_prompts_that_are_too_long() {
    let model = qwen();
    fails(&model, &["generate", "MODEL", "x", "--max-context", "40961"], &["--max-context 40961", "40960"]);
    let tokens = model.beside("tokens.json");
    std::fs::write(&tokens, json!(vec![1; 100]).to_string()).unwrap();
    let tokens = tokens.to_str().unwrap();
    let short = ["--tokens-file", tokens, "--max-context", "64"];
    fails(&model, &[&["generate", "MODEL"], &short[..]].concat(), &["100 tokens", "64", "--max-context"]);
    let out = model.beside("out.safetensors");
    let capture = ["capture", "MODEL", "--out", out.to_str().unwrap()];
    fails(&model, &[&capture, &short[..]].concat(), &["100 tokens", "64", "--max-context"]);
    assert!(!out.exists());
}

#[test]
fn prompts_that_are_no_prompts() {
    let model = qwen();
    let tokens = model.beside("tokens.json");
    let file = tokens.to_str().unwrap();
    let out = model.beside("out.safetensors");
    let capture = ["capture", "MODEL", "--out", out.to_str().unwrap(), "--tokens-file", file];
    let generate = ["generate", "MODEL", "--tokens-file", file];
    for command in [&capture[..], &generate] {
        fails(&model, command, &["tokens.json"]);
        for text in ["", "[1, 2", "{\"tokens\": [1]}", "[-1]", "[1.5]", "[\"1\"]", "[4294967296]", "null"] {
            std::fs::write(&tokens, text).unwrap();
            fails(&model, command, &["tokens.json", "JSON array of token ids"]);
        }
        std::fs::write(&tokens, "[]").unwrap();
        fails(&model, command, &["prompt is empty"]);
        std::fs::write(&tokens, "[1, 544]").unwrap();
        fails(&model, command, &["token id 544", "544"]);
        std::fs::remove_file(&tokens).unwrap();
    }
    fails(&model, &["generate", "MODEL", ""], &["prompt is empty"]);
    fails(&model, &[&capture[..4], &["--prompt", ""]].concat(), &["prompt is empty"]);
    fails(&model, &[&capture[..4], &["--tokens", "1", "--hidden", "3"]].concat(), &["layer 3", "0 to 2"]);
    assert!(!out.exists());
}

#[test]
fn a_chat_without_a_template() {
    let model = qwen();
    model.json("tokenizer_config.json", |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    fails(&model, &["chat", "MODEL"], &["no chat template", "generate", "chat_template.jinja"]);
    model.json("tokenizer_config.json", |config| config["chat_template"] = json!("{% for m in messages %}"));
    fails(&model, &["chat", "MODEL"], &["template"]);
    model.json("tokenizer_config.json", |config| config["chat_template"] = json!("{{ messages }}"));
    fails(model.bytes("tokenizer.json", |bytes| bytes.truncate(500)), &["generate", "MODEL", "x"], &["tokenizer.json"]);
}

#[test]
fn flags_that_do_not_fit_the_model() {
    let model = qwen();
    fails(
        &model,
        &["generate", "MODEL", "x", "--group-size", "128"],
        &["--group-size 128", "128 and 64", "use --group-size 64"],
    );
    fails(&model, &["generate", "MODEL", "x", "--temperature", "-1"], &["temperature is -1", "from 0"]);
    fails(&model, &["generate", "MODEL", "x", "--threads", "0"], &["--threads"]);
    fails(&model, &["generate", "MODEL", "x", "--threads", "100000"], &["--threads"]);
    fails(&model, &["generate", "MODEL", "x", "--max-batch-tokens", "18446744073709551615"], &["--max-batch-tokens"]);
    fails(&model, &["cache", "info", "MODEL"], &["has no int4-g64 cache", "moebius cache build"]);
    fails(&model, &["cache", "verify", "MODEL"], &["has no int4-g64 cache", "moebius cache build"]);
    assert!(files(&model.cache()).is_empty(), "refused before anything is converted");
    model.config(json!({"moe_intermediate_size": 65}));
    fails(&model, &["generate", "MODEL", "x"], &["--experts bf16"]);
}

#[test]
fn places_that_cannot_be_written() {
    let model = qwen();
    let out = model.beside("nowhere/out.safetensors");
    fails(&model, &[&["capture", "--out", out.to_str().unwrap()], &TOKENS[..]].concat(), &["no directory", "nowhere"]);
    fails(&model, &[&["capture", "--out", model.dir().to_str().unwrap()], &TOKENS[..]].concat(), &["is a directory"]);
    fails(&model, &[&["capture", "--out", "/dev/null"], &TOKENS[..]].concat(), &["/dev/null", "device"]);
    assert!(files(&model.cache()).is_empty(), "refused before anything is converted");

    std::fs::write(model.cache(), "a file").unwrap();
    let text = sentence(&model.run(&["generate", "MODEL", "x"]));
    assert_says(&text, &[model.cache().to_str().unwrap(), "--cache-dir"]);
    std::fs::remove_file(model.cache()).unwrap();

    std::fs::create_dir(model.cache()).unwrap();
    let mut permissions = std::fs::metadata(model.cache()).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o555);
    std::fs::set_permissions(model.cache(), permissions).unwrap();
    if std::fs::write(model.cache().join("x"), "").is_ok() {
        eprintln!("skipped: permissions do not bind this user, so a read-only folder cannot be tried");
        return;
    }
    assert_says(&sentence(&model.run(&["generate", "MODEL", "x"])), &["may not write there", "--cache-dir"]);
    assert_says(&sentence(&model.run(&["generate", "demo", "x"])), &["--cache-dir"]);
}

/// A user whom modes of files bind: the one who runs the tests or, for root, `nobody`.
fn bound_user() -> u32 {
    match moebius_cache::user_id() {
        0 => 65534,
        user => user,
    }
}

/// Runs the command as [`bound_user`]. `None`: root may not become that user, or that one not run what is built here.
fn run_bound(cache: &Path, args: &[&str]) -> Option<Output> {
    let mut command = moebius(cache, args);
    if moebius_cache::user_id() == 0 {
        command.uid(bound_user()).gid(bound_user());
    }
    command.output().ok()
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn what_another_user_owns_is_told_with_the_user() {
    let root = tempfile::tempdir().unwrap();
    set_mode(root.path(), 0o755);
    let place = |name: &str| root.path().join(name);
    let [listed, closed, within, tokens, open] = ["listed", "closed", "closed/model", "tokens.json", "open"].map(place);
    for dir in [&listed, &closed, &within, &open] {
        std::fs::create_dir(dir).unwrap();
    }
    std::fs::write(&tokens, "[1]").unwrap();
    set_mode(&listed, 0o555);
    set_mode(&closed, 0);
    set_mode(&tokens, 0);
    set_mode(&open, 0o777);
    let user = bound_user();
    let (no_write, no_read) = (format!("user {user} may not write there"), format!("user {user} may not read it"));
    let hidden = format!("{} may not be read by user {user}: change the owner", within.display());
    let [listed, within, tokens] = [&listed, &within, &tokens].map(|path| path.to_str().unwrap());
    let out = format!("{listed}/out.safetensors");
    let model = fixture_dir("qwen3_moe");
    let model = model.to_str().unwrap();
    let cases: [(&[&str], &Path, [&str; 2]); 7] = [
        (&["generate", "demo", "x"], Path::new(listed), [&no_write, "--cache-dir"]),
        (&["cache", "build", model], Path::new(listed), [&no_write, "--cache-dir"]),
        (&["cache", "build", model], Path::new(within), [&no_read, "--cache-dir"]),
        (&["generate", "demo", "--tokens-file", tokens], &open, [&no_read, "change its owner"]),
        (&["capture", "demo", "--tokens", "1", "--logits", "--out", &out], &open, [&no_write, &out]),
        (&["generate", within, "x"], Path::new(listed), [&hidden, "folders above it"]),
        (&["plan", within], Path::new(listed), [&hidden, "folders above it"]),
    ];
    let run = || {
        for (args, cache, says) in cases {
            assert_says(&sentence(&run_bound(cache, args)?), &says);
        }
        let doctor = run_bound(Path::new(listed), &["doctor"])?;
        let text = String::from_utf8(doctor.stdout).unwrap();
        assert_says(
            &text,
            &[&format!("{listed} cannot be written by user {user}: change its owner, or set --cache-dir")],
        );
        Some(())
    };
    if run().is_none() {
        say_skipped("what_another_user_owns_is_told_with_the_user", "root may not run the command as user 65534");
    }
    set_mode(&closed, 0o755); // so that it can be removed
}

#[test]
fn a_hub_that_cannot_be_reached() {
    let cache = tempfile::tempdir().unwrap();
    for command in [
        &["generate", "no-org/no-model", "x"][..],
        &["chat", "no-org/no-model"],
        &["cache", "build", "no-org/no-model"],
    ] {
        let text = sentence(&moebius(cache.path(), command).output().unwrap());
        assert_says(&text, &["no-org/no-model", "http://127.0.0.1:1", "directory"]);
    }
    assert!(!files(cache.path()).iter().any(|name| is_unfinished(name)));
}

/// A hub on the loopback that speaks https and has no model.
fn empty_hub() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("https://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = StreamOwned::new(ServerConnection::new(tls::config()).unwrap(), stream.unwrap());
            // A client that does not trust the hub says nothing.
            let mut lines = BufReader::new(&mut stream).lines();
            if lines.find(|line| line.as_ref().map_or(true, String::is_empty)).is_some_and(|line| line.is_ok()) {
                let _ = stream.write_all(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            }
        }
    });
    endpoint
}

#[test]
fn a_hub_is_trusted_whose_authority_the_system_trusts() {
    let (cache, hub) = (tempfile::tempdir().unwrap(), empty_hub());
    let asked = |authorities: Option<&Path>| {
        let mut command = moebius(cache.path(), &["generate", "org/tiny", "x"]);
        command.env("HF_ENDPOINT", &hub).env_remove("SSL_CERT_DIR").env_remove("SSL_CERT_FILE");
        command.envs(authorities.map(|file| ("SSL_CERT_FILE", file)));
        sentence(&command.output().unwrap())
    };
    assert_says(&asked(Some(&tls::certificate())), &[&format!("there is no org/tiny on {hub}")]);
    // The authorities of this machine, or else those that are built in, do not know it.
    let unknown = [&*format!("cannot download org/tiny from {hub}"), "UnknownIssuer", "a PEM file in SSL_CERT_FILE"];
    let nowhere = cache.path().join("nowhere.pem");
    for file in [None, Some(Path::new("/dev/null")), Some(&nowhere)] {
        assert_says(&asked(file), &unknown);
    }
    assert_says(&asked(Some(&nowhere)), &[nowhere.to_str().unwrap()]);
}

#[test]
fn a_file_is_no_model() {
    let cache = tempfile::tempdir().unwrap();
    let file = fixture_dir("qwen3_moe").join("model.safetensors");
    assert_says(
        &sentence(&moebius(cache.path(), &["generate", file.to_str().unwrap(), "x"]).output().unwrap()),
        &["is a file"],
    );
    assert!(Path::new(&file).exists());
}
