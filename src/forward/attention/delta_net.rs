//! Gated DeltaNet: linear attention whose memory is one matrix per head and sequence, whatever the length of the
//! context.

mod tensors;

use super::{Layer, Step};
use crate::Result;
use crate::backend::{Backend, DeltaInputs};
use crate::forward::join::{Partial, Stream, join};
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::Loader;
use crate::model::DeltaNet;

/// Projections and the rule of gated DeltaNet.
pub struct Weights<B: Backend> {
    /// Queries, keys and values before the convolution, `[conv_dim, hidden]`.
    qkv: B::Linear,
    /// Gate of the output, `[value_dim, hidden]`.
    z: B::Linear,
    /// `[hidden, value_dim]`
    o: B::Linear,
    /// What is between them.
    rule: B::DeltaNet,
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, a: &DeltaNet) -> Result<Self> {
        let (backend, bits) = (loader.backend, loader.bits);
        let tensors::Tensors { qkv, z, o, rule, tiled } = tensors::read(loader, &format!("{layer}.linear_attn"), a)?;
        Ok(Self {
            qkv: backend.load_linear(qkv, None, bits)?,
            z: backend.load_linear(z, None, bits)?,
            o: backend.load_linear(o, None, bits.of_out())?,
            rule: backend.load_delta_net(&DeltaNet { tiled, ..a.heads(loader.share) }, rule)?,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        [&self.qkv, &self.z, &self.o].map(|w| backend.linear_bytes(w)).iter().sum()
    }
}

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    qkv: B::Tensor, // [T, conv_dim]
    z: B::Tensor,   // [T, value_dim]
    out: B::Tensor, // [T, value_dim]
    scratch: B::DeltaScratch,
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &DeltaNet, _: &LayerCache<B>, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        let (qkv, z, out) = (tensor(a.conv_dim())?, tensor(a.value_dim())?, tensor(a.value_dim())?);
        Ok(Self { qkv, z, out, scratch: backend.delta_scratch(a, max_tokens)? })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.qkv, &mut self.z, &mut self.out] {
            backend.set_rows(t, rows);
        }
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { weights, cache, .. }: Layer<'_, B, DeltaNet, Weights<B>>,
    Buffers { qkv, z, out, scratch }: &mut Buffers<B>,
    h: &mut B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    let backend = step.backend;
    // Its gates read `h` as well, which `norm_linears` may leave out.
    stream.read(backend, h);
    backend.linears(h, [(&weights.qkv, &mut *qkv), (&weights.z, &mut *z)]);
    backend.delta_net(cache.state(), step.batch, &weights.rule, scratch, DeltaInputs { h, qkv, z }, out);
    join(backend, Partial::Product(&weights.o, out), stream)
}
