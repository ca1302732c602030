//! The residual stream: steering; and capture of it, of logits and of routers.

use std::collections::BTreeMap;
use std::sync::Arc;

use moebius::engine::{CaptureWanted, Captured, EngineInfo, HookPoint, Layers, Positions, Steer};
use numpy::ndarray::ArrayD;
use numpy::{Element, PyArrayDyn, PyReadonlyArray1};
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

/// Layers (`None`: all), positions, and whether to capture logits and the routers' choices.
pub(crate) type CaptureRequest = (Option<Vec<usize>>, At, bool, bool);

pub(crate) fn wanted((layers, at, logits, router): CaptureRequest) -> PyResult<CaptureWanted> {
    Ok(CaptureWanted { layers: layers.map_or(Layers::All, Layers::Some), positions: at.positions()?, logits, router })
}

/// Captured rows of one sequence, as they come.
#[derive(Default)]
pub(crate) struct Rows {
    floats: BTreeMap<HookPoint, (Vec<usize>, Vec<f32>)>, // shape of a row, and rows one after the other
    router: BTreeMap<usize, Routed>,
}

/// Experts of a layer, and their weights.
#[derive(Default)]
struct Routed {
    positions: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

type Array<'py, T> = Bound<'py, PyArrayDyn<T>>;

/// Arrays of one sequence: of the residual stream by layer, of its logits, and of experts and weights by layer.
pub(crate) type Arrays<'py> =
    (BTreeMap<usize, Array<'py, f32>>, Option<Array<'py, f32>>, BTreeMap<usize, (Array<'py, i32>, Array<'py, f32>)>);

impl Rows {
    /// Empty arrays for what was requested.
    pub(crate) fn new(wanted: Option<&CaptureWanted>, model: &EngineInfo) -> Self {
        let Some(wanted) = wanted else { return Self::default() };
        let hidden = (0..model.layers)
            .filter(|&layer| wanted.layers.contains(layer))
            .map(|layer| (HookPoint::Hidden(layer), model.stream_shape().rows(1)[1..].to_vec()));
        let logits = wanted.logits.then_some((HookPoint::Logits, vec![model.vocab_size]));
        let floats = hidden.chain(logits).map(|(what, row)| (what, (row, Vec::new()))).collect();
        Self { floats, router: BTreeMap::new() }
    }

    /// Adds rows.
    pub(crate) fn extend(&mut self, captured: Vec<Captured>) {
        for Captured { what, rows: more, count, experts, .. } in captured {
            if let HookPoint::Router(layer) = what {
                let routed = self.router.entry(layer).or_default();
                routed.positions += count;
                routed.ids.extend(experts);
                routed.weights.extend(more);
            } else if let Some((_, rows)) = self.floats.get_mut(&what) {
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
        for (what, (row, rows)) in self.floats {
            let shape = [&[rows.len() / row.iter().product::<usize>()], &row[..]].concat();
            let array = array(py, shape, rows);
            match what {
                HookPoint::Hidden(layer) => drop(hidden.insert(layer, array)),
                HookPoint::Logits | HookPoint::Router(_) => logits = Some(array),
            }
        }
        let router = self.router.into_iter().map(|(layer, Routed { positions, ids, weights })| {
            let shape = vec![positions, ids.len() / positions.max(1)];
            (layer, (array(py, shape.clone(), ids), array(py, shape, weights)))
        });
        (hidden, logits, router.collect())
    }
}

fn array<T: Element>(py: Python<'_>, shape: Vec<usize>, numbers: Vec<T>) -> Array<'_, T> {
    PyArrayDyn::from_owned_array(py, ArrayD::from_shape_vec(shape, numbers).expect("rows of the model's width"))
}
