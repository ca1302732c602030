//! `moebius bench`: prefill and decode speed of a model, or of a model's dimensions with random weights.

mod serve;

use crate::cli::measure::bench::{self, BenchModel, Routing, Workload};
use crate::load::LoadProgress;
use crate::{Error, Result, hub, load};

use super::args::{EngineArgs, SubjectArgs};
use super::print_line;
use super::terminal::Status;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    subject: SubjectArgs,
    /// Print one JSON object with machine, model, precision and rows.
    #[arg(long)]
    json: bool,
    /// Prompt lengths to prefill.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "128,512")]
    prompt_tokens: Vec<usize>,
    /// Tokens to decode per sequence.
    #[arg(long, value_name = "N", default_value_t = 64)]
    decode_tokens: usize,
    /// Tokens of context before decoding is measured.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = counts(1 << 24))]
    context: u64,
    /// Numbers of sequences to decode together.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1", value_parser = counts(1024))]
    batch: Vec<u64>,
    /// Runs per measurement after one warm-up run; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = counts(1000))]
    runs: u64,
    /// Also measure where the time of a pass goes: each kernel of a GPU, or each family of ops of the CPU.
    #[arg(long)]
    ops: bool,
    /// Which experts tokens choose: as the router says (uniform, with random weights), repeating as real models do
    /// (local), or as recorded by `moebius capture --router` in a file.
    #[arg(long, value_name = "uniform|local|FILE", default_value = "uniform")]
    routing: Routing,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(clap::Subcommand)]
enum Command {
    Serve(Box<serve::Args>),
}

/// Numbers from 1 to `most`.
fn counts(most: u64) -> clap::builder::RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(1..=most)
}

pub(crate) fn run(args: Args) -> Result<()> {
    if let Some(Command::Serve(args)) = args.command {
        return serve::run(*args);
    }
    let config = args.engine.to_config()?;
    if args.prompt_tokens.contains(&0) {
        return Err(Error::Invalid("a prompt of 0 tokens cannot be measured: give at least 1".into()));
    }
    let batches = args.batch.iter().map(|&sequences| sequences as usize).collect();
    let workload = Workload {
        prompt_tokens: args.prompt_tokens,
        decode_tokens: args.decode_tokens,
        context: args.context as usize,
        batches,
        runs: args.runs as usize,
        ops: args.ops,
        routing: args.routing,
    };
    let status = Status::new();
    let progress = |p: LoadProgress<'_>| status.loading(p);
    let report = match (&args.subject.model, &args.subject.shape) {
        (Some(model), _) => {
            let dir = hub::resolve(model, &load::cache_dir(&config)?)?;
            bench::run(model, BenchModel::Directory(&dir), &config, &workload, &progress)?
        }
        (None, shape) => {
            let shape = shape.as_deref().expect("clap demands a model or a shape");
            let source = BenchModel::Shape { layers: args.subject.layers, stored: args.subject.stored };
            bench::run(shape, source, &config, &workload, &progress)?
        }
    };
    drop(status);
    if args.json {
        print_line(&serde_json::to_string(&report).expect("a report of numbers and strings is JSON"))
    } else {
        print_line(report.to_string().trim_end())
    }
}
