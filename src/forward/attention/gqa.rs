//! Grouped-query attention.

use super::{Layer, Step, indexer};
use crate::backend::source::LinearWeight;
use crate::backend::tensor::HostTensor;
use crate::backend::{Backend, Heads, Softmax};
use crate::forward::join::{Partial, Stream, join};
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::{Cut, Loader};
use crate::model::{Bias, Gqa, OutputGate, QkNorm};
use crate::{Error, Result};

/// Grouped-query projections.
pub struct Weights<B: Backend> {
    q: B::Linear,                        // [num_heads * head_dim, hidden]
    k: B::Linear,                        // [num_kv_heads * head_dim, hidden]
    v: Option<B::Linear>,                // [num_kv_heads * value_dim, hidden]; none: as k
    o: B::Linear,                        // [hidden, num_heads * value_dim]
    qk_norm: Option<(B::Norm, B::Norm)>, // of query and key heads, [head_dim]; or of all together, [heads * head_dim]
    value_norm: Option<B::Norm>,         // ones, [value_dim]
    sinks: Option<B::Norm>,              // [num_heads]
    output_gate: Option<B::Linear>,      // [num_heads * value_dim or num_heads, hidden]
    indexer: Option<indexer::Weights<B>>,
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, a: &Gqa) -> Result<Self> {
        let (backend, names, hidden) = (loader.backend, &loader.model.names, loader.model.hidden_size);
        let name = format!("{layer}.{}", names.attention);
        let (q, kv) = (a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim);
        let (bias, qk) = (a.bias != Bias::None, format!("{name}.q_proj"));
        let fused = a.fused_parts.map(|parts| Fused::of(&name, a, parts));
        let of_keys_and_values = loader.of_keys_and_values();
        let heads = Cut::Heads(a.num_heads);
        let projection = |i: usize, rows: usize| {
            let (loader, cut) = match i {
                0 => (loader, heads),
                _ => (&of_keys_and_values, Cut::Heads(a.num_kv_heads)),
            };
            match &fused {
                Some(fused) => {
                    let part = loader.cut_stored(fused.part(loader, i)?, cut)?;
                    loader.backend.load_linear(part, None, loader.bits)
                }
                None => loader.cut_linear(&format!("{name}.{}_proj", ["q", "k", "v"][i]), (rows, hidden), cut, bias),
            }
        };
        let (queries, output_gate) = match (a.output_gate, a.gate()) {
            (Some(OutputGate::InQuery), _) => {
                (head_part(loader, &qk, a, 0, bias)?, Some(head_part(loader, &qk, a, 1, bias)?))
            }
            (_, Some((rows, _))) => {
                (projection(0, q)?, Some(loader.cut_linear(&format!("{name}.g_proj"), (rows, hidden), heads, false)?))
            }
            (_, None) => (projection(0, q)?, None),
        };
        let norms = |q_len, kv_len| {
            let [q, k] = names.qk_norm.map(|which| format!("{name}.{which}.weight"));
            Ok::<_, Error>(Some((loader.norm(&q, q_len)?, loader.norm(&k, kv_len)?)))
        };
        let ones = |len: usize| backend.load_made_norm(len, || vec![1.0; len]);
        Ok(Self {
            q: queries,
            k: projection(1, kv)?,
            v: match a.values_are_keys {
                false => Some(projection(2, a.num_kv_heads * a.value_dim)?),
                true => None,
            },
            o: {
                let (shape, cut) = ((hidden, a.num_heads * a.value_dim), Cut::OfHeads(a.num_heads));
                loader.cut_linear(&format!("{name}.{}", names.o), shape, cut, a.bias == Bias::All)?
            },
            qk_norm: match a.qk_norm {
                QkNorm::None => None,
                QkNorm::PerHead => norms(a.head_dim, a.head_dim)?,
                QkNorm::FullWidth => norms(q, kv)?,
                QkNorm::AfterRope => Some((ones(a.head_dim)?, ones(a.head_dim)?)),
            },
            value_norm: if a.value_norm { Some(ones(a.value_dim)?) } else { None },
            sinks: match a.sinks {
                true => {
                    let name = format!("{name}.{}", names.sinks);
                    Some(backend.load_norm(loader.cut(loader.source.vector(&name, a.num_heads)?, heads))?)
                }
                false => None,
            },
            output_gate,
            indexer: indexer::Weights::load(loader, &name, a.selection.as_ref())?,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        let all = [&self.q, &self.k, &self.o].into_iter().chain(&self.v).chain(&self.output_gate);
        let index = self.indexer.as_ref().map_or(0, |indexer| indexer.bytes_per_token(backend));
        index + all.map(|w| backend.linear_bytes(w)).sum::<usize>()
    }
}

/// Queries, keys and values in one tensor. Source: vLLM's mimo_v2.
struct Fused {
    name: String, // of [parts * (queries, keys and values of a part), hidden]
    parts: usize,
    ends: [usize; 4], // of queries, keys and values within a part, behind its beginning
}

impl Fused {
    fn of(name: &str, a: &Gqa, parts: usize) -> Self {
        let (keys, values) = (a.num_kv_heads * a.head_dim / parts, a.num_kv_heads * a.value_dim / parts);
        let queries = a.num_heads * a.head_dim / parts;
        let ends = [0, queries, queries + keys, queries + keys + values];
        Self { name: format!("{name}.qkv_proj.weight"), parts, ends }
    }

    /// Queries, keys or values.
    fn part<'a, B: Backend>(&self, loader: &Loader<'a, B>, i: usize) -> Result<LinearWeight<'a>> {
        let all = loader.source.stored(&self.name, self.parts * self.ends[3], loader.model.hidden_size)?;
        Ok(all.head_rows(self.parts, self.ends[i], self.ends[i + 1]))
    }
}

