//! Mamba-2: what a layer keeps of a sequence is a state of fixed size and its last few inputs.

use std::ops::Range;

use super::{Layer, Step};
use crate::backend::tensor::HostTensor;
use crate::backend::{Backend, Mamba2Inputs, Mamba2Rule};
use crate::config::DenseBits;
use crate::forward::join::{Partial, Stream, join};
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::{Cut, Loader};
use crate::model::Mamba2;
use crate::{Error, Result};

/// Projections, and what is between them.
pub struct Weights<B: Backend> {
    z: B::Linear,               // [inner_dim, hidden]
    xbc: B::Linear,             // [conv_dim, hidden]
    dt: B::Linear,              // [num_heads, hidden], at 16 bits
    o: B::Linear,               // [hidden, inner_dim]
    taps: B::Norm,              // [conv_width, conv_dim], the last one for the token itself
    conv_bias: Option<B::Norm>, // [conv_dim]
    rates: B::Norm,             // [num_heads], exp(A_log)
    dt_bias: B::Norm,           // [num_heads]
    skip: B::Norm,              // [num_heads], D
    norm: B::Norm,              // [inner_dim]
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, a: &Mamba2) -> Result<Self> {
        let (backend, source, bits) = (loader.backend, loader.source, loader.bits);
        let (hidden, inner, heads) = (loader.model.hidden_size, a.inner_dim(), a.num_heads);
        let of = |part: &str| format!("{layer}.{}.{part}", loader.model.names.mamba);
        let groups = Cut::Heads(a.num_groups);
        let rows = |from: usize, len: usize| {
            let all = source.stored(&of("in_proj.weight"), inner + a.conv_dim() + heads, hidden)?;
            Ok::<_, Error>(all.head_rows(1, from, from + len))
        };
        let cut_rows = |from: usize, len: usize| loader.cut_stored(rows(from, len)?, groups);
        // What there is for each number of x, of b and of c.
        let (of_b, channels) = (inner..inner + a.num_groups * a.state_dim, a.conv_dim());
        let channel_rows = |all: HostTensor<'_>| {
            let part = |of: Range<usize>| loader.cut(all.head_rows(1, of.start, of.end), groups);
            HostTensor::stacked(&[part(0..inner), part(of_b.clone()), part(of_b.end..channels)])
        };
        let conv = source.numbers(&of("conv1d.weight"), &[channels, 1, a.conv_width])?.reshaped(a.conv_width);
        let vector = |part: &str, len: usize| source.vector(&of(part), len);
        let norm = |weight: HostTensor<'_>| backend.load_norm(loader.cut(weight, groups));
        // GGUF files have a row for each group.
        let by_group = source.numbers(&of("norm.weight"), &[a.num_groups, inner / a.num_groups]);
        let of_groups = by_group.map(|norm| norm.reshaped(1)).or_else(|_| vector("norm.weight", inner))?;
        Ok(Self {
            z: backend.load_linear(cut_rows(0, inner)?, None, bits)?,
            xbc: {
                let all = rows(inner, channels)?;
                let weight = if loader.share.is_whole() { all } else { channel_rows(all.plain()?).into() };
                backend.load_linear(weight, None, bits)?
            },
            dt: backend.load_linear(cut_rows(inner + a.conv_dim(), heads)?, None, DenseBits::Bf16)?,
            o: loader.cut_linear(&of("out_proj"), (hidden, inner), Cut::OfHeads(a.num_groups), false)?,
            taps: backend.load_norm(channel_rows(conv).transpose_heads(1))?,
            conv_bias: match a.conv_bias {
                true => Some(backend.load_norm(channel_rows(vector("conv1d.bias", channels)?))?),
                false => None,
            },
            rates: norm(loader.rates(&format!("{layer}.{}", loader.model.names.mamba), heads)?)?,
            dt_bias: norm(vector("dt_bias", heads)?)?,
            skip: norm(vector("D", heads)?)?,
            norm: norm(of_groups.map(|w| w * a.output_scale))?,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        [&self.z, &self.xbc, &self.dt, &self.o].map(|w| backend.linear_bytes(w)).iter().sum()
    }
}

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    z: B::Tensor,     // [T, inner_dim]
    xbc: B::Tensor,   // [T, conv_dim]
    mixed: B::Tensor, // [T, conv_dim]
    dt: B::Tensor,    // [T, num_heads], f32
    out: B::Tensor,   // [T, inner_dim]
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &Mamba2, _: &LayerCache<B>, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        Ok(Self {
            z: tensor(a.inner_dim())?,
            xbc: tensor(a.conv_dim())?,
            mixed: tensor(a.conv_dim())?,
            dt: backend.tensor_f32(max_tokens, a.num_heads)?,
            out: tensor(a.inner_dim())?,
        })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.z, &mut self.xbc, &mut self.mixed, &mut self.dt, &mut self.out] {
            backend.set_rows(t, rows);
        }
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { config, weights: w, cache, .. }: Layer<'_, B, Mamba2, Weights<B>>,
    Buffers { z, xbc, mixed, dt, out }: &mut Buffers<B>,
    h: &mut B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    let (backend, eps) = (step.backend, step.norm_eps);
    stream.read(backend, h);
    backend.linears(h, [(&w.z, &mut *z), (&w.xbc, &mut *xbc)]);
    backend.linear(&w.dt, h, dt);
    let state = cache.state();
    backend.convolve(state, step.batch, (&w.taps, w.conv_bias.as_ref()), xbc, mixed);
    let rule = Mamba2Rule { config, rates: &w.rates, dt_bias: &w.dt_bias, skip: &w.skip, norm: &w.norm, eps };
    backend.mamba2(state, step.batch, &rule, Mamba2Inputs { xbc: mixed, z, dt }, out);
    join(backend, Partial::Product(&w.o, out), stream)
}
