//! Kimi delta attention: what a layer keeps of a sequence is a matrix per head and its last few inputs.

use super::{Layer, Step};
use crate::backend::source::LinearWeight;
use crate::backend::tensor::HostTensor;
use crate::backend::{Backend, KdaInputs, KdaRule};
use crate::config::DenseBits;
use crate::forward::join::{Partial, Stream, join};
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::{Cut, Loader};
use crate::model::Kda;
use crate::{Error, Result};

/// Projections, and what is between them.
pub struct Weights<B: Backend> {
    qkv: B::Linear,   // [conv_dim, hidden]
    decay: Gate<B>,   // to [inner_dim]
    gate: Gate<B>,    // to [inner_dim]
    beta: B::Linear,  // [num_heads, hidden], at 16 bits
    o: B::Linear,     // [hidden, inner_dim]
    taps: B::Norm,    // [conv_width, conv_dim], the last one for the token itself
    rates: B::Norm,   // [num_heads], exp(A_log)
    dt_bias: B::Norm, // [inner_dim]
    norm: B::Norm,    // [head_dim]
}

/// One projection, or one through a few numbers.
struct Gate<B: Backend> {
    first: B::Linear,          // [rank or inner_dim, hidden]
    second: Option<B::Linear>, // [inner_dim, rank]
}

impl<B: Backend> Gate<B> {
    fn load(loader: &Loader<'_, B>, name: &str, letter: char, a: &Kda) -> Result<Self> {
        let (hidden, inner, heads) = (loader.model.hidden_size, a.inner_dim(), Cut::Heads(a.num_heads));
        let of = |part: &str| format!("{name}.{letter}{part}_proj");
        Ok(match a.gate_rank {
            Some(rank) => Self {
                first: loader.linear(&of("_a"), rank, hidden, false)?,
                second: Some(loader.cut_linear(&of("_b"), (inner, rank), heads, false)?),
            },
            None => Self { first: loader.cut_linear(&of(""), (inner, hidden), heads, false)?, second: None },
        })
    }

    fn bytes_per_token(&self, backend: &B) -> usize {
        [&self.first].into_iter().chain(&self.second).map(|w| backend.linear_bytes(w)).sum()
    }
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, a: &Kda) -> Result<Self> {
        let (backend, source, hidden) = (loader.backend, loader.source, loader.model.hidden_size);
        let (inner, heads) = (a.inner_dim(), a.num_heads);
        let name = format!("{layer}.{}", loader.model.names.attention);
        let of_heads = Cut::Heads(heads);
        let part = |which: &str| {
            loader.cut_stored(source.stored(&format!("{name}.{which}_proj.weight"), inner, hidden)?, of_heads)
        };
        let conv = |which: &str| {
            let name = format!("{name}.{which}_conv1d.weight");
            let taps = source.numbers(&name, &[inner, 1, a.conv_width])?.reshaped(a.conv_width);
            Ok::<_, Error>(loader.cut(taps, of_heads))
        };
        let vector = |all: HostTensor<'_>| backend.load_norm(loader.cut(all, of_heads));
        let taps = HostTensor::stacked(&[conv("q")?, conv("k")?, conv("v")?]);
        Ok(Self {
            qkv: backend.load_linear(
                LinearWeight::stacked([part("q")?, part("k")?, part("v")?])?,
                None,
                loader.bits,
            )?,
            decay: Gate::load(loader, &name, 'f', a)?,
            gate: Gate::load(loader, &name, 'g', a)?,
            beta: backend.load_linear(
                loader.cut(source.matrix(&format!("{name}.b_proj.weight"), heads, hidden)?, of_heads),
                None,
                DenseBits::Bf16,
            )?,
            o: loader.cut_linear(&format!("{name}.o_proj"), (hidden, inner), Cut::OfHeads(heads), false)?,
            taps: backend.load_norm(taps.transpose_heads(1))?,
            rates: vector(loader.rates(&name, heads)?)?,
            dt_bias: vector(source.vector(&format!("{name}.dt_bias"), inner)?)?,
            norm: backend.load_norm(source.vector(&format!("{name}.o_norm.weight"), a.head_dim)?)?,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        let gates = self.decay.bytes_per_token(backend) + self.gate.bytes_per_token(backend);
        gates + [&self.qkv, &self.beta, &self.o].map(|w| backend.linear_bytes(w)).iter().sum::<usize>()
    }
}

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    qkv: B::Tensor,                // [T, conv_dim]
    mixed: B::Tensor,              // [T, conv_dim]
    decay: B::Tensor,              // [T, inner_dim]
    gate: B::Tensor,               // [T, inner_dim]
    ranks: Option<[B::Tensor; 2]>, // [T, rank]: what decay and gate are made of
    beta: B::Tensor,               // [T, num_heads], f32
    out: B::Tensor,                // [T, inner_dim]
    scratch: B::KdaScratch,
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &Kda, _: &LayerCache<B>, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        Ok(Self {
            qkv: tensor(a.conv_dim())?,
            mixed: tensor(a.conv_dim())?,
            decay: tensor(a.inner_dim())?,
            gate: tensor(a.inner_dim())?,
            ranks: match a.gate_rank {
                Some(rank) => Some([tensor(rank)?, tensor(rank)?]),
                None => None,
            },
            beta: backend.tensor_f32(max_tokens, a.num_heads)?,
            out: tensor(a.inner_dim())?,
            scratch: backend.kda_scratch(a, max_tokens)?,
        })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        let Self { qkv, mixed, decay, gate, ranks, beta, out, scratch: _ } = self;
        for t in [qkv, mixed, decay, gate, beta, out].into_iter().chain(ranks.iter_mut().flatten()) {
            backend.set_rows(t, rows);
        }
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { config, weights: w, cache, .. }: Layer<'_, B, Kda, Weights<B>>,
    Buffers { qkv, mixed, decay, gate, ranks, beta, out, scratch }: &mut Buffers<B>,
    h: &mut B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    let (backend, eps) = (step.backend, step.norm_eps);
    stream.read(backend, h);
    match (&w.decay.second, &w.gate.second, ranks) {
        (Some(to_decay), Some(to_gate), Some([of_decay, of_gate])) => {
            let jobs = [(&w.qkv, &mut *qkv), (&w.decay.first, &mut *of_decay), (&w.gate.first, &mut *of_gate)];
            backend.linears(h, jobs);
            backend.linear(to_decay, of_decay, decay);
            backend.linear(to_gate, of_gate, gate);
        }
        _ => backend.linears(h, [(&w.qkv, &mut *qkv), (&w.decay.first, &mut *decay), (&w.gate.first, &mut *gate)]),
    }
    backend.linear(&w.beta, h, beta);
    let state = cache.state();
    backend.convolve(state, step.batch, (&w.taps, None), qkv, mixed);
    let rule = KdaRule { config, rates: &w.rates, dt_bias: &w.dt_bias, norm: &w.norm, eps };
    backend.kda(state, step.batch, &rule, scratch, KdaInputs { qkv: mixed, decay, beta, gate }, out);
    join(backend, Partial::Product(&w.o, out), stream)
}
