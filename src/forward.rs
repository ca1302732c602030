//! The forward pass: one for every architecture.
//!
//! ```text
//! x = embed(ids)
//! layer:  x += attention(norm(x))
//!         h = norm(x);  dense: x += mlp(h)
//!                       moe:   submit(h, route(h)); x += shared(h); x += finish()
//! logits = lm_head(norm(x[last rows]))
//! ```
//!
//! ```text
//! kv_cache     blocks of keys and values; recurrent state, where layers have that instead
//! weights      resident weights by layer
//! join         where results enter the residual stream
//! attention    one file for each kind
//! tap          what is added to the residual stream, and taken from it
//! ```
//!
//! Imports config, model, backend and experts. Read [`Model::forward`](Forward::forward) first.

pub mod attention;
mod join;
pub mod kv_cache;
pub mod tap;
pub mod weights;

use std::ops::Range;
use std::sync::Arc;

use crate::backend::batch::Batch;
use crate::backend::tensor::Shortlist;
use crate::backend::{Addition, Backend, Form, OpTime, Rates, Rotary, Routing};
use crate::experts::{ExpertExecutor, Traffic};
use crate::forward::attention::{AttentionBuffers, Step, attention};
use crate::forward::join::{Partial, join};
use crate::forward::kv_cache::{KvCache, LayerCache};
use crate::forward::tap::{Add, Tap, intersection};
use crate::forward::weights::{FfnWeights, LayerWeights, MlpWeights, Weights};
use crate::model::{Ffn, LayerConfig, ModelConfig};
use crate::{Error, Result};

/// A model that reads batches, whatever it runs on.
pub trait Forward: Send {
    /// What it is.
    fn config(&self) -> &ModelConfig;

    /// Reads the batch: stores its keys and values, and leaves its hidden states for [`Forward::logits`]. `tap` must
    /// not be empty, and its vectors must be [held](Forward::hold).
    ///
    /// Errors: `Error::Cache` when an expert's bytes are not what was written, found at its first use; `Error::Device`.
    fn forward(&mut self, batch: &Batch, tap: Option<&mut Tap>) -> Result<()>;

    /// Brings vectors `[hidden]` to the device, to be added by a [`Tap`] for as long as somebody else has them too.
    ///
    /// Errors: `Error::Busy` when those of all requests take too much; `Error::Resources` when the device has no memory
    /// for them.
    fn hold(&mut self, vectors: &mut dyn Iterator<Item = &Arc<[f32]>>) -> Result<()>;

    /// Logits `[rows, vocab]` of rows of the last batch, on the host; at most [`Forward::max_logit_rows`] rows at a
    /// time.
    fn logits(&mut self, rows: &[usize]) -> Result<&mut [f32]>;

    /// The largest logits of rows of the last batch, and what a row weighs at an inverse temperature; as many rows as
    /// for [`Forward::logits`]. `false`: this device gives whole rows only, and nothing was done.
    fn shortlists(&mut self, rows: &[usize], inverse_temperatures: &[f32], out: &mut Vec<Shortlist>) -> Result<bool>;

    /// Whole rows, after [`Forward::shortlists`] of them.
    fn whole_rows(&mut self) -> Result<&mut [f32]>;

    /// Rows of logits that one call may ask for.
    fn max_logit_rows(&self) -> usize;

    /// Bytes of resident weights that a decode step of one token reads.
    fn resident_bytes_per_token(&self) -> u64;

    /// Expert weights that were moved since the start.
    fn traffic(&self) -> Traffic;

    /// Experts of each layer that live on the device.
    fn resident_experts(&self) -> usize;

    /// Measures the device; `None`: it is the CPU. Errors: `Error::Resources` if the device has no memory left for it;
    /// `Error::Device`.
    fn rates(&self) -> Result<Option<Rates>>;

    /// Reads the batch, and logits of its last row, twice; times of the second pass's ops, none on the CPU.
    fn profile(&mut self, batch: &Batch) -> Result<Vec<OpTime>>;

