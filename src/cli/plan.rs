//! `moebius plan`: where the weights go and how fast the model will be, without loading weights. Of a model on the hub
//! only config.json is downloaded.

use crate::config::{LoadChoices, parse_bytes};
use crate::load::{Description, Kept, Spec, plan};
use crate::model::families::shapes;
use crate::{Result, hub, load};

use super::args::{EngineArgs, SubjectArgs};
use super::print_line;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    subject: SubjectArgs,
    /// RAM to plan with, such as 64GiB [default: what is available here].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    ram: Option<u64>,
    /// Print one JSON object with sizes in bytes.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    load: LoadChoices,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let config = args.load.over(args.engine.to_config()?);
    let (name, model, kept) = match (&args.subject.model, &args.subject.shape) {
        (Some(name), _) => {
            let description = Description::read(&hub::resolve_config(name, &load::cache_dir(&config)?)?)?;
            let model = description.model()?;
            let kept = description.kept(&model)?;
            (name, model, kept)
        }
        (None, shape) => {
            let shape = shape.as_ref().expect("clap demands a model or a shape");
            (shape, shapes::shape(shape, args.subject.layers)?, Kept::of_shape(args.subject.stored))
        }
    };
    let plan = plan::plan(name, &Spec::new(&model, &config, kept)?, args.ram)?;
    match args.json {
        true => print_line(&serde_json::to_string(&plan).expect("a plan of numbers and strings is JSON")),
        false => print_line(plan.to_string().trim_end()),
    }
}
