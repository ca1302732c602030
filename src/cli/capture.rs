//! `moebius capture`: one forward pass without sampling, written as safetensors.

use std::path::PathBuf;

use crate::config::EngineConfig;
use crate::engine::capture::{self, Layers, Wanted};
use crate::load::{Description, ModelFolder};
use crate::text::tokenizer::Tokenizer;
use crate::{Result, hub, load};

use super::args::{EngineArgs, read_tokens};
use super::terminal::Status;

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("input").required(true)))]
pub(crate) struct Args {
    /// `demo`, a directory, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-30B-A3B.
    model: String,
    /// Prompt as text.
    #[arg(long, value_name = "TEXT", group = "input")]
    prompt: Option<String>,
    /// Prompt as token ids, separated by commas.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', group = "input")]
    tokens: Option<Vec<u32>>,
    /// File with the prompt as a JSON array of token ids.
    #[arg(long, value_name = "F.json", group = "input")]
    tokens_file: Option<PathBuf>,
    /// Output file.
    #[arg(long, value_name = "F.safetensors")]
    out: PathBuf,
    /// Write `logits` [T, vocab] f32.
    #[arg(long)]
    logits: bool,
    /// Write `hidden.{i}` [T, hidden] f32, the residual stream after layer i, for `all` layers or a list.
    #[arg(long, value_name = "all|0,5,9")]
    hidden: Option<Layers>,
    /// Write `router.{i}.ids` [T, top_k] i32 and `router.{i}.weights` [T, top_k] f32 of every MoE layer.
    #[arg(long)]
    router: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let config = EngineConfig { prefix_cache: false, ..args.engine.to_config()? };
    capture::check_out(&args.out)?;
    let description = Description::read(&hub::resolve(&args.model, &load::cache_dir(&config)?)?)?;
    let tokens = match (&args.tokens, &args.tokens_file, &args.prompt) {
        (Some(tokens), _, _) => tokens.clone(),
        (_, Some(path), _) => read_tokens(path)?,
        (_, _, text) => Tokenizer::of(&description)?.encode(text.as_deref().unwrap_or_default(), true)?,
    };
    let status = Status::new();
    let mut loaded = load::load(&ModelFolder::open(&args.model, description)?, &config, &|p| status.loading(p))?;
    drop(status);
    let wanted = Wanted { logits: args.logits, hidden: args.hidden, router: args.router };
    let captured = {
        let chunk = loaded.max_batch_tokens;
        capture::capture(&mut loaded, &tokens, &wanted, chunk)?
    };
    captured.write(loaded.model.config(), &args.out)
}
