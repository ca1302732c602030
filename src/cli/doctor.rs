//! `moebius doctor`: what this machine has, and what would make it faster.

use std::path::PathBuf;

use moebius::{Error, Result};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where packed experts are kept [default: ~/.cache/moebius].
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(_args: Args) -> Result<()> {
    // The examination goes here: `moebius::doctor::run(...)`.
    Err(Error::Invalid("doctor is not there yet".into()))
}
