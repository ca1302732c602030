//! The residual stream: steering and capture.

use std::collections::BTreeMap;
use std::sync::Arc;

use moebius::engine::{CaptureWanted, Captured, EngineInfo, HookPoint, Layers, Positions, Steer};
use numpy::ndarray::ArrayD;
use numpy::{PyArrayDyn, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A vector that requests share. A GPU holds one copy of it.
#[pyclass(frozen)]
pub(crate) struct Vector(Arc<[f32]>);

#[pymethods]
impl Vector {
    #[new]
    fn new(values: PyReadonlyArray1<'_, f32>) -> PyResult<Self> {
        Ok(Self(values.as_slice()?.into()))
    }
}

/// Positions of a sequence: a word, or ranges with excluded ends; `None` means the end of the sequence.
#[derive(FromPyObject)]
pub(crate) enum At {
    Word(String),
    Ranges(Vec<(usize, Option<usize>)>),
}

impl At {
    fn positions(self) -> PyResult<Positions> {
        match self {
            At::Word(word) => match word.as_str() {
                "all" => Ok(Positions::All),
                "prompt" => Ok(Positions::Prompt),
                "generated" => Ok(Positions::Generated),
                _ => Err(PyValueError::new_err(format!(
                    "positions are {word:?}: give 'all', 'prompt', 'generated', or ranges such as [(0, 5), (9, 12)]"
                ))),
            },
            At::Ranges(ranges) => {
                let range = |(start, end): (usize, Option<usize>)| start..end.unwrap_or(usize::MAX);
                Ok(Positions::Some(ranges.into_iter().map(range).collect()))
            }
        }
    }
}

/// Layer, vector, coefficient, positions.
pub(crate) type SteerBy<'py> = (usize, Bound<'py, Vector>, f32, At);

pub(crate) fn steer((layer, vector, coefficient, at): SteerBy<'_>) -> PyResult<Steer> {
    Ok(Steer { layer, vector: vector.get().0.clone(), coefficient, positions: at.positions()? })
}

/// Layers (`None`: all), positions, and whether to capture logits.
pub(crate) type CaptureRequest = (Option<Vec<usize>>, At, bool);

pub(crate) fn wanted((layers, at, logits): CaptureRequest) -> PyResult<CaptureWanted> {
    Ok(CaptureWanted { layers: layers.map_or(Layers::All, Layers::Some), positions: at.positions()?, logits })
}

/// Captured rows of one sequence, as they come.
#[derive(Default)]
pub(crate) struct Rows(BTreeMap<HookPoint, (Vec<usize>, Vec<f32>)>); // shape of a row, and rows one after the other

/// Arrays of one sequence, by layer, and of its logits.
pub(crate) type Arrays<'py> = (BTreeMap<usize, Bound<'py, PyArrayDyn<f32>>>, Option<Bound<'py, PyArrayDyn<f32>>>);

impl Rows {
    /// Empty arrays for what was requested.
    pub(crate) fn new(wanted: Option<&CaptureWanted>, model: &EngineInfo) -> Self {
        let Some(wanted) = wanted else { return Self::default() };
        let hidden = (0..model.layers)
            .filter(|&layer| wanted.layers.contains(layer))
            .map(|layer| (HookPoint::Hidden(layer), model.stream_shape().rows(1)[1..].to_vec()));
        let logits = wanted.logits.then_some((HookPoint::Logits, vec![model.vocab_size]));
        Self(hidden.chain(logits).map(|(what, row)| (what, (row, Vec::new()))).collect())
    }

    /// Adds rows.
    pub(crate) fn extend(&mut self, captured: Vec<Captured>) {
        for Captured { what, rows: more, .. } in captured {
            if let Some((_, rows)) = self.0.get_mut(&what) {
                match rows.is_empty() {
                    true => *rows = more,
                    false => rows.extend_from_slice(&more),
                }
            }
        }
    }

    /// Moves all rows to Python, without a copy.
    pub(crate) fn into_arrays(self, py: Python<'_>) -> Arrays<'_> {
        let (mut hidden, mut logits) = (BTreeMap::new(), None);
        for (what, (row, rows)) in self.0 {
            let shape = [&[rows.len() / row.iter().product::<usize>()], &row[..]].concat();
            let array = ArrayD::from_shape_vec(shape, rows).expect("rows of the model's width");
            let array = PyArrayDyn::from_owned_array(py, array);
            match what {
                HookPoint::Hidden(layer) => drop(hidden.insert(layer, array)),
                HookPoint::Logits => logits = Some(array),
            }
        }
        (hidden, logits)
    }
}
