//! `moebius completions` and `moebius manual`: what a package installs beside the program, made of its own flags.

use std::path::PathBuf;

use clap::Command;
use clap_complete::Shell;

use super::stdout_error;
use crate::{Error, Result};

#[derive(clap::Args)]
pub(super) struct Completions {
    /// The shell.
    shell: Shell,
}

#[derive(clap::Args)]
pub(super) struct Manual {
    /// An existing directory, such as /usr/local/share/man/man1.
    directory: PathBuf,
}

pub(super) fn completions(args: &Completions, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "moebius", &mut script);
    std::io::Write::write_all(&mut std::io::stdout(), &script).map_err(stdout_error)
}

pub(super) fn manual(args: &Manual, command: Command) -> Result<()> {
    clap_mangen::generate_to(command, &args.directory).map_err(Error::unwritable(&args.directory))
}
