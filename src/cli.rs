//! The command line: one file per subcommand, the flags they share, and how errors reach a person.
//!
//! ```text
//! args, terminal, process                                       flags, what a person sees, what a process must set
//! measure                                                       speed, of an engine, a server, a machine
//! open                                                          a model by its name, with progress
//! bench, cache, capture, chat, doctor, generate, plan, serve    the subcommands
//! ```
//!
//! Imports every room. Read [`main`] first.

mod args;
mod bench;
mod cache;
mod capture;
mod chat;
mod doctor;
mod generate;
pub mod measure;
mod open;
mod plan;
mod process;
mod serve;
mod terminal;

use std::ffi::OsString;
use std::process::ExitCode;

use crate::text::chat_template;
use crate::{Error, Result, log};
use clap::{Parser, Subcommand};
pub use open::{open, options};

/// The only argument of a process that renders chat templates for another: nothing for people, so `--help` does not
/// tell of it.
pub const RENDER_TEMPLATES: &str = "--render-templates";

/// Mixture-of-experts language models larger than your GPU, on one box.
#[derive(Parser)]
#[command(name = "moebius", version, propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Talk with a model in the terminal, or through a pipe, one question per line.
    Chat(chat::Args),
    /// Complete one prompt.
    Generate(generate::Args),
    /// A chat page, and the APIs of OpenAI and Anthropic, over HTTP.
    Serve(serve::Args),
    /// Say what would go where, what context fits and how fast it would be, without loading weights.
    Plan(plan::Args),
    /// Build, check or describe the packed experts of a model.
    #[command(subcommand)]
    Cache(cache::Command),
    /// Write what one forward pass computes as safetensors.
    Capture(capture::Args),
    /// Measure prefill and decode, beside what the machine allows.
    Bench(bench::Args),
    /// Examine this machine and say what would make it faster.
    Doctor(doctor::Args),
}

/// Parses a command line, its program's name first, runs it, and turns an error into one sentence on stderr. A wrong
/// flag, and `--help`, end the process.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|arg| arg == RENDER_TEMPLATES) {
        return chat_template::render_for_parent();
    }
    std::panic::set_hook(Box::new(|panic| log::say(&format!("error: internal error, please report it: {panic}"))));
    let _end = End;
    let command = Cli::parse_from(args).command;
    let result = process::prepare().and_then(|()| match command {
        Command::Chat(args) => chat::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Cache(command) => cache::run(command),
        Command::Capture(args) => capture::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            log::say(&format!("error: {}", terminal::sentence(&e.to_string())));
            ExitCode::FAILURE
        }
    }
}

/// The end of the command, after a panic too: what was said reaches its reader.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        log::finish();
    }
}

const STDOUT: &str = "stdout";

/// The reader of our output has seen enough, as in `moebius generate ... | head`.
fn is_broken_pipe(error: &Error) -> bool {
    matches!(error, Error::Io { path, source } if source.kind() == std::io::ErrorKind::BrokenPipe && path.as_os_str() == STDOUT)
}

/// Maps a failure to write to stdout.
fn stdout_error(source: std::io::Error) -> Error {
    Error::Io { path: STDOUT.into(), source }
}

/// Writes one line to stdout.
fn print_line(line: &str) -> Result<()> {
    use std::io::Write;
    writeln!(std::io::stdout(), "{line}").map_err(stdout_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
