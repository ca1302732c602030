//! A window of keys that are values, beside entries that stand for several positions each: the cache holds entries, the
//! slots of sequences their windows and open entries.

use super::{Layer, Step};
use crate::Result;
use crate::backend::tensor::HostTensor;
use crate::backend::{Backend, CompressRule, IndexQueries, Seen};
use crate::forward::join::{Partial, Stream, join};
use crate::forward::kv_cache::LayerCache;
use crate::forward::loader::{Cut, Loader};
use crate::model::{Compressed, Compressor, Indexer, Selection};

/// Projections, and what is between them.
pub struct Weights<B: Backend> {
    q_a: B::Linear,          // [q_lora_rank, hidden]
    q_a_norm: B::Norm,       // [q_lora_rank]
    q_b: B::Linear,          // [num_heads * head_dim, q_lora_rank]
    q_norm: Option<B::Norm>, // [head_dim], ones
    kv: B::Linear,           // [head_dim, hidden]
    kv_norm: B::Norm,        // [head_dim]
    sinks: B::Norm,          // [num_heads]
    inv_freq: B::Norm,       // [rope.dim / 2]
    o_a: B::Groups,          // of each group [o_lora_rank, heads of a group * head_dim]
    o_b: B::Linear,          // [hidden, groups * o_lora_rank]
    compressor: Option<CompressorWeights<B>>,
    indexer: Option<IndexerWeights<B>>,
}

/// What makes entries.
struct CompressorWeights<B: Backend> {
    of: Compressor,
    product: B::Linear, // [2 * width, hidden]: values, then gates
    bias: B::Norm,      // [ratio, width]
    norm: B::Norm,      // [dim]
}

/// What chooses among them.
struct IndexerWeights<B: Backend> {
    q: B::Linear,                // [num_heads * head_dim, q_lora_rank]
    weights: B::Linear,          // [num_heads, hidden]
    keys: Option<KeyWeights<B>>, // `None`: the layer borrows them
}

/// What makes index keys: of positions, or of entries [dim, head_dim of attention] and the norm [dim].
enum KeyWeights<B: Backend> {
    OfPositions(CompressorWeights<B>),
    OfEntries(B::Linear, B::Norm),
}

