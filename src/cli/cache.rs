//! `moebius cache`: converts a checkpoint's experts, verifies and describes the result.

use std::path::Path;

use crate::config::{EngineConfig, PackedChoices};
use crate::load::calibrate::{CalibrationText, ImportanceMatrix};
use crate::load::components::{Component, components};
use crate::load::{Description, LoadProgress, ModelFolder};
use crate::machine::topology::Topology;
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Result, hub, load, log};
use moebius_cache::convert::{self, Calibration, Job};
use moebius_cache::format::ExpertCache;

use super::args::{complete, read_text};
use super::print_line;
use super::terminal::Status;

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Convert the experts of a checkpoint once, so that later starts are fast.
    Build(BuildArgs),
    /// Verify the checksums of a built cache.
    Verify(Args),
    /// Describe a built cache (dimensions, precision, source, size) and the formats of its checkpoint.
    Info(Args),
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// `demo`, a directory, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-30B-A3B.
    model: String,
    #[command(flatten)]
    packed: PackedChoices,
}

#[derive(clap::Args)]
pub(crate) struct BuildArgs {
    /// Build the cache again even if one exists, for example because it is damaged.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    args: Args,
}

pub(crate) fn run(command: Command) -> Result<()> {
    match command {
        Command::Build(BuildArgs { args, force }) => with_job(&args, |job, folder, cache_dir, components| {
            let status = Status::new();
            let make = if force { convert::build } else { convert::ensure };
            let progress = |p: convert::Progress| status.loading(LoadProgress::Convert(&p));
            let cache = match &args.packed.clone().over(EngineConfig::default()).calibrate {
                Some(path) if path.extension().is_some_and(|extension| extension == "gguf") => {
                    let matrix = ImportanceMatrix::read(path, &folder.model)?;
                    let calibration = job.calibration.map(|it| Calibration { inputs: Some(&matrix), ..it });
                    make(&Job { calibration, ..job }, cache_dir, &progress)?
                }
                Some(path) => {
                    let machine = load::machine(&EngineConfig::default(), &Topology::read())?;
                    let tokens = Tokenizer::of(&folder.description)?.encode(&read_text(path)?, false)?;
                    let text = CalibrationText::new(folder, &machine, tokens)?;
                    let calibration = job.calibration.map(|it| Calibration { inputs: Some(&text), ..it });
                    make(&Job { calibration, ..job }, cache_dir, &progress)?
                }
                None => make(&job, cache_dir, &progress)?,
            };
            drop(status);
            for component in components()?.iter().filter(|component| component.is_experts()) {
                log::print(&component.to_string());
            }
            print_line(&cache.path().display().to_string())
        }),
        Command::Verify(args) => with_job(&args, |job, _, cache_dir, _| {
            let cache = built(&job, cache_dir)?;
            let status = Status::new();
            cache.verify(&|done, total| status.report("verifying checksums", done, total, true))?;
            drop(status);
            print_line(&format!("{} is intact", cache.path().display()))
        }),
        Command::Info(args) => with_job(&args, |job, _, cache_dir, components| {
            describe(&built(&job, cache_dir)?)?;
            components()?.iter().enumerate().try_for_each(|(i, component)| {
                print_line(&format!("{:10} {component}", if i == 0 { "components" } else { "" }))
            })
        }),
    }
}

/// Finds the model and its conversion, and calls `act` with both.
fn with_job(
    args: &Args,
    act: impl FnOnce(Job<'_>, &ModelFolder, &Path, &dyn Fn() -> Result<Vec<Component>>) -> Result<()>,
) -> Result<()> {
    let config = complete(args.packed.clone().over(EngineConfig::default()))?;
    let cache_dir = load::cache_dir(&config)?;
    let folder = ModelFolder::open(&args.model, Description::read(&hub::resolve(&args.model, &cache_dir)?)?)?;
    let ModelFolder { name, model, checkpoint, .. } = &folder;
    let spec = folder.spec(&config)?;
    match spec.precision.clone() {
        Some(precision) => {
            let calibration = config.calibrate.as_deref().map(load::calibration_name).transpose()?;
            let job = load::cache_job(name, checkpoint, model, precision);
            let job = load::calibrated(job, calibration.as_deref(), None);
            act(job, &folder, &cache_dir, &|| components(checkpoint, &spec))
        }
        None => Err(Error::Invalid(format!("{} has no routed experts: there is nothing to convert", args.model))),
    }
}

fn built(job: &Job<'_>, cache_dir: &Path) -> Result<ExpertCache> {
    match convert::locate(job, cache_dir)? {
        Some(path) => Ok(ExpertCache::open(&path)?),
        None => Err(Error::Invalid(format!(
            "{} has no {} cache in {}: build one with `moebius cache build` and the same flags",
            job.model,
            job.precision,
            cache_dir.display()
        ))),
    }
}

fn describe(cache: &ExpertCache) -> Result<()> {
    let header = cache.header();
    let source = header.source.as_ref();
    let layers = |end: Option<&moebius_cache::format::LayerEntry>| end.map_or(0, |entry| entry.layer);
    let (first, last) = (layers(header.layers.first()), layers(header.layers.last()));
    print_line(&format!("file       {}", cache.path().display()))?;
    print_line(&format!("size       {}", indicatif::HumanBytes(header.file_bytes())))?;
    print_line(&format!("precision  {}", header.precision))?;
    print_line(&format!(
        "experts    {} in each of {} layers ({first} to {last})",
        header.num_experts,
        header.layers.len()
    ))?;
    print_line(&format!("expert     {} x {}", header.hidden, header.intermediate))?;
    print_line(&format!(
        "source     {} ({})",
        source.map_or("random weights", |s| &s.dir),
        source.map_or("-", |s| &s.key)
    ))?;
    match source.and_then(|source| source.calibration.as_ref()) {
        Some(name) => print_line(&format!("calibrated with {name}")),
        None => Ok(()),
    }
}
