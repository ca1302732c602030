//! How fast a model will run on a GPU, as planned: the formulas stand in `load/speed.rs`.

use std::sync::Arc;

use super::plan::GpuPlan;
use crate::Result;
use crate::config::{DecodeOn, PrefillOn};
use crate::cuda::{Cuda, DeviceInfo};
use crate::experts::cost::{CostModel, OtherLink};
use crate::experts::pool::expected_hits;
use crate::load::spec::Spec;
use crate::load::speed::{CpuRates, Expected, TokenWork};

/// What a GPU and the box around it do in a second.
#[derive(Clone, Debug)]
pub struct GpuRates {
    /// Bytes of VRAM.
    pub vram_bytes: f64,
    /// Of each GPU that holds experts for it.
    pub beside: Vec<HolderRates>,
    /// Of what experts in RAM need; `None` where there are none.
    pub speeds: Option<CostModel>,
}

/// What a GPU that holds experts for another one does in a second.
#[derive(Clone, Copy, Debug)]
pub struct HolderRates {
    /// Bytes of VRAM.
    pub vram_bytes: f64,
    /// Products of long prompts.
    pub products: f64,
    /// Bytes of its link.
    pub link_bytes: f64,
}

/// Bytes over which bandwidths are measured, where there is room.
const SAMPLE_BYTES: u64 = 128 << 20;

impl HolderRates {
    /// Measures a GPU.
    pub fn measure(cuda: &Arc<Cuda>) -> Result<Self> {
        let sample = SAMPLE_BYTES.min(cuda.info.free_bytes / 4).max(1 << 20) as usize;
        cuda.enter_thread()?;
        let (vram_bytes, link_bytes) = (cuda.vram_bandwidth(sample)?, cuda.pcie_bandwidth(sample)?);
        Ok(Self { vram_bytes, products: products(&cuda.info), link_bytes })
    }
}

impl GpuRates {
    /// Of each of so many GPUs, whose links carry a part of an expert each.
    pub fn of(cpu: &CpuRates, ranks: usize, vram_bytes: f64, pcie_bytes: f64) -> Self {
        let speeds = CostModel {
            cpu_bytes: CostModel::CPU_SHARE * cpu.read_bytes,
            cpu_products: cpu.expert_products,
            pcie_bytes: CostModel::links(ranks, pcie_bytes),
        };
        Self { vram_bytes, beside: Vec::new(), speeds: Some(speeds) }
    }
}

/// Products a second of long prompts: measured on Hopper, elsewhere in proportion to the width of the tensor cores.
pub fn products(device: &DeviceInfo) -> f64 {
    let multiprocessor = match device.capability {
        (9, _) => 1.7e12,
        (8, 0) | (10, _) => 0.65e12,
        _ => 0.33e12,
    };
    device.multiprocessors as f64 * multiprocessor
}

