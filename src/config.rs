//! `EngineConfig`: every choice a user can make, with its default, unit and validation.

use std::path::PathBuf;
use std::time::Duration;

use moebius_cache::Precision;
use moebius_cache::pack::largest_group_size;

use crate::kernel::Simd;

/// Gives a choice its names: `ALL` in the order they are offered, `Display` and `FromStr`.
macro_rules! named {
    ($type:ident: $($variant:ident $name:literal),*) => {
        impl $type {
            /// Every choice.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $(Self::$variant => $name,)*
                })
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(name: &str) -> Result<Self, String> {
                match name {
                    $($name => Ok(Self::$variant),)*
                    _ => Err(format!("{name:?} is unknown: use {}", one_of(&Self::ALL))),
                }
            }
        }
    };
}

/// `auto, bf16 or int8`
fn one_of(all: &[impl std::fmt::Display]) -> String {
    let names: Vec<String> = all.iter().map(ToString::to_string).collect();
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => names.concat(),
    }
}

named!(ExpertBits: Auto "auto", Bf16 "bf16", Int8 "int8", Int4 "int4");
named!(DenseBits: Bf16 "bf16", Int8 "int8", Int4 "int4");
named!(KvBits: Bf16 "bf16", Bf16x2 "bf16x2", Fp8 "fp8");
named!(Numa: Auto "auto", Off "off", Interleave "interleave");
named!(ExpertsMemory: Auto "auto", Map "map", Copy "copy");
named!(PrefillOn: Auto "auto", Cpu "cpu", Gpu "gpu");

/// Storage and arithmetic of the routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ExpertBits {
    /// What keeps a quantized checkpoint as it is, exactly where that can be; INT4 of any other.
    #[default]
    Auto,
    /// As most checkpoints come; activations keep 16 bits of mantissa.
    Bf16,
    /// 8-bit codes, group scales, int8 activations.
    Int8,
    /// 4-bit codes, group scales, int8 activations.
    Int4,
}

impl ExpertBits {
    /// The precision in groups of 32, where it has groups; `kept` is what keeps the checkpoint, if it is quantized.
    pub fn precision(self, kept: Option<Precision>) -> Precision {
        match self {
            ExpertBits::Auto => kept.unwrap_or(Precision::int4(32)),
            ExpertBits::Bf16 => Precision::Bf16,
            ExpertBits::Int8 => Precision::int8(32),
            ExpertBits::Int4 => Precision::int4(32),
        }
    }
}

/// Storage of attention, shared experts, dense MLPs and the output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DenseBits {
    /// As most checkpoints come; activations keep 16 bits of mantissa.
    #[default]
    Bf16,
    /// 8-bit codes, group scales, int8 activations. The small matrices that absorb `kv_b_proj` into latent attention
    /// stay at 16 bits.
    Int8,
    /// The same with 4-bit codes.
    Int4,
}

impl DenseBits {
    /// How a weight with rows of `k` inputs is stored; `None`: they cannot be cut into groups.
    pub fn precision(self, k: usize) -> Option<Precision> {
        let group_size = largest_group_size(&[k]);
        match self {
            DenseBits::Bf16 => Some(Precision::Bf16),
            DenseBits::Int8 => group_size.map(Precision::int8),
            DenseBits::Int4 => group_size.map(Precision::int4),
        }
    }
}

/// What the NUMA nodes of a machine are used for; on a machine of one node all are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Numa {
    /// Each node holds a slice of every expert, which its own cores compute.
    #[default]
    Auto,
    /// Memory comes from wherever the system takes it.
    Off,
    /// The pages of the experts alternate between the nodes.
    Interleave,
}

/// Where the routed experts are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ExpertsMemory {
    /// A copy where several NUMA nodes need one, or where it is measured to be a tenth faster; else the mapped file.
    #[default]
    Auto,
    /// The mapped cache file.
    Map,
    /// A copy in huge pages.
    Copy,
}

/// What a model runs on.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Device {
    /// The first GPU, or the CPU where there is none.
    #[default]
    Auto,
    /// The CPU alone.
    Cpu,
    /// The GPUs of these numbers.
    Cuda(Vec<usize>),
}

impl std::str::FromStr for Device {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(vec![0])),
            _ => s
                .strip_prefix("cuda:")
                .and_then(|list| list.split(',').map(|n| n.parse().ok()).collect())
                .map(Self::Cuda)
                .ok_or_else(|| "give auto, cpu or cuda:0".to_string()),
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Cpu => f.pad("cpu"),
            Self::Cuda(list) => {
                let numbers: Vec<String> = list.iter().map(usize::to_string).collect();
                f.pad(&format!("cuda:{}", numbers.join(",")))
            }
        }
    }
}

