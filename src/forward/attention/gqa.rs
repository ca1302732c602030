//! Grouped-query attention.

use super::{Layer, Step};
use crate::backend::{Backend, Heads, Softmax};
use crate::forward::join::{Partial, join};
use crate::forward::loader::Loader;
use crate::model::{Bias, Gqa, QkNorm};
use crate::{Error, Result};

/// Grouped-query projections.
pub struct Weights<B: Backend> {
    /// `[num_heads * head_dim, hidden]`
    q: B::Linear,
    /// `[num_kv_heads * head_dim, hidden]`
    k: B::Linear,
    /// `[num_kv_heads * head_dim, hidden]`
    v: B::Linear,
    /// `[hidden, num_heads * head_dim]`
    o: B::Linear,
    /// Norms of query and key heads, `[head_dim]` each; or of all heads together, `[heads * head_dim]`.
    qk_norm: Option<(B::Norm, B::Norm)>,
    /// `[num_heads]`
    sinks: Option<B::Norm>,
    /// `[num_heads * head_dim, hidden]`
    output_gate: Option<B::Linear>,
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, a: &Gqa) -> Result<Self> {
        let name = format!("{layer}.self_attn");
        let (hidden, q, kv) = (loader.model.hidden_size, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim);
        let (bias, qk) = (a.bias != Bias::None, format!("{name}.q_proj"));
        let (queries, output_gate) = match a.output_gate {
            false => (loader.linear(&qk, q, hidden, bias)?, None),
            true => (head_part(loader, &qk, a, 0, bias)?, Some(head_part(loader, &qk, a, 1, bias)?)),
        };
        let norms = |q_len, kv_len| {
            let norm = |which, len| loader.norm(&format!("{name}.{which}_norm.weight"), len);
            Ok::<_, Error>(Some((norm("q", q_len)?, norm("k", kv_len)?)))
        };
        Ok(Self {
            q: queries,
            k: loader.linear(&format!("{name}.k_proj"), kv, hidden, bias)?,
            v: loader.linear(&format!("{name}.v_proj"), kv, hidden, bias)?,
            o: loader.linear(&format!("{name}.o_proj"), hidden, q, a.bias == Bias::All)?,
            qk_norm: match a.qk_norm {
                QkNorm::None => None,
                QkNorm::PerHead => norms(a.head_dim, a.head_dim)?,
                QkNorm::FullWidth => norms(q, kv)?,
            },
            sinks: match a.sinks {
                true => Some(loader.backend.load_norm(loader.source.vector(&format!("{name}.sinks"), a.num_heads)?)?),
                false => None,
            },
            output_gate,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        let all = [&self.q, &self.k, &self.v, &self.o].into_iter().chain(&self.output_gate);
        all.map(|w| backend.linear_bytes(w)).sum()
    }
}

/// The first or second half of the rows of each head of a projection.
fn head_part<B: Backend>(loader: &Loader<'_, B>, name: &str, a: &Gqa, half: usize, bias: bool) -> Result<B::Linear> {
    let (rows, dim) = (2 * a.num_heads * a.head_dim, a.head_dim);
    let weight = loader.source.matrix(&format!("{name}.weight"), rows, loader.model.hidden_size)?;
    let bias = match bias {
        true => {
            let all = loader.source.vector(&format!("{name}.bias"), rows)?;
            Some(all.chunks_exact(dim).skip(half).step_by(2).flatten().copied().collect())
        }
        false => None,
    };
    loader.backend.load_linear(weight.head_rows(a.num_heads, half * dim, (half + 1) * dim), bias, loader.bits)
}

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    q: B::Tensor,            // [T, num_heads * head_dim]
    k: B::Tensor,            // [T, num_kv_heads * head_dim]
    v: B::Tensor,            // [T, num_kv_heads * head_dim]
    out: B::Tensor,          // [T, num_heads * head_dim]
    gate: Option<B::Tensor>, // [T, num_heads * head_dim]
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &Gqa, max_tokens: usize) -> Result<Self> {
        let tensor = |heads| backend.tensor(max_tokens, heads * a.head_dim);
        let (q, k, v, out) =
            (tensor(a.num_heads)?, tensor(a.num_kv_heads)?, tensor(a.num_kv_heads)?, tensor(a.num_heads)?);
        Ok(Self { q, k, v, out, gate: if a.output_gate { Some(tensor(a.num_heads)?) } else { None } })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.q, &mut self.k, &mut self.v, &mut self.out].into_iter().chain(&mut self.gate) {
            backend.set_rows(t, rows);
        }
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { config, weights, norm, cache }: Layer<'_, B, Gqa, Weights<B>>,
    Buffers { q, k, v, out, gate }: &mut Buffers<B>,
    h: &mut B::Tensor,
    x: &mut B::Tensor,
) -> Result<()> {
    let kv = cache.kv();
    let (backend, eps, dim) = (step.backend, step.norm_eps, config.head_dim);
    let qkv = [(&weights.q, &mut *q), (&weights.k, &mut *k), (&weights.v, &mut *v)];
    match (&weights.output_gate, &mut *gate) {
        (Some(w), Some(gate)) => {
            let [q, k, v] = qkv;
            backend.norm_linears(x, (norm, eps), h, [q, k, v, (w, gate)]);
        }
        _ => backend.norm_linears(x, (norm, eps), h, qkv),
    }
    let (mut q_norm, mut k_norm) = weights.qk_norm.as_ref().map(|(q, k)| ((q, dim, eps), (k, dim, eps))).unzip();
    if config.qk_norm == QkNorm::FullWidth {
        for (x, norm, heads) in
            [(&mut *q, q_norm.take(), config.num_heads), (&mut *k, k_norm.take(), config.num_kv_heads)]
        {
            norm.iter().for_each(|(norm, ..)| backend.rms_norm_heads(x, norm, eps, 0..heads * dim));
        }
    }
    let queries = Heads { x: &mut *q, heads: config.num_heads, dim, norm: q_norm, rope_at: 0 };
    let keys = Heads { x: k, heads: config.num_kv_heads, dim, norm: k_norm, rope_at: 0 };
    backend.prepare_heads(kv, step.batch, step.rotary(), queries, keys, Some(v));
    let softmax = Softmax { scale: config.scale, window: config.window, sinks: weights.sinks.as_ref() };
    backend.attend(kv, step.batch, &softmax, q, out);
    if let Some(gate) = gate {
        backend.sigmoid_mul(gate, out);
    }
    join(backend, Partial::Product(&weights.o, out), x)
}
