//! The precisions of a model's experts: files whose tensors have types of their own keep each of them.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Precision;

/// The precisions of the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertPrecision {
    /// Of `gate` and of `up`.
    pub gate: Precision,
    /// Of `down`.
    pub down: Precision,
}

impl From<Precision> for ExpertPrecision {
    fn from(precision: Precision) -> Self {
        Self { gate: precision, down: precision }
    }
}

/// The precisions of the experts of a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Precisions {
    /// Of all.
    One(Precision),
    /// Of each layer with experts, in order.
    Layers(Vec<ExpertPrecision>),
}

impl From<Precision> for Precisions {
    fn from(precision: Precision) -> Self {
        Self::One(precision)
    }
}

impl FromIterator<ExpertPrecision> for Precisions {
    /// Of each layer.
    fn from_iter<T: IntoIterator<Item = ExpertPrecision>>(layers: T) -> Self {
        let layers: Vec<_> = layers.into_iter().collect();
        match layers[..] {
            [ExpertPrecision { gate, .. }, ..] if layers.iter().all(|layer| *layer == gate.into()) => Self::One(gate),
            _ => Self::Layers(layers),
        }
    }
}

impl Precisions {
    /// Those of layer index `i`. Panics: there is no such layer (a bug).
    pub fn layer(&self, i: usize) -> ExpertPrecision {
        match self {
            Self::One(precision) => (*precision).into(),
            Self::Layers(layers) => layers[i],
        }
    }

    /// Those of a run of layer indices. Panics: as [`layer`](Self::layer).
    pub fn of_layers(&self, run: Range<usize>) -> Self {
        match self {
            Self::One(precision) => Self::One(*precision),
            Self::Layers(layers) => layers[run].iter().copied().collect(),
        }
    }

    /// Whether they are those of so many layers.
    pub fn are_of(&self, layers: usize) -> bool {
        match self {
            Self::One(_) => true,
            Self::Layers(own) => own.len() == layers,
        }
    }

    /// Each that some layer has, once.
    pub fn distinct(&self) -> Vec<ExpertPrecision> {
        let mut distinct = Vec::new();
        if let Self::One(precision) = self {
            distinct.push((*precision).into());
        }
        for &precision in self.layers() {
            if !distinct.contains(&precision) {
                distinct.push(precision);
            }
        }
        distinct
    }

    fn layers(&self) -> &[ExpertPrecision] {
        match self {
            Self::One(_) => &[],
            Self::Layers(layers) => layers,
        }
    }
}

impl fmt::Display for Precisions {
    /// All that there are, the most frequent first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::One(precision) = self {
            return write!(f, "{precision}");
        }
        let mut counts: Vec<(Precision, usize)> = Vec::new();
        // An expert has two matrices like its gate.
        let matrices = self.layers().iter().flat_map(|layer| [layer.gate, layer.gate, layer.down]);
        for precision in matrices {
            match counts.iter_mut().find(|(known, _)| *known == precision) {
                Some((_, count)) => *count += 1,
                None => counts.push((precision, 1)),
            }
        }
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count)); // stable
        let names: Vec<String> = counts.iter().map(|(precision, _)| precision.to_string()).collect();
        f.write_str(&names.join("+"))
    }
}
