//! `EngineConfig`: every choice a user can make, with its flag, help, default, unit and validation.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use moebius_cache::Precision;
use moebius_cache::pack::{GROUP_SIZES, largest_group_size};

use crate::Error;
use crate::kernel::Simd;

/// Gives a choice its names: `ALL` in the order they are offered, `Display` and `FromStr`. Those behind a semicolon are
/// no choices of a user, and displayed alone.
macro_rules! named {
    ($type:ident: $($variant:ident $name:literal),* $(; $($inner:ident $inner_name:literal),*)?) => {
        impl $type {
            /// Every choice.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $(Self::$variant => $name,)*
                    $($(Self::$inner => $inner_name,)*)?
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

named!(DenseBits: Auto "auto", Bf16 "bf16", Int8 "int8", Int4 "int4"; Out "int4 out", Down "int4 down");
named!(ActivationBits: Eight "8", Sixteen "16");
named!(KvBits: Bf16 "bf16", Bf16x2 "bf16x2", Int8 "int8");
named!(Numa: Auto "auto", Off "off", Interleave "interleave");
named!(ExpertsMemory: Auto "auto", Map "map", Copy "copy");
named!(PrefillOn: Auto "auto", Cpu "cpu", Gpu "gpu");
named!(DecodeOn: Auto "auto", Cpu "cpu");
named!(Split: Auto "auto", Width "width", Experts "experts", Layers "layers");

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
    /// 4 bits of a table, and more where they pay, in so many hundredths of a bit for each weight with its scales.
    Within(u16),
}

impl Display for ExpertBits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            ExpertBits::Auto => f.pad("auto"),
            ExpertBits::Bf16 => f.pad("bf16"),
            ExpertBits::Int8 => f.pad("int8"),
            ExpertBits::Int4 => f.pad("int4"),
            ExpertBits::Within(hundredths) => f.pad(&format!("auto:{}bpw", f64::from(hundredths) / 100.0)),
        }
    }
}

impl std::str::FromStr for ExpertBits {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let bits = name.strip_prefix("auto:").and_then(|bits| bits.strip_suffix("bpw"));
        match (name, bits.and_then(|bits| bits.parse::<f64>().ok())) {
            ("auto", _) => Ok(ExpertBits::Auto),
            ("bf16", _) => Ok(ExpertBits::Bf16),
            ("int8", _) => Ok(ExpertBits::Int8),
            ("int4", _) => Ok(ExpertBits::Int4),
            (_, Some(bits)) if (0.0..=16.0).contains(&bits) => Ok(ExpertBits::Within((bits * 100.0).round() as u16)),
            _ => Err(format!("{name:?} is unknown: use auto, bf16, int8, int4, or a size such as auto:4.5bpw")),
        }
    }
}

impl ExpertBits {
    /// The precision in groups of 32, where it has groups; `kept` is what keeps the checkpoint, if it is quantized.
    pub fn precision(self, kept: Option<Precision>) -> Precision {
        match self {
            ExpertBits::Auto => kept.unwrap_or(Precision::int4(32)),
            ExpertBits::Bf16 => Precision::Bf16,
            ExpertBits::Int8 => Precision::int8(32),
            ExpertBits::Int4 | ExpertBits::Within(_) => Precision::int4(32),
        }
    }
}

/// Storage of attention, shared experts, dense MLPs and the output head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DenseBits {
    /// On the CPU what a quantized checkpoint has, exactly where there is a precision for it; else BF16.
    #[default]
    Auto,
    /// As most checkpoints come; activations keep 16 bits of mantissa.
    Bf16,
    /// 8-bit codes, group scales, int8 activations. The small matrices that absorb `kv_b_proj` into latent attention
    /// stay at 16 bits.
    Int8,
    /// The same with 4 bits of a table, but for the output head, keys, values and what adds to the residual stream.
    Int4,
    /// Beside `Int4`: attention's last projection.
    Out,
    /// Beside `Int4`: MLPs' last projection.
    Down,
}

impl DenseBits {
    /// Of the output head, of keys and of values: there 4 bits cost more than they save (docs/precision.md). The head's
    /// errors reach every probability undamped, and those of keys and values every later position.
    pub fn of_sensitive(self) -> Self {
        match self {
            DenseBits::Int4 => DenseBits::Int8,
            other => other,
        }
    }

    /// Of attention's last projection, which adds to the residual stream: 4 bits cost most there for its size
    /// (docs/precision.md).
    pub fn of_out(self) -> Self {
        match self {
            DenseBits::Int4 => DenseBits::Out,
            other => other,
        }
    }

    /// Of MLPs' last projection, which adds to it, too.
    pub fn of_down(self) -> Self {
        match self {
            DenseBits::Int4 => DenseBits::Down,
            other => other,
        }
    }

