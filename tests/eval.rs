//! `moebius eval` as a person meets it.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

const TEXT: &str = "What is 2+2? 2 + 2 = 4. What is the capital of France? It is Paris. Count to five: 1, 2, 3, 4, 5. ";

fn eval(cache: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moebius"))
        .args(["eval", "demo"])
        .args(args)
        .env("XDG_CACHE_HOME", cache)
        .env("HF_HOME", cache.join("hf"))
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .output()
        .unwrap()
}

/// What a command says: its output and its errors.
fn moebius(cache: &Path, args: &[&str]) -> [String; 2] {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
    command.args(args).env("XDG_CACHE_HOME", cache).env("HF_HOME", cache.join("hf"));
    let output = command.env("HF_ENDPOINT", "http://127.0.0.1:1").output().unwrap();
    [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap())
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(dir: &Path) -> PathBuf {
    let path = dir.join("text.txt");
    std::fs::write(&path, TEXT.repeat(8)).unwrap();
    path
}

#[test]
fn a_precision_beside_a_better_one_and_beside_itself() {
    let dir = tempfile::tempdir().unwrap();
    let text = text(dir.path());
    let run = |more: &[&str]| {
        let flags = ["--text", text.to_str().unwrap(), "--context", "64", "--json"];
        json(&eval(dir.path(), &[&flags, more].concat()))
    };
    let of = |value: &Value, field: &str| value["against"][field].as_f64().unwrap();

    let alone = run(&[]);
    assert!(alone["against"].is_null() && alone["tokens"].as_u64().unwrap() > 100, "{alone}");
    let itself = run(&["--against=--experts int4"]);
    assert_eq!(itself["perplexity"], alone["perplexity"]);
    assert_eq!((of(&itself, "kl_max"), of(&itself, "top1_equal"), of(&itself, "perplexity_change")), (0.0, 1.0, 0.0));

    let [int4, int8] = ["int4", "int8"].map(|experts| run(&["--experts", experts, "--against"]));
    assert_eq!(int4["perplexity"], alone["perplexity"], "the default");
    let [worse, better] = [&int4, &int8].map(|value| of(value, "kl_mean"));
    assert!(0.0 < better && better < worse, "KL of int8 {better}, of int4 {worse}");
    assert!(of(&int4, "kl_median") <= of(&int4, "kl_p90") && of(&int4, "kl_p99") <= of(&int4, "kl_max"));
    // Of all tokens each is in one span.
    let spans = int4["against"]["spans"].as_array().unwrap();
    assert_eq!(
        spans.iter().map(|span| span["tokens"].as_u64().unwrap()).sum::<u64>(),
        int4["tokens"].as_u64().unwrap()
    );
    assert_eq!(int4["against"]["largest"][0]["kl"], int4["against"]["kl_max"]);
}

#[test]
fn windows_do_not_depend_on_the_passes_they_are_read_in() {
    let dir = tempfile::tempdir().unwrap();
    let text = text(dir.path());
    let run = |passes: &str| {
        let flags = ["--text", text.to_str().unwrap(), "--context", "100", "--json", "--max-batch-tokens", passes];
        json(&eval(dir.path(), &flags))
    };
    assert_eq!(run("7"), run("512"));
}

#[test]
fn people_read_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let text = text(dir.path());
    let output = eval(dir.path(), &["--text", text.to_str().unwrap(), "--tokens", "50", "--against"]);
    let page = String::from_utf8(output.stdout).unwrap();
    for part in ["perplexity", "against", "KL ", "likeliest", "largest differences"] {
        assert!(page.contains(part), "{part} is not in {page}");
    }
}

#[test]
fn a_text_that_experts_are_calibrated_with_costs_less() {
    let dir = tempfile::tempdir().unwrap();
    let (text, short) = (dir.path().join("text.txt"), dir.path().join("short.txt"));
    std::fs::write(&text, TEXT.repeat(60)).unwrap();
    std::fs::write(&short, TEXT).unwrap();
    let (text, short) = (text.to_str().unwrap(), short.to_str().unwrap());
    let moebius = |args: &[&str]| moebius(dir.path(), args);
    let [_, few] = moebius(&["cache", "build", "demo", "--calibrate", short]);
    assert!(few.contains("too few for 8 experts: give 256 at least"), "{few}");
    let [_, absent] = moebius(&["eval", "demo", "--text", text, "--calibrate", text]);
    assert!(absent.contains("build it with `moebius cache build`"), "{absent}");
    let [path, stderr] = moebius(&["cache", "build", "demo", "--calibrate", text]);
    assert!(path.trim_end().ends_with(".moebius"), "{path} {stderr}");
    let [info, stderr] = moebius(&["cache", "info", "demo", "--calibrate", text]);
    assert!(info.contains("calibrated with text.txt ("), "{info} {stderr}");
    let loss = |more: &[&str]| {
        let flags = ["--text", text, "--context", "64", "--json", "--against"];
        json(&eval(dir.path(), &[&flags, more].concat()))["against"]["kl_mean"].as_f64().unwrap()
    };
    let [plain, calibrated] = [loss(&[]), loss(&["--calibrate", text])];
    assert!(calibrated < 0.8 * plain, "{calibrated} of {plain}");
}

