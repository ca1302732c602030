//! The indexer of a layer: scores what each query sees, and chooses what it attends to.

use super::Step;
use crate::Result;
use crate::backend::{Backend, Choice, IndexQueries, KeyNorm, KeyPool, Rotary};
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::{Cut, Loader};
use crate::model::{Indexer, Score, Selection};

/// Projections of an indexer.
pub(super) struct Weights<B: Backend> {
    /// `[num_heads * head_dim, query latent or hidden]`
    q: B::Linear,
    /// `[head_dim, hidden]`
    k: B::Linear,
    /// Norm of each query, `[head_dim]`.
    q_norm: Option<B::Norm>,
    /// Of the keys' norm, `[head_dim]`.
    k_norm: B::Norm,
    /// Of the keys' norm, `[head_dim]`.
    k_bias: Option<B::Norm>,
    /// `[num_heads, hidden]`
    weights: Option<B::Linear>,
    /// Of keys that are pooled with gates.
    pool: Option<Pool<B>>,
}

/// What weighs the keys of a unit.
struct Pool<B: Backend> {
    gate: B::Linear, // [head_dim, hidden]
    bias: B::Norm,   // [unit, head_dim]
}

impl<B: Backend> Weights<B> {
    /// Of a layer whose attention is `name`; `None`: it has no indexer.
    pub(super) fn load(loader: &Loader<'_, B>, name: &str, selection: Option<&Selection>) -> Result<Option<Self>> {
        let Some(indexer) = selection.and_then(Selection::own) else { return Ok(None) };
        let Loader { backend, source, bits, .. } = *loader;
        let (hidden, queries, dim) = (loader.model.hidden_size, indexer.num_heads * indexer.head_dim, indexer.head_dim);
        let linear = |part: &str, n, k| loader.linear(&format!("{name}.{part}"), n, k, false);
        let norm = |part: &str| loader.norm(&format!("{name}.{part}.weight"), dim);
        Ok(Some(match indexer.score {
            Score::Weighted { latent } | Score::Gated { latent } => {
                let pool = match indexer.score {
                    Score::Gated { .. } => {
                        let of = |part: &str| format!("{name}.indexer.index_kpool_compress_{part}");
                        Some(Pool {
                            gate: backend.load_linear(source.matrix(&of("gate"), dim, hidden)?, None, bits)?,
                            bias: backend.load_norm(source.numbers(&of("ape"), &[indexer.unit, dim])?)?,
                        })
                    }
                    _ => None,
                };
                // A LayerNorm, whose weights are around one in every family.
                let vector =
                    |part: &str| backend.load_norm(source.vector(&format!("{name}.indexer.k_norm.{part}"), dim)?);
                Self {
                    q: linear("indexer.wq_b", queries, latent)?,
                    k: linear("indexer.wk", dim, hidden)?,
                    q_norm: None,
                    k_norm: vector("weight")?,
                    k_bias: Some(vector("bias")?),
                    weights: Some(linear("indexer.weights_proj", indexer.num_heads, hidden)?),
                    pool,
                }
            }
            Score::Entries { .. } => panic!("what attends to entries has an indexer of its own"),
            // Each head chooses for KV heads of its own.
            Score::Largest => Self {
                q: {
                    let cut = Cut::Heads(indexer.num_heads);
                    loader.cut_linear(&format!("{name}.index_q_proj"), (queries, hidden), cut, false)?
                },
                k: linear("index_k_proj", dim, hidden)?,
                q_norm: Some(norm("index_q_norm")?),
                k_norm: norm("index_k_norm")?,
                k_bias: None,
                weights: None,
                pool: None,
            },
            Score::Pooled => {
                // GGUF files have them apart.
                let [q, k] = if source.has(&format!("{name}.indexer.q_proj.weight")) {
                    [linear("indexer.q_proj", queries, hidden)?, linear("indexer.k_proj", dim, hidden)?]
                } else {
                    let both = source.matrix(&format!("{name}.indexer.index_qk_proj.weight"), queries + dim, hidden)?;
                    let rows = |from, to| backend.load_linear(both.head_rows(1, from, to), None, bits);
                    [rows(0, queries)?, rows(queries, queries + dim)?]
                };
                Self {
                    q,
                    k,
                    q_norm: Some(norm("indexer.q_layernorm")?),
                    k_norm: norm("indexer.k_layernorm")?,
                    k_bias: None,
                    weights: None,
                    pool: None,
                }
            }
        }))
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        let gate = self.pool.iter().map(|pool| &pool.gate);
        [&self.q, &self.k].into_iter().chain(&self.weights).chain(gate).map(|w| backend.linear_bytes(w)).sum()
    }
}

