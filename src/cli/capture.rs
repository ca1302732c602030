//! `moebius capture`: one forward pass without sampling, written as safetensors.

use std::path::PathBuf;

use moebius::{Error, Result};

use super::args::EngineArgs;

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("input").required(true)))]
pub(crate) struct Args {
    /// `demo`, a directory, or a hub id such as Qwen/Qwen3-30B-A3B.
    pub(crate) model: String,
    /// The prompt as text.
    #[arg(long, value_name = "TEXT", group = "input")]
    pub(crate) prompt: Option<String>,
    /// The prompt as token ids, separated by commas.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', group = "input")]
    pub(crate) tokens: Option<Vec<u32>>,
    /// The prompt as a JSON array of token ids.
    #[arg(long, value_name = "F.json", group = "input")]
    pub(crate) tokens_file: Option<PathBuf>,
    /// Where to write.
    #[arg(long, value_name = "F.safetensors")]
    pub(crate) out: PathBuf,
    /// Write `logits` [T, vocab] f32.
    #[arg(long)]
    pub(crate) logits: bool,
    /// Write `hidden.{i}` [T, hidden] f32, the residual stream after layer i: `all`, or layers separated by commas.
    #[arg(long, value_name = "all|0,5,9", value_parser = layers)]
    pub(crate) hidden: Option<Layers>,
    /// Write `router.{i}.ids` [T, top_k] i32 and `router.{i}.weights` [T, top_k] f32 of every MoE layer.
    #[arg(long)]
    pub(crate) router: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// Layers chosen on the command line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Layers {
    /// Every layer of the model.
    All,
    /// These, by their number in the model.
    These(Vec<usize>),
}

fn layers(text: &str) -> std::result::Result<Layers, String> {
    if text == "all" {
        return Ok(Layers::All);
    }
    let numbers: std::result::Result<_, _> = text.split(',').map(|number| number.trim().parse()).collect();
    numbers.map(Layers::These).map_err(|_| "give `all`, or layer numbers separated by commas".into())
}

pub(crate) fn run(args: Args) -> Result<()> {
    let _config = args.engine.to_config()?;
    // The forward pass goes here: `moebius::capture::run(...)`.
    Err(Error::Invalid("capture is not there yet".into()))
}
