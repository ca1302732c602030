//! Gated short convolution: what a layer keeps of a sequence is its last few inputs.

use super::{Layer, Step};
use crate::Result;
use crate::backend::Backend;
use crate::forward::join::{Partial, Stream, join};
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::{Cut, Loader};
use crate::model::ShortConv;

/// Projections and the convolution.
pub struct Weights<B: Backend> {
    bcx: B::Linear, // [3 * channels, hidden]
    o: B::Linear,   // [hidden, channels]
    taps: B::Norm,  // [conv_width, channels], the last one for the token itself
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, a: &ShortConv) -> Result<Self> {
        let (hidden, channels, width) = (loader.model.hidden_size, a.channels, a.conv_width);
        let conv = loader.source.numbers(&format!("{layer}.conv.conv.weight"), &[channels, 1, width])?;
        Ok(Self {
            bcx: {
                let shape = (3 * channels, hidden);
                loader.cut_linear(&format!("{layer}.conv.in_proj"), shape, Cut::OfEach(3, a.runs()), false)?
            },
            o: {
                let shape = (hidden, channels);
                loader.cut_linear(&format!("{layer}.conv.out_proj"), shape, Cut::OfHeads(a.runs()), false)?
            },
            taps: {
                let of_rank = loader.cut(conv.reshaped(width), Cut::Heads(a.runs()));
                loader.backend.load_norm(of_rank.transpose_heads(1))?
            },
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        backend.linear_bytes(&self.bcx) + backend.linear_bytes(&self.o)
    }
}

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    bcx: B::Tensor, // [T, 3 * channels]
    out: B::Tensor, // [T, channels]
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &ShortConv, _: &LayerCache<B>, max_tokens: usize) -> Result<Self> {
        Ok(Self { bcx: backend.tensor(max_tokens, 3 * a.channels)?, out: backend.tensor(max_tokens, a.channels)? })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        [&mut self.bcx, &mut self.out].into_iter().for_each(|t| backend.set_rows(t, rows));
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { weights, cache, .. }: Layer<'_, B, ShortConv, Weights<B>>,
    Buffers { bcx, out }: &mut Buffers<B>,
    h: &mut B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    stream.linears(step.backend, h, [(&weights.bcx, &mut *bcx)]);
    step.backend.short_conv(cache.state(), step.batch, &weights.taps, bcx, out);
    join(step.backend, Partial::Product(&weights.o, out), stream)
}
