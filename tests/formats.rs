//! Quantized checkpoints against HF transformers, which computed the reference from the dequantized weights in float32.
//!
//! With BF16 weights what is lost is the rounding of dequantized weights to BF16; `--experts auto` keeps the codes of experts as they are, and
//! rounds activations to 8 bits. `tests/fixtures/README.md` says what the reference is.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use common::{Fixture, cosine};
use moebius::capture::{Wanted, capture};
use moebius::config::{DenseBits, EngineConfig, ExpertBits, KvBits};
use moebius_cache::{Precision, ScaleType};

/// Root mean square of the error of all logits over that of the logits.
fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| (v as f64).powi(2)).sum::<f64>();
    (square(&mut got.iter().zip(want).map(|(g, w)| g - w)) / square(&mut want.iter().copied())).sqrt()
}

/// The errors of the three prompts' logits, of which the largest counts.
fn error_of(fixture: &Fixture, config: &EngineConfig) -> (f64, Option<Precision>) {
    let mut loaded = fixture.load(config);
    let vocab = loaded.model.config().vocab_size;
    let mut worst = 0f64;
    for prompt in ["short", "mid", "long"] {
        let tokens = fixture.tokens(&format!("{prompt}.input_ids"));
        let got = capture(&mut loaded, &tokens, &Wanted { logits: true, ..Default::default() }, 512).unwrap().logits;
        let (from, name) = if prompt == "long" { (tokens.len() - 32, "long.logits_last32") } else { (0, &*format!("{prompt}.logits")) };
        let want = fixture.floats(name);
        worst = worst.max(relative_error(&got[from * vocab..], &want));
        assert!(cosine(&got[from * vocab..], &want) > 0.99);
    }
    (worst, loaded.precision)
}

/// `bf16` and `auto` bound the errors of these two; each is some half more than what was measured.
fn check(name: &str, bf16: f64, auto: f64, precision: Precision) {
    let fixture = Fixture::open(name);
    let exact = EngineConfig { experts: ExpertBits::Bf16, dense: DenseBits::Bf16, kv: KvBits::Bf16x2, ..Default::default() };
    let (error, _) = error_of(&fixture, &exact);
    assert!(error < bf16, "{name}, experts as bf16: logits off by {error}");
    let (error, kept) = error_of(&fixture, &EngineConfig { experts: ExpertBits::Auto, ..exact });
    assert!(error < auto, "{name}, experts as they are: logits off by {error}");
    assert_eq!(kept, Some(precision), "{name}");
}

const INT4_G32: Precision = Precision::int4(32);

#[test]
fn fp8_in_blocks() {
    check("qwen3_moe_fp8", 0.01, 0.03, Precision::int8(32));
    check("kimi_k2_fp8", 0.01, 0.03, Precision::int8(128));
}

#[test]
fn compressed_tensors_int4() {
    check("kimi_k25_ct_int4_sharded", 0.01, 0.03, INT4_G32);
}

#[test]
fn mxfp4_stacked() {
    check("gpt_oss_mxfp4", 0.05, 0.1, Precision::Mxfp4);
}

#[test]
fn gptq() {
    check("qwen3_moe_gptq", 0.01, 0.03, Precision::int4(128).with_scales(ScaleType::F16));
}

#[test]
fn awq() {
    check("qwen3_moe_awq", 0.01, 0.03, Precision::int8(64).with_scales(ScaleType::F16));
}