impl<B: Backend> CompressorWeights<B> {
    fn load(loader: &Loader<'_, B>, name: &str, of: Compressor) -> Result<Self> {
        let (backend, source, hidden) = (loader.backend, loader.source, loader.model.hidden_size);
        let part = |which: &str| source.matrix(&format!("{name}.{which}.weight"), of.width(), hidden);
        let values = part("wkv")?;
        let gates = if of.gates() { part("wgate")? } else { values.zero_rows(of.width()) };
        Ok(Self {
            of,
            product: backend.load_linear(HostTensor::stacked(&[values, gates]), None, loader.bits)?,
            bias: match of.bias {
                true => backend.load_norm(source.numbers(&format!("{name}.ape"), &[of.ratio, of.width()])?)?,
                false => backend.load_made_norm(of.ratio * of.width(), || vec![0.0; of.ratio * of.width()])?,
            },
            norm: loader.norm(&format!("{name}.norm.weight"), of.dim)?,
        })
    }
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, a: &Compressed) -> Result<Self> {
        let (backend, source, names) = (loader.backend, loader.source, &loader.model.names);
        let name = format!("{layer}.{}", names.attention);
        let (hidden, heads) = (loader.model.hidden_size, a.num_heads * a.head_dim);
        let linear = |part: &str, n, k| loader.linear(&format!("{name}.{part}"), n, k, false);
        let norm = |part: &str, len| loader.norm(&format!("{name}.{part}.weight"), len);
        let (low, of_group) = (a.groups * a.o_lora_rank, heads / a.groups);
        // A rank has whole groups of heads.
        let (of_heads, of_groups) = (Cut::Heads(a.num_heads), Cut::Heads(a.groups));
        let o_a = loader.cut_stored(source.stored(&format!("{name}.wo_a.weight"), low, of_group)?, of_groups)?;
        let sinks = loader.cut(source.vector(&format!("{name}.{}", names.sinks), a.num_heads)?, of_heads);
        let keys = match (a.key_compressor(), a.keys_of_entries()) {
            (Some(keys), _) => Some(KeyWeights::OfPositions(CompressorWeights::load(
                loader,
                &format!("{name}.indexer.compressor"),
                keys,
            )?)),
            (None, Some(dim)) => {
                Some(KeyWeights::OfEntries(linear("indexer.wk", dim, a.head_dim)?, norm("indexer.k_norm", dim)?))
            }
            (None, None) => None,
        };
        let indexer = match a.selection.as_ref().and_then(Selection::own) {
            Some(own) => Some(IndexerWeights {
                q: linear("indexer.wq_b", own.num_heads * own.head_dim, a.q_lora_rank)?,
                weights: linear("indexer.weights_proj", own.num_heads, hidden)?,
                keys,
            }),
            None => None,
        };
        Ok(Self {
            q_a: linear("wq_a", a.q_lora_rank, hidden)?,
            q_a_norm: norm("q_norm", a.q_lora_rank)?,
            q_b: loader.cut_linear(&format!("{name}.wq_b"), (heads, a.q_lora_rank), of_heads, false)?,
            q_norm: match a.norms_queries {
                true => Some(backend.load_made_norm(a.head_dim, || vec![1.0; a.head_dim])?),
                false => None,
            },
            kv: loader.of_keys_and_values().linear(&format!("{name}.wkv"), a.head_dim, hidden, false)?,
            kv_norm: norm("kv_norm", a.head_dim)?,
            sinks: backend.load_norm(sinks)?,
            inv_freq: backend.load_made_norm(a.rope.dim / 2, || a.rope.inv_freq())?,
            o_a: backend.load_groups(loader.share.run(a.groups).len(), o_a, loader.bits)?,
            o_b: loader.cut_linear(&format!("{name}.wo_b"), (hidden, low), Cut::OfHeads(a.groups), false)?,
            compressor: match a.own_compressor() {
                Some(of) => Some(CompressorWeights::load(loader, &format!("{name}.compressor"), of)?),
                None => None,
            },
            indexer,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        let index = self.indexer.iter().flat_map(|indexer| {
            let keys = indexer.keys.iter().map(|keys| match keys {
                KeyWeights::OfPositions(of) => &of.product,
                KeyWeights::OfEntries(product, _) => product,
            });
            [&indexer.q, &indexer.weights].into_iter().chain(keys)
        });
        let compressor = self.compressor.iter().map(|of| &of.product);
        let all = [&self.q_a, &self.q_b, &self.kv, &self.o_b].into_iter().chain(compressor).chain(index);
        all.map(|w| backend.linear_bytes(w)).sum::<usize>() + backend.groups_bytes(&self.o_a)
    }
}

/// Activations of one layer.
pub(super) struct Buffers<B: Backend> {
    q_latent: B::Tensor, // [T, q_lora_rank]
    normed: B::Tensor,   // [T, q_lora_rank]
    q: B::Tensor,        // [T, num_heads * head_dim]
    kv: B::Tensor,       // [T, head_dim]
    out: B::Tensor,      // [T, num_heads * head_dim]
    low: B::Tensor,      // [T, groups * o_lora_rank]
    compressor: Option<CompressorBuffers<B>>,
    indexer: Option<IndexerBuffers<B>>,
    scratch: B::EntriesScratch,
}

/// Activations of a compressor.
struct CompressorBuffers<B: Backend> {
    x: B::Tensor,       // [T, 2 * width]
    entries: B::Tensor, // [T, dim]
}

/// Activations of an indexer.
struct IndexerBuffers<B: Backend> {
    q: B::Tensor,            // [T, num_heads * head_dim]
    weights: B::Tensor,      // [T, num_heads], f32
    x: Option<B::Tensor>,    // [T, 2 * width], of a compressor of keys
    keys: Option<B::Tensor>, // [T, head_dim]
    scratch: B::SelectScratch,
}

impl<B: Backend> CompressorBuffers<B> {
    fn new(backend: &B, of: Compressor, max_tokens: usize) -> Result<Self> {
        Ok(Self { x: backend.tensor(max_tokens, 2 * of.width())?, entries: backend.tensor(max_tokens, of.dim)? })
    }
}

impl<B: Backend> IndexerBuffers<B> {
    fn new(backend: &B, own: &Indexer, a: &Compressed, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        let compressor = a.key_compressor();
        Ok(Self {
            q: tensor(own.num_heads * own.head_dim)?,
            weights: backend.tensor_f32(max_tokens, own.num_heads)?,
            x: compressor.map(|of| tensor(2 * of.width())).transpose()?,
            keys: compressor.map(|of| of.dim).or(a.keys_of_entries()).map(tensor).transpose()?,
            scratch: backend.select_scratch(own, max_tokens)?,
        })
    }

    fn tensors(&mut self) -> impl Iterator<Item = &mut B::Tensor> {
        [&mut self.q, &mut self.weights].into_iter().chain(&mut self.x).chain(&mut self.keys)
    }
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, a: &Compressed, _: &LayerCache<B>, max_tokens: usize) -> Result<Self> {
        let tensor = |cols| backend.tensor(max_tokens, cols);
        let own = a.selection.as_ref().and_then(Selection::own);
        Ok(Self {
            q_latent: tensor(a.q_lora_rank)?,
            normed: tensor(a.q_lora_rank)?,
            q: tensor(a.num_heads * a.head_dim)?,
            kv: tensor(a.head_dim)?,
            out: tensor(a.num_heads * a.head_dim)?,
            low: tensor(a.groups * a.o_lora_rank)?,
            compressor: a.own_compressor().map(|of| CompressorBuffers::new(backend, of, max_tokens)).transpose()?,
            indexer: own.map(|own| IndexerBuffers::new(backend, own, a, max_tokens)).transpose()?,
            scratch: backend.entries_scratch(a, max_tokens)?,
        })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        let Self { q_latent, normed, q, kv, out, low, compressor, indexer, .. } = self;
        let index = indexer.iter_mut().flat_map(IndexerBuffers::tensors);
        let compressor = compressor.iter_mut().flat_map(|of| [&mut of.x, &mut of.entries]);
        for t in [q_latent, normed, q, kv, out, low].into_iter().chain(compressor).chain(index) {
            backend.set_rows(t, rows);
        }
    }
}

