//! Flags that several subcommands share.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::{DenseBits, Device, EngineConfig, ExpertBits, ExpertsMemory, KvBits, Numa, PrefillOn};
use crate::engine::{SamplingOverrides, SamplingParams};
use crate::kernel::Simd;
use crate::model::families::shapes;
use crate::{Error, Result};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use moebius_cache::pack::GROUP_SIZES;

/// More threads or larger batches would only waste memory.
const MAX_THREADS: usize = 1024;
const MAX_BATCH_TOKENS: usize = 1 << 16;

/// The subject of a measurement or a plan: a model, or only its dimensions.
#[derive(Args)]
#[command(group(clap::ArgGroup::new("what").required(true)))]
pub(crate) struct SubjectArgs {
    /// `demo`, a directory, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-30B-A3B.
    #[arg(group = "what")]
    pub(crate) model: Option<String>,
    /// Use the dimensions of a known model; nothing is downloaded.
    #[arg(long, value_name = "NAME", group = "what", value_parser = PossibleValuesParser::new(shapes::names()))]
    pub(crate) shape: Option<String>,
    /// Use only the first N layers of the shape.
    #[arg(long, value_name = "N", requires = "shape", conflicts_with = "model")]
    pub(crate) layers: Option<usize>,
}

/// The precision of packed experts, and their directory.
#[derive(Args, Clone)]
#[command(next_help_heading = "Engine")]
pub(crate) struct PackedArgs {
    /// Precision of the routed experts; auto keeps the precision of a quantized checkpoint and converts others to int4.
    #[arg(long, default_value = "auto", value_parser = one_of(&ExpertBits::ALL))]
    experts: ExpertBits,
    /// Inputs that share one scale [default: the checkpoint's group size, else the largest that divides].
    #[arg(long, value_parser = one_of(&GROUP_SIZES))]
    group_size: Option<usize>,
    /// Directory of packed experts and the demo model [default: ~/.cache/moebius].
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
}

impl PackedArgs {
    /// The engine's configuration, with the cache directory filled in.
    pub(crate) fn to_config(&self) -> Result<EngineConfig> {
        let mut config = EngineConfig {
            experts: self.experts,
            group_size: self.group_size,
            cache_dir: self.cache_dir.clone(),
            ..EngineConfig::default()
        };
        config.cache_dir = Some(crate::load::cache_dir(&config)?);
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
    #[arg(long, default_value = "bf16", value_parser = one_of(&DenseBits::ALL))]
    dense: DenseBits,
    /// Precision of the KV cache; bf16x2 is close to f32 and takes twice the memory of bf16.
    #[arg(long, default_value = "bf16", value_parser = one_of(&KvBits::ALL))]
    kv: KvBits,
    /// Maximum tokens of a sequence, prompt plus answer [default: the model's limit, or what memory allows].
    #[arg(long, value_name = "N")]
    max_context: Option<usize>,
    /// Maximum tokens of one forward pass, the size of a prefill chunk [default: 512; on a GPU up to 8192, as VRAM
    /// allows].
    #[arg(long, value_name = "N")]
    max_batch_tokens: Option<usize>,
    /// Worker threads [default: one per physical core].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Instruction set of the CPU kernels [default: the best that this machine supports].
    #[arg(long, value_parser = one_of(&Simd::ALL))]
    simd: Option<Simd>,
    /// Lock the experts in RAM, so that the system cannot evict them.
    #[arg(long)]
    lock: bool,
    /// Use of NUMA nodes: each holds a slice of every expert (auto), ignored (off), or the experts' pages alternate
    /// (interleave).
    #[arg(long, default_value = "auto", value_parser = one_of(&Numa::ALL))]
    numa: Numa,
    /// Memory of the experts: the mapped cache file (map), a copy in huge pages (copy), or the faster one (auto).
    #[arg(long, default_value = "auto", value_parser = one_of(&ExpertsMemory::ALL))]
    experts_memory: ExpertsMemory,
    /// Device to run on: auto (the first GPU, else the CPU), cpu or cuda:0.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Device,
    /// Maximum VRAM to use, such as 16GiB [default: all that is free].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    vram: Option<u64>,
    /// Experts of each layer to keep in VRAM: auto (as many as fit), or a number.
    #[arg(long, value_name = "N", default_value = "auto", value_parser = parse_auto)]
    resident_experts: Auto,
    /// Where to compute the routed experts during prefill when there is a GPU; auto chooses the faster.
    #[arg(long, default_value = "auto", value_parser = one_of(&PrefillOn::ALL))]
    prefill: PrefillOn,
}

/// A number, or the best one.
#[derive(Clone, Copy)]
struct Auto(Option<usize>);

fn parse_auto(s: &str) -> std::result::Result<Auto, String> {
    match s {
        "auto" => Ok(Auto(None)),
        _ => s.parse().map(|n| Auto(Some(n))).map_err(|_| "give auto or a number".into()),
    }
}

/// `16GiB`, `500MiB`, `8G`: units are powers of 1024.
pub(crate) fn parse_bytes(s: &str) -> std::result::Result<u64, String> {
    let digits = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let unit = match s[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err("give a size such as 16GiB or 500MiB".into()),
    };
    let number: f64 = s[..digits].parse().map_err(|_| "give a size such as 16GiB or 500MiB".to_string())?;
    Ok((number * (1u64 << unit) as f64) as u64)
}

/// `90s`, `5m`, `1.5h`, `200ms`; seconds without a unit.
pub(crate) fn parse_duration(s: &str) -> std::result::Result<Duration, String> {
    let wrong = || "give a time such as 90s, 5m or 200ms".to_string();
    let digits = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let unit = match &s[digits..] {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    let number: f64 = s[..digits].parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * unit).map_err(|_| wrong())
}

impl EngineArgs {
    /// The engine's configuration, with the cache directory filled in.
    pub(crate) fn to_config(&self) -> Result<EngineConfig> {
        for (flag, value) in [
            ("--threads", self.threads),
            ("--max-context", self.max_context),
            ("--max-batch-tokens", self.max_batch_tokens),
        ] {
            if value == Some(0) {
                return Err(Error::Invalid(format!("{flag} is 0: give at least 1")));
            }
        }
        for (flag, value, max) in
            [("--threads", self.threads, MAX_THREADS), ("--max-batch-tokens", self.max_batch_tokens, MAX_BATCH_TOKENS)]
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
            device: self.device.clone(),
            vram: self.vram,
            resident_experts: self.resident_experts.0,
            prefill: self.prefill,
            ..self.packed.to_config()?
        })
    }
}

