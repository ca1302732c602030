//! Flags that several subcommands share.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use moebius::config::{DenseBits, EngineConfig, ExpertBits, ExpertsMemory, KvBits, Numa};
use moebius::kernel::Simd;
use moebius::{Error, Result};

/// More of either takes memory for nothing.
const MAX_THREADS: usize = 1024;
const MAX_BATCH_TOKENS: usize = 1 << 16;

/// Which packed experts, and where they are kept.
#[derive(Args, Clone)]
#[command(next_help_heading = "Engine")]
pub(crate) struct PackedArgs {
    /// Precision of the routed experts.
    #[arg(long, default_value = "int4", value_parser = PossibleValuesParser::new(["bf16", "int8", "int4"]).map(|s| expert_bits(&s)))]
    experts: ExpertBits,
    /// Inputs that share a scale [default: the checkpoint's own, else the largest that divides].
    #[arg(long, value_parser = PossibleValuesParser::new(["32", "64", "128"]).map(|s| s.parse::<usize>().expect("a listed number")))]
    group_size: Option<usize>,
    /// Where packed experts and the demo model are kept [default: ~/.cache/moebius].
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
}

impl PackedArgs {
    /// The choices as the engine takes them, the cache directory decided.
    pub(crate) fn to_config(&self) -> Result<EngineConfig> {
        let mut config = EngineConfig {
            experts: self.experts,
            group_size: self.group_size,
            cache_dir: self.cache_dir.clone(),
            ..EngineConfig::default()
        };
        config.cache_dir = Some(moebius::load::cache_dir(&config)?);
        Ok(config)
    }
}

/// How to load and run a model.
#[derive(Args, Clone)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    packed: PackedArgs,
    /// Precision of attention, shared experts, dense layers and the output head.
    #[arg(long, default_value = "bf16", value_parser = PossibleValuesParser::new(["bf16", "int8", "int4"]).map(|s| dense_bits(&s)))]
    dense: DenseBits,
    /// Precision of keys and values: bf16x2 is nearly f32, at twice the memory.
    #[arg(long, default_value = "bf16", value_parser = PossibleValuesParser::new(["bf16", "bf16x2"]).map(|s| kv_bits(&s)))]
    kv: KvBits,
    /// Tokens of prompt plus answer that a conversation may hold [default: the model's limit, or what memory allows].
    #[arg(long, value_name = "N")]
    max_context: Option<usize>,
    /// Tokens of one forward pass: the size of a prefill chunk.
    #[arg(long, value_name = "N", default_value_t = EngineConfig::default().max_batch_tokens)]
    max_batch_tokens: usize,
    /// Worker threads [default: one per physical core].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Instruction set of the CPU kernels [default: the best this machine has].
    #[arg(long, value_parser = simd_names().map(|s| s.parse::<Simd>().expect("a listed name")))]
    simd: Option<Simd>,
    /// Lock the experts in RAM.
    #[arg(long)]
    lock: bool,
    /// What NUMA nodes are used for: a slice of every expert on each, nothing, or the experts' pages in turn.
    #[arg(long, default_value = "auto", value_parser = PossibleValuesParser::new(["auto", "off", "interleave"]).map(|s| numa(&s)))]
    numa: Numa,
    /// Where the experts are read from: the mapped cache file, a copy in huge pages, or what is faster.
    #[arg(long, default_value = "auto", value_parser = PossibleValuesParser::new(["auto", "map", "copy"]).map(|s| experts_memory(&s)))]
    experts_memory: ExpertsMemory,
}

impl EngineArgs {
    /// The choices as the engine takes them, the cache directory decided.
    pub(crate) fn to_config(&self) -> Result<EngineConfig> {
        for (flag, value) in
            [("--threads", self.threads), ("--max-context", self.max_context), ("--max-batch-tokens", Some(self.max_batch_tokens))]
        {
            if value == Some(0) {
                return Err(Error::Invalid(format!("{flag} is 0: give at least 1")));
            }
        }
        for (flag, value, max) in
            [("--threads", self.threads, MAX_THREADS), ("--max-batch-tokens", Some(self.max_batch_tokens), MAX_BATCH_TOKENS)]
        {
            if let Some(value) = value.filter(|&value| value > max) {
                return Err(Error::Invalid(format!("{flag} is {value}: give at most {max}")));
            }
        }
        Ok(EngineConfig {
            dense: self.dense,
            kv: self.kv,
            max_context: self.max_context,
            max_batch_tokens: self.max_batch_tokens,
            threads: self.threads,
            simd: self.simd,
            lock: self.lock,
            numa: self.numa,
            experts_memory: self.experts_memory,
            ..self.packed.to_config()?
        })
    }
}

fn simd_names() -> PossibleValuesParser {
    PossibleValuesParser::new(Simd::ALL.map(|simd| simd.to_string()))
}

fn expert_bits(name: &str) -> ExpertBits {
    match name {
        "bf16" => ExpertBits::Bf16,
        "int8" => ExpertBits::Int8,
        _ => ExpertBits::Int4,
    }
}

fn numa(name: &str) -> Numa {
    match name {
        "off" => Numa::Off,
        "interleave" => Numa::Interleave,
        _ => Numa::Auto,
    }
}

fn experts_memory(name: &str) -> ExpertsMemory {
    match name {
        "map" => ExpertsMemory::Map,
        "copy" => ExpertsMemory::Copy,
        _ => ExpertsMemory::Auto,
    }
}

fn kv_bits(name: &str) -> KvBits {
    if name == "bf16x2" { KvBits::Bf16x2 } else { KvBits::Bf16 }
}

fn dense_bits(name: &str) -> DenseBits {
    match name {
        "int8" => DenseBits::Int8,
        "int4" => DenseBits::Int4,
        _ => DenseBits::Bf16,
    }
}

/// How tokens are chosen; what is not given is the model's own default.
#[derive(Args, Clone)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Randomness; 0 is greedy [default: the model's own, else 0].
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep the smallest set of tokens whose probabilities sum to this.
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Keep this many tokens; 0 keeps all.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Drop tokens below this share of the best one's probability.
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Same seed, same text.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// Refuses what is out of range, before a model is loaded for it.
    pub(crate) fn check(&self) -> Result<()> {
        moebius::text_model::check_sampling(&self.over(&Default::default()))
    }

    /// The model's defaults with what was given on the command line.
    pub(crate) fn over(&self, defaults: &moebius::engine::SamplingParams) -> moebius::engine::SamplingParams {
        moebius::engine::SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: defaults.repetition_penalty,
            seed: self.seed.or(defaults.seed),
        }
    }
}

/// A JSON array of token ids.
pub(crate) fn read_tokens(path: &Path) -> Result<Vec<u32>> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    serde_json::from_slice(&bytes)
        .map_err(|e| Error::Invalid(format!("{}: not a JSON array of token ids, such as [1, 2, 3]: {e}", path.display())))
}

/// A text file; anything that is not UTF-8 is refused by name.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    String::from_utf8(bytes).map_err(|_| Error::Invalid(format!("{} is not UTF-8 text", path.display())))
}
