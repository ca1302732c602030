//! GGUF files written byte by byte: what is right opens under Hugging Face's names, and every way to be wrong has a
//! sentence.
//!
//! That blocks are decoded as others decode them is tested where there is Python, in the main crate.
#![allow(clippy::unwrap_used)] // a test

mod common;

use std::collections::HashSet;
use std::path::Path;

use common::gguf_file::{File, string};
use moebius_cache::Checkpoint;
use moebius_cache::checkpoint::gguf::{self, GgufNames, files_of, in_folder, parse};
use moebius_cache::codec::{Quantization, decode_f32};
use proptest::prelude::*;
use tempfile::TempDir;

fn good() -> File {
    File::default()
        .text("general.architecture", "qwen3moe")
        .number("qwen3moe.block_count", 1)
        .floats("token_embd.weight", &[4, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        .tensor("blk.0.ffn_gate_exps.weight", &[32, 2, 3], 8, &[7; 6 * 34])
}

fn error(file: &File) -> String {
    parse(&file.bytes()).unwrap_err()
}

#[test]
fn tensors_and_metadata_are_read() {
    let bytes = good()
        .pair("a.list", 9, &[&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &string("x"), &string("yz")].concat())
        .bytes();
    let parsed = parse(&bytes).unwrap();
    assert_eq!(parsed.metadata["a.list"], serde_json::json!(["x", "yz"]));
    assert_eq!(parsed.tensors["token_embd.weight"].shape, [2, 4]);
    assert_eq!(parsed.tensors["blk.0.ffn_gate_exps.weight"].bytes.len(), 6 * 34);

    let dir = TempDir::new().unwrap();
    let path = dir.path().join("a.gguf");
    std::fs::write(&path, &bytes).unwrap();
    for place in [path.as_path(), dir.path()] {
        let checkpoint = Checkpoint::open(place).unwrap();
        assert_eq!(
            checkpoint.names().collect::<Vec<_>>(),
            ["model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_proj.weight"]
        );
        let view = checkpoint.tensor("model.embed_tokens.weight").unwrap();
        let mut values = [0.0; 8];
        decode_f32(&view, &mut values).unwrap();
        assert_eq!(values, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let expert = checkpoint.source("model.layers.0.mlp.experts.2.gate_proj.weight", [2, 32]).unwrap();
        assert_eq!(expert.parts()[0].data.len(), 2 * 34);
        let beyond =
            checkpoint.source("model.layers.0.mlp.experts.3.gate_proj.weight", [2, 32]).unwrap_err().to_string();
        assert!(beyond.contains("has no expert 3"), "{beyond}");
        let listed: HashSet<String> = checkpoint.matrices().into_iter().map(|(name, _)| name).collect();
        assert!(listed.contains("model.layers.0.mlp.experts.0.gate_proj.weight"), "{listed:?}");
    }
}

#[test]
fn every_lie_is_refused_with_a_remedy() {
    let huge = [u64::MAX, 1 << 63, 1 << 62, (1 << 61) + 1, 1 << 40];
    let mut cases: Vec<(Vec<u8>, &str)> = vec![
        (b"GGU".to_vec(), "does not begin with GGUF"),
        (b"GGML....".to_vec(), "does not begin with GGUF"),
        (b"GGUF\x03\0\0\0".to_vec(), "ends inside of its header"),
        (b"GGUF\x01\0\0\0".to_vec(), "version 1"),
        (b"GGUF\0\0\0\x03".to_vec(), "big-endian"),
        (b"GGUF\x09\0\0\0".to_vec(), "version 9"),
    ];
    let whole = good().bytes();
    cases.push((whole[..whole.len() - 1].to_vec(), "beyond the end of the file"));
    cases.push((whole[..70].to_vec(), "cut off"));
    for n in huge {
        for at in [8, 16] {
            let mut lying = whole.clone();
            lying[at..at + 8].copy_from_slice(&n.to_le_bytes());
            cases.push((lying, "pairs of metadata"));
        }
        let mut key = whole.clone();
        key[24..32].copy_from_slice(&n.to_le_bytes());
        cases.push((key, "impossible lengths"));
        cases.push((good().pair("a", 8, &n.to_le_bytes()).bytes(), "impossible lengths"));
        for kind in [0u32, 4, 8] {
            cases
                .push((good().pair("a", 9, &[&kind.to_le_bytes()[..], &n.to_le_bytes()].concat()).bytes(), "elements"));
        }
        cases.push((good().tensor("x", &[n], 0, &[0; 4]).bytes(), "beyond the end"));
        cases.push((good().tensor("x", &[32, n], 2, &[0; 18]).bytes(), "beyond the end"));
        cases.push((good().tensor("x", &[n & !31, 1 << 33, 1 << 33], 2, &[0; 18]).bytes(), "beyond the end"));
        let mut offset = good();
        offset.tensors[1].3 = n & !31;
        cases.push((offset.bytes(), "beyond the end"));
    }
    let mut overlapping = good();
    overlapping.tensors[1].3 = 0;
    let mut unaligned = good();
    unaligned.tensors[0].3 = 8;
    let nested =
        [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &9u32.to_le_bytes(), &1u64.to_le_bytes(), &0u32.to_le_bytes()]
            .concat();
    let more: [(File, &str); 15] = [
        (overlapping, "overlap"),
        (unaligned, "multiple of 32"),
        (good().tensor("token_embd.weight", &[1], 0, &[0; 4]), "twice"),
        (good().number("qwen3moe.block_count", 1), "twice"),
        (good().tensor("x", &[], 0, &[]), "0 dimensions"),
        (good().tensor("x", &[1, 1, 1, 1, 1], 0, &[0; 4]), "5 dimensions"),
        (good().tensor("x", &[33], 2, &[0; 36]), "blocks of 32"),
        (good().tensor(&"x".repeat(257), &[32], 2, &[0; 18]), "name has 257 bytes"),
        (good().tensor("x", &[0], 0, &[]), "is empty"),
        (good().tensor("x", &[256], 9, &[0; 66]), "number 9, which is not supported"),
        (good().tensor("x", &[256], 99, &[0; 66]), "number 99, which is not supported"),
        (good().pair("a", 13, &[]), "unknown type 13"),
        (good().pair("a", 9, &nested), "unknown type 9"),
        (good().number("general.alignment", 0), "alignment"),
        (good().number("general.alignment", 48), "alignment"),
    ];
    cases.extend(more.into_iter().map(|(file, words)| (file.bytes(), words)));
    for (bytes, words) in cases {
        let error = parse(&bytes).unwrap_err();
        let remedy = ["download it again", "convert the model", "use a file in", "update it"]
            .iter()
            .any(|remedy| error.contains(remedy));
        assert!(error.contains(words) && remedy, "{words}: {error}");
    }
    // Two of GGUF's names that mean one of Hugging Face's.
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("a.gguf");
    let twice =
        good().floats("blk.0.ffn_norm.weight", &[1], &[1.0]).floats("blk.0.post_attention_norm.weight", &[1], &[1.0]);
    std::fs::write(&path, twice.bytes()).unwrap();
    assert!(
        Checkpoint::open(&path)
            .unwrap_err()
            .to_string()
            .contains("two tensors that are both model.layers.0.post_attention_layernorm.weight")
    );
    std::fs::write(&path, "").unwrap();
    assert!(Checkpoint::open(&path).unwrap_err().to_string().contains("is empty"));
    assert!(gguf::metadata(&path).unwrap_err().to_string().contains("is empty"));
    assert!(error(&good().text("general.alignment", "x")).contains("alignment"));
}

#[test]
fn rows_that_llama_reordered_are_put_back() {
    // Two heads of four rows: halves 0 1 | 2 3 lie as pairs 0 2 1 3.
    let rows = [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0];
    let file = |heads: u32| {
        File::default()
            .text("general.architecture", "llama")
            .number("llama.attention.head_count", heads)
            .number("llama.attention.head_count_kv", 2)
            .floats("blk.0.attn_q.weight", &[1, 8], &rows)
            .floats("blk.0.attn_v.weight", &[1, 8], &rows)
    };
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("a.gguf");
    let names = GgufNames { architecture: "llama", tensors: &[], permuted: &[("attn_q", "attention.head_count")] };
    let open = || Checkpoint::open_as(&path, Quantization::NONE, &[names]);
    std::fs::write(&path, file(2).bytes()).unwrap();
    let checkpoint = open().unwrap();
    let decoded = |name: &str| {
        let (mut out, source) = ([0.0; 8], checkpoint.source(name, [8, 1]).unwrap());
        source.decode(0, &mut out).unwrap();
        (out, source.plain().is_some())
    };
    assert_eq!(decoded("model.layers.0.self_attn.q_proj.weight"), ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], false));
    assert_eq!(decoded("model.layers.0.self_attn.v_proj.weight"), (rows, true));
    for heads in [0, 3, 8] {
        std::fs::write(&path, file(heads).bytes()).unwrap();
        let error = open().unwrap_err().to_string();
        assert!(error.contains("attn_q.weight of 8 rows does not belong to"), "{error}");
    }
}

#[test]
fn splits_are_found_by_name_and_checked() {
    let dir = TempDir::new().unwrap();
    let name = |i: usize, of: usize| dir.path().join(format!("m-{i:05}-of-{of:05}.gguf"));
    let part = |no: u16, count: u16, file: File| {
        file.pair("split.no", 2, &no.to_le_bytes()).pair("split.count", 2, &count.to_le_bytes()).bytes()
    };
    std::fs::write(name(1, 2), part(0, 2, good())).unwrap();
    assert!(
        files_of(&name(1, 2))
            .unwrap_err()
            .to_string()
            .contains("m-00002-of-00002.gguf: this one of 2 files is missing")
    );
    std::fs::write(name(2, 2), part(1, 2, File::default().floats("output.weight", &[1, 1], &[1.0]))).unwrap();
    assert_eq!(in_folder(dir.path()).unwrap(), Some(name(1, 2)));
    let names: Vec<String> = Checkpoint::open(&name(2, 2)).unwrap().names().map(String::from).collect();
    assert!(names.contains(&"lm_head.weight".to_string()) && names.len() == 3, "{names:?}");
    // One file that says it is another, or of another number, or holds what the first has.
    for (no, count, file, words) in [
        (0, 2, File::default(), "says otherwise"),
        (1, 3, File::default(), "says otherwise"),
        (1, 2, File::default().floats("token_embd.weight", &[1, 1], &[1.0]), "is also in"),
    ] {
        std::fs::write(name(2, 2), part(no, count, file)).unwrap();
        let error = Checkpoint::open(&name(1, 2)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    // A count that no disk holds costs nothing.
    assert!(files_of(Path::new("/x/m-00001-of-99999.gguf")).unwrap_err().to_string().contains("one of 99999 files"));
    std::fs::write(dir.path().join("other.gguf"), good().bytes()).unwrap();
    assert!(in_folder(dir.path()).unwrap_err().to_string().contains("holds 2 models"));
}

#[test]
fn names_are_translated() {
    let gated = GgufNames {
        architecture: "gated",
        tensors: &[("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"), ("exp_probs_b.bias", "mlp.bias")],
        permuted: &[],
    };
    for (names, theirs, ours) in [
        (GgufNames::default(), "token_embd.weight", "model.embed_tokens.weight"),
        (GgufNames::default(), "output.weight", "lm_head.weight"),
        (GgufNames::default(), "blk.11.attn_q_norm.weight", "model.layers.11.self_attn.q_norm.weight"),
        (GgufNames::default(), "blk.0.ffn_up_shexp.weight", "model.layers.0.mlp.shared_experts.up_proj.weight"),
        (gated, "blk.0.ffn_up_shexp.weight", "model.layers.0.mlp.shared_expert.up_proj.weight"),
        (GgufNames::default(), "blk.3.exp_probs_b.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        (gated, "blk.3.exp_probs_b.bias", "model.layers.3.mlp.bias"),
        (GgufNames::default(), "blk.3.attn_sinks.weight", "model.layers.3.self_attn.sinks"),
        (GgufNames::default(), "blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        (GgufNames::default(), "blk.0.ffn_gate_up_exps.weight", "model.layers.0.mlp.experts.gate_up_proj.weight"),
        (GgufNames::default(), "blk.0.ssm_in.weight", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        (GgufNames::default(), "blk.0.ssm_a", "model.layers.0.linear_attn.A"),
        (GgufNames::default(), "blk.0.ssm_dt.bias", "model.layers.0.linear_attn.dt_bias"),
        (GgufNames::default(), "rope_freqs.weight", "rope_freqs.weight"),
        (GgufNames::default(), "blk.0.nextn.eh_proj.weight", "blk.0.nextn.eh_proj.weight"),
        (GgufNames::default(), "blk", "blk"),
        (GgufNames::default(), "", ""),
    ] {
        assert_eq!(names.hf_name(theirs), ours);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_damage_is_refused_or_harmless(at in 0usize..600, value: u8, cut in 0usize..600) {
        let mut bytes = good().bytes();
        let at = at % bytes.len();
        bytes[at] = value;
        if cut % 3 == 0 {
            bytes.truncate(bytes.len().saturating_sub(cut));
        }
        if let Ok(parsed) = parse(&bytes) {
            prop_assert!(parsed.tensors.values().all(|entry| bytes.get(entry.bytes.clone()).is_some_and(|b| !b.is_empty(
                ))));
        }
    }

    #[test]
    fn random_bytes_are_no_file(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
        let _ = parse(&[&b"GGUF\x03\0\0\0"[..], &bytes].concat());
    }
}
