//! The command line: one file per subcommand, the flags they share, and how errors reach a person.
//!
//! ```text
//! args, terminal, process                                       shared flags, status lines, signals and limits
//! measure                                                       how fast an engine, a server, a machine is
//! open                                                          opens a model by its name, with progress
//! bench, cache, capture, chat, doctor, eval, generate, plan, serve    the subcommands
//! install                                                       completions of shells, manual pages
//! ```
//!
//! Imports every room. Read [`main`] first.

mod args;
mod bench;
mod cache;
mod capture;
mod chat;
mod doctor;
mod eval;
mod generate;
mod install;
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
use clap::{CommandFactory, Parser, Subcommand};
use moebius_cache::format::{OLDEST_VERSION, VERSION};
pub use open::{EngineOption, open, options};

/// The only argument of a child process that renders chat templates. It is not for people, so `--help` does not list
/// it.
pub const RENDER_TEMPLATES: &str = "--render-templates";

/// What a report of a fault, or of a speed, should say.
fn long_version() -> String {
    let build = if cfg!(debug_assertions) { "with debug assertions, which are slow" } else { "release" };
    format!(
        "{}\ncommit: {}\nbuild: {build}\nkernels: {}\ncache format: {VERSION}, reads {OLDEST_VERSION} to {VERSION}",
        env!("CARGO_PKG_VERSION"),
        env!("MOEBIUS_COMMIT"),
        env!("MOEBIUS_KERNELS"),
    )
}

/// Run mixture-of-experts language models larger than your GPU, on one machine.
#[derive(Parser)]
#[command(name = "moebius", version, long_version = long_version(), propagate_version = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Chat with a model in the terminal, or answer questions from a pipe, one per line.
    Chat(chat::Args),
    /// Complete one prompt.
    Generate(generate::Args),
    /// Serve a chat page and OpenAI- and Anthropic-compatible APIs over HTTP.
    Serve(serve::Args),
    /// Show where the weights would go, which context fits and the expected speed, without loading weights.
    Plan(plan::Args),
    /// Build, verify or describe the packed experts of a model.
    #[command(subcommand)]
    Cache(cache::Command),
    /// Run one forward pass and write its logits, hidden states or routing as safetensors.
    Capture(capture::Args),
    /// Measure prefill and decode speed, next to the limits of this machine.
    Bench(bench::Args),
    /// Measure what a precision or a checkpoint costs: perplexity, and how far its probabilities are from another's.
    Eval(eval::Args),
    /// Examine this machine and suggest what would make it faster.
    Doctor(doctor::Args),
    /// Print what a shell needs to complete commands and flags.
    Completions(install::Completions),
    /// Write a manual page for each command.
    #[command(hide = true)]
    Manual(install::Manual),
}

/// Parses a command line, with the program's name first, and runs it. An error becomes one sentence on stderr. A wrong
/// flag and `--help` end the process.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|arg| arg == RENDER_TEMPLATES) {
        return chat_template::render_for_parent();
    }
    std::panic::set_hook(Box::new(|panic| log::print(&format!("error: internal error, please report it: {panic}"))));
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
        Command::Eval(args) => eval::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => install::completions(&args, Cli::command()),
        Command::Manual(args) => install::manual(&args, Cli::command()),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            log::print(&format!("error: {}", terminal::sentence(&e.to_string())));
            ExitCode::FAILURE
        }
    }
}

/// Flushes the log at the end of the command, also after a panic.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        log::finish();
    }
}

const STDOUT: &str = "stdout";

/// Whether the reader of stdout has closed it, as in `moebius generate ... | head`.
fn is_broken_pipe(error: &Error) -> bool {
    matches!(error, Error::Io { path,
        source } if source.kind() == std::io::ErrorKind::BrokenPipe && path.as_os_str() == STDOUT)
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
        Cli::command().debug_assert();
    }
}