    /// Must be called on the thread that runs the model, before its first batch.
    fn enter_thread(&self) -> Result<()>;
}

/// Bytes of vectors that are on the device to be added, of all requests together.
const MAX_VECTOR_BYTES: usize = 32 << 20;

/// What a pass may hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens of a pass.
    pub tokens: usize,
    /// Tokens that go through an op at a time. A pass of more takes each layer in parts, so that a layer's experts are
    /// fetched once.
    pub chunk_tokens: usize,
    /// Rows of logits at a time.
    pub logit_rows: usize,
}

/// A model ready to run on a backend, with its KV cache and the buffers of its forward pass.
pub struct Model<B: Backend> {
    backend: B,
    config: ModelConfig,
    weights: Weights<B>,
    experts: Option<Box<dyn ExpertExecutor<B>>>,
    kv: KvCache<B>,
    buffers: Buffers<B>,
    parts: Vec<Part<B>>,
    inv_freq: B::Norm, // [rope.dim / 2]
    limits: Limits,
    cut: Batch,                  // a part of the batch on its way to the device
    vectors: Vec<Held<B::Norm>>, // to be added to the residual stream
    additions: B::Additions,     // of a pass
    last: B::Tensor,             // [R, hidden], rows of x of which logits are wanted
    last_normed: B::Tensor,      // [R, hidden]
    logits: B::Tensor,           // [R, vocab]
    host_logits: B::Host,        // [R, vocab]
    shortlister: B::Shortlister,
    logit_rows: usize, // of the last call
}

/// A vector of requests, `[hidden]`.
struct Held<N> {
    given: Arc<[f32]>,
    on_device: Arc<N>,
}

/// What lasts through all layers, of `chunk_tokens` tokens.
struct Part<B: Backend> {
    rows: Range<usize>, // of the batch
    batch: B::Batch,
    x: B::Tensor,      // [T, hidden], the residual stream
    angles: B::Tensor, // [T, rope.dim]
}

/// Activations within a layer, allocated once at their largest.
struct Buffers<B: Backend> {
    h: B::Tensor, // [T, hidden], a norm of x
    attention: AttentionBuffers<B>,
    mlp: Vec<MlpBuffers<B>>, // one for each width
    routing: Option<B::Routing>,
}

/// Activations of an MLP of one width, `[T, width]` each.
struct MlpBuffers<B: Backend> {
    width: usize,
    gate: B::Tensor,
    up: B::Tensor,
    product: B::Tensor,
}

impl<B: Backend> Model<B> {
    /// Allocates the buffers.
    pub fn new(
        backend: B,
        config: ModelConfig,
        weights: Weights<B>,
        experts: Option<Box<dyn ExpertExecutor<B>>>,
        kv: KvCache<B>,
        limits: Limits,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        let Limits { tokens, chunk_tokens, logit_rows } = limits;
        let part = |_| {
            Ok(Part {
                rows: 0..0,
                batch: backend.batch(chunk_tokens)?,
                x: backend.tensor_f32(chunk_tokens, hidden)?,
                angles: backend.tensor_f32(chunk_tokens, config.rope.dim)?,
            })
        };
        Ok(Self {
            buffers: Buffers::new(&backend, &config, chunk_tokens)?,
            parts: (0..tokens.div_ceil(chunk_tokens)).map(part).collect::<Result<_>>()?,
            inv_freq: backend.load_norm(config.rope.inv_freq())?,
            cut: Batch::default(),
            vectors: Vec::new(),
            additions: backend.additions(config.layers.len())?,
            last: backend.tensor_f32(logit_rows, hidden)?,
            last_normed: backend.tensor(logit_rows, hidden)?,
            logits: backend.tensor_f32(logit_rows, config.vocab_size)?,
            logit_rows: 0,
            shortlister: backend.shortlister(logit_rows, config.vocab_size)?,
            host_logits: backend.host(logit_rows * config.vocab_size)?,
            backend,
            config,
            weights,
            experts,
            kv,
            limits,
        })
    }

