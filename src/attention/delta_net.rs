//! Gated DeltaNet: linear attention whose memory is one matrix per head and sequence, whatever the length of the context.

use super::Step;
use crate::Result;
use crate::backend::Backend;
use crate::model::DeltaNet;
use crate::weights::DeltaNetWeights;

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    qkv: B::Tensor, // [T, conv_dim]
    z: B::Tensor,   // [T, value_dim]
    out: B::Tensor, // [T, value_dim]
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &DeltaNet, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        Ok(Self { qkv: tensor(a.conv_dim())?, z: tensor(a.value_dim())?, out: tensor(a.value_dim())? })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.qkv, &mut self.z, &mut self.out] {
            backend.set_rows(t, rows);
        }
    }
}

#[allow(clippy::too_many_arguments)] // as `super::attention`
pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    config: &DeltaNet,
    weights: &DeltaNetWeights<B>,
    norm: &B::Norm,
    state: &mut B::State,
    Buffers { qkv, z, out }: &mut Buffers<B>,
    h: &mut B::Tensor,
    x: &mut B::Tensor,
) {
    let (backend, eps) = (step.backend, step.norm_eps);
    backend.norm_linears(x, (norm, eps), h, [(&weights.qkv, qkv), (&weights.z, z)]);
    backend.delta_net(state, step.batch, (config, eps), &weights.rule, h, (qkv, z), out);
    backend.linear_add(&weights.o, out, x);
}
