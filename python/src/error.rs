//! Errors as exceptions, with the engine's text.

use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};

pyo3::create_exception!(moebius, Error, PyRuntimeError, "What the engine cannot do; its text says the remedy.");
pyo3::create_exception!(
    moebius,
    Busy,
    Error,
    "More is asked for at the same time than is taken: try again in a while."
);

/// The exception of an error: `ValueError` for what was asked wrongly, else [`Error`] or one of its kinds.
pub(crate) fn exception(error: moebius::Error) -> PyErr {
    let text = error.to_string();
    match error {
        moebius::Error::Invalid(_) => PyValueError::new_err(text),
        moebius::Error::Busy(_) => Busy::new_err(text),
        _ => Error::new_err(text),
    }
}