    /// Logits of rows of the last batch, on the device.
    fn compute_logits(&mut self, rows: &[usize]) {
        let Self { backend, config, weights, parts, last, last_normed, logits, .. } = self;
        for t in [&mut *last, &mut *last_normed, &mut *logits] {
            backend.set_rows(t, rows.len());
        }
        let part_of =
            |row: &usize| parts.iter().position(|part| part.rows.contains(row)).expect("a row of the last batch");
        let mut at = 0;
        for same in rows.chunk_by(|a, b| part_of(a) == part_of(b)) {
            let part = &parts[part_of(&same[0])];
            backend.gather(&part.x, same, part.rows.start, last, at);
            at += same.len();
        }
        backend.rms_norm(last, &weights.norm, config.norm_eps, last_normed);
        backend.linear(&weights.lm_head, last_normed, logits);
        self.logit_rows = rows.len();
    }
}

impl<B: Backend> Forward for Model<B> {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, batch: &Batch, mut tap: Option<&mut Tap>) -> Result<()> {
        let Self {
            backend,
            config,
            weights,
            experts,
            kv,
            buffers,
            parts,
            inv_freq,
            limits,
            cut,
            vectors,
            additions,
            ..
        } = self;
        assert!(batch.len() <= limits.tokens, "a batch larger than was allocated for");
        if let Some(experts) = experts {
            experts.between_passes()?;
        }
        let count = batch.len().div_ceil(limits.chunk_tokens);
        let parts = &mut parts[..count];
        for (i, part) in parts.iter_mut().enumerate() {
            part.rows = i * limits.chunk_tokens..batch.len().min((i + 1) * limits.chunk_tokens);
            if count == 1 {
                backend.set_batch(&mut part.batch, batch);
            } else {
                batch.part(part.rows.clone(), cut);
                backend.set_batch(&mut part.batch, cut);
            }
            for t in [&mut part.x, &mut part.angles] {
                backend.set_rows(t, part.rows.len());
            }
        }

        let steered = tap.as_ref().is_some_and(|tap| !tap.adds.is_empty());
        if let Some(tap) = tap.as_ref().filter(|_| steered) {
            let addition = |Add { layer, rows, vector, coefficient }: &Add| {
                let held = vectors
                    .iter()
                    .find(|held| Arc::ptr_eq(&held.given, vector))
                    .expect("vectors are held before they are added");
                Addition {
                    layer: *layer,
                    rows: rows.clone(),
                    vector: held.on_device.clone(),
                    coefficient: *coefficient,
                }
            };
            backend.set_additions(additions, tap.adds.iter().map(addition).collect())?;
        }

