//! `moebius plan`: what goes where and how fast it will be, without loading weights. Of a model on the hub only
//! config.json is downloaded.

use crate::load::plan;
use crate::model::families::{self, shapes};
use crate::{Result, hub, load};

use super::args::{EngineArgs, SubjectArgs, parse_bytes};
use super::print_line;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    subject: SubjectArgs,
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
    let (name, model) = match (&args.subject.model, &args.subject.shape) {
        (Some(name), _) => {
            let dir = hub::resolve_config(name, &load::cache_dir(&config)?)?;
            let model = families::read(&dir)?;
            config = load::for_folder(&config, &model, &dir)?;
            (name, model)
        }
        (None, shape) => {
            let shape = shape.as_ref().expect("clap demands a model or a shape");
            (shape, shapes::shape(shape, args.subject.layers)?)
        }
    };
    let plan = plan::plan(name, &model, &config, args.ram)?;
    match args.json {
        true => print_line(&serde_json::to_string(&plan).expect("a plan of numbers and strings is JSON")),
        false => print_line(plan.to_string().trim_end()),
    }
}
