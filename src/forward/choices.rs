//! Experts that a measurement gives tokens, in place of the router's choice, and guesses of them.

use crate::Result;
use crate::backend::Backend;
use crate::model::ModelConfig;

/// The experts of a pass's tokens in all MoE layers, where every pass finds them.
pub(super) struct Choices<B: Backend> {
    ids: B::Choices,     // [MoE layers, tokens, top_k]
    guesses: B::Choices, // the same
    tokens: usize,       // of the pass
    top_k: usize,
}

impl<B: Backend> Choices<B> {
    /// Room for passes of `max_tokens` tokens.
    pub(super) fn new(backend: &B, model: &ModelConfig, max_tokens: usize) -> Result<Self> {
        let (layers, top_k) = (model.moe_layers().count(), model.moe().map_or(0, |moe| moe.router.top_k));
        let room = || backend.choices(layers * max_tokens * top_k);
        Ok(Self { ids: room()?, guesses: room()?, tokens: 0, top_k })
    }

    /// Those of the next pass, `[MoE layers, tokens, top_k]`, and what is foreseen of them.
    pub(super) fn set(&mut self, backend: &B, ids: &[i32], guesses: &[i32], tokens: usize) {
        self.tokens = tokens;
        backend.set_choices(&mut self.ids, ids);
        backend.set_choices(&mut self.guesses, guesses);
    }

    /// Those of a layer, and where the tokens from `row` on begin.
    pub(super) fn of(&self, layer: usize, row: usize) -> (&B::Choices, usize) {
        (&self.ids, (layer * self.tokens + row) * self.top_k)
    }

    /// What is foreseen of a layer's, in the same way.
    pub(super) fn guesses_of(&self, layer: usize, row: usize) -> (&B::Choices, usize) {
        (&self.guesses, self.of(layer, row).1)
    }
}
