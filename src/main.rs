//! The `moebius` command.

fn main() -> std::process::ExitCode {
    moebius::cli::main(std::env::args_os())
}