    /// How a weight with rows of `k` inputs is stored on a GPU. There a table's values take three times the
    /// instructions of integers, and 5 bits are multiplied more slowly than 8; groups of 32 cost their size alone.
    pub fn precision_on_gpu(self, k: usize) -> Option<Precision> {
        let group_size = largest_group_size(&[k]);
        match self {
            DenseBits::Int4 | DenseBits::Down => group_size.map(|_| Precision::int4(GROUP_SIZES[0])),
            DenseBits::Out => group_size.map(Precision::int8),
            _ => self.precision(k),
        }
    }

    /// How a weight with rows of `k` inputs is stored that is plain numbers; `None`: they cannot be cut into groups.
    pub fn precision(self, k: usize) -> Option<Precision> {
        let group_size = largest_group_size(&[k]);
        match self {
            DenseBits::Auto | DenseBits::Bf16 => Some(Precision::Bf16),
            DenseBits::Int8 => group_size.map(Precision::int8),
            // Groups of 32 are no faster than INT8 where cores are many, so only the few that pay most have them.
            DenseBits::Int4 => group_size.map(Precision::iq4),
            // A fifth bit takes most of what they cost.
            DenseBits::Out | DenseBits::Down => group_size.map(|_| Precision::Q5_0),
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
    /// As many GPUs like the first one as make the model fastest, or the CPU where there is none.
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

/// How several GPUs share a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Split {
    /// As the GPUs and the model allow.
    #[default]
    Auto,
    /// Each has a part of every layer.
    Width,
    /// One has the layers, the others hold experts for it.
    Experts,
    /// Each has some of the layers.
    Layers,
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

/// Where the routed experts in RAM are computed in decode, beside a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DecodeOn {
    /// On the CPU, but for those that the GPU reads over the link: as many as make steps fastest.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
}

/// What activations are next to weights in integers of 2 to 8 bits, on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ActivationBits {
    /// 8-bit codes, group scales.
    #[default]
    Eight,
    /// The sum of two of these.
    Sixteen,
}

/// Storage of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvBits {
    /// One bf16 number each.
    #[default]
    Bf16,
    /// The sum of two bf16 numbers each, nearly f32: twice the memory and the work. On the CPU.
    Bf16x2,
    /// 8-bit codes with a scale for each head's 64 numbers: half the memory.
    Int8,
}

impl KvBits {
    /// Stored numbers to a key or value.
    pub fn parts(self) -> usize {
        match self {
            KvBits::Bf16 => 1,
            KvBits::Bf16x2 => 2,
            KvBits::Int8 => 1,
        }
    }
}