/// How far the text of messages is trusted.
#[derive(Args, Clone)]
#[command(next_help_heading = "Messages")]
pub(crate) struct ContentArgs {
    /// Treat special tokens spelled out in messages as special tokens; by default they are plain text, and only the
    /// chat template writes special tokens.
    #[arg(long)]
    trust_content: bool,
}

impl ContentArgs {
    /// `config` with these choices.
    pub(crate) fn over(&self, config: EngineConfig) -> EngineConfig {
        EngineConfig { trust_content: self.trust_content, ..config }
    }
}

/// How many requests run at the same time.
#[derive(Args, Clone)]
#[command(next_help_heading = "Load")]
pub(crate) struct SchedulingArgs {
    /// Maximum requests that run at the same time.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    max_sequences: u16,
    /// Maximum requests that wait; more are refused (HTTP 429).
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_queue: usize,
    /// Maximum milliseconds between two tokens of an answer while other requests prefill; longer prompts are prefilled
    /// in parts.
    #[arg(long, value_name = "MS", default_value_t = 500)]
    max_gap: u64,
    /// Do not reuse the KV cache of a common prefix.
    #[arg(long)]
    no_prefix_cache: bool,
}

impl SchedulingArgs {
    /// `config` with these choices.
    pub(crate) fn over(&self, config: EngineConfig) -> EngineConfig {
        EngineConfig {
            max_sequences: self.max_sequences.into(),
            max_queue: self.max_queue,
            max_gap: Duration::from_millis(self.max_gap),
            prefix_cache: !self.no_prefix_cache,
            ..config
        }
    }
}

/// Parses the name of one of `all`.
pub(crate) fn one_of<T: Display + Copy + Send + Sync + 'static>(all: &'static [T]) -> impl TypedValueParser<Value = T> {
    let named = |name: String| *all.iter().find(|value| value.to_string() == name).expect("a listed name");
    PossibleValuesParser::new(all.iter().map(ToString::to_string)).map(named)
}

/// Sampling parameters; the model has a default for each.
#[derive(Args, Clone)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Sampling temperature; 0 is greedy [default: the model's own, else 0].
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Sample from the smallest set of tokens whose probabilities sum to P.
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Sample from the K likeliest tokens; 0 means all.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Drop tokens less likely than P times the likeliest token.
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Random seed; the same seed gives the same text.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// Refuses values out of range before a model is loaded.
    pub(crate) fn check(&self) -> Result<()> {
        crate::text::model::check_sampling(&self.over(&Default::default()))
    }

    /// The model's defaults, overridden by the command line.
    pub(crate) fn over(&self, defaults: &SamplingParams) -> SamplingParams {
        let Self { temperature, top_p, top_k, min_p, seed } = *self;
        let overrides = SamplingOverrides { temperature, top_p, top_k, min_p, seed, ..SamplingOverrides::default() };
        overrides.over(defaults)
    }
}

/// A JSON array of token ids.
pub(crate) fn read_tokens(path: &Path) -> Result<Vec<u32>> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::Invalid(format!("{}: not a JSON array of token ids, such as [1, 2, 3]: {e}", path.display()))
    })
}

/// A text file; anything that is not UTF-8 is refused by name.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    String::from_utf8(bytes).map_err(|_| Error::Invalid(format!("{} is not UTF-8 text", path.display())))
}
