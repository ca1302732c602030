//! GGUF files that the `gguf` Python package wrote, against the safetensors they were made from.
//!
//! Without Python 3 and that package nothing here can run: each test then says so and passes. `.ci/run` has both.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use common::checkpoint::moebius;
use common::{Fixture, cache_dir, demo_dir, experts_rounding, fixture_dir, load, root};
use moebius::backend::cpu::Cpu;
use moebius::backend::source::{LinearWeight, TensorSource};
use moebius::backend::{Dense, Load, Memory};
use moebius::config::{DenseBits, Device, EngineConfig, ExpertBits, KvBits};
use moebius::engine::capture::{Wanted, capture};
use moebius::hub;
use moebius::kernel;
use moebius::machine::workers::Team;
use moebius::model::families;
use moebius::text::chat_template::ChatTemplate;
use moebius::text::tokenizer::Tokenizer;
use moebius_cache::checkpoint::{Checkpoint, GgmlType};
use moebius_cache::codec::decode_f32;
use moebius_cache::pack::{ExpertPrecision, Precisions};
use moebius_cache::{Precision, ScaleType};
use tempfile::TempDir;

/// A Python that can import the package: the one that `.ci/run` prepared, or the system's.
fn python() -> Option<PathBuf> {
    let candidates = [root().join("target/python/bin/python"), PathBuf::from("python3")];
    let has = |python: &PathBuf| {
        Command::new(python).args(["-c", "import gguf"]).output().is_ok_and(|out| out.status.success())
    };
    let found = candidates.into_iter().find(has);
    if found.is_none() {
        eprintln!(
            "skipped: no Python 3 with the package gguf (python3 -m venv target/python && target/python/bin/pip \
             install gguf)"
        );
    }
    found
}

/// Runs `tests/gguf/make.py`.
fn make(python: &Path, arguments: &[&str]) {
    let out = Command::new(python).arg(root().join("tests/gguf/make.py")).args(arguments).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// A fixture's weights in these types: the GGUF file, and the folder with what they stand for.
fn model(python: &Path, dir: &TempDir, fixture: &str, types: &str, more: &[&str]) -> (PathBuf, PathBuf) {
    let out = dir.path().join("model");
    make(python, &[&["model", fixture_dir(fixture).to_str().unwrap(), out.to_str().unwrap(), types], more].concat());
    (out.with_extension("gguf"), out)
}

fn exact() -> EngineConfig {
    EngineConfig { experts: ExpertBits::Bf16, dense: DenseBits::Bf16, kv: KvBits::Bf16x2, ..Default::default() }
}

/// Logits of a fixture's middle prompt, and the precision of the experts.
fn logits(dir: &Path, fixture: &Fixture, config: &EngineConfig) -> (Vec<f32>, Option<Precisions>) {
    logits_of(dir, &fixture.tokens("mid.input_ids"), config)
}

fn logits_of(dir: &Path, tokens: &[u32], config: &EngineConfig) -> (Vec<f32>, Option<Precisions>) {
    let mut loaded = load(dir, config);
    let got = capture(&mut loaded, tokens, &Wanted { logits: true, ..Default::default() }, 512).unwrap();
    (got.logits, loaded.precision)
}

fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| (v as f64).powi(2)).sum::<f64>();
    (square(&mut got.iter().zip(want).map(|(g, w)| g - w)) / square(&mut want.iter().copied())).sqrt()
}

/// The median of the relative errors of the tokens: of some, another expert is chosen, and they are far off.
fn typical_error(got: &[f32], want: &[f32], tokens: usize) -> f64 {
    let vocab = want.len() / tokens;
    let mut errors: Vec<f64> =
        got.chunks(vocab).zip(want.chunks(vocab)).map(|(got, want)| relative_error(got, want)).collect();
    errors.sort_unstable_by(f64::total_cmp);
    errors[tokens / 2]
}