pub(super) fn attention<B: Backend>(
    step: &Step<'_, B>,
    Layer { config, weights: w, cache, lent, chosen }: Layer<'_, B, Compressed, Weights<B>>,
    Buffers { q_latent, normed, q, kv, out, low, compressor, indexer, scratch }: &mut Buffers<B>,
    h: &mut B::Tensor,
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    let (backend, batch, eps) = (step.backend, step.batch, step.norm_eps);
    let (dim, at) = (config.head_dim, config.rope_at());
    let rotary = step.rotary.as_ref().expect("the attention has a rope");
    stream.settle(backend, h); // compressors read it as well
    backend.linears(h, [(&w.q_a, &mut *q_latent), (&w.kv, &mut *kv)]);
    backend.rms_norm(q_latent, &w.q_a_norm, eps, normed);
    backend.linear(&w.q_b, normed, q);
    if let Some(q_norm) = &w.q_norm {
        backend.rms_norm_heads(q, q_norm, eps, 0..config.num_heads * dim);
    }
    backend.rope(q, dim, at, rotary);
    backend.rms_norm_heads(kv, &w.kv_norm, eps, 0..dim);
    backend.rope(kv, dim, at, rotary);

    let (mut entries, mut index, state) = cache.compressed();
    let compressors = [config.own_compressor(), config.key_compressor()];
    let of_slot: usize = compressors.iter().flatten().map(Compressor::state).sum();
    let keys = w.indexer.as_ref().and_then(|of| of.keys.as_ref());
    let mut compress = |w_of: &CompressorWeights<B>, at: usize, rotates, x: &mut B::Tensor, to: &mut B::Tensor| {
        backend.linear(&w_of.product, h, x);
        let CompressorWeights { of, bias, norm, .. } = w_of;
        let inv_freq = if rotates { Some(&w.inv_freq) } else { None };
        let rule = CompressRule { compressor: *of, bias, norm, eps, inv_freq, state: (at, of_slot) };
        backend.compress(state, batch, &rule, x, to);
    };
    if let (Some(of), Some(CompressorBuffers { x, entries: made }), Some(entries)) =
        (&w.compressor, compressor, &mut entries)
    {
        let (ratio, of_keys) = (of.of.ratio, indexer.as_mut().map(|of| (&mut of.x, &mut of.keys)));
        compress(of, 0, !matches!(keys, Some(KeyWeights::OfEntries(..))), x, made);
        if let (Some(index), Some(keys), Some((x, Some(key)))) = (&mut index, keys, of_keys) {
            match (keys, x) {
                (KeyWeights::OfEntries(product, norm), _) => {
                    let dim_of_keys = config.keys_of_entries().unwrap_or_default();
                    backend.linear(product, made, key);
                    backend.rms_norm_heads(key, norm, eps, 0..dim_of_keys);
                    backend.rope_entries(batch, ratio, &w.inv_freq, key);
                    backend.rope_entries(batch, ratio, &w.inv_freq, made);
                }
                (KeyWeights::OfPositions(keys), Some(x)) => compress(keys, of.of.state(), true, x, key),
                (KeyWeights::OfPositions(_), None) => panic!("a compressor of keys has buffers"),
            }
            backend.index_entries(index, batch, ratio, key);
        }
        backend.entries_write(entries, batch, made);
    }
    let (entries, index) = match lent {
        Some(lender) => lender.lent(),
        None => (entries.as_deref(), index.as_deref()),
    };
    let selection = config.selection.as_ref().map(|selection| &selection.indexer);
    if let (Some(own), Some(w), Some(to), Some(index)) = (selection, &w.indexer, indexer, index) {
        backend.linear(&w.q, normed, &mut to.q);
        backend.rope(&mut to.q, own.head_dim, own.head_dim - config.rope.dim, rotary);
        backend.linear(&w.weights, h, &mut to.weights);
        let chosen = chosen.as_mut().expect("a model with an indexer has room for its choice");
        let queries = IndexQueries { q: &to.q, weights: Some(&to.weights) };
        backend.select(index, batch, own, &queries, &mut to.scratch, chosen);
    }
    let seen = Seen {
        window: config.window,
        entries,
        chosen: chosen.as_ref().filter(|_| config.selection.is_some()),
        scratch,
        scale: 1.0 / (dim as f32).sqrt(),
        sinks: &w.sinks,
    };
    backend.attend_entries(state, batch, &seen, (q, kv), out);
    backend.rope_back(out, dim, at, rotary);
    backend.linear_groups(&w.o_a, out, low);
    join(backend, Partial::Product(&w.o_b, low), stream)
}
