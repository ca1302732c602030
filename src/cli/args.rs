//! Flags that several subcommands share.

use std::path::Path;
use std::time::Duration;

use crate::config::{EngineConfig, PackedChoices, RunChoices};
use crate::engine::{SamplingOverrides, SamplingParams};
use crate::model::families::shapes;
use crate::{Error, Result};
use clap::Args;
use clap::builder::PossibleValuesParser;
use moebius_cache::Precision;

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
    /// The precision of the shape's checkpoint, such as q2_k, nvfp4 or fp8-g128 [default: bf16].
    #[arg(long, value_name = "PRECISION", requires = "shape", conflicts_with = "model")]
    pub(crate) stored: Option<Precision>,
}

/// How to load and run a model.
#[derive(Args, Clone)]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    packed: PackedChoices,
    #[command(flatten)]
    run: RunChoices,
}

impl EngineArgs {
    /// The engine's configuration, with the cache directory filled in.
    pub(crate) fn to_config(&self) -> Result<EngineConfig> {
        complete(self.run.clone().over(self.packed.clone().over(EngineConfig::default())))
    }
}

/// `config`, checked, with the cache directory filled in.
pub(crate) fn complete(mut config: EngineConfig) -> Result<EngineConfig> {
    config.check()?;
    config.cache_dir = Some(crate::load::cache_dir(&config)?);
    Ok(config)
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
