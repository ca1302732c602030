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

use super::{Layer, Step, indexer};
use crate::Result;
use crate::backend::{Backend, Heads};
use crate::forward::join::{Partial, Stream, join};
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::{Cut, Loader};
use crate::model::{GateActivation, Mla};

/// Latent-attention projections.
pub struct Weights<B: Backend> {
    /// Down to the query latent, its norm, up to the heads; or straight to the heads.
    q: Query<B>,
    /// `[kv_lora_rank + rope, hidden]`
    kv_a: B::Linear,
    /// Norm of the latent, `[kv_lora_rank]`
    kv_a_norm: B::Norm,
    /// Keys and values out of latents.
    up: B::LatentUp,
    /// `[hidden, num_heads * v_head_dim]`
    o: B::Linear,
    /// `[num_heads, hidden]`, of heads with a gate.
    gate: Option<B::Linear>,
    /// Of a layer that chooses positions.
    indexer: Option<indexer::Weights<B>>,
}

/// How queries are made.
pub(super) enum Query<B: Backend> {
    /// `[num_heads * qk_head_dim, hidden]`
    Direct(B::Linear),
    /// Through a latent.
    Lora {
        /// `[q_lora_rank, hidden]`
        a: B::Linear,
        /// `[q_lora_rank]`
        norm: B::Norm,
        /// `[num_heads * qk_head_dim, q_lora_rank]`
        b: B::Linear,
    },
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, a: &Mla) -> Result<Self> {
        let names = &loader.model.names;
        let name = format!("{layer}.{}", names.attention);
        let (hidden, heads) = (loader.model.hidden_size, a.num_heads);
        let q = heads * a.qk_head_dim();
        let kv_b_rows = heads * (a.qk_nope_head_dim + a.v_head_dim);
        let cut = Cut::Heads(heads);
        let kv_b = loader.source.matrix(&format!("{name}.kv_b_proj.weight"), kv_b_rows, a.kv_lora_rank)?;
        Ok(Self {
            q: match a.q_lora_rank {
                None => Query::Direct(loader.cut_linear(&format!("{name}.q_proj"), (q, hidden), cut, false)?),
                Some(rank) => Query::Lora {
                    a: loader.linear(&format!("{name}.q_a_proj"), rank, hidden, a.bias)?,
                    norm: loader.norm(&format!("{name}.q_a_layernorm.weight"), rank)?,
                    b: loader.cut_linear(&format!("{name}.q_b_proj"), (q, rank), cut, false)?,
                },
            },
            kv_a: loader.of_keys_and_values().linear(
                &format!("{name}.kv_a_proj_with_mqa"),
                a.cache_dim(),
                hidden,
                a.bias,
            )?,
            kv_a_norm: loader.norm(&format!("{name}.kv_a_layernorm.weight"), a.kv_lora_rank)?,
            up: loader.backend.load_latent_up(&a.heads(loader.share), loader.cut(kv_b, cut))?,
            gate: match a.head_gate {
                true => Some(loader.cut_linear(&format!("{name}.g_proj"), (heads, hidden), cut, false)?),
                false => None,
            },
            o: {
                let shape = (hidden, heads * a.v_head_dim);
                loader.cut_linear(&format!("{name}.{}", names.o), shape, Cut::OfHeads(heads), a.bias)?
            },
            indexer: indexer::Weights::load(loader, &name, a.selection.as_ref())?,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        let query = match &self.q {
            Query::Direct(q) => backend.linear_bytes(q),
            Query::Lora { a, b, .. } => backend.linear_bytes(a) + backend.linear_bytes(b),
        };
        let index = self.indexer.as_ref().map_or(0, |indexer| indexer.bytes_per_token(backend));
        let gate = self.gate.as_ref().map_or(0, |gate| backend.linear_bytes(gate));
        index
            + gate
            + query
            + backend.linear_bytes(&self.kv_a)
            + backend.linear_bytes(&self.o)
            + backend.latent_up_bytes(&self.up)
    }
}

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    q_latent: Option<B::Tensor>,        // [T, q_lora_rank]
    q_latent_normed: Option<B::Tensor>, // [T, q_lora_rank]
    q: B::Tensor,                       // [T, heads, nope + rope]
    latent: B::Tensor,                  // [T, kv_lora_rank + rope]: a row of the cache
    scratch: B::LatentScratch,
    out: B::Tensor,          // [T, heads, v_head_dim]
    gate: Option<B::Tensor>, // [T, heads]
    indexer: Option<indexer::Buffers<B>>,
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &Mla, cache: &LayerCache<B>, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        Ok(Self {
            q_latent: a.q_lora_rank.map(tensor).transpose()?,
            q_latent_normed: a.q_lora_rank.map(tensor).transpose()?,
            q: tensor(a.num_heads * a.qk_head_dim())?,
            latent: tensor(a.cache_dim())?,
            scratch: backend.latent_scratch(a, max_tokens)?,
            out: tensor(a.num_heads * a.v_head_dim)?,
            gate: a.head_gate.then(|| tensor(a.num_heads)).transpose()?,
            indexer: indexer::Buffers::new(backend, a.selection.as_ref(), cache, max_tokens)?,
        })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        let Self { q_latent, q_latent_normed, q, latent, out, gate, indexer, .. } = self;
        indexer.iter_mut().for_each(|indexer| indexer.set_rows(backend, rows));
        for t in q_latent.iter_mut().chain(q_latent_normed).chain([q, latent, out]).chain(gate) {
            backend.set_rows(t, rows);
        }
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { config, weights, cache, chosen, .. }: Layer<'_, B, Mla, Weights<B>>,
    buffers: &mut Buffers<B>,
    h: &mut B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    let backend = step.backend;
    let Buffers { q_latent, q_latent_normed, q, latent, scratch, out, gate, indexer } = buffers;
    if weights.indexer.is_some() || weights.gate.is_some() {
        stream.settle(backend, h); // others read it as well
    }
    match (&weights.q, q_latent, &mut *q_latent_normed) {
        (Query::Direct(w), None, None) => stream.linears(backend, h, [(w, q), (&weights.kv_a, latent)]),
        (Query::Lora { a, norm: q_norm, b }, Some(q_latent), Some(normed)) => {
            stream.linears(backend, h, [(a, q_latent), (&weights.kv_a, latent)]);
            backend.rms_norm(q_latent, q_norm, config.norm_eps, normed);
            backend.linear(b, normed, q);
        }
        _ => panic!("weights and buffers are of one configuration"),
    }
    if let (Some(selection), Some(w), Some(buffers)) = (&config.selection, &weights.indexer, &mut *indexer) {
        let inputs = indexer::Inputs { h, latent: q_latent_normed.as_ref() };
        indexer::select(step, &selection.indexer, w, cache.index(), buffers, inputs, chosen);
    }
    if let Some(scale) = &config.position_scale {
        backend.scale_by_position(q, step.batch, scale);
    }
    let choice = indexer::choice(chosen, indexer);
    backend.absorb_latent(step.batch, &weights.up, scratch, (&*q, choice.as_ref()));
    let kv = cache.kv();
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
        norm: Some((&weights.kv_a_norm, rank, config.norm_eps)),
        rope_at: rank,
    };
    backend.prepare_heads(kv, step.batch, step.rotary.as_ref(), queries, latents, None);
    backend.attend_latent(kv, step.batch, &weights.up, scratch, (q, choice.as_ref()), out);
    if let (Some(w), Some(gate)) = (&weights.gate, gate) {
        backend.linear(w, h, gate);
        backend.gate(gate, GateActivation::Sigmoid, out);
    }
    join(backend, Partial::Product(&weights.o, out), stream)
}