/// On a GPU, as planned.
pub fn on_gpu(plan: &GpuPlan, spec: &Spec<'_>, rates: &GpuRates) -> Result<Expected> {
    const VRAM_SHARE: f64 = 0.85;
    // Of several GPUs each reads less at a time: what the same step takes longer for each that is added.
    const SHORTER_READS: f64 = 0.06;
    const PREFILL_LAYER_S: f64 = 200e-6; // however short the prompt
    // Sums over several GPUs: of one row, and bytes a second of many.
    const SUM_S: f64 = 4e-6;
    const SUM_BYTES: f64 = 320e9;
    let ranks = spec.ranks() as f64;
    let sums = if ranks > 1.0 { 2.0 * spec.model.layers.len() as f64 } else { 0.0 };
    let work = TokenWork::of(&spec.decoded())?;
    let resident = plan.sizes.map_or(work.num_experts, |sizes| sizes.resident);
    let others = plan.sizes.map_or(0, |sizes| sizes.in_ram(work.num_experts));
    let (all, top_k, moe_layers) = (work.num_experts as f64, work.top_k as f64, work.moe_layers as f64);

    let share = expected_hits(resident as f64 / all);
    let own = work.dense_bytes + share * moe_layers * top_k * work.expert_bytes();
    let mut decode = own * (1.0 + SHORTER_READS * (ranks - 1.0)) / (ranks * VRAM_SHARE * rates.vram_bytes)
        + sums * SUM_S
        + spec.model.layers.iter().map(|layer| layer.attention.gpu_seconds()).sum::<f64>();
    // Beside the CPU's experts, those that other GPUs hold: of the rest, the most chosen.
    let cached = |experts: usize| expected_hits(experts as f64 / all);
    let holders = || plan.holders.iter().zip(&rates.beside);
    let (mut before, mut beside) = (resident, 0.0f64);
    // To GPUs that hold experts hidden states go in bf16, and sums come back in f32.
    let row_bytes = 6.0 * spec.model.hidden_size as f64;
    for (holder, of) in holders() {
        let chosen = cached(before + holder.experts) - cached(before);
        before += holder.experts;
        let hop = 2.0 * CostModel::HANDOFF_S + row_bytes / of.link_bytes;
        beside = beside.max(chosen * top_k * work.expert_bytes() / (VRAM_SHARE * of.vram_bytes) + hop);
    }
    if let (Some(speeds), true) = (&rates.speeds, others > 0) {
        let (n, bytes) = ((1.0 - cached(before)) * top_k, work.expert_bytes());
        beside = beside.max(match spec.config.decode {
            DecodeOn::Auto if spec.ranks() == 1 => speeds.in_decode(n, bytes).1,
            _ => speeds.on_cpu_in_decode(n, bytes),
        });
    }
    decode += moe_layers * beside;

    let tokens = plan.limits.tokens.min(plan.max_context);
    let n = tokens as f64;
    // Where experts of a layer run that are not resident: seconds of PCIe, seconds of the CPU, and their number on
    // the GPU.
    let mut hops_pay = true;
    let (crossing, cpu, streamed) = match (&rates.speeds, &work.shape, plan.sizes) {
        (Some(speeds), Some(shape), Some(sizes)) if others > 0 => {
            let layout = &shape.layouts[shape.layers() / 2]; // stands for all
            let streamed = match spec.config.prefill {
                PrefillOn::Cpu => 0,
                PrefillOn::Gpu => others,
                PrefillOn::Auto if tokens > sizes.cpu_tokens => others,
                PrefillOn::Auto => speeds.streamed(others, work.num_experts, tokens, sizes.top_k, layout),
            };
            let cpu = speeds.cpu_seconds(work.num_experts, tokens, sizes.top_k, layout);
            let links: Vec<_> =
                holders().map(|(h, of)| OtherLink { bytes: of.link_bytes, passes: h.ring >= 2 }).collect();
            let numbers = tokens * spec.model.hidden_size;
            let own = match streamed == others && !links.is_empty() {
                true => match speeds.divided((others, sizes.on_holders), layout.bytes(), numbers, &links) {
                    Some(shares) => shares[0],
                    None => {
                        hops_pay = false;
                        others + sizes.on_holders
                    }
                },
                false => streamed,
            };
            (own as f64 * work.expert_bytes() / speeds.pcie_bytes, (others - streamed) as f64 * cpu, own)
        }
        _ => (0.0, 0.0, 0),
    };
    let rate = ranks * products(&plan.device);
    let on_gpu = (resident + streamed) as f64 / all * n * top_k * work.expert_products() / rate;
    let on_others =
        holders().map(|(holder, of)| holder.experts as f64 / all * n * top_k * work.expert_products() / of.products);
    let on_gpu = if hops_pay { on_others.fold(on_gpu, f64::max) } else { on_gpu };
    let rest = n * (work.dense_products + n / 2.0 * work.attention_products) / rate;
    // Copies run beside all of the GPU's work, the CPU only beside the experts'.
    let least = spec.model.layers.len() as f64 * PREFILL_LAYER_S;
    let summing = sums * n * 4.0 * spec.model.hidden_size as f64 / SUM_BYTES;
    // Rows go out and back through the first one's link and the holder's.
    let hops = match &rates.speeds {
        Some(speeds) if hops_pay => {
            speeds.hop_seconds(tokens * spec.model.hidden_size, holders().map(|(_, of)| of.link_bytes))
        }
        _ => 0.0,
    };
    // What crosses does so beside everything but hidden states.
    let prefill =
        (least + rest + summing + moe_layers * on_gpu.max(cpu)).max(moe_layers * crossing) + moe_layers * hops;
    Ok(Expected { decode_tok_per_s: 1.0 / decode, prefill_tok_per_s: n / prefill, prefill_tokens: tokens })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineConfig;
    use crate::load::Kept;
    use crate::model::families::shapes;

    /// A Hopper with so much memory, read so fast.
    struct Card(u64, f64);

    /// Expects what was measured of the first layers of a shape on so many GPUs: tok/s in decode and of a prompt.
    fn check(
        Card(gib, vram_bytes): Card,
        (ranks, decode_on, speeds): (usize, DecodeOn, Option<CostModel>),
        (name, layers, resident): (&str, Option<usize>, Option<usize>),
        [decode, prefill]: [f64; 2],
    ) {
        let device = DeviceInfo {
            name: "a card".into(),
            capability: (9, 0),
            multiprocessors: 132,
            shared_bytes: 0,
            total_bytes: gib << 30,
            free_bytes: gib << 30,
        };
        let model = shapes::shape(name, layers).unwrap();
        let config = EngineConfig { resident_experts: resident, decode: decode_on, ..EngineConfig::default() };
        let spec = Spec::new(&model, &config, Kept::NOTHING).unwrap().on(ranks);
        let machine = crate::load::machine(&config, &crate::machine::topology::Topology::read()).unwrap();
        let machine = crate::load::Machine { available_bytes: 64 << 30, ..machine };
        let plan = GpuPlan::new(&spec, &device, &machine).unwrap();
        let expected = on_gpu(&plan, &spec, &GpuRates { vram_bytes, beside: Vec::new(), speeds }).unwrap();
        let near = |a: f64, b: f64| (a / b).max(b / a) < 1.15;
        assert_eq!(expected.prefill_tokens, 8192);
        assert!(
            near(expected.decode_tok_per_s, decode) && near(expected.prefill_tok_per_s, prefill),
            "{name} {resident:?} on {ranks}: {expected}, measured {decode} and {prefill}"
        );
    }

    /// One H200 beside 16 cores.
    #[test]
    fn what_was_measured_is_expected() {
        for (name, layers, resident, decode_on, read_bytes, measured) in [
            ("qwen3-30b-a3b", None, None, DecodeOn::Auto, 137e9, [497.0, 52_900.0]),
            ("qwen3-30b-a3b", None, Some(0), DecodeOn::Cpu, 137e9, [98.0, 30_100.0]),
            ("qwen3-30b-a3b", Some(24), Some(0), DecodeOn::Auto, 126e9, [239.0, 59_900.0]),
            ("deepseek-v2-lite", None, None, DecodeOn::Auto, 137e9, [573.0, 86_300.0]),
            ("deepseek-v2-lite", None, Some(0), DecodeOn::Cpu, 137e9, [143.0, 59_800.0]),
            ("deepseek-v2-lite", None, Some(0), DecodeOn::Auto, 195e9, [194.0, 59_800.0]),
        ] {
            let cpu_bytes = CostModel::CPU_SHARE * read_bytes;
            let speeds = CostModel { cpu_bytes, cpu_products: 1.5e12, pcie_bytes: 55e9 };
            check(Card(140, 4.15e12), (1, decode_on, Some(speeds)), (name, layers, resident), measured);
        }
    }

    /// One, two and four H100 with all experts in VRAM: benches/record/h100-x4.
    #[test]
    fn what_was_measured_on_several_gpus_is_expected() {
        for (name, layers, measured) in [
            ("qwen3-235b-a22b", Some(12), [[517.0, 70_400.0], [794.0, 117_200.0], [1058.0, 187_700.0]]),
            ("glm-4.5", Some(10), [[340.0, 56_300.0], [557.0, 97_300.0], [900.0, 159_500.0]]),
            ("deepseek-v3", Some(7), [[290.0, 44_300.0], [477.0, 82_200.0], [720.0, 140_400.0]]),
            ("qwen3-30b-a3b", None, [[426.0, 51_500.0], [489.0, 77_200.0], [577.0, 108_400.0]]),
            ("deepseek-v2-lite", None, [[479.0, 84_000.0], [621.0, 119_900.0], [723.0, 169_600.0]]),
        ] {
            for (ranks, measured) in [1, 2, 4].into_iter().zip(measured) {
                check(Card(78, 2.92e12), (ranks, DecodeOn::Auto, None), (name, layers, None), measured);
            }
        }
    }
}
