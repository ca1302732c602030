//! `moebius eval`: what a precision or a checkpoint costs, on a text.

use std::path::PathBuf;

use clap::Parser;

use crate::cli::measure::eval::{self, Evaluation, Rows, Tally};
use crate::config::EngineConfig;
use crate::load::{Description, Loaded, ModelFolder};
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Result, hub, load};

use super::args::{EngineArgs, read_text, read_tokens};
use super::print_line;
use super::terminal::{Status, printable};

/// The most exact way to run a checkpoint.
const EXACT: &str = "--experts bf16 --dense bf16 --kv bf16x2";

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("input").required(true)))]
pub(crate) struct Args {
    /// `demo`, a directory, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-30B-A3B.
    model: String,
    /// Text to score, in UTF-8: one that the model was not trained on.
    #[arg(long, value_name = "FILE", group = "input")]
    text: Option<PathBuf>,
    /// Tokens to score, as a JSON array of token ids.
    #[arg(long, value_name = "F.json", group = "input")]
    tokens_file: Option<PathBuf>,
    /// Compare with a reference: another model, its flags, or both, in quotes; without a value the same model as
    /// exactly as it can run (`--experts bf16 --dense bf16 --kv bf16x2`). Both must have the same tokens.
    #[arg(long, value_name = "[MODEL] [FLAGS]", num_args = 0..=1, require_equals = true,
        default_missing_value = EXACT)]
    against: Option<String>,
    /// Tokens of the text to score at most.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(2..))]
    tokens: u64,
    /// Tokens of a window; each is read as a sequence of its own.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(2..))]
    context: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// What `--against` says.
#[derive(Parser)]
#[command(name = "--against", no_binary_name = true, disable_help_flag = true)]
struct Reference {
    model: Option<String>,
    #[command(flatten)]
    engine: EngineArgs,
}

impl Reference {
    fn parse_words(words: &str) -> Result<Self> {
        let split =
            shlex::split(words).ok_or_else(|| Error::Invalid(format!("--against {words:?}: a quote is open")))?;
        Self::try_parse_from(split).map_err(|e| {
            let text = e.to_string();
            let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_string();
            Error::Invalid(format!("--against {words:?}: {line}"))
        })
    }
}

/// A model that is not loaded yet.
struct Side {
    name: String,
    config: EngineConfig,
    description: Description,
}

impl Side {
    fn new(name: &str, engine: &EngineArgs, context: usize) -> Result<Self> {
        let mut config = EngineConfig { prefix_cache: false, ..engine.to_config()? };
        config.max_context.get_or_insert(context);
        let description = Description::read(&hub::resolve(name, &load::cache_dir(&config)?)?)?;
        Ok(Self { name: name.into(), config, description })
    }

    fn load(self, status: &Status) -> Result<Loaded> {
        let folder = ModelFolder::open(&self.name, self.description)?;
        load::load(&folder, &self.config, &|progress| status.loading(progress))
    }
}

/// What is scored.
struct Input {
    windows: Vec<Vec<u32>>,
    tokenizer: Option<Tokenizer>, // to show tokens; none where tokens were given to a model without one
}

/// Characters of a text before a token that are shown.
const SHOWN: usize = 40;

