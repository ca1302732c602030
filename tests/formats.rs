//! Quantized checkpoints against HF transformers, which computed the reference from the dequantized weights in float32.
//!
//! With BF16 weights what is lost is the rounding of dequantized weights to BF16; `--experts auto` keeps the codes of
//! experts as they are, and rounds activations to 8 bits. `tests/fixtures/README.md` says what the reference is.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::checkpoint::Checkpoint;
use common::{Fixture, cosine, experts_rounding, load};
use moebius::config::{DenseBits, EngineConfig, ExpertBits, KvBits};
use moebius::engine::capture::{Wanted, capture};
use moebius_cache::codec::{Format, Library};
use moebius_cache::pack::Precisions;
use moebius_cache::{Precision, ScaleType};
use serde_json::{Value, json};

/// Root mean square of the error of all logits over that of the logits.
fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| (v as f64).powi(2)).sum::<f64>();
    (square(&mut got.iter().zip(want).map(|(g, w)| g - w)) / square(&mut want.iter().copied())).sqrt()
}

/// The errors of the three prompts' logits, of which the largest counts.
fn error_of(fixture: &Fixture, config: &EngineConfig) -> (f64, Option<Precisions>) {
    let mut loaded = fixture.load(config);
    let vocab = loaded.model.config().vocab_size;
    let mut worst = 0f64;
    for prompt in ["short", "mid", "long"] {
        let tokens = fixture.tokens(&format!("{prompt}.input_ids"));
        let got = capture(&mut loaded, &tokens, &Wanted { logits: true, ..Default::default() }, 512).unwrap().logits;
        let (from, name) = if prompt == "long" {
            (tokens.len() - 32, "long.logits_last32")
        } else {
            (0, &*format!("{prompt}.logits"))
        };
        let want = fixture.floats(name);
        worst = worst.max(relative_error(&got[from * vocab..], &want));
        assert!(cosine(&got[from * vocab..], &want) > 0.99);
    }
    (worst, loaded.precision)
}

fn exact() -> EngineConfig {
    EngineConfig { experts: ExpertBits::Bf16, dense: DenseBits::Bf16, kv: KvBits::Bf16x2, ..Default::default() }
}

/// The format of the first expert's gate in the last layer.
fn format_of(dir: &Path) -> Format {
    let model = common::model_in(dir);
    let (names, moe, layer) = (&model.names, model.moe().unwrap(), model.layers.len() - 1);
    let name = names.expert(layer, 0)[0].clone();
    let checkpoint = moebius_cache::Checkpoint::open(dir).unwrap();
    checkpoint.source(&name, [moe.intermediate_size, model.hidden_size]).unwrap().kind()
}

/// `bf16` and `auto` bound the errors of these two; each is some half more than what was measured.
fn check(name: &str, format: Format, bf16: f64, auto: f64, precision: Precision) {
    let fixture = Fixture::open(name);
    assert_eq!(format_of(&fixture.dir), format, "{name}");
    let (error, _) = error_of(&fixture, &exact());
    assert!(error < bf16, "{name}, experts as bf16: logits off by {error}");
    let (error, kept) = error_of(&fixture, &EngineConfig { experts: ExpertBits::Auto, ..exact() });
    assert!(error < auto, "{name}, experts as they are: logits off by {error}");
    assert_eq!(kept, Some(precision.into()), "{name}");
    // Codes pass with their scales.
    assert_eq!(experts_rounding(&fixture.dir), 0.0, "{name}");
}

const INT4_G32: Precision = Precision::int4(32);

#[test]
fn fp8_in_blocks() {
    // Beside FP8 activations keep 16 bits: experts are more exact than rounded to BF16.
    check("qwen3_moe_fp8", Format::Fp8, 0.01, 0.01, Precision::fp8(32));
    check("kimi_k2_fp8", Format::Fp8, 0.01, 0.01, Precision::fp8(128).with_scales(ScaleType::F32));
}

#[test]
fn nvfp4() {
    check("qwen3_moe_nvfp4", Format::Nvfp4, 0.01, 0.03, Precision::Nvfp4);
}

#[test]
fn compressed_tensors_int4() {
    let format = Format::Integers { by: Library::CompressedTensors, bits: 4, zeros: false };
    check("kimi_k25_ct_int4_sharded", format, 0.01, 0.03, INT4_G32);
}