/// The first or second half of the rows of each head of a projection.
fn head_part<B: Backend>(loader: &Loader<'_, B>, name: &str, a: &Gqa, half: usize, bias: bool) -> Result<B::Linear> {
    let (rows, dim) = (2 * a.num_heads * a.head_dim, a.head_dim);
    let weight = loader.source.stored(&format!("{name}.weight"), rows, loader.model.hidden_size)?;
    let weight = weight.head_rows(a.num_heads, half * dim, (half + 1) * dim);
    let bias = if bias { Some(loader.source.vector(&format!("{name}.bias"), rows)?) } else { None };
    let part = |all: HostTensor<'_>| {
        loader.cut(all.head_rows(a.num_heads, half * dim, (half + 1) * dim), Cut::Heads(a.num_heads))
    };
    loader.backend.load_linear(loader.cut_stored(weight, Cut::Heads(a.num_heads))?, bias.map(part), loader.bits)
}

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    q: B::Tensor,            // [T, num_heads * head_dim]
    k: B::Tensor,            // [T, num_kv_heads * head_dim]
    v: B::Tensor,            // [T, num_kv_heads * value_dim]
    out: B::Tensor,          // [T, num_heads * value_dim]
    gate: Option<B::Tensor>, // [T, rows of the gate]
    indexer: Option<indexer::Buffers<B>>,
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &Gqa, cache: &LayerCache<B>, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        Ok(Self {
            q: tensor(a.num_heads * a.head_dim)?,
            k: tensor(a.num_kv_heads * a.head_dim)?,
            v: tensor(a.num_kv_heads * a.value_dim)?,
            out: tensor(a.num_heads * a.value_dim)?,
            gate: a.gate().map(|(rows, _)| tensor(rows)).transpose()?,
            indexer: indexer::Buffers::new(backend, a.selection.as_ref(), cache, max_tokens)?,
        })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        for t in [&mut self.q, &mut self.k, &mut self.v, &mut self.out].into_iter().chain(&mut self.gate) {
            backend.set_rows(t, rows);
        }
        self.indexer.iter_mut().for_each(|indexer| indexer.set_rows(backend, rows));
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { config, weights, cache, chosen, .. }: Layer<'_, B, Gqa, Weights<B>>,
    Buffers { q, k, v, out, gate, indexer }: &mut Buffers<B>,
    h: &mut B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    let (backend, eps) = (step.backend, step.norm_eps);
    if let (Some(selection), Some(w), Some(buffers)) = (&config.selection, &weights.indexer, &mut *indexer) {
        stream.settle(backend, h); // queries, keys and values are made of it as well
        let inputs = indexer::Inputs { h, latent: None };
        indexer::select(step, &selection.indexer, w, cache.index(), buffers, inputs, chosen);
    }
    let kv = cache.kv();
    let (heads, kv_heads, dim) = (config.num_heads, config.num_kv_heads, config.head_dim);
    let value = weights.v.as_ref().unwrap_or(&weights.k);
    let qkv = [(&weights.q, &mut *q), (&weights.k, &mut *k), (value, &mut *v)];
    match (&weights.output_gate, &mut *gate) {
        (Some(w), Some(gate)) => {
            let [q, k, v] = qkv;
            stream.linears(backend, h, [q, k, v, (w, gate)]);
        }
        _ => stream.linears(backend, h, qkv),
    }
    if let Some(ones) = &weights.value_norm {
        backend.rms_norm_heads(v, ones, eps, 0..kv_heads * config.value_dim);
    }
    if config.value_scale != 1.0 {
        backend.scale(v, config.value_scale);
    }
    // Where norm and rotation come in the other order, or a norm covers all heads, they are ops of their own.
    let (mut rotary, mut of_heads) = (step.rotary.as_ref(), None);
    if let Some((q_norm, k_norm)) = &weights.qk_norm {
        match config.qk_norm {
            QkNorm::None | QkNorm::PerHead => of_heads = Some(((q_norm, dim, eps), (k_norm, dim, eps))),
            QkNorm::FullWidth | QkNorm::AfterRope => {
                for (x, norm, heads) in [(&mut *q, q_norm, heads), (&mut *k, k_norm, kv_heads)] {
                    if let Some(rotary) = rotary.filter(|_| config.qk_norm == QkNorm::AfterRope) {
                        backend.rope(x, dim, 0, rotary);
                    }
                    backend.rms_norm_heads(x, norm, eps, 0..heads * dim);
                }
                rotary = rotary.filter(|_| config.qk_norm == QkNorm::FullWidth);
            }
        }
    }
    let (q_norm, k_norm) = of_heads.unzip();
    let queries = Heads { x: &mut *q, heads, dim, norm: q_norm, rope_at: 0 };
    let keys = Heads { x: k, heads: kv_heads, dim, norm: k_norm, rope_at: 0 };
    backend.prepare_heads(kv, step.batch, rotary, queries, keys, Some(v));
    if let Some(scale) = &config.position_scale {
        backend.scale_by_position(q, step.batch, scale);
    }
    let choice = indexer::choice(chosen, indexer);
    let (scale, sinks) = (config.scale, weights.sinks.as_ref());
    let softmax = Softmax { scale, window: config.window, sinks, choice: choice.as_ref() };
    backend.attend(kv, step.batch, &softmax, q, out);
    if let (Some(gate), Some((_, activation))) = (gate, config.gate()) {
        backend.gate(gate, activation, out);
    }
    join(backend, Partial::Product(&weights.o, out), stream)
}
