//! `moebius plan`: what goes where and how fast it will be, without loading weights.

use clap::builder::PossibleValuesParser;
use moebius::models::{self, shapes};
use moebius::{Result, hub, load, plan};

use super::args::{EngineArgs, parse_bytes};
use super::print_line;

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true)))]
pub(crate) struct Args {
    /// `demo`, a directory, a GGUF file, or a hub id such as Qwen/Qwen3-30B-A3B, of which only config.json is downloaded.
    #[arg(group = "what")]
    model: Option<String>,
    /// The dimensions of a known model.
    #[arg(long, value_name = "NAME", group = "what", value_parser = PossibleValuesParser::new(shapes::names()))]
    shape: Option<String>,
    /// Only this many layers of the shape.
    #[arg(long, value_name = "N", requires = "shape", conflicts_with = "model")]
    layers: Option<usize>,
    /// RAM that may be taken, as in 64GiB [default: what is available here].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    ram: Option<u64>,
    /// Print one JSON object, sizes in bytes.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let mut config = args.engine.to_config()?;
    let (name, model) = match (&args.model, &args.shape) {
        (Some(name), _) => {
            let dir = hub::resolve_config(name, &load::cache_dir(&config)?)?;
            let model = models::read(&dir)?;
            config = load::for_folder(&config, &model, &dir)?;
            (name, model)
        }
        (None, shape) => {
            let shape = shape.as_ref().expect("clap demands a model or a shape");
            (shape, shapes::shape(shape, args.layers)?)
        }
    };
    let plan = plan::plan(name, &model, &config, args.ram)?;
    match args.json {
        true => print_line(&serde_json::to_string(&plan).expect("a plan of numbers and strings is JSON")),
        false => print_line(plan.to_string().trim_end()),
    }
}
