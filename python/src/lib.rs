//! The extension module `moebius._moebius`: thin bindings, a file for each class. What people import is in `moebius/`.

use std::ffi::OsString;

use pyo3::prelude::*;

/// The engine, as Python sees it.
#[pymodule]
mod _moebius {
    #[pymodule_export]
    use super::main;
}

/// Runs the `moebius` command with `args`, its name first. Returns the status to exit with.
#[pyfunction]
fn main(py: Python<'_>, args: Vec<OsString>) -> u8 {
    let code = py.detach(|| moebius::cli::main(args));
    // What an `ExitCode` holds cannot be read, only compared.
    u8::from(code != std::process::ExitCode::SUCCESS)
}