/// Activations of a layer that selects.
pub(super) struct Buffers<B: Backend> {
    q: B::Tensor,               // [T, num_heads * head_dim]
    k: B::Tensor,               // [T, head_dim]
    weights: Option<B::Tensor>, // [T, num_heads]
    gate: Option<B::Tensor>,    // [T, head_dim], of keys that are pooled with gates
    scratch: B::SelectScratch,
    gathered: B::Gathered,
}

/// What a layer's tokens attend to, where it selects: what the last layer with an indexer chose.
pub(super) fn choice<'a, B: Backend>(
    chosen: &'a Option<B::Chosen>,
    buffers: &'a Option<Buffers<B>>,
) -> Option<Choice<'a, B>> {
    let (chosen, Buffers { gathered, .. }) = chosen.as_ref().zip(buffers.as_ref())?;
    Some(Choice { chosen, gathered })
}

impl<B: Backend> Buffers<B> {
    /// `None`: it does not.
    pub(super) fn new(
        backend: &B,
        selection: Option<&Selection>,
        cache: &LayerCache<B>,
        max_tokens: usize,
    ) -> Result<Option<Self>> {
        let Some(Selection { indexer, .. }) = selection else { return Ok(None) };
        Ok(Some(Self {
            q: backend.tensor(max_tokens, indexer.num_heads * indexer.head_dim)?,
            k: backend.tensor(max_tokens, indexer.head_dim)?,
            weights: match indexer.score {
                Score::Weighted { .. } | Score::Gated { .. } => {
                    Some(backend.tensor_f32(max_tokens, indexer.num_heads)?)
                }
                Score::Largest | Score::Pooled | Score::Entries { .. } => None,
            },
            gate: match indexer.score {
                Score::Gated { .. } => Some(backend.tensor(max_tokens, indexer.head_dim)?),
                _ => None,
            },
            scratch: backend.select_scratch(indexer, max_tokens)?,
            gathered: backend.gathered(cache.keys_and_values(), indexer, max_tokens)?,
        }))
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        let some = [&mut self.q, &mut self.k].into_iter().chain(&mut self.weights).chain(&mut self.gate);
        some.for_each(|t| backend.set_rows(t, rows));
    }
}

/// What an indexer reads.
pub(super) struct Inputs<'a, B: Backend> {
    pub(super) h: &'a B::Tensor,              // [T, hidden], what attention reads
    pub(super) latent: Option<&'a B::Tensor>, // [T, query latent], normed
}

/// Stores the batch's index keys, and chooses the positions that its queries attend to.
pub(super) fn select<B: Backend>(
    step: &Step<'_, B>,
    indexer: &Indexer,
    w: &Weights<B>,
    index: &mut B::Index,
    Buffers { q, k, weights, gate, scratch, .. }: &mut Buffers<B>,
    Inputs { h, latent }: Inputs<'_, B>,
    chosen: &mut Option<B::Chosen>,
) {
    let backend = step.backend;
    match (indexer.score, latent, &w.weights, &mut *weights) {
        (Score::Weighted { .. } | Score::Gated { .. }, Some(latent), Some(of_heads), Some(weights)) => {
            backend.linears(h, [(&w.k, &mut *k), (of_heads, weights)]);
            backend.linear(&w.q, latent, q);
        }
        (Score::Largest | Score::Pooled, ..) => backend.linears(h, [(&w.k, &mut *k), (&w.q, &mut *q)]),
        _ => panic!("weighted heads have a query latent"),
    }
    if let Some(norm) = &w.q_norm {
        backend.rms_norm_heads(q, norm, step.norm_eps, 0..indexer.num_heads * indexer.head_dim);
    }
    let rotary = step.rotary.as_ref().map(|of| Rotary { angles: of.angles, interleaved: indexer.interleaved });
    if let Some(rotary) = &rotary {
        backend.rope(q, indexer.head_dim, 0, rotary);
    }
    let pool = w.pool.as_ref().zip(gate.as_mut()).map(|(pool, gate)| {
        backend.linear(&pool.gate, h, gate);
        KeyPool { gate, bias: &pool.bias }
    });
    let eps = if w.k_bias.is_some() { Indexer::LAYER_NORM_EPS } else { step.norm_eps };
    let norm = KeyNorm { weight: &w.k_norm, bias: w.k_bias.as_ref(), eps };
    backend.index_write(index, step.batch, indexer, (rotary.as_ref(), &norm, pool), k);
    let chosen = chosen.as_mut().expect("a model with an indexer has room for its choice");
    let queries = IndexQueries { q, weights: weights.as_ref() };
    backend.select(index, step.batch, indexer, &queries, scratch, chosen);
}
