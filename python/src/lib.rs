//! The extension module `moebius._moebius`: thin bindings, one file per class. The package itself is in `moebius/`.

mod dlpack;
mod error;
mod model;
mod moe;
mod owned;
mod residual;
mod stream;

use std::ffi::OsString;

use pyo3::prelude::*;

/// The engine for Python.
#[pymodule]
mod _moebius {
    #[pymodule_export]
    use super::{
        engine_options,
        error::{Busy, Error},
        main,
        model::Model,
        moe::ExpertLayer,
        render_templates, render_templates_in,
        residual::Vector,
        stream::Stream,
    };
}

/// Runs the `moebius` command with `args`, its name first. Returns the status to exit with.
#[pyfunction]
fn main(py: Python<'_>, args: Vec<OsString>) -> u8 {
    let code = py.detach(|| moebius::cli::main(args));
    // An `ExitCode` cannot be read, only compared.
    u8::from(code != std::process::ExitCode::SUCCESS)
}

/// Renders chat templates in processes of this command line, which calls `render_templates`.
#[pyfunction]
fn render_templates_in(command: Vec<OsString>) {
    moebius::text::chat_template::render_in(command);
}

/// Renders chat templates for the process that started this one. Returns the status to exit with.
#[pyfunction]
fn render_templates(py: Python<'_>) -> u8 {
    let code = py.detach(moebius::text::chat_template::render_for_parent);
    u8::from(code != std::process::ExitCode::SUCCESS)
}

/// Name, whether it takes a value, and help of every option of the engine.
#[pyfunction]
fn engine_options() -> Vec<(String, bool, String)> {
    moebius::cli::options()
        .into_iter()
        .map(|option| (option.name.clone(), option.takes_value(), option.help()))
        .collect()
}
