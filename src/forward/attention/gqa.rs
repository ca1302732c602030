//! Grouped-query attention.

use super::{Layer, Step};
use crate::Result;
use crate::backend::{Backend, Heads, Softmax};
use crate::forward::join::{Partial, join};
use crate::forward::weights::GqaWeights;
use crate::model::{Gqa, QkNorm};

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
    Layer { config, weights, norm, cache: kv }: Layer<'_, B, Gqa, GqaWeights<B>, B::Kv>,
    Buffers { q, k, v, out, gate }: &mut Buffers<B>,
    h: &mut B::Tensor,
    x: &mut B::Tensor,
) -> Result<()> {
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
