//! Attention of one layer, from the normalized hidden state into the residual stream.

mod compressed;
mod delta_net;
mod gqa;
mod indexer;
mod kda;
mod mamba2;
mod mla;
mod nothing;
mod short_conv;

use super::join::Stream;
use super::kv_cache::{KvCache, LayerCache};
use super::loader::Loader;
use crate::Result;
use crate::backend::{Backend, Rotary};
use crate::model::{Attention, ModelConfig};

/// Every kind of attention, and its file.
macro_rules! kinds {
    ($($kind:ident: $file:ident),+) => {
        /// The resident weights of one attention.
        pub enum AttentionWeights<B: Backend> {
            $(#[doc = concat!("Of [`Attention::", stringify!($kind), "`].")] $kind($file::Weights<B>)),+
        }

        /// Activations of one kind of attention.
        enum Buffers<B: Backend> {
            $($kind($file::Buffers<B>)),+
        }

        impl<B: Backend> AttentionWeights<B> {
            pub(super) fn load(loader: &Loader<'_, B>, layer: &str, attention: &Attention) -> Result<Self> {
                match attention {
                    $(Attention::$kind(a) => $file::Weights::load(loader, layer, a).map(Self::$kind)),+
                }
            }

            /// Bytes that a token reads of them.
            pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
                match self {
                    $(Self::$kind(weights) => weights.bytes_per_token(backend)),+
                }
            }
        }

        impl<B: Backend> Buffers<B> {
            fn new(backend: &B, attention: &Attention, cache: &LayerCache<B>, max_tokens: usize) -> Result<Self> {
                match attention {
                    $(Attention::$kind(a) => $file::Buffers::new(backend, a, cache, max_tokens).map(Self::$kind)),+
                }
            }

            fn set_rows(&mut self, backend: &B, rows: usize) {
                match self {
                    $(Self::$kind(buffers) => buffers.set_rows(backend, rows)),+
                }
            }
        }

        /// Attention of what `stream` reads, and its result into `stream`. On the way it stores the batch's keys and
        /// values, or what its sequences' states become. `h` is the part's input, or a buffer for it, `[T, hidden]`.
        pub(super) fn attention<B: Backend>(
            step: &Step<'_, B>,
            Layer { config, weights, cache, lent, chosen }: Layer<'_, B>,
            buffers: &mut AttentionBuffers<B>,
            h: &mut B::Tensor,
            stream: &mut Stream<'_, B>,
        ) -> Result<()> {
            match (config, weights, buffers.of(config)) {
                $((Attention::$kind(config), AttentionWeights::$kind(weights), Buffers::$kind(buffers)) => {
                    $file::attention(step, Layer { config, weights, cache, lent, chosen }, buffers, h, stream)
                })+
                _ => panic!("configuration, weights and buffers of one layer are of one kind"),
            }
        }
    };
}

kinds!(
    Gqa: gqa, Mla: mla, DeltaNet: delta_net, ShortConv: short_conv, Kda: kda, Mamba2: mamba2, Compressed: compressed,
    Nothing: nothing
);

/// Activations of attention, allocated once and used by all layers of their kind and widths.
pub struct AttentionBuffers<B: Backend> {
    all: Vec<(Attention, Buffers<B>)>, // and the first layer's attention that they are for
}

impl<B: Backend> AttentionBuffers<B> {
    /// Buffers for `max_tokens` tokens, beside the caches of all layers.
    pub fn new(backend: &B, model: &ModelConfig, kv: &KvCache<B>, max_tokens: usize) -> Result<Self> {
        let of = |attention: &Attention| {
            let first = model.layers.iter().position(|layer| layer.attention.same_widths(attention));
            let cache = &kv.layers[first.expect("an attention is a layer's")];
            Ok((attention.clone(), Buffers::new(backend, attention, cache, max_tokens)?))
        };
        Ok(Self { all: model.attentions().into_iter().map(of).collect::<Result<_>>()? })
    }

    pub(crate) fn set_rows(&mut self, backend: &B, rows: usize) {
        self.all.iter_mut().for_each(|(_, buffers)| buffers.set_rows(backend, rows));
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

/// Attention of one layer: what it is, what it has, and what it keeps of its sequences. A kind's file names its own.
pub struct Layer<'a, B: Backend, C = Attention, W = AttentionWeights<B>> {
    /// Its shape.
    pub config: &'a C,
    /// Projections.
    pub weights: &'a W,
    /// Keys and values, or recurrent state.
    pub cache: &'a mut LayerCache<B>,
    /// The cache of the layer whose entries it borrows.
    pub lent: Option<&'a LayerCache<B>>,
    /// The positions that the last layer with an indexer chose.
    pub chosen: &'a mut Option<B::Chosen>,
}
