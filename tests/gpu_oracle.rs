//! The GPU side against HF transformers, at the noise of bf16: experts in VRAM, on the CPU, streamed, and mixed.
//!
//! Runs on a GPU, or on kernels/emulator where there is none.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use common::gpu::{gpus, need_gpu, on_gpu};
use common::{Fixture, greedy};
use moebius::config::{DenseBits, Device, EngineConfig, ExpertBits, PrefillOn};
use moebius::engine::capture::{Wanted, capture};

const FIXTURES: &[&str] = &[
    "gpt_oss_mxfp4",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5_dense",
    "hy_v3",
    "mistral4",
    "ernie4_5_moe",
    "qwen3_dense",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m2",
    "minimax_m3",
    "lfm2_moe",
    "kimi_linear",
    "bailing_hybrid",
    "nemotron_h",
    "nemotron_h_latent",
    "granitemoehybrid",
    "qwen4_exp",
    "glm5_next",
    "deepseek_v4",
    "deepseek_v41",
    "qwen3_moe",
    "qwen3_moe_dense_layer_sharded",
    "deepseek_v2_lite",
    "deepseek_v2_full",
    "deepseek_v3",
    "mimo_v2_flash",
    "step3p5",
    "laguna",
    "llama4",
    "cohere2_moe",
    "gemma4",
];

/// How far HF's own bf16 run is from the reference.
struct Noise {
    max: f32,
    rms: f32,
}

fn noise(name: &str) -> Noise {
    // Nobody ran it in bf16: what has the same layers stands for it.
    let name = if name == "qwen3_5_moe" { "qwen3_next" } else { name };
    let text = std::fs::read_to_string(common::fixture_dir(name).join("reference.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let bf16 = &json["quality"]["hf_bf16_vs_f32"];
    Noise {
        max: bf16["max_abs_logit_diff"].as_f64().unwrap() as f32,
        rms: bf16["rms_logit_diff"].as_f64().unwrap() as f32,
    }
}

fn exact(config: EngineConfig) -> EngineConfig {
    on_gpu(EngineConfig { experts: ExpertBits::Bf16, dense: DenseBits::Bf16, ..config })
}

/// Prompts, and what the reference has of their logits.
fn prompts(name: &str) -> &'static [(&'static str, &'static str)] {
    let all = &[("short", "short.logits"), ("mid", "mid.logits"), ("long", "long.logits_last32")];
    // Its queries grow from position 48 on.
    if name == "mistral4" { all } else { &all[..2] }
}

/// Logits of prompts within HF's own bf16 noise.
fn check(name: &str, what: &str, config: &EngineConfig) {
    let fixture = Fixture::open(name);
    let mut loaded = fixture.load(config);
    assert!(loaded.device.is_some(), "{name}: {what} runs on the GPU");
    let noise = noise(name);
    for (prompt, logits) in prompts(name) {
        let tokens = fixture.tokens(&format!("{prompt}.input_ids"));
        let got = capture(&mut loaded, &tokens, &Wanted { logits: true, ..Default::default() }, 512).unwrap();
        let want = fixture.floats(logits);
        let last = &got.logits[got.logits.len() - want.len()..];
        let differences = || last.iter().zip(&want).map(|(g, w)| (g - w).abs());
        let max = differences().fold(0.0, f32::max);
        let rms = (differences().map(|d| d * d).sum::<f32>() / want.len() as f32).sqrt();
        assert!(got.logits.iter().all(|l| l.is_finite()), "{name} {prompt}, {what}: not finite");
        eprintln!(
            "{name} {prompt}, {what}: max {max:.3} (HF in bf16 {:.3}), rms {rms:.4} ({:.4})",
            noise.max, noise.rms
        );
        assert!(rms <= noise.rms && max <= 1.2 * noise.max, "{name} {prompt}, {what}: logits off by {max}, rms {rms}");
    }
    for prompt in ["short", "mid"] {
        let (want, margins) =
            (fixture.tokens(&format!("{prompt}.greedy")), fixture.floats(&format!("{prompt}.greedy_margin")));
        let got = greedy(&mut loaded, &fixture.tokens(&format!("{prompt}.input_ids")), want.len().min(12));
        let sure = margins.iter().position(|&m| m < 0.6).unwrap_or(want.len()).min(got.len());
        assert_eq!(got[..sure], want[..sure], "{name} {prompt}, {what}: greedy tokens");
    }
}

#[test]
fn experts_in_vram() {
    need_gpu!();
    for name in FIXTURES {
        check(name, "all resident", &exact(EngineConfig::default()));
    }
}

/// Heads, widths and experts divided, and the sums of what GPUs make of them.
#[test]
fn shares_of_two() {
    need_gpu!(gpus() < 2, "it takes two GPUs");
    let two = |config| EngineConfig { device: Device::Cuda(vec![0, 1]), ..exact(config) };
    for name in [
        "qwen3_moe",
        "deepseek_v3",
        "qwen3_next",
        "qwen2_moe",
        "gpt_oss_mxfp4",
        "minimax_m2",
        "nemotron_h_latent",
        "mimo_v2_flash",
    ] {
        check(name, "a half on each of two GPUs", &two(EngineConfig::default()));
    }
    for name in ["qwen3_moe", "deepseek_v3"] {
        for (resident, prefill) in [(0, PrefillOn::Cpu), (0, PrefillOn::Gpu), (3, PrefillOn::Auto)] {
            let config = EngineConfig { resident_experts: Some(resident), prefill, ..Default::default() };
            check(name, &format!("on two GPUs, {resident} resident, prompts on {prefill}"), &two(config));
        }
    }
}

#[test]
fn experts_on_the_cpu() {
    need_gpu!();
    for name in ["qwen3_moe", "deepseek_v3", "nemotron_h_latent"] {
        let config = EngineConfig { resident_experts: Some(0), prefill: PrefillOn::Cpu, ..Default::default() };
        check(name, "on the CPU", &exact(config));
    }
}

#[test]
fn experts_streamed() {
    need_gpu!();
    for name in ["qwen3_moe", "deepseek_v3", "nemotron_h_latent"] {
        let config = EngineConfig { resident_experts: Some(0), prefill: PrefillOn::Gpu, ..Default::default() };
        check(name, "streamed", &exact(config));
    }
}

#[test]
fn experts_here_and_there() {
    need_gpu!();
    for name in ["qwen3_moe", "deepseek_v3"] {
        for prefill in PrefillOn::ALL {
            let config = EngineConfig { resident_experts: Some(3), prefill, ..Default::default() };
            check(name, &format!("three resident, prompts on {prefill}"), &exact(config));
        }
    }
}