#[test]
fn every_type_of_block_is_decoded_as_the_package_does() {
    let Some(python) = python() else { return };
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("blocks.gguf");
    make(&python, &["blocks", file.to_str().unwrap()]);
    let checkpoint = Checkpoint::open(&file).unwrap();
    for kind in GgmlType::ALL {
        let expected = checkpoint.tensor(&format!("{kind}.expected")).unwrap();
        let (n, k) = (expected.shape[0], expected.shape[1]);
        let mut want = vec![0.0; n * k];
        decode_f32(&expected, &mut want).unwrap();
        let source = checkpoint.source(&kind.to_string(), [n, k]).unwrap();
        let mut got = vec![0.0; n * k];
        source.decode(0, &mut got).unwrap();
        let wrong = got.iter().zip(&want).position(|(g, w)| g != w);
        assert_eq!(wrong.map(|i| (i, got[i], want[i])), None, "{kind}");
        // Some rows are those rows of the whole.
        let mut some = vec![0.0; 3 * k];
        source.decode(5, &mut some).unwrap();
        assert_eq!(some, got[5 * k..8 * k], "{kind}");
    }
}

/// With activations of 16 bits, what a product is off by is a hundredth of what 8 bits cost.
#[test]
fn dense_weights_of_every_type_multiply_as_they_are_stored() {
    let Some(python) = python() else { return };
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("blocks.gguf");
    make(&python, &["blocks", file.to_str().unwrap()]);
    let checkpoint = Checkpoint::open(&file).unwrap();
    let cpu = Cpu::new(Arc::new(Team::new(&[0]).unwrap()), kernel::halves(kernel::best()));
    for kind in GgmlType::ALL {
        let shape = checkpoint.tensor(&format!("{kind}.expected")).unwrap().shape;
        let (n, k) = (shape[0], shape[1]);
        let mut want = vec![0.0; n * k];
        checkpoint.source(&kind.to_string(), [n, k]).unwrap().decode(0, &mut want).unwrap();
        let stored = checkpoint.stored(&kind.to_string(), n, k).unwrap();
        assert!(matches!(stored, LinearWeight::Stored(..)), "{kind} is decoded");
        let weight = cpu.load_linear(stored, None, DenseBits::Auto).unwrap();
        let (mut x, mut out) = (cpu.tensor(3, k).unwrap(), cpu.tensor(3, n).unwrap());
        x.data_mut().iter_mut().enumerate().for_each(|(i, x)| *x = ((i * 37 % 101) as f32 - 50.0) * 0.02);
        cpu.linear(&weight, &x, &mut out);
        for t in 0..3 {
            let (mut off, mut size) = (0f64, 0f64);
            for (r, w) in want.chunks_exact(k).enumerate() {
                let terms = || w.iter().zip(x.row(t)).map(|(w, x)| f64::from(*w) * f64::from(*x));
                off += (f64::from(out.row(t)[r]) - terms().sum::<f64>()).powi(2);
                size += terms().map(|term| term * term).sum::<f64>();
            }
            let error = (off / size).sqrt();
            assert!(error < 1e-4, "{kind}: off by {error}");
        }
    }
}