/// Where the routed experts of prompts run, beside a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PrefillOn {
    /// Where, or in what shares, they end first.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On the GPU.
    Gpu,
}

/// Storage of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvBits {
    /// One bf16 number each.
    #[default]
    Bf16,
    /// The sum of two bf16 numbers each, nearly f32: twice the memory and the work. On the CPU.
    Bf16x2,
    /// FP8 E4M3 without a scale: half the memory. On a GPU.
    Fp8,
}

impl KvBits {
    /// bf16 numbers to a key or value.
    pub fn parts(self) -> usize {
        match self {
            KvBits::Bf16 => 1,
            KvBits::Bf16x2 => 2,
            KvBits::Fp8 => 1,
        }
    }
}

/// Every user choice of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Precision of the routed experts, in prefill and decode alike.
    pub experts: ExpertBits,
    /// Inputs that share a scale (32, 64 or 128); `None`: the checkpoint's own, else the largest that divides.
    pub group_size: Option<usize>,
    /// Precision of everything else (router and norms are always f32).
    pub dense: DenseBits,
    /// Tokens of prompt plus answer that a sequence may hold; `None`: the model's own limit, lowered to what memory
    /// allows.
    pub max_context: Option<usize>,
    /// Sequences that run at the same time.
    pub max_sequences: usize,
    /// Requests that may wait beside them.
    pub max_queue: usize,
    /// Between two tokens of a running answer, while prompts are read: they are read in parts that take no longer,
    /// down to 32 tokens.
    pub max_gap: Duration,
    /// Keep the KV blocks of what was read, for requests that begin alike; nothing is kept of a model with recurrent
    /// state.
    pub prefix_cache: bool,
    /// Tokens of one forward pass: the size of a prefill chunk; `None`: [`CPU_BATCH_TOKENS`], or what the GPU's memory
    /// allows.
    pub max_batch_tokens: Option<usize>,
    /// Worker threads; `None`: one per physical core this process may use.
    pub threads: Option<usize>,
    /// Precision of keys and values.
    pub kv: KvBits,
    /// Instruction set of the CPU kernels; `None`: the best this machine has.
    pub simd: Option<Simd>,
    /// Where expert caches are kept; `None`: `$XDG_CACHE_HOME/moebius` or `~/.cache/moebius`.
    pub cache_dir: Option<PathBuf>,
    /// Lock the experts in RAM.
    pub lock: bool,
    /// What NUMA nodes are used for.
    pub numa: Numa,
    /// Where the routed experts are read from.
    pub experts_memory: ExpertsMemory,
    /// What everything but the CPU's share of the experts runs on.
    pub device: Device,
    /// VRAM that may be taken, in bytes; `None`: what is free.
    pub vram: Option<u64>,
    /// Experts of each layer that live in VRAM; `None`: as many as fit.
    pub resident_experts: Option<usize>,
    /// Where the experts of prompts run.
    pub prefill: PrefillOn,
    /// Special tokens that messages spell out count as the chat template's own.
    pub trust_content: bool,
}

/// Tokens of a forward pass on the CPU.
pub const CPU_BATCH_TOKENS: usize = 512;

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            experts: ExpertBits::default(),
            group_size: None,
            dense: DenseBits::default(),
            max_context: None,
            max_sequences: 16,
            max_queue: 256,
            max_gap: Duration::from_millis(500),
            prefix_cache: true,
            max_batch_tokens: None,
            threads: None,
            kv: KvBits::default(),
            simd: None,
            cache_dir: None,
            lock: false,
            numa: Numa::default(),
            experts_memory: ExpertsMemory::default(),
            device: Device::default(),
            vram: None,
            resident_experts: None,
            prefill: PrefillOn::default(),
            trust_content: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precisions_are_named_as_they_are_given() {
        for bits in ExpertBits::ALL {
            assert_eq!(bits.to_string().parse(), Ok(bits));
        }
        let unknown = "INT4".parse::<ExpertBits>();
        assert_eq!(unknown, Err("\"INT4\" is unknown: use auto, bf16, int8 or int4".into()));
    }

    #[test]
    fn devices_are_named_as_they_are_given() {
        for (text, device) in [
            ("auto", Device::Auto),
            ("cpu", Device::Cpu),
            ("cuda:3", Device::Cuda(vec![3])),
            ("cuda:0,1", Device::Cuda(vec![0, 1])),
        ] {
            assert_eq!(device.to_string(), text);
            assert_eq!(text.parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(vec![0])));
        for wrong in ["", "cuda:", "cuda:x", "cuda:0,", "cuda:0 1", "gpu"] {
            assert!(wrong.parse::<Device>().is_err_and(|e| e.contains("cuda:0")), "{wrong}");
        }
    }
}