#[test]
fn mxfp4_stacked() {
    // Its values are bf16's: noise of f32 is left, 1.6e-5.
    check("gpt_oss_mxfp4", Format::Mxfp4, 1e-4, 0.03, Precision::Mxfp4);
}

#[test]
fn gptq() {
    let format = Format::Integers { by: Library::Gptq, bits: 4, zeros: false };
    check("qwen3_moe_gptq", format, 0.01, 0.03, Precision::int4(128).with_scales(ScaleType::F16));
}

#[test]
fn awq() {
    let format = Format::Integers { by: Library::Awq, bits: 4, zeros: true };
    check("qwen3_moe_awq", format, 0.01, 0.03, Precision::uint4(64).with_scales(ScaleType::F16));
}

/// Experts of each layer in two tensors, gate above up, as Qwen3.5's checkpoints have them and what transformers 5
/// saves of others.
fn stack_experts(header: &mut Value, data: &mut Vec<u8>) {
    let all = header.as_object().unwrap().clone();
    let bytes = |entry: &Value| {
        let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
        data[at(0)..at(1)].to_vec()
    };
    let bf16 = Value::from("BF16");
    let (mut stacked, mut kept) = (serde_json::Map::new(), Vec::new());
    let mut keep = |name: String, dtype: &Value, shape: Value, bytes: Vec<u8>| {
        let offsets = [kept.len(), kept.len() + bytes.len()];
        stacked.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        kept.extend(bytes);
    };
    let mut experts: BTreeMap<(String, usize), [Vec<u8>; 3]> = BTreeMap::new();
    let mut shapes = BTreeMap::new();
    for (name, entry) in all.iter().filter(|(name, _)| *name != "__metadata__") {
        let part =
            |rest: &str| ["gate_proj", "up_proj", "down_proj"].iter().position(|part| rest == format!("{part}.weight"));
        let split = name.split_once(".experts.").and_then(|(head, rest)| Some((head, rest.split_once('.')?)));
        match split.and_then(|(head, (e, rest))| Some((head, e.parse().unwrap(), part(rest)?))) {
            Some((head, e, part)) => {
                experts.entry((head.to_string(), e)).or_default()[part] = bytes(entry);
                shapes.insert((head.to_string(), part), entry["shape"].clone());
            }
            None => {
                keep(name.clone(), &entry["dtype"], entry["shape"].clone(), bytes(entry));
            }
        }
    }
    let heads: std::collections::BTreeSet<String> = experts.keys().map(|(head, _)| head.clone()).collect();
    for head in heads {
        let of: Vec<_> = experts.iter().filter(|((of, _), _)| *of == head).map(|(_, parts)| parts).collect();
        let (up, down) = (&shapes[&(head.clone(), 1)], &shapes[&(head.clone(), 2)]);
        let width = 2 * up[0].as_u64().unwrap();
        let gate_up = of.iter().flat_map(|[gate, up, _]| [gate.clone(), up.clone()].concat()).collect();
        keep(format!("{head}.experts.gate_up_proj"), &bf16, json!([of.len(), width, up[1]]), gate_up);
        keep(
            format!("{head}.experts.down_proj"),
            &bf16,
            json!([of.len(), down[0], down[1]]),
            of.iter().flat_map(|parts| parts[2].clone()).collect(),
        );
    }
    (*header, *data) = (Value::Object(stacked), kept);
}

#[test]
fn stacked_experts_are_the_same_experts() {
    for name in ["qwen3_5_moe", "qwen3_next", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3"] {
        let fixture = Fixture::open(name);
        let copy = Checkpoint::copy_of(&fixture.dir);
        copy.tensors("model.safetensors", stack_experts);
        for config in [exact(), EngineConfig { experts: ExpertBits::Int8, ..exact() }] {
            let logits = |dir: &Path| {
                let wanted = Wanted { logits: true, ..Default::default() };
                capture(&mut load(dir, &config), &fixture.tokens("mid.input_ids"), &wanted, 512).unwrap().logits
            };
            assert!(logits(&copy.dir()) == logits(&fixture.dir), "{name}: logits differ");
        }
    }
}