        let one_each =
            batch.spans.len() == batch.len() && count == 1 && tap.as_ref().is_none_or(|tap| !tap.takes_any());
        let mut pass = || {
            for part in parts.iter_mut() {
                backend.embed(&weights.embedding, &part.batch, &mut part.x);
                backend.rope_angles(inv_freq, config.rope.attention_factor(), &part.batch, &mut part.angles);
            }
            let mut moe_index = 0;
            for (i, (layer, w)) in config.layers.iter().zip(&weights.layers).enumerate() {
                for part in parts.iter_mut() {
                    let moe = experts.as_deref_mut().map(|experts| (experts, moe_index));
                    run_layer(backend, config, layer, w, moe, &mut kv.layers[i], buffers, part)?;
                    let Some(tap) = &mut tap else { continue };
                    if steered {
                        backend.add_vectors(additions, i, part.rows.start, &mut part.x);
                    }
                    if let (true, Ffn::Moe(_), Some(device)) = (tap.routing, &layer.ffn, &buffers.routing) {
                        let mut routing = Routing::default();
                        backend.read_routing(device, &mut routing)?;
                        tap.routed.entry(i).or_default().append(&routing);
                    }
                    take_residual(backend, config.hidden_size, i, part, tap)?;
                }
                moe_index += usize::from(matches!(layer.ffn, Ffn::Moe(_)));
            }
            Ok(())
        };
        let replayed = if one_each {
            backend.replay(Form { tokens: batch.len(), steered }, &mut pass)?
        } else {
            pass().map(|()| false)?
        };
        match experts {
            Some(experts) if replayed => experts.replayed(batch.len()),
            _ => Ok(()),
        }
    }

    fn hold(&mut self, vectors: &mut dyn Iterator<Item = &Arc<[f32]>>) -> Result<()> {
        let before = self.vectors.len();
        self.vectors.retain(|held| Arc::strong_count(&held.given) > 1);
        if self.vectors.len() < before {
            self.backend.set_additions(&mut self.additions, Vec::new())?; // it holds them too
        }
        let each = self.config.hidden_size * size_of::<f32>();
        for vector in vectors {
            assert_eq!(vector.len(), self.config.hidden_size, "a vector of the residual stream");
            if self.vectors.iter().any(|held| Arc::ptr_eq(&held.given, vector)) {
                continue;
            }
            if (self.vectors.len() + 1) * each > MAX_VECTOR_BYTES {
                return Err(Error::Busy(format!(
                    "the steering vectors of all requests take more than {} MiB: try again in a while, or use fewer",
                    MAX_VECTOR_BYTES >> 20
                )));
            }
            let on_device = Arc::new(self.backend.load_norm(vector.to_vec())?);
            self.vectors.push(Held { given: vector.clone(), on_device });
        }
        Ok(())
    }

    fn logits(&mut self, rows: &[usize]) -> Result<&mut [f32]> {
        self.compute_logits(rows);
        self.whole_rows()
    }

    fn shortlists(&mut self, rows: &[usize], inverse_temperatures: &[f32], out: &mut Vec<Shortlist>) -> Result<bool> {
        if B::SHORTLISTS {
            self.compute_logits(rows);
            self.backend.shortlist(&mut self.shortlister, &self.logits, inverse_temperatures, out)?;
        }
        Ok(B::SHORTLISTS)
    }

    fn whole_rows(&mut self) -> Result<&mut [f32]> {
        let host = &mut self.host_logits[..self.logit_rows * self.config.vocab_size];
        self.backend.read_rows(&self.logits, 0..self.logit_rows, host)?;
        Ok(host)
    }

    fn max_logit_rows(&self) -> usize {
        self.limits.logit_rows
    }

    fn resident_bytes_per_token(&self) -> u64 {
        self.weights.bytes_per_token(&self.backend) as u64
    }

    fn traffic(&self) -> Traffic {
        self.experts.as_ref().map(|experts| experts.traffic()).unwrap_or_default()
    }

    fn resident_experts(&self) -> usize {
        self.experts.as_ref().map_or(0, |experts| experts.resident())
    }

    fn rates(&self) -> Result<Option<Rates>> {
        self.backend.rates()
    }

    fn profile(&mut self, batch: &Batch) -> Result<Vec<OpTime>> {
        self.backend.profiling(true);
        let mut pass = || {
            self.forward(batch, None)?;
            self.logits(&[batch.len() - 1])?;
            self.backend.take_profile()
        };
        // The first pass loads whatever it needs, the second may be recorded.
        let times = pass().and_then(|_| pass());
        self.backend.profiling(false);
        times
    }

    fn enter_thread(&self) -> Result<()> {
        self.backend.enter_thread()
    }
}

