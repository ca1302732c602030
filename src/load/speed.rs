//! How fast a model will run, reckoned from bytes and bandwidths before it runs: what `plan` and the line at start say.
//!
//! One sequence, a short context:
//!
//! ```text
//! decode, CPU alone   a token's bytes / (0.8 x read bandwidth) + 80 us a layer
//! decode, GPU         (dense + resident experts) / (0.8 x VRAM bandwidth) + 30 us a layer (latent attention: 44)
//!                     + others / (0.9 x read bandwidth) + 10 us a layer; of one GPU, whose link reads some of the
//!                     others, the slower of both sides
//! prefill             products / rate; on a GPU the slowest of its products, PCIe and the CPU's share, layer by layer
//! ```
//!
//! Shares and microseconds are those that make the records true within some 15 percent: on the CPU benches/record, on
//! the GPU an H200 with 16 cores (decode 402 resident and 98 from RAM at 136 GB/s for Qwen3-30B-A3B, 486 and 143 for
//! DeepSeek-V2-Lite; prefill of 8,192 tokens 50,000 and 81,900 resident).

use std::sync::Arc;

use moebius_cache::Precision;
use moebius_cache::pack::{ExpertPrecision, Precisions};

use super::machine::Machine;
use super::memory::{cache_bytes, weight_bytes};
use super::spec::Spec;
use super::synthetic;
use crate::Result;
use crate::backend::Routing;
use crate::config::{DenseBits, EngineConfig};
use crate::experts::{CpuExperts, ExpertMemory, ExpertShape};
use crate::forward::kv_cache::CacheSize;
use crate::machine::heap::Heap;
use crate::machine::memory::{Pages, read_bandwidth};
use crate::model::{Ffn, LayerConfig, ModelConfig, Moe};

/// What a model is expected to do.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Expected {
    /// Tokens a second of one sequence.
    pub decode_tok_per_s: f64,
    /// Tokens a second of a prompt.
    pub prefill_tok_per_s: f64,
    /// Tokens of that prompt.
    pub prefill_tokens: usize,
}

impl std::fmt::Display for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { decode_tok_per_s: decode, prefill_tok_per_s: prefill, prefill_tokens } = self;
        write!(f, "{} tok/s in decode, {} in a prompt of {prefill_tokens}", round(*decode), round(*prefill))
    }
}

/// Two or three digits: more would promise more than is known.
fn round(x: f64) -> String {
    match x {
        _ if x < 10.0 => format!("{x:.1}"),
        _ if x < 1000.0 => format!("{x:.0}"),
        _ => format!("{:.0}", (x / 100.0).round() * 100.0),
    }
}

/// What a token takes.
pub(super) struct TokenWork {
    layers: usize,
    pub(super) dense_bytes: f64,
    pub(super) dense_products: f64,     // of a token, without the output head
    pub(super) attention_products: f64, // of a token and one it attends to
    pub(super) top_k: usize,
    pub(super) num_experts: usize,
    pub(super) moe_layers: usize,
    pub(super) shape: Option<ExpertShape>,
}

impl TokenWork {
    pub(super) fn of(spec: &Spec<'_>) -> Result<Self> {
        let Spec { model, config, .. } = *spec;
        let embedding = match model.is_first_stage() {
            true => 2.0 * model.hidden_size as f64 * model.vocab_size as f64,
            false => 0.0,
        };
        let moe = model.moe();
        // Where rows have no groups, a GPU keeps them as they are, and the CPU was refused.
        let a_sequence = CacheSize { slots: 1, ..CacheSize::default() };
        let bf16 = EngineConfig { dense: DenseBits::Bf16, ..config.clone() };
        let weights = weight_bytes(spec).or_else(|_| weight_bytes(&spec.with(&bf16)))?;
        Ok(Self {
            layers: model.layers.len(),
            // A token's states are read and written.
            dense_bytes: (weights as f64 - embedding).max(0.0) + 2.0 * cache_bytes(spec, a_sequence)? as f64,
            dense_products: model.layers.iter().map(|layer| layer.dense_products(model.hidden_size)).sum(),
            attention_products: model.layers.iter().map(|layer| layer.attention.products_per_pair() as f64).sum(),
            top_k: moe.map_or(0, |moe| moe.router.top_k),
            num_experts: moe.map_or(1, |moe| moe.num_experts),
            moe_layers: model.moe_layers().count(),
            shape: spec.expert_shape()?,
        })
    }

    pub(super) fn expert_bytes(&self) -> f64 {
        // In the mean of all layers.
        self.shape.as_ref().map_or(0.0, |shape| shape.bytes_of_one() as f64 / shape.layers() as f64)
    }

    pub(super) fn expert_products(&self) -> f64 {
        self.shape.as_ref().map_or(0.0, |shape| shape.layouts[0].weights() as f64)
    }
}

/// What the cores of a box do in a second.
#[derive(Clone, Copy, Debug)]
pub struct CpuRates {
    /// Bytes read.
    pub read_bytes: f64,
    /// Products of weights and activations in dense layers.
    pub dense_products: f64,
    /// Products in routed experts.
    pub expert_products: f64,
}

/// Bytes over which the read bandwidth is measured.
const SAMPLE_BYTES: usize = 256 << 20;

