//! Multi-head latent attention: the cache holds one row of `kv_lora_rank + rope` numbers per token, whatever the number
//! of heads.
//!
//! Scores and values can be taken in the latent's space (absorbed), or of keys and values made of latents; a backend
//! chooses.
//!
//! ```text
//! q_nope · (W_uk c) = (W_uk^T q_nope) · c        the query moves into the latent's space
//! sum_j p_j (W_uv c_j) = W_uv (sum_j p_j c_j)    the value is read once, after the sum
//! ```
//!
//! Source: DeepSeek-V2 report, section 2.1.

use super::{Layer, Step};
use crate::Result;
use crate::backend::{Backend, Heads};
use crate::forward::join::{Partial, join};
use crate::forward::weights::{MlaQuery, MlaWeights};
use crate::model::Mla;

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    q_latent: Option<B::Tensor>,        // [T, q_lora_rank]
    q_latent_normed: Option<B::Tensor>, // [T, q_lora_rank]
    q: B::Tensor,                       // [T, heads, nope + rope]
    latent: B::Tensor,                  // [T, kv_lora_rank + rope]: a row of the cache
    scratch: B::LatentScratch,
    out: B::Tensor, // [T, heads, v_head_dim]
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &Mla, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        Ok(Self {
            q_latent: a.q_lora_rank.map(tensor).transpose()?,
            q_latent_normed: a.q_lora_rank.map(tensor).transpose()?,
            q: tensor(a.num_heads * a.qk_head_dim())?,
            latent: tensor(a.cache_dim())?,
            scratch: backend.latent_scratch(a, max_tokens)?,
            out: tensor(a.num_heads * a.v_head_dim)?,
        })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        let Self { q_latent, q_latent_normed, q, latent, out, .. } = self;
        for t in q_latent.iter_mut().chain(q_latent_normed).chain([q, latent, out]) {
            backend.set_rows(t, rows);
        }
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { config, weights, norm, cache: kv }: Layer<'_, B, Mla, MlaWeights<B>, B::Kv>,
    buffers: &mut Buffers<B>,
    h: &mut B::Tensor,
    x: &mut B::Tensor,
) -> Result<()> {
    let (backend, norm) = (step.backend, (norm, step.norm_eps));
    let Buffers { q_latent, q_latent_normed, q, latent, scratch, out } = buffers;
    match (&weights.q, q_latent, q_latent_normed) {
        (MlaQuery::Direct(w), None, None) => backend.norm_linears(x, norm, h, [(w, q), (&weights.kv_a, latent)]),
        (MlaQuery::Lora { a, norm: q_norm, b }, Some(q_latent), Some(normed)) => {
            backend.norm_linears(x, norm, h, [(a, q_latent), (&weights.kv_a, latent)]);
            backend.rms_norm(q_latent, q_norm, Mla::NORM_EPS, normed);
            backend.linear(b, normed, q);
        }
        _ => panic!("weights and buffers are of one configuration"),
    }
    let queries = Heads {
        x: &mut *q,
        heads: config.num_heads,
        dim: config.qk_head_dim(),
        norm: None,
        rope_at: config.qk_nope_head_dim,
    };
    let rank = config.kv_lora_rank;
    let latents = Heads {
        x: latent,
        heads: 1,
        dim: config.cache_dim(),
        norm: Some((&weights.kv_a_norm, rank, Mla::NORM_EPS)),
        rope_at: rank,
    };
    backend.prepare_heads(kv, step.batch, step.rotary(), queries, latents, None);
    backend.attend_latent(kv, step.batch, &weights.up, scratch, q, out);
    join(backend, Partial::Product(&weights.o, out), x)
}
