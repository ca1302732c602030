//! Attention of one layer, from the normalized hidden state into the residual stream.

mod delta_net;
mod gqa;
mod mla;

use crate::Result;
use crate::backend::{Backend, Rotary};
use crate::forward::kv_cache::LayerCache;
use crate::forward::weights::AttentionWeights;
use crate::model::{Attention, ModelConfig};

/// Activations of attention, allocated once and used by all layers of their kind and widths.
pub struct AttentionBuffers<B: Backend> {
    all: Vec<(Attention, Buffers<B>)>, // and the first layer's attention that they are for
}

/// Activations of one kind of attention.
enum Buffers<B: Backend> {
    Gqa(gqa::Buffers<B>),
    Mla(mla::Buffers<B>),
    DeltaNet(delta_net::Buffers<B>),
}

impl<B: Backend> AttentionBuffers<B> {
    /// Buffers for `max_tokens` tokens.
    pub fn new(backend: &B, model: &ModelConfig, max_tokens: usize) -> Result<Self> {
        let all = model.attentions().into_iter().map(|attention| {
            let buffers = match attention {
                Attention::Gqa(a) => Buffers::Gqa(gqa::Buffers::new(backend, a, max_tokens)?),
                Attention::Mla(a) => Buffers::Mla(mla::Buffers::new(backend, a, max_tokens)?),
                Attention::DeltaNet(a) => Buffers::DeltaNet(delta_net::Buffers::new(backend, a, max_tokens)?),
            };
            Ok((attention.clone(), buffers))
        });
        Ok(Self { all: all.collect::<Result<_>>()? })
    }

    pub(crate) fn set_rows(&mut self, backend: &B, rows: usize) {
        for (_, buffers) in &mut self.all {
            match buffers {
                Buffers::Gqa(b) => b.set_rows(backend, rows),
                Buffers::Mla(b) => b.set_rows(backend, rows),
                Buffers::DeltaNet(b) => b.set_rows(backend, rows),
            }
        }
    }

    /// Those of a layer.
    fn of(&mut self, attention: &Attention) -> &mut Buffers<B> {
        let found = self.all.iter_mut().find(|(of, _)| of.same_widths(attention));
        &mut found.expect("there are buffers for every attention that the model has").1
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
    match (config, weights, cache, buffers.of(config)) {
        (Attention::Gqa(config), AttentionWeights::Gqa(weights), LayerCache::Kv(cache), Buffers::Gqa(buffers)) => {
            gqa::attention(step, Layer { config, weights, norm, cache }, buffers, h, x)
        }
        (Attention::Mla(config), AttentionWeights::Mla(weights), LayerCache::Kv(cache), Buffers::Mla(buffers)) => {
            mla::attention(step, Layer { config, weights, norm, cache }, buffers, h, x)
        }
        (
            Attention::DeltaNet(config),
            AttentionWeights::DeltaNet(weights),
            LayerCache::State(cache),
            Buffers::DeltaNet(buffers),
        ) => delta_net::attention(step, Layer { config, weights, norm, cache }, buffers, h, x),
        _ => panic!("configuration, weights and cache of one layer are of one kind"),
    }
}
