//! Attention of one layer, from the normalized hidden state into the residual stream.

mod gqa;
mod mla;

use crate::Result;
use crate::backend::Backend;
use crate::model::{Attention, ModelConfig};
use crate::weights::AttentionWeights;

/// Activations of attention, allocated once and used by every layer.
pub enum AttentionBuffers<B: Backend> {
    /// Grouped queries.
    Gqa(gqa::Buffers<B>),
    /// Latent attention.
    Mla(mla::Buffers<B>),
}

impl<B: Backend> AttentionBuffers<B> {
    /// Buffers for `max_tokens` tokens of a model all of whose layers have the attention of its first.
    pub fn new(backend: &B, model: &ModelConfig, max_tokens: usize) -> Result<Self> {
        Ok(match &model.layers[0].attention {
            Attention::Gqa(a) => AttentionBuffers::Gqa(gqa::Buffers::new(backend, a, max_tokens)?),
            Attention::Mla(a) => AttentionBuffers::Mla(mla::Buffers::new(backend, a, max_tokens)?),
        })
    }

    pub(crate) fn set_rows(&mut self, backend: &B, rows: usize) {
        match self {
            AttentionBuffers::Gqa(b) => b.set_rows(backend, rows),
            AttentionBuffers::Mla(b) => b.set_rows(backend, rows),
        }
    }
}

/// What attention needs of the running step.
pub struct Step<'a, B: Backend> {
    /// The device.
    pub backend: &'a B,
    /// The tokens.
    pub batch: &'a B::Batch,
    /// cos and sin of the batch's positions.
    pub angles: &'a B::Tensor,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// Rotary pairs are neighbours.
    pub interleaved: bool,
}

/// `x += attention(norm(x))`, storing the batch's keys and values on the way. `x` is `[T, hidden]`, `h` a buffer like it.
#[allow(clippy::too_many_arguments)] // what a layer is, what it has, what it changes
pub fn attention<B: Backend>(
    step: &Step<'_, B>,
    config: &Attention,
    weights: &AttentionWeights<B>,
    norm: &B::Norm,
    kv: &mut B::Kv,
    buffers: &mut AttentionBuffers<B>,
    h: &mut B::Tensor,
    x: &mut B::Tensor,
) {
    match (config, weights, buffers) {
        (Attention::Gqa(c), AttentionWeights::Gqa(w), AttentionBuffers::Gqa(b)) => gqa::attention(step, c, w, norm, kv, b, h, x),
        (Attention::Mla(c), AttentionWeights::Mla(w), AttentionBuffers::Mla(b)) => mla::attention(step, c, w, norm, kv, b, h, x),
        _ => panic!("configuration, weights and buffers of one layer are of one kind"),
    }
}