/// One layer of one part of the batch; `experts` with the layer's number among the MoE layers.
#[allow(clippy::too_many_arguments)] // what a layer is, what it has, what it changes
fn run_layer<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    layer: &LayerConfig,
    w: &LayerWeights<B>,
    experts: Option<(&mut (dyn ExpertExecutor<B> + 'static), usize)>,
    cache: &mut LayerCache<B>,
    buffers: &mut Buffers<B>,
    part: &mut Part<B>,
) -> Result<()> {
    buffers.set_rows(backend, part.rows.len());
    let Buffers { h, attention: attention_buffers, mlp: mlp_buffers, routing } = buffers;
    let Part { batch, x, angles, .. } = part;

    let rotary = Rotary { angles, interleaved: config.rope.interleaved };
    let step = Step { backend, batch, rotary, norm_eps: config.norm_eps };
    let of_layer = attention::Layer { config: &layer.attention, weights: &w.attention, norm: &w.attention_norm, cache };
    attention(&step, of_layer, attention_buffers, h, x)?;
    let norm = (&w.ffn_norm, config.norm_eps);
    match (&layer.ffn, &w.ffn, experts, routing) {
        (Ffn::Dense { .. }, FfnWeights::Dense(w), ..) => {
            backend.rms_norm(x, norm.0, norm.1, h);
            mlp(backend, w, mlp_buffers, layer.ffn.mlp_width(), h, x)?;
        }
        (Ffn::Moe(moe), FfnWeights::Moe { router, shared }, Some((experts, moe_index)), Some(routing)) => {
            backend.norm_route(x, norm, h, router, &moe.router, routing);
            experts.submit(moe_index, h, routing)?;
            if let Some(w) = shared {
                mlp(backend, w, mlp_buffers, layer.ffn.mlp_width(), h, x)?;
            }
            join(backend, Partial::Experts(experts), x)?;
        }
        _ => panic!("configuration, weights and experts of one layer are of one kind"),
    }
    Ok(())
}

/// Takes from the residual stream of one part after layer `layer`.
fn take_residual<B: Backend>(
    backend: &B,
    hidden_size: usize,
    layer: usize,
    part: &Part<B>,
    tap: &mut Tap,
) -> Result<()> {
    for (number, take) in tap.takes.iter().enumerate().filter(|(_, take)| take.layers.contains(layer)) {
        let rows = intersection(&take.rows, &part.rows);
        if rows.is_empty() {
            continue;
        }
        let rows = rows.start - part.rows.start..rows.end - part.rows.start;
        let taken = tap.taken.entry((number, layer)).or_default();
        let before = taken.len();
        taken.resize(before + rows.len() * hidden_size, 0.0);
        backend.read_rows(&part.x, rows, &mut taken[before..])?;
    }
    Ok(())
}

impl<B: Backend> Buffers<B> {
    fn new(backend: &B, config: &ModelConfig, max_tokens: usize) -> Result<Self> {
        let mut widths: Vec<usize> = config.layers.iter().filter_map(|layer| layer.ffn.mlp_width()).collect();
        widths.sort_unstable();
        widths.dedup();
        let tensor = |cols| backend.tensor(max_tokens, cols);
        let mlp = |width| Ok(MlpBuffers { width, gate: tensor(width)?, up: tensor(width)?, product: tensor(width)? });
        Ok(Self {
            h: tensor(config.hidden_size)?,
            attention: AttentionBuffers::new(backend, config, max_tokens)?,
            mlp: widths.into_iter().map(mlp).collect::<Result<_>>()?,
            routing: config.moe().map(|moe| backend.routing(max_tokens, moe.router.top_k)).transpose()?,
        })
    }

    fn set_rows(&mut self, backend: &B, rows: usize) {
        backend.set_rows(&mut self.h, rows);
        for m in &mut self.mlp {
            for t in [&mut m.gate, &mut m.up, &mut m.product] {
                backend.set_rows(t, rows);
            }
        }
        self.attention.set_rows(backend, rows);
    }
}

/// `x += down(silu(gate h) * up h)`, of a gated one its share: what `down` reads is multiplied instead of what it
/// gives.
fn mlp<B: Backend>(
    backend: &B,
    w: &MlpWeights<B>,
    buffers: &mut [MlpBuffers<B>],
    width: Option<usize>,
    h: &B::Tensor,
    x: &mut B::Tensor,
) -> Result<()> {
    let MlpBuffers { gate, up, product, .. } =
        buffers.iter_mut().find(|b| Some(b.width) == width).expect("there is a buffer for every width");
    backend.gated_linears(h, (&w.gate, &w.up), (gate, up), product);
    if let Some(gate) = &w.output_gate {
        backend.gate_rows(gate, h, product);
    }
    join(backend, Partial::Product(&w.down, product), x)
}
