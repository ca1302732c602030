//! `moebius cache`: the offline converter of a checkpoint's experts.

use moebius::{Error, Result};

use super::args::EngineArgs;

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Convert a checkpoint's experts once, so that later starts take a moment.
    Build(Args),
    /// Compare every byte of a built cache with its checksums.
    Verify(Args),
    /// Say what a cache holds: dimensions, precision, source, size.
    Info(Args),
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// `demo`, a directory, or a hub id such as Qwen/Qwen3-30B-A3B.
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

pub(crate) fn run(command: Command) -> Result<()> {
    let (Command::Build(args) | Command::Verify(args) | Command::Info(args)) = &command;
    let _config = args.engine.to_config()?;
    // The converter goes here: `moebius::convert::{build, verify, info}`.
    Err(Error::Invalid("cache is not there yet".into()))
}
