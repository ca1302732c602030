//! Rotary angles of a pass: computed once for each distinct rope of the model, whatever number of layers have it.

use super::buffers::Part;
use crate::Result;
use crate::backend::Backend;
use crate::model::ModelConfig;

/// The distinct ropes of a model, and which of them each layer has.
pub(super) struct Ropes<B: Backend> {
    distinct: Vec<Frequencies<B>>,
    by_layer: Vec<Option<usize>>, // `None`: the layer rotates nothing
}

/// What makes angles of positions.
struct Frequencies<B: Backend> {
    inv_freq: B::Norm,     // [rope.dim / 2]
    attention_factor: f32, // multiplies cos and sin
}

impl<B: Backend> Ropes<B> {
    pub(super) fn new(backend: &B, model: &ModelConfig) -> Result<Self> {
        let ropes = model.ropes();
        let index = |rope| ropes.iter().position(|other| *other == rope).expect("a rope of a layer");
        let by_layer = model.layers.iter().map(|layer| layer.attention.rope().map(index)).collect();
        let distinct = ropes.iter().map(|rope| {
            let inv_freq = backend.load_made_norm(rope.dim / 2, || rope.inv_freq())?;
            Ok(Frequencies { inv_freq, attention_factor: rope.attention_factor() })
        });
        Ok(Self { distinct: distinct.collect::<Result<_>>()?, by_layer })
    }

    /// Computes the angles of the part's positions.
    pub(super) fn angles(&self, backend: &B, part: &mut Part<B>) {
        let Part { batch, angles, .. } = part;
        for (Frequencies { inv_freq, attention_factor }, angles) in self.distinct.iter().zip(angles) {
            backend.rope_angles(inv_freq, *attention_factor, batch, angles);
        }
    }

    /// Which of a part's angles are those of `layer`.
    pub(super) fn of_layer(&self, layer: usize) -> Option<usize> {
        self.by_layer[layer]
    }
}
