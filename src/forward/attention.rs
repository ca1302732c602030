//! Attention of one layer, from the normalized hidden state into the residual stream.

mod delta_net;
mod gqa;
mod mla;

use crate::Result;
use crate::backend::{Backend, Rotary};
use crate::forward::kv_cache::LayerCache;
use crate::forward::weights::AttentionWeights;
use crate::model::{Attention, ModelConfig};

/// Activations of attention, allocated once and used by every layer of their kind; all layers of a kind have the same
/// widths.
pub struct AttentionBuffers<B: Backend> {
    gqa: Option<gqa::Buffers<B>>,
    mla: Option<mla::Buffers<B>>,
    delta_net: Option<delta_net::Buffers<B>>,
}

impl<B: Backend> AttentionBuffers<B> {
    /// Buffers for `max_tokens` tokens.
    pub fn new(backend: &B, model: &ModelConfig, max_tokens: usize) -> Result<Self> {
        let mut buffers = Self { gqa: None, mla: None, delta_net: None };
        for attention in model.attentions() {
            match attention {
                Attention::Gqa(a) => buffers.gqa = Some(gqa::Buffers::new(backend, a, max_tokens)?),
                Attention::Mla(a) => buffers.mla = Some(mla::Buffers::new(backend, a, max_tokens)?),
                Attention::DeltaNet(a) => buffers.delta_net = Some(delta_net::Buffers::new(backend, a, max_tokens)?),
            }
        }
        Ok(buffers)
    }

    pub(crate) fn set_rows(&mut self, backend: &B, rows: usize) {
        let Self { gqa, mla, delta_net } = self;
        gqa.iter_mut().for_each(|b| b.set_rows(backend, rows));
        mla.iter_mut().for_each(|b| b.set_rows(backend, rows));
        delta_net.iter_mut().for_each(|b| b.set_rows(backend, rows));
    }
}

/// What attention needs of the running step.
pub struct Step<'a, B: Backend> {
    /// The device.
    pub backend: &'a B,
    /// The tokens.
    pub batch: &'a B::Batch,
    /// How heads are rotated at the batch's positions, if the layer rotates.
    pub rotary: Option<Rotary<'a, B>>,
    /// Epsilon of the norms.
    pub norm_eps: f32,
}

impl<'a, B: Backend> Step<'a, B> {
    /// Of a layer that rotates.
    fn rotary(&self) -> &Rotary<'a, B> {
        self.rotary.as_ref().expect("a layer that rotates has angles")
    }
}

/// Attention of one layer: what it is, what it has, and what it keeps of its sequences. A kind's file names its own.
pub struct Layer<'a, B: Backend, C = Attention, W = AttentionWeights<B>, K = LayerCache<B>> {
    /// Its shape.
    pub config: &'a C,
    /// Projections.
    pub weights: &'a W,
    /// Before attention.
    pub norm: &'a B::Norm,
    /// Keys and values, or recurrent state.
    pub cache: &'a mut K,
}

/// `x += attention(norm(x))`, storing the batch's keys and values, or what its sequences' states become, on the way.
/// `x` is `[T, hidden]`, `h` a buffer like it.
pub fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { config, weights, norm, cache }: Layer<'_, B>,
    buffers: &mut AttentionBuffers<B>,
    h: &mut B::Tensor,
    x: &mut B::Tensor,
) -> Result<()> {
    let AttentionBuffers { gqa, mla, delta_net } = buffers;
    match (config, weights, cache) {
        (Attention::Gqa(c), AttentionWeights::Gqa(w), LayerCache::Kv(kv)) => {
            let layer = Layer { config: c, weights: w, norm, cache: kv };
            gqa::attention(step, layer, gqa.as_mut().expect(THERE), h, x)
        }
        (Attention::Mla(c), AttentionWeights::Mla(w), LayerCache::Kv(kv)) => {
            let layer = Layer { config: c, weights: w, norm, cache: kv };
            mla::attention(step, layer, mla.as_mut().expect(THERE), h, x)
        }
        (Attention::DeltaNet(c), AttentionWeights::DeltaNet(w), LayerCache::State(state)) => {
            let layer = Layer { config: c, weights: w, norm, cache: state };
            delta_net::attention(step, layer, delta_net.as_mut().expect(THERE), h, x)
        }
        _ => panic!("configuration, weights and cache of one layer are of one kind"),
    }
}

const THERE: &str = "there are buffers for every kind of attention that the model has";