/// Declares groups of choices, each the flags that some commands share, and [`EngineConfig`], which has them all. A
/// field is its flag: its comment is the help, its `arg` the values and the default.
macro_rules! engine_config {
    ($($(#[$about:meta])* struct $Group:ident { $($(#[$arg:meta])* $choice:ident: $Type:ty,)* })*) => {
        /// Every user choice of an engine.
        #[derive(Clone, Debug, clap::Parser)]
        #[command(no_binary_name = true, disable_help_flag = true)]
        pub struct EngineConfig { $($($(#[$arg])* pub $choice: $Type,)*)* }

        $(
            #[derive(Clone, Debug, clap::Args)]
            $(#[$about])*
            pub struct $Group { $($(#[$arg])* $choice: $Type,)* }

            impl $Group {
                /// `config` with these choices.
                pub fn over(self, config: EngineConfig) -> EngineConfig {
                    EngineConfig { $($choice: self.$choice,)* ..config }
                }
            }
        )*
    };
}

engine_config! {
    /// The precision of packed experts, and their directory.
    #[command(next_help_heading = "Engine")]
    struct PackedChoices {
        /// Precision of the routed experts; auto keeps the precision of a quantized checkpoint and converts others to
        /// int4; auto:4.5bpw packs four bits of a table, and more where they pay, up to 4.5 for each weight.
        #[arg(long, default_value = "auto", value_name = "auto|bf16|int8|int4|auto:4.5bpw")]
        experts: ExpertBits,
        /// Inputs that share one scale [default: the checkpoint's group size, else the largest that divides].
        #[arg(long, value_parser = choice_of(&GROUP_SIZES))]
        group_size: Option<usize>,
        /// Choose the experts' codes for what they read of this text, in UTF-8, or of the text that an importance
        /// matrix of llama.cpp was made of; `moebius cache build` builds such a cache.
        #[arg(long, value_name = "FILE.txt|imatrix.gguf")]
        calibrate: Option<PathBuf>,
        /// Directory of packed experts and the demo model [default: ~/.cache/moebius].
        #[arg(long, value_name = "DIR")]
        cache_dir: Option<PathBuf>,
    }

    /// How to load and run a model.
    #[command(next_help_heading = "Engine")]
    struct RunChoices {
        /// Precision of attention, shared experts, dense layers and the output head; auto keeps on the CPU what a
        /// quantized checkpoint has, and is bf16 of others.
        #[arg(long, default_value = "auto", value_parser = choice_of(&DenseBits::ALL))]
        dense: DenseBits,
        /// Bits of activations next to weights in integers on the CPU; 16 is to compare with.
        #[arg(long, default_value = "8", value_parser = choice_of(&ActivationBits::ALL))]
        activations: ActivationBits,
        /// Precision of the KV cache; bf16x2 is close to f32 and takes twice the memory of bf16, int8 half.
        #[arg(long, default_value = "bf16", value_parser = choice_of(&KvBits::ALL))]
        kv: KvBits,
        /// Maximum tokens of a sequence, prompt plus answer [default: the model's limit, or what memory allows].
        #[arg(long, value_name = "N")]
        max_context: Option<usize>,
        /// Maximum tokens of one forward pass, the size of a prefill chunk [default: 512; on a GPU up to 8192, as VRAM
        /// allows].
        #[arg(long, value_name = "N")]
        max_batch_tokens: Option<usize>,
        /// Worker threads [default: as many physical cores as are fastest, measured at start].
        #[arg(long, value_name = "N")]
        threads: Option<usize>,
        /// Instruction set of the CPU kernels [default: the best that this machine supports].
        #[arg(long, value_parser = choice_of(&Simd::ALL))]
        simd: Option<Simd>,
        /// Lock the experts in RAM, so that the system cannot evict them.
        #[arg(long)]
        lock: bool,
        /// Use of NUMA nodes: each holds a slice of every expert (auto), ignored (off), or the experts' pages alternate
        /// (interleave).
        #[arg(long, default_value = "auto", value_parser = choice_of(&Numa::ALL))]
        numa: Numa,
        /// Memory of the experts: the mapped cache file (map), a copy in huge pages (copy), or the faster one (auto).
        #[arg(long, default_value = "auto", value_parser = choice_of(&ExpertsMemory::ALL))]
        experts_memory: ExpertsMemory,
        /// Device to run on: auto (the GPUs that make the model fastest, else the CPU), cpu, cuda:0, or cuda:0,1 for
        /// several, which share the model as --split says.
        #[arg(long, value_name = "DEVICE", default_value = "auto")]
        device: Device,
        /// How several GPUs share a model: width (each has a part of every layer), experts (one has the layers, the
        /// others hold experts for it), layers (each has some of the layers), or auto (what suits the GPUs and the
        /// model; with --device auto what should be fastest).
        #[arg(long, default_value = "auto", value_parser = choice_of(&Split::ALL))]
        split: Split,
        /// Maximum VRAM to use of each GPU, such as 16GiB, or 16GiB,24GiB for the two of --device cuda:0,1 [default:
        /// all that is free].
        #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = parse_bytes)]
        vram: Vec<u64>,
        /// Experts of each layer to keep in VRAM: auto (as many as fit), or a number.
        #[arg(long, value_name = "N", default_value = "auto", value_parser = parse_auto)]
        resident_experts: std::option::Option<usize>, // clap would make a plain `Option` a flag without a default
        /// Where to compute the routed experts during prefill when there is a GPU; auto chooses the faster.
        #[arg(long, default_value = "auto", value_parser = choice_of(&PrefillOn::ALL))]
        prefill: PrefillOn,
        /// Where to compute the experts in RAM during decode when there is a GPU: auto (the GPU reads some of them over
        /// the link, as many as make steps fastest), or cpu.
        #[arg(long, default_value = "auto", value_parser = choice_of(&DecodeOn::ALL))]
        decode: DecodeOn,
    }

    /// How many requests run at the same time.
    #[command(next_help_heading = "Load")]
    struct LoadChoices {
        /// Maximum requests that run at the same time.
        #[arg(long, value_name = "N", default_value = "16")]
        #[arg(value_parser = clap::value_parser!(u16).range(1..=1024).map(usize::from))]
        max_sequences: usize,
        /// Maximum requests that wait; more are refused (HTTP 429).
        #[arg(long, value_name = "N", default_value = "256")]
        max_queue: usize,
        /// Maximum milliseconds between two tokens of an answer while other requests prefill; longer prompts are
        /// prefilled in parts.
        #[arg(long, value_name = "MS", default_value = "500")]
        #[arg(value_parser = clap::value_parser!(u64).map(Duration::from_millis))]
        max_gap: Duration,
        /// Do not reuse the KV cache of a common prefix.
        #[arg(id = "no_prefix_cache", long = "no-prefix-cache", action = clap::ArgAction::SetFalse)]
        prefix_cache: bool,
        /// RAM for the KV cache of prefixes that leave VRAM, such as 16GiB; they come back when they are needed
        /// [default: none].
        #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
        kv_host: Option<u64>,
        /// RAM for snapshots of recurrent state, such as 4GiB, from which requests with a common prefix go on; 0 for
        /// none [default: up to an eighth of what is free].
        #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
        state_cache: Option<u64>,
    }

    /// How far the text of messages is trusted.
    #[command(next_help_heading = "Messages")]
    struct MessageChoices {
        /// Treat special tokens spelled out in messages as special tokens; by default they are plain text, and only the
        /// chat template writes special tokens.
        #[arg(long)]
        trust_content: bool,
    }
}

/// Tokens of a forward pass on the CPU.
pub const CPU_BATCH_TOKENS: usize = 512;

/// More threads or larger batches would only waste memory.
const MAX_THREADS: usize = 1024;
const MAX_BATCH_TOKENS: usize = 1 << 16;

impl Default for EngineConfig {
    /// As without any flag.
    fn default() -> Self {
        clap::Parser::parse_from(None::<&str>)
    }
}

impl EngineConfig {
    /// Refuses numbers that no machine can run with. Errors: `Error::Invalid`.
    pub fn check(&self) -> crate::Result<()> {
        for (flag, value, most) in [
            ("--threads", self.threads, MAX_THREADS),
            ("--max-context", self.max_context, usize::MAX),
            ("--max-batch-tokens", self.max_batch_tokens, MAX_BATCH_TOKENS),
        ] {
            match value {
                Some(0) => return Err(Error::Invalid(format!("{flag} is 0: give at least 1"))),
                Some(n) if n > most => return Err(Error::Invalid(format!("{flag} is {n}: give at most {most}"))),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Parses the name of one of `all`.
pub(crate) fn choice_of<T: Display + Copy + Send + Sync + 'static>(
    all: &'static [T],
) -> impl TypedValueParser<Value = T> {
    let named = |name: String| *all.iter().find(|value| value.to_string() == name).expect("a listed name");
    PossibleValuesParser::new(all.iter().map(ToString::to_string)).map(named)
}

fn parse_auto(s: &str) -> Result<Option<usize>, String> {
    match s {
        "auto" => Ok(None),
        _ => s.parse().map(Some).map_err(|_| "give auto or a number".into()),
    }
}

/// `16GiB`, `500MiB`, `8G`: units are powers of 1024.
pub(crate) fn parse_bytes(s: &str) -> Result<u64, String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precisions_are_named_as_they_are_given() {
        use ExpertBits::{Auto, Bf16, Int4, Int8, Within};
        for bits in [Auto, Bf16, Int8, Int4, Within(450), Within(487)] {
            assert_eq!(bits.to_string().parse(), Ok(bits));
        }
        assert_eq!(Within(450).to_string(), "auto:4.5bpw");
        for wrong in ["INT4", "auto:4.5", "auto:bpw", "auto:-1bpw", "auto:NaNbpw", "auto:17bpw"] {
            assert!(wrong.parse::<ExpertBits>().is_err_and(|e| e.contains("auto:4.5bpw")), "{wrong}");
        }
        for bits in DenseBits::ALL {
            assert_eq!(bits.to_string().parse(), Ok(bits));
        }
        assert!("int4 out".parse::<DenseBits>().is_err()); // a part of int4
        assert_eq!("INT4".parse::<DenseBits>(), Err("\"INT4\" is unknown: use auto, bf16, int8 or int4".into()));
    }

    #[test]
    fn dense_weights_in_int4_have_more_bits_where_they_pay() {
        let on_both = |bits: DenseBits| [bits.precision(4096), bits.precision_on_gpu(4096)].map(Option::unwrap);
        let of = |bits: DenseBits| on_both(bits).map(|precision| precision.to_string());
        let int4 = DenseBits::Int4;
        assert_eq!(of(int4), ["iq4-g128", "int4-g32"]);
        assert_eq!(of(int4.of_out()), ["q5_0", "int8-g128"]);
        assert_eq!(of(int4.of_down()), ["q5_0", "int4-g32"]);
        for bits in [int4.of_sensitive(), int4.of_sensitive().of_out(), DenseBits::Int8.of_down()] {
            assert_eq!(of(bits), ["int8-g128"; 2]);
        }
        // Rows of 48 have no groups.
        for bits in [int4, int4.of_out(), int4.of_down()] {
            assert_eq!((bits.precision(48), bits.precision_on_gpu(48)), (None, None));
        }
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