impl CpuRates {
    /// Measures, on random weights of the model's dimensions and with batches of `tokens`. Takes about a second.
    pub fn measure(spec: &Spec<'_>, machine: &Machine, tokens: usize) -> Result<Self> {
        let Spec { model, ref precision, .. } = *spec;
        let sample = SAMPLE_BYTES.min((crate::machine::topology::available_bytes() / 8) as usize).max(1);
        machine.team.fit(1);
        let read_bytes = 1e9 * read_bandwidth(&machine.team, sample, Pages::Huge, 3)?;
        let dense_precision = spec.dense_precision(model.hidden_size);
        let width = model.moe().map_or(model.hidden_size, |moe| moe.intermediate_size);
        let fits = [model.hidden_size, width].iter().all(|k| k.is_multiple_of(dense_precision.unit()));
        let dense_precision = if fits { dense_precision } else { Precision::Bf16 };
        let dense_products = products(model, machine, dense_precision.into(), 1, tokens)?;
        let expert_products = match (model.moe(), precision) {
            (Some(moe), Some(precision)) => {
                let each = (tokens * moe.router.top_k).div_ceil(moe.num_experts);
                products(model, machine, precision.layer(0), moe.num_experts.min(8), each)?
            }
            _ => dense_products,
        };
        Ok(Self { read_bytes, dense_products, expert_products })
    }
}

/// Products a second with `experts` random experts, `each` tokens to every one of them.
fn products(
    model: &ModelConfig,
    machine: &Machine,
    precision: ExpertPrecision,
    experts: usize,
    each: usize,
) -> Result<f64> {
    let Some(moe) = model.moe() else { return Ok(f64::INFINITY) };
    let ffn = Ffn::Moe(Moe { num_experts: experts, ..moe.clone() });
    let layer = LayerConfig { ffn, ..model.layers[0].clone() };
    let precision: Precisions = [precision].into_iter().collect();
    let cache = synthetic::experts(&ModelConfig { layers: vec![layer], ..model.clone() }, precision)?;
    let (layout, memory) = (cache.layout(0), Arc::new(ExpertMemory::mapped(Arc::new(cache))));
    let tokens = experts * each;
    let mut cpu = CpuExperts::new(&Heap::default(), memory, machine.team.clone(), machine.kernel, tokens)?;
    let routing =
        Routing { top_k: 1, ids: (0..tokens).map(|i| (i % experts) as i32).collect(), weights: vec![1.0; tokens] };
    let (x, mut out) = (vec![0.5; tokens * layout.gate.k], vec![0.0; tokens * layout.down.n]);
    let mut seconds = f64::INFINITY;
    for _ in 0..3 {
        let started = std::time::Instant::now();
        cpu.submit_rows(0, &x, &routing)?;
        cpu.finish_rows(&mut out)?;
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    Ok((layout.weights() * tokens) as f64 / seconds)
}

/// On the CPU alone, prompts in batches of `tokens`.
pub fn on_cpu(spec: &Spec<'_>, rates: &CpuRates, tokens: usize) -> Result<Expected> {
    const SHARE: f64 = 0.8;
    const LAYER_S: f64 = 80e-6;
    let work = TokenWork::of(spec)?;
    let experts = (work.moe_layers * work.top_k) as f64;
    let read = SHARE * rates.read_bytes;
    let layers = work.layers as f64 * LAYER_S;
    let decode = (work.dense_bytes + experts * work.expert_bytes()) / read + layers;
    let n = tokens as f64;
    let dense = n * (work.dense_products + n / 2.0 * work.attention_products) / rates.dense_products;
    let routed = n * experts * work.expert_products() / rates.expert_products;
    // A batch reads every expert that some token chose.
    let chosen = 1.0 - (1.0 - work.top_k as f64 / work.num_experts as f64).powi(tokens as i32);
    let all = (work.moe_layers * work.num_experts) as f64 * chosen * work.expert_bytes();
    let prefill = (dense + routed).max((work.dense_bytes + all) / read) + layers;
    Ok(Expected { decode_tok_per_s: 1.0 / decode, prefill_tok_per_s: n / prefill, prefill_tokens: tokens })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineConfig;
    use crate::load::Kept;
    use crate::model::families::shapes;

    /// Records of 2 and 16 cores.
    #[test]
    fn what_was_measured_on_cpus_is_expected() {
        for (name, dense, gb_per_s, decode) in [
            ("deepseek-v2-lite", DenseBits::Bf16, 33.8, 9.6),
            ("deepseek-v2-lite", DenseBits::Int4, 235.7, 103.2),
            ("deepseek-v2-lite", DenseBits::Int8, 272.8, 81.9),
            ("qwen3-30b-a3b", DenseBits::Bf16, 233.6, 47.2),
            ("qwen3-30b-a3b", DenseBits::Int8, 247.1, 65.0),
            ("qwen3-30b-a3b", DenseBits::Int4, 233.6, 84.3),
        ] {
            let model = shapes::shape(name, None).unwrap();
            let config = EngineConfig { dense, ..EngineConfig::default() };
            let spec = Spec::new(&model, &config, Kept::NOTHING).unwrap();
            let rates = CpuRates { read_bytes: gb_per_s * 1e9, dense_products: 1e12, expert_products: 1e12 };
            let expected = on_cpu(&spec, &rates, 512).unwrap();
            let ratio = expected.decode_tok_per_s / decode;
            assert!((0.85..1.2).contains(&ratio), "{name} {dense}: {expected}, measured {decode}");
        }
    }
}
