//! Grouped-query attention.

use super::Step;
use crate::Result;
use crate::backend::Backend;
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

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    config: &Gqa,
    weights: &GqaWeights<B>,
    kv: &mut B::Kv,
    Buffers { q, k, v, out }: &mut Buffers<B>,
    h: &B::Tensor,
    x: &mut B::Tensor,
) {
    let backend = step.backend;
    backend.linears(h, [(&weights.q, q), (&weights.k, k), (&weights.v, v)]);
    if let Some((q_norm, k_norm)) = &weights.qk_norm {
        backend.rms_norm_heads(q, q_norm, step.norm_eps, 0..config.num_heads * config.head_dim);
        backend.rms_norm_heads(k, k_norm, step.norm_eps, 0..config.num_kv_heads * config.head_dim);
    }
    backend.rope(q, config.head_dim, 0, step.interleaved, step.angles);
    backend.rope(k, config.head_dim, 0, step.interleaved, step.angles);
    backend.kv_write(kv, step.batch, k, Some(v));
    backend.attention(kv, step.batch, config.num_heads, config.scale, q, out);
    backend.linear_add(&weights.o, out, x);
}
