//! The `moebius` command.

use moebius::cli;
use moebius::text::chat_template;

fn main() -> std::process::ExitCode {
    // This very file, even when another has taken its name since.
    chat_template::render_in(vec!["/proc/self/exe".into(), cli::RENDER_TEMPLATES.into()]);
    cli::main(std::env::args_os())
}