/// Of the demo model's shape, but for the experts' inputs: `hidden` numbers, of which each `every`th counts.
fn importance_matrix(path: &Path, hidden: usize, every: usize) {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let (mut infos, mut data, mut count) = (Vec::new(), Vec::new(), 0u64);
    let mut tensor = |name: String, inputs: usize, number: &dyn Fn(usize) -> f32| {
        infos.extend([string(&name), 2u32.to_le_bytes().to_vec()].concat());
        infos.extend([inputs as u64, 8].map(u64::to_le_bytes).concat());
        infos.extend([&0u32.to_le_bytes()[..], &(data.len() as u64).to_le_bytes()].concat());
        data.extend((0..8 * inputs).flat_map(|i| number(i % inputs).to_le_bytes()));
        count += 1;
    };
    for layer in 0..3 {
        for (of, inputs) in [("up", hidden), ("gate", hidden), ("down", 128)] {
            let name = |what: &str| format!("blk.{layer}.ffn_{of}_exps.weight.{what}");
            tensor(name("in_sum2"), inputs, &|i| if i % every == 0 { 40.0 } else { 0.0 });
            tensor(name("counts"), 1, &|_| 20.0);
        }
    }
    let pair = [string("general.type"), 8u32.to_le_bytes().to_vec(), string("imatrix")].concat();
    let head = [&b"GGUF"[..], &3u32.to_le_bytes(), &count.to_le_bytes(), &1u64.to_le_bytes(), &pair].concat();
    let mut bytes = [head, infos].concat();
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    std::fs::write(path, [bytes, data].concat()).unwrap();
}

#[test]
fn an_importance_matrix_stands_in_for_a_text() {
    let dir = tempfile::tempdir().unwrap();
    let [even, uneven, other] = ["even.gguf", "uneven.gguf", "other.gguf"].map(|name| dir.path().join(name));
    importance_matrix(&even, 256, 1);
    importance_matrix(&uneven, 256, 64);
    importance_matrix(&other, 128, 1);
    let text = text(dir.path());
    let loss = |matrix: &Path| {
        let matrix = matrix.to_str().unwrap();
        let [path, stderr] = moebius(dir.path(), &["cache", "build", "demo", "--calibrate", matrix]);
        assert!(path.trim_end().ends_with(".moebius"), "{path} {stderr}");
        let flags = ["--text", text.to_str().unwrap(), "--context", "64", "--json", "--against"];
        let with = [&flags[..], &["--calibrate", matrix]].concat();
        json(&eval(dir.path(), &with))["against"]["kl_mean"].as_f64().unwrap()
    };
    // What the matrix says counts: inputs that it leaves out lose more.
    let [even, uneven] = [loss(&even), loss(&uneven)];
    assert!(even < 0.9 * uneven, "{even} beside {uneven}");
    let [_, stderr] = moebius(dir.path(), &["cache", "build", "demo", "--calibrate", other.to_str().unwrap()]);
    assert!(stderr.contains("give an importance matrix of this model"), "{stderr}");
}

#[test]
fn a_budget_of_bits_is_spent_where_it_pays() {
    let dir = tempfile::tempdir().unwrap();
    let text = text(dir.path());
    let run = |experts: &str| {
        let flags = ["--text", text.to_str().unwrap(), "--context", "64", "--json", "--against", "--device", "cpu"];
        json(&eval(dir.path(), &[&flags[..], &["--experts", experts]].concat()))["against"]["kl_mean"].as_f64().unwrap()
    };
    let [plain, more] = ["int4", "auto:4.6bpw"].map(run);
    assert!(more < 0.8 * plain, "{more} beside {plain}");
    let [_, stderr] = moebius(dir.path(), &["cache", "build", "demo", "--experts", "auto:4bpw"]);
    assert!(stderr.contains("iq4-g128 alone takes 4.125 bits"), "{stderr}");
}

#[test]
fn what_cannot_be_measured_is_refused_in_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let text = text(dir.path());
    let (text, empty, ids) = (text.to_str().unwrap(), dir.path().join("empty"), dir.path().join("ids.json"));
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&ids, "[1, 2, 3000000]").unwrap();
    for (args, sentence) in [
        (&["--text", empty.to_str().unwrap()][..], "fewer than two tokens"),
        (&["--text", "/nowhere.txt"], "/nowhere.txt"),
        (&["--tokens-file", ids.to_str().unwrap()], "token id 3000000 is not in the vocabulary"),
        (&["--text", text, "--against=--experts int3"], "--against \"--experts int3\": invalid value 'int3'"),
        (&["--text", text, "--against=\"open"], "a quote is open"),
        (&["--text", text, "--against=/nowhere/model"], "/nowhere/model"),
    ] {
        let output = eval(dir.path(), args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.trim_end().lines().count()), (Some(1), 1), "{args:?}: {stderr}");
        assert!(stderr.contains(sentence), "{args:?}: {stderr}");
    }
    let leftovers = std::fs::read_dir(dir.path().join("moebius"))
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(".tmp"));
    assert_eq!(leftovers.count(), 0);
}