#[test]
fn the_same_weights_give_the_same_logits() {
    let Some(python) = python() else { return };
    let mut seen = BTreeSet::new();
    for (name, more) in [
        ("qwen3_moe", [].as_slice()),
        // A latent's keys and values lie apart.
        ("deepseek_v2_lite", &[]),
        // The converter keeps one factor of YaRN's two, which are equal in every published model and not in the
        // fixture.
        (
            "deepseek_v2_full",
            &[
                "--config",
                r#"{"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "beta_fast": 24, "beta_slow": 2, "original_max_position_embeddings": 64}}"#,
            ],
        ),
        ("deepseek_v3", &[]),
        // Layers without an indexer are known by its tensors that are not there.
        ("glm_moe_dsa", &[]),
        ("deepseek_v32", &[]),
        ("qwen2_moe", &[]),
        // Rows of queries and keys are reordered.
        ("mixtral", &[]),
        // Frequencies stretched by numbers of their own.
        ("llama", &[]),
        ("qwen3_dense", &[]),
        ("olmoe", &[]),
        // The layer that drafts further tokens is a block of the file.
        ("glm4_moe", &[]),
        ("minimax_m2", &[]),
        // Experts in MXFP4, gate and up apart, as llama.cpp repacks them.
        ("gpt_oss_mxfp4", &[]),
        // Projections in other parts, norms with their one, decays as they are used.
        ("qwen3_next", &[]),
        // Value heads tiled.
        ("qwen3_5_moe", &[]),
        ("qwen3_5_dense", &[]),
        // Streams, a table of n-grams whose hash is metadata, queries and keys of its indexer apart.
        ("qwen4_exp", &[]),
        ("hy_v3", &[]),
        // Queries grow with their position.
        ("mistral4", &[]),
        // Rows of queries and keys are not reordered.
        ("ernie4_5_moe", &[]),
        ("qwen3_moe", &["--config", r#"{"model_type": "qwen3_vl_moe_text"}"#]),
        ("qwen3_dense", &["--config", r#"{"model_type": "qwen3_vl_text"}"#]),
        // Heads and ropes by the kind of a layer.
        ("mimo_v2_flash", &[]),
        // And norms with their one; between two factors, frequencies are rounded otherwise in a file.
        (
            "step3p5",
            &[
                "--config",
                r#"{"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 64}}"#,
            ],
        ),
        // What is equal in every published model and not in the fixture, the converter leaves to llama.cpp's code.
        (
            "laguna",
            &[
                "--config",
                r#"{"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
            "moe_router_logit_softcapping": 0}"#,
            ],
        ),
        (
            "llama4",
            &[
                "--config",
                r#"{"no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192, "attn_scale": 0.1,
            "floor_scale": 8192}"#,
            ],
        ),
        ("cohere2_moe", &[]),
        // The layers' scales, the router's and the experts' lie beside the weights.
        ("gemma4", &[]),
        // Key/value heads of the layers that have some; layers without are convolutions.
        ("lfm2_moe", &[]),
        ("kimi_linear", &[]),
        // Rates with the other sign; gates of one projection.
        ("bailing_hybrid", &[]),
        // Experts by token in a tensor of 32 bits; connections of streams outside of layers.
        ("deepseek_v4", &[]),
        // And an indexer with pooled keys beside Kimi delta attention.
        ("glm5_next", &[]),
        // What a layer is, is known by its tensors; norms in groups, experts without a gate.
        ("nemotron_h", &[]),
        // Gate and up apart; results multiplied.
        ("granitemoehybrid", &[]),
        // What is equal in every published model and not in the fixture, the converter leaves to llama.cpp's code.
        ("minimax_m3", &["--config", r#"{"swiglu_limit": 7.0}"#]),
        // Only the bias says that scores are sigmoids.
        ("deepseek_v3", &["--config", r#"{"model_type": "glm4_moe_lite"}"#]),
    ] {
        let (dir, fixture) = (TempDir::new().unwrap(), Fixture::open(name));
        let (file, stands_for) = model(&python, &dir, name, "BF16", more);
        let resolved = hub::resolve(file.to_str().unwrap(), &cache_dir()).unwrap();
        seen.insert(common::model_in(&resolved).architecture);
        let of_gguf = logits(&resolved, &fixture, &exact());
        let want = if more.is_empty() { &fixture.dir } else { &stands_for };
        assert!(of_gguf == logits(want, &fixture, &exact()), "{name}: logits differ");
    }
    // Their files are those of DeepSeek-V3, GLM-4.5 and MiMo-V2-Flash.
    seen.extend(["kimi_k2", "kimi_k25", "glm4_moe_lite", "glm4v_moe_text", "mimo_v2"].map(String::from));
    let registered = families::GGUF.iter().flat_map(|gguf| gguf.model_types);
    assert_eq!(seen, registered.map(|name| name.to_string()).collect());
}

#[test]
fn quantized_weights_give_the_logits_of_what_they_stand_for() {
    let Some(python) = python() else { return };
    let fixture = Fixture::open("qwen3_moe");
    let want = fixture.floats("mid.logits");
    let [int4, int8] =
        [Precision::int4(32), Precision::int8(32)].map(|precision| precision.with_scales(ScaleType::F16));
    // How far these formats put this random model off, at most twice of what was measured: not ours, but a sign of what
    // was made. Ours is that logits are those of the weights that the file stands for.
    for (types, kept, bound) in [
        ("F16", None, 0.01),
        ("Q8_0", Some(int8), 0.055),
        ("Q4_0", Some(int4), 0.86),
        ("Q5_0", Some(Precision::Q5_0), 0.47),
        ("MXFP4", Some(Precision::Mxfp4), 1.0),
        ("Q8_0,Q8_0,Q8_0,Q8_0,F16,BF16", Some(int8), 0.29),
    ] {
        let dir = TempDir::new().unwrap();
        let (file, stands_for) = model(&python, &dir, "qwen3_moe", types, &[]);
        let resolved = hub::resolve(file.to_str().unwrap(), &cache_dir()).unwrap();
        let (got, _) = logits(&resolved, &fixture, &exact());
        assert!(got == logits(&stands_for, &fixture, &exact()).0, "{types}: logits differ");
        let error = typical_error(&got, &want, fixture.tokens("mid.input_ids").len());
        assert!(error < bound, "{types}: logits off by {error}");
        let (auto, precision) = logits(&resolved, &fixture, &EngineConfig { experts: ExpertBits::Auto, ..exact() });
        if let Some(kept) = kept {
            assert_eq!(precision, Some(kept.into()), "{types}");
            let error = typical_error(&auto, &got, fixture.tokens("mid.input_ids").len());
            assert!(error < 0.06, "{types}: experts as they are, off by {error}");
            assert!(types.contains(',') || experts_rounding(&resolved) == 0.0, "{types}: codes or scales were rounded");
        }
    }
}

/// Types with super-blocks need wide experts. Each tensor keeps its own type, layer by layer.
#[test]
fn blocks_of_experts_are_kept_exactly() {
    use Precision::*;
    let Some(python) = python() else { return };
    let tokens: Vec<u32> = (0..60).map(|i| 5 + i * i % 900).collect();
    let layer = |gate, down| ExpertPrecision { gate, down };
    let one = |precision: Precision| Precisions::from(precision);
    let mixed = |layers: [ExpertPrecision; 3]| layers.into_iter().collect::<Precisions>();
    let int8 = Precision::int8(32).with_scales(ScaleType::F16);
    for (types, kept) in [
        ("Q4_K", one(Q4K)),
        ("Q6_K", one(Q6K)),
        // Down, gate and up of a layer, then those of the next.
        ("Q6_K,Q4_K,Q4_K,Q4_K,Q4_K,Q4_K,Q8_0,Q5_K,Q5_K", mixed([layer(Q4K, Q6K), Q4K.into(), layer(Q5K, int8)])),
        (
            "IQ3_S,IQ3_XXS,IQ3_XXS,IQ2_S,IQ2_XXS,IQ2_XXS,IQ2_XS,IQ2_XS,IQ2_XS",
            mixed([layer(Iq3Xxs, Iq3S), layer(Iq2Xxs, Iq2S), Iq2Xs.into()]),
        ),
        (
            "TQ2_0,TQ1_0,TQ1_0,IQ1_M,IQ1_S,IQ1_S,IQ1_S,IQ1_M,IQ1_M",
            mixed([layer(Tq1_0, Tq2_0), layer(Iq1S, Iq1M), layer(Iq1M, Iq1S)]),
        ),
        (
            "Q3_K,Q2_K,Q2_K,IQ4_NL,IQ4_XS,IQ4_XS,Q5_1,Q4_1,Q4_1",
            mixed([layer(Q2K, Q3K), layer(Iq4Xs, Iq4Nl), layer(Q4_1, Q5_1)]),
        ),
        (
            "Q5_0,Q3_K,Q3_K,MXFP4,Q6_K,Q6_K,Q2_K,Q5_0,Q5_0",
            mixed([layer(Q3K, Q5_0), layer(Q6K, Mxfp4), layer(Q5_0, Q2K)]),
        ),
        // Gate and up lie together: of two types both become what keeps both.
        ("Q4_K,Q4_K,Q6_K", mixed([layer(Precision::int8(32), Q4K); 3])),
    ] {
        let (dir, out) = (TempDir::new().unwrap(), "model");
        let (file, stands_for) = (dir.path().join(out).with_extension("gguf"), dir.path().join(out));
        let wide = r#"{"moe_intermediate_size": 256}"#;
        let from = demo_dir("moe-gqa");
        make(&python, &["model", from.to_str().unwrap(), stands_for.to_str().unwrap(), types, "--config", wide]);
        let resolved = hub::resolve(file.to_str().unwrap(), &cache_dir()).unwrap();
        let (got, _) = logits_of(&resolved, &tokens, &exact());
        assert!(got == logits_of(&stands_for, &tokens, &exact()).0, "{types}: logits differ");
        let (auto, precision) =
            logits_of(&resolved, &tokens, &EngineConfig { experts: ExpertBits::Auto, device: Device::Cpu, ..exact() });
        assert_eq!(precision, Some(kept), "{types}");
        let error = typical_error(&auto, &got, tokens.len());
        assert!(error < 0.06, "{types}: experts as they are, off by {error}");
        // What it costs to multiply dense weights as they are stored is activations of 8 bits, too.
        let dense = EngineConfig { dense: DenseBits::Auto, device: Device::Cpu, ..exact() };
        let (dense, _) = logits_of(&resolved, &tokens, &dense);
        let error = typical_error(&dense, &got, tokens.len());
        assert!(error > 0.0 && error < 0.06, "{types}: dense weights as they are, off by {error}");
        let rounds = types == "Q4_K,Q4_K,Q6_K";
        assert!(rounds || experts_rounding(&resolved) == 0.0, "{types}: codes or scales were rounded");
    }
}

#[test]
fn experts_with_gate_and_up_in_one_tensor_beside_delta_rules() {
    let Some(python) = python() else { return };
    for (name, types, how) in [
        ("qwen3_next", "Q8_0", ["--fuse"].as_slice()),
        ("qwen3_next", "Q8_0", &["--old"]),
        ("qwen3_5_moe", "F16", &["--fuse"]),
    ] {
        let (dir, fixture) = (TempDir::new().unwrap(), Fixture::open(name));
        let (file, stands_for) = model(&python, &dir, name, types, how);
        let resolved = hub::resolve(file.to_str().unwrap(), &cache_dir()).unwrap();
        assert!(
            logits(&resolved, &fixture, &exact()) == logits(&stands_for, &fixture, &exact()),
            "{name}: logits differ"
        );
    }
}

/// Projections that are cut or joined while they are read: rows of gated DeltaNet, whose value heads a file may have
/// tiled, of KDA, and of Mamba-2.
#[test]
fn dense_weights_in_parts_stay_as_they_are_stored() {
    let Some(python) = python() else { return };
    for (name, how) in [
        ("qwen3_next", [].as_slice()),
        ("qwen3_next", &["--old"]),
        ("qwen3_5_moe", &[]),
        ("kimi_linear", &[]),
        ("granitemoehybrid", &[]),
    ] {
        let (dir, fixture) = (TempDir::new().unwrap(), Fixture::open(name));
        let (file, _) = model(&python, &dir, name, "Q8_0", how);
        let resolved = hub::resolve(file.to_str().unwrap(), &cache_dir()).unwrap();
        let exact = EngineConfig { device: Device::Cpu, ..exact() };
        let stored = EngineConfig { dense: DenseBits::Auto, ..exact.clone() };
        let [(want, _), (got, _)] = [&exact, &stored].map(|config| logits(&resolved, &fixture, config));
        let error = typical_error(&got, &want, fixture.tokens("mid.input_ids").len());
        assert!(error > 0.0 && error < 0.06, "{name} {how:?}: dense weights as they are, off by {error}");
    }
}

#[test]
fn a_split_model_is_one_model() {
    let Some(python) = python() else { return };
    let (dir, fixture) = (TempDir::new().unwrap(), Fixture::open("qwen3_moe"));
    let (_, stands_for) = model(&python, &dir, "qwen3_moe", "Q8_0", &["--split", "12"]);
    std::fs::rename(&stands_for, dir.path().join("elsewhere")).unwrap();
    let want = logits(&dir.path().join("elsewhere"), &fixture, &exact());
    let files: Vec<PathBuf> = (1..=4).map(|i| dir.path().join(format!("model-{i:05}-of-00004.gguf"))).collect();
    // Any of them, or the folder they are in.
    for path in [&files[0], &files[2], &dir.path().to_path_buf()] {
        let resolved = hub::resolve(path.to_str().unwrap(), &cache_dir()).unwrap();
        assert!(logits(&resolved, &fixture, &exact()) == want, "{}", path.display());
    }
    let says = |words: &str| {
        let error = hub::resolve(files[0].to_str().unwrap(), &dir.path().join("cache")).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let aside = dir.path().join("aside");
    std::fs::rename(&files[2], &aside).unwrap();
    says("model-00003-of-00004.gguf: this one of 4 files is missing");
    std::fs::copy(&files[1], &files[2]).unwrap();
    says("but says otherwise of itself");
    std::fs::rename(&aside, &files[2]).unwrap();
    let alone = dir.path().join("alone.gguf");
    std::fs::copy(&files[0], &alone).unwrap();
    let error = Checkpoint::open(&alone).unwrap_err().to_string();
    assert!(error.contains("is one of 4 files"), "{error}");
    let error = hub::resolve(dir.path().to_str().unwrap(), &cache_dir()).unwrap_err().to_string();
    assert!(error.contains("holds 2 models"), "{error}");
}

/// Vocabularies of models with hostile texts and what the models' own tokenizers make of them, which llama.cpp has for
/// its tests.
#[test]
fn text_is_cut_as_the_models_own_tokenizers_do() {
    let Some(python) = python() else { return };
    let folder = root().join("target/vocabularies");
    if !folder.join("ggml-vocab-gpt-2.gguf").is_file() {
        eprintln!(
            "skipped: no target/vocabularies (models/ggml-vocab-*.gguf* of llama.cpp's sources; .ci/run gets them)"
        );
        return;
    }
    let mut wrong = Vec::new();
    for name in ["deepseek-llm", "deepseek-coder", "llama-bpe", "llama-spm", "qwen2", "qwen35", "gpt-2", "gemma-4"] {
        let (dir, from) = (TempDir::new().unwrap(), folder.join(format!("ggml-vocab-{name}.gguf")));
        let file = dir.path().join("vocabulary.gguf");
        make(&python, &["vocabulary", from.to_str().unwrap(), file.to_str().unwrap()]);
        let tokenizer =
            Tokenizer::load(&hub::resolve(file.to_str().unwrap(), &dir.path().join("cache")).unwrap()).unwrap();
        let beside = |end: &str| std::fs::read_to_string(from.with_extension(format!("gguf.{end}"))).unwrap();
        let (texts, ids) = (beside("inp"), beside("out"));
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        assert!(texts.len() > 40, "{name}");
        for (text, ids) in texts.iter().zip(ids.lines()) {
            let want: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let got = tokenizer.encode(text, false).unwrap();
            if got != want {
                wrong.push(format!("{name}, {text:?}: {got:?} instead of {want:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_single_file_has_its_text_side() {
    let Some(python) = python() else { return };
    let dir = TempDir::new().unwrap();
    let (file, stands_for) = model(&python, &dir, "qwen3_moe", "Q8_0", &[]);
    let resolved = hub::resolve(file.to_str().unwrap(), &dir.path().join("cache")).unwrap();
    let (got, want) = (Tokenizer::load(&resolved).unwrap(), Tokenizer::load(&stands_for).unwrap());
    assert_eq!((got.vocab_size(), got.eos_ids()), (want.vocab_size(), &want.eos_ids()[..1]));
    let reference = std::fs::read(fixture_dir("_tokenizer").join("tokenizer_reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_slice(&reference).unwrap();
    for case in reference["encode"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = want.encode(text, true).unwrap();
        assert_eq!(got.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(got.decode(&ids, true).unwrap(), want.decode(&ids, true).unwrap());
    }
    let messages = [serde_json::json!({"role": "user", "content": "Hi"})];
    let render = |dir: &Path| ChatTemplate::load(dir).unwrap().unwrap().render(&messages, &Default::default()).unwrap();
    assert_eq!(render(&resolved), render(&stands_for));
    // The same again without a word; another file of the same name is another model.
    assert_eq!(hub::resolve(file.to_str().unwrap(), &dir.path().join("cache")).unwrap(), resolved);
    let bytes = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, bytes).unwrap();
    assert_ne!(hub::resolve(file.to_str().unwrap(), &dir.path().join("cache")).unwrap(), resolved);

    let run = |model: &Path| {
        let arguments = [
            "generate",
            model.to_str().unwrap(),
            "Once upon",
            "--max-tokens",
            "8",
            "--experts",
            "bf16",
            "--dense",
            "bf16",
            "--device",
            "cpu",
        ];
        let out = moebius(&dir.path().join("cache"), &arguments).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        out.stdout
    };
    assert_eq!(run(&file), run(&stands_for));
}
