//! Grouped-query attention.

use super::Step;
use crate::Result;
use crate::backend::{Backend, Heads};
use crate::model::Gqa;
use crate::weights::GqaWeights;

/// Activations of one layer.
pub struct Buffers<B: Backend> {
    q: B::Tensor,   // [T, num_heads * head_dim]
    k: B::Tensor,   // [T, num_kv_heads * head_dim]
    v: B::Tensor,   // [T, num_kv_heads * head_dim]
    out: B::Tensor, // [T, num_heads * head_dim]
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &Gqa, max_tokens: usize) -> Result<Self> {
        let tensor = |heads| backend.tensor(max_tokens, heads * a.head_dim);
        Ok(Self { q: tensor(a.num_heads)?, k: tensor(a.num_kv_heads)?, v: tensor(a.num_kv_heads)?, out: tensor(a.num_heads)? })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.q, &mut self.k, &mut self.v, &mut self.out] {
            backend.set_rows(t, rows);
        }
    }
}

#[allow(clippy::too_many_arguments)] // as `super::attention`
pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    config: &Gqa,
    weights: &GqaWeights<B>,
    norm: &B::Norm,
    kv: &mut B::Kv,
    Buffers { q, k, v, out }: &mut Buffers<B>,
    h: &mut B::Tensor,
    x: &mut B::Tensor,
) {
    let (backend, eps, dim) = (step.backend, step.norm_eps, config.head_dim);
    backend.norm_linears(x, (norm, eps), h, [(&weights.q, q), (&weights.k, k), (&weights.v, v)]);
    let (q_norm, k_norm) = weights.qk_norm.as_ref().map(|(q, k)| ((q, dim, eps), (k, dim, eps))).unzip();
    let queries = Heads { x: &mut *q, heads: config.num_heads, dim, norm: q_norm, rope_at: 0 };
    let keys = Heads { x: k, heads: config.num_kv_heads, dim, norm: k_norm, rope_at: 0 };
    backend.heads(kv, step.batch, step.angles, step.interleaved, queries, keys, Some(v));
    backend.attention(kv, step.batch, config.num_heads, config.scale, q, out);
    backend.linear_add(&weights.o, out, x);
}
