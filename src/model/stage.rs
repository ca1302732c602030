//! A run of a model's layers, which one of several devices has whole: a stage. The first stage has the embedding as
//! well, and the last one the output head.

use std::ops::Range;

use super::{ChosenBy, ModelConfig};

/// Where a run of layers stands in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The number of its first layer.
    pub first: usize,
    /// Layers of the model.
    pub of: usize,
}

impl ModelConfig {
    /// These layers, as a model of their own.
    pub fn stage(&self, layers: Range<usize>) -> Self {
        let stage = Stage { first: self.number_of(layers.start), of: self.all_layers() };
        Self { layers: self.layers[layers].to_vec(), stage: Some(stage), ..self.clone() }
    }

    /// Layers of the whole model.
    pub fn all_layers(&self) -> usize {
        self.stage.map_or(self.layers.len(), |stage| stage.of)
    }

    /// The number of layer `i` in the whole model.
    pub fn number_of(&self, i: usize) -> usize {
        self.stage.map_or(0, |stage| stage.first) + i
    }

    /// Whether it begins with tokens, and so has the embedding.
    pub fn is_first_stage(&self) -> bool {
        self.number_of(0) == 0
    }

    /// Whether it ends in logits, and so has the output head.
    pub fn is_last_stage(&self) -> bool {
        self.number_of(self.layers.len()) == self.all_layers()
    }

    /// Layers that a stage may begin with, but for the first: what it has needs nothing of layers before them but
    /// their residual streams.
    pub fn cuts(&self) -> Vec<usize> {
        let earliest = |i: usize| self.needs(i).min().unwrap_or(i);
        // Of all layers from `i` on, the earliest that one needs.
        let mut least = usize::MAX;
        let mut cuts: Vec<usize> = (1..self.layers.len())
            .rev()
            .filter(|&i| {
                least = least.min(earliest(i));
                least >= i
            })
            .collect();
        cuts.reverse();
        cuts
    }

    /// Earlier layers whose entries, or whose choice of positions, a layer uses.
    fn needs(&self, layer: usize) -> impl Iterator<Item = usize> {
        let earlier = &self.layers[..layer];
        let selection = |of: usize| self.layers[of].attention.selection();
        let chosen = selection(layer).filter(|selection| selection.by == ChosenBy::Earlier).and_then(|_| {
            earlier.iter().rposition(|before| before.attention.selection().is_some_and(|of| of.by == ChosenBy::Own))
        });
        let candidates = |by: ChosenBy| {
            move |of: &super::Selection| of.indexer.candidates.is_some_and(|candidates| candidates.by == by)
        };
        let limited = selection(layer).filter(|of| candidates(ChosenBy::Earlier)(of)).and_then(|_| {
            earlier.iter().rposition(|before| before.attention.selection().is_some_and(candidates(ChosenBy::Own)))
        });
        [self.lender(layer), chosen, limited].into_iter().flatten()
    }
}
