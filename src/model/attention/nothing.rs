//! No attention: a layer that is only a feed-forward part.

use super::{Facts, Matrix};

/// Nothing, in the place of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Nothing;

impl Facts for Nothing {
    fn widths(&self) -> [usize; 10] {
        [0; 10]
    }

    fn matrices(&self, _: usize) -> Vec<Matrix> {
        vec![]
    }

    fn gpu_seconds(&self) -> f64 {
        0.0
    }
}