impl Input {
    fn read(args: &Args, sides: [Option<&Side>; 2]) -> Result<Self> {
        let (tokens, context) = (args.tokens as usize, args.context as usize);
        if let Some(path) = &args.tokens_file {
            let ids = read_tokens(path)?;
            let windows = eval::windows(&ids[..ids.len().min(tokens)], &[], context)?;
            let tokenizer = sides[0].and_then(|side| Tokenizer::of(&side.description).ok());
            return Ok(Self { windows, tokenizer });
        }
        let text = read_text(args.text.as_deref().expect("clap demands a text or tokens"))?;
        let mut found: Option<(Vec<u32>, Vec<u32>, Tokenizer)> = None;
        for side in sides.into_iter().flatten() {
            let tokenizer = Tokenizer::of(&side.description)?;
            let (prefix, mut ids) = (tokenizer.encode("", true)?, tokenizer.encode(&text, false)?);
            ids.truncate(tokens);
            if found.as_ref().is_some_and(|(first, others, _)| (first, others) != (&prefix, &ids)) {
                return Err(Error::Invalid(
                    "the two models cut this text into different tokens, so their probabilities cannot be compared: \
                     give --against a model with the same tokenizer"
                        .into(),
                ));
            }
            found.get_or_insert((prefix, ids, tokenizer));
        }
        let (prefix, ids, tokenizer) = found.expect("there is a model");
        Ok(Self { windows: eval::windows(&ids, &prefix, context)?, tokenizer: Some(tokenizer) })
    }

    /// The end of what stands before a token, and the token.
    fn text(&self, window: usize, position: usize) -> [String; 2] {
        let tokens = &self.windows[window];
        let show = |ids: &[u32]| {
            let text = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(ids, false).ok());
            printable(&text.unwrap_or_default())
        };
        let before = show(&tokens[position.saturating_sub(24)..position]);
        let from = before.char_indices().rev().nth(SHOWN - 1).map_or(0, |(at, _)| at);
        [before[from..].to_string(), show(&tokens[position..=position])]
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let context = args.context as usize;
    let reference = args.against.as_deref().map(Reference::parse_words).transpose()?;
    let model = Side::new(&args.model, &args.engine, context)?;
    let reference = match &reference {
        Some(it) => Some(Side::new(it.model.as_deref().unwrap_or(&args.model), &it.engine, context)?),
        None => None,
    };
    let input = Input::read(&args, [Some(&model), reference.as_ref()])?;
    let scored = eval::scored(&input.windows);
    let status = Status::new();
    let progress = |done: usize| status.report("tokens", done as u64, scored as u64, false);
    let experts =
        |loaded: &Loaded| loaded.precision.as_ref().map_or("none".to_string(), |precision| precision.to_string());
    let words = args.against.clone().unwrap_or_default();
    let mut written = match reference {
        Some(side) => {
            let (name, dir) = (side.name.clone(), load::cache_dir(&side.config)?);
            let mut loaded = side.load(&status)?;
            let mut rows = Rows::new(&dir, scored, loaded.model.config().vocab_size)?;
            eval::each_row(&mut loaded, &input.windows, &progress, |_, part| rows.write(part))?;
            rows.rewind()?;
            Some((rows, loaded.model.config().vocab_size, format!("{name} {words}"), experts(&loaded)))
        }
        None => None,
    };
    let mut loaded = model.load(&status)?;
    let vocab = loaded.model.config().vocab_size;
    if let Some((_, other, ..)) = written.as_ref().filter(|(_, other, ..)| *other != vocab) {
        return Err(Error::Invalid(format!(
            "the models have {vocab} and {other} tokens, so their probabilities cannot be compared: give --against a \
             model with the same tokenizer"
        )));
    }
    let mut tally = Tally::default();
    eval::each_row(&mut loaded, &input.windows, &progress, |tokens, part| {
        let reference = written.as_mut().map(|(rows, ..)| rows.next(part.len())).transpose()?;
        tally.add(tokens, part, reference);
        Ok(())
    })?;
    drop(status);
    let (perplexity, perplexity_error) = tally.perplexity();
    let evaluation = Evaluation {
        model: args.model,
        experts: experts(&loaded),
        windows: input.windows.len(),
        tokens: scored,
        perplexity,
        perplexity_error,
        against: written.map(|(_, _, name, experts)| tally.compare(name, experts, |w, p| input.text(w, p))),
    };
    if args.json {
        print_line(&serde_json::to_string(&evaluation).expect("numbers and strings are JSON"))
    } else {
        print_line(evaluation.to_string().trim_end())
    }
}
