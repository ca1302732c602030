//! `moebius bench`: prefill and decode speed of a model, or of a real model's dimensions with random weights.

use moebius::{Error, Result};

use super::args::EngineArgs;

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true)))]
pub(crate) struct Args {
    /// `demo`, a directory, or a hub id such as Qwen/Qwen3-30B-A3B.
    #[arg(group = "what")]
    pub(crate) model: Option<String>,
    /// Random weights with the dimensions of a known model: deepseek-v2-lite, qwen3-30b-a3b, qwen3-235b-a22b, kimi-k2, ...
    #[arg(long, value_name = "NAME", group = "what")]
    pub(crate) shape: Option<String>,
    /// Only this many layers of the shape.
    #[arg(long, value_name = "N", requires = "shape", conflicts_with = "model")]
    pub(crate) layers: Option<usize>,
    /// Print one JSON object: machine, model, precision, rows.
    #[arg(long)]
    pub(crate) json: bool,
    /// Lengths of the prompts to measure.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "128,512")]
    pub(crate) prompt_tokens: Vec<usize>,
    /// Numbers of tokens to decode.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "64")]
    pub(crate) decode_tokens: Vec<usize>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let _config = args.engine.to_config()?;
    // The measurement goes here: `moebius::bench::run(...)`.
    Err(Error::Invalid("bench is not there yet".into()))
}
