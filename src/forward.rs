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
//! block_pool   blocks of the KV cache, handed out to sequences
//! kv_cache     keys and values of layers; recurrent state, where layers have that instead
//! loader       tensors of a checkpoint onto a backend
//! join         where results enter the residual stream
//! streams      several residual streams and their mixers
//! attention    one file for each kind: its weights, its buffers, its way through the ops
//! ffn          a dense MLP; a router and a shared expert
//! ngrams       rows of a table that the last tokens choose
//! weights      resident weights by layer
//! buffers      activations: of a layer, and of the parts of a pass
//! rope         rotary angles, once for each distinct rope
//! tap          what a pass adds to the residual stream, and takes from it
//! steer        steering vectors on the device
//! choices      experts that a measurement gives tokens
//! logits       rows of the residual stream become logits
//! measure      what a model is measured by
//! erased       `Forward`: a model on any device
//! ranks        the same of several devices, each with its share
//! stages       the same of several devices, each with a run of the layers
//! ```
//!
//! Imports config, model, backend and experts. Read [`Model::forward`] first.

pub mod attention;
pub mod block_pool;
mod buffers;
mod choices;
mod erased;
mod ffn;
mod join;
pub mod kv_cache;
mod loader;
mod logits;
mod measure;
mod ngrams;
mod ranks;
mod rope;
mod stages;
mod steer;
mod streams;
pub mod tap;
pub mod weights;

use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::{Backend, Hooks, Rotary};
use crate::experts::ExpertExecutor;
use crate::model::{Ffn, LayerConfig, ModelConfig, Norm, Residual};
use attention::{Step, attention};
pub use buffers::Limits;
use buffers::{Buffers, Part, Parts};
use choices::Choices;
pub use erased::Forward;
use ffn::{FfnWeights, NextRouter, ffn};
use join::{After, Stream, Through};
use kv_cache::{KvCache, LayerCache};
use logits::Head;
pub use measure::Measure;
pub use ranks::Ranks;
use rope::Ropes;
pub use stages::Stages;
use steer::Steering;
use tap::Tap;
use weights::{Entries, LayerWeights, Weights};

/// A model ready to run on a backend, with its KV cache and the buffers of its forward pass.
pub struct Model<B: Backend> {
    backend: B,
    config: ModelConfig,
    weights: Weights<B>,
    experts: Option<Box<dyn ExpertExecutor<B>>>,
    kv: KvCache<B>,
    ropes: Ropes<B>,
    parts: Parts<B>,
    buffers: Buffers<B>,
    steering: Steering<B>,
    head: Head<B>,
    choices: Option<Choices<B>>,
}

impl<B: Backend> Model<B> {
    /// Reads the batch: stores its keys and values, and leaves its hidden states for [`Forward::logits`]. `tap` must
    /// not be empty, and its vectors must be [held](Forward::hold).
    pub fn forward(&mut self, batch: &Batch, tap: Option<&mut Tap>) -> Result<()> {
        let replayed = self.launch(None, batch, tap)?;
        self.serve(batch, replayed)
    }

    /// Starts a pass; of a stage, whose residual streams come from the one before it, if there is one. Returns whether
    /// a recorded one was launched, whose part on the CPU is to be [served](Model::serve).
    fn launch(
        &mut self,
        before: Option<(&Model<B>, &mut B::Way)>,
        batch: &Batch,
        mut tap: Option<&mut Tap>,
    ) -> Result<bool> {
        let Self { backend, config, weights, experts, kv, ropes, parts, buffers, steering, choices, .. } = self;
        if let Some(experts) = experts {
            experts.between_passes()?;
        }
        let parts = parts.cut(backend, batch);
        steering.prepare(backend, tap.as_deref())?;
        let rows = parts.iter_mut().map(|part| (part.rows.clone(), &mut part.ngrams[..]));
        weights.tables.look_up(backend, batch, rows)?;
        let hooks = tap.as_ref().map_or(Hooks::None, |tap| tap.hooks());
        if let Some((before, way)) = before {
            let streams = before.parts.of_batch().iter().flat_map(Part::streams);
            backend.bring(way, streams, parts.iter_mut().flat_map(Part::streams_mut))?;
        }
        let mut pass = || {
            for part in &mut *parts {
                if let Some(embedding) = &weights.embedding {
                    backend.embed(embedding, &part.batch, config.hidden_size, &mut part.x);
                    if config.embedding_scale != 1.0 {
                        backend.scale(&mut part.x, config.embedding_scale);
                    }
                }
                ropes.angles(backend, part);
            }
            let (mut moe_layers, mut ngram_layers) = (0.., 0..);
            for (i, (layer, of_layer)) in config.layers.iter().zip(&weights.layers).enumerate() {
                let moe = matches!(layer.ffn, Ffn::Moe(_)).then(|| moe_layers.next()).flatten();
                let ngrams = layer.ngrams.as_ref().and_then(|_| ngram_layers.next());
                let (cache, lent) = kv.layer(i, config.lender(i));
                let mut layer = Layer {
                    backend,
                    norm: config.norm,
                    norm_eps: config.norm_eps,
                    config: layer,
                    weights: of_layer,
                    next: config.layers.get(i + 1).zip(weights.layers.get(i + 1)),
                    rope: ropes.of_layer(i),
                    cache,
                    lent,
                    is_first: config.number_of(i) == 0,
                    experts: experts.as_deref_mut().zip(moe),
                    choices: choices.as_ref(),
                    ngrams,
                    buffers,
                };
                // First the attention of all parts, so that ranks sum one part's beside the ops of the next. Where both
                // halves of a layer read one input, it stays in a buffer that parts share.
                let is_parallel = layer.config.residual == Residual::Parallel;
                if !is_parallel {
                    parts.iter_mut().try_for_each(|part| layer.attend(part))?;
                }
                for part in &mut *parts {
                    if is_parallel {
                        layer.attend(part)?;
                    }
                    layer.feed(part)?;
                    if let Some(tap) = &mut tap {
                        backend.wait_for_sum(&part.x);
                        steering.add(backend, config.number_of(i), part);
                        tap.take(backend, config.number_of(i), part, layer.routing())?;
                    }
                }
            }
            parts.iter().for_each(|part| backend.wait_for_sum(&part.x));
            Ok(())
        };
        let replayed = backend.replay(batch, hooks, &mut pass)?;
        assert!(!replayed || parts.len() == 1, "a recorded pass has one part");
        Ok(replayed)
    }

    /// Computes the CPU's part of a pass that was launched.
    fn serve(&mut self, batch: &Batch, replayed: bool) -> Result<()> {
        match &mut self.experts {
            Some(experts) if replayed => experts.replayed(batch.len()),
            _ => Ok(()),
        }
    }

    /// Logits of rows of the last batch, on the device.
    fn compute_logits(&mut self, rows: &[usize]) {
        let Self { backend, weights, parts, head, .. } = self;
        head.compute(backend, weights.head.as_ref().expect("the last stage has the head"), parts, rows);
    }
}

/// One layer of a pass: what it is, what it has, and what it may change.
struct Layer<'a, B: Backend> {
    backend: &'a B,
    norm: Norm,
    norm_eps: f32,
    config: &'a LayerConfig,
    weights: &'a LayerWeights<B>,
    next: Option<(&'a LayerConfig, &'a LayerWeights<B>)>,
    rope: Option<usize>, // its angles
    cache: &'a mut LayerCache<B>,
    lent: Option<&'a LayerCache<B>>, // of the layer that it borrows from
    is_first: bool,
    experts: Option<(&'a mut (dyn ExpertExecutor<B> + 'static), usize)>, // and its number among the MoE layers
    choices: Option<&'a Choices<B>>,                                     // of the pass
    ngrams: Option<usize>,                                               // its rows of the parts
    buffers: &'a mut Buffers<B>,
}

const CONNECTED: &str = "connected streams have buffers, and norms of both parts";

impl<B: Backend> Layer<'_, B> {
    /// `x += attention(norm(x))`, or as [`Residual`](crate::model::Residual) says.
    fn attend(&mut self, part: &mut Part<B>) -> Result<()> {
        let Self { backend, norm, norm_eps, config, weights, rope, cache, ngrams, buffers, .. } = self;
        let (backend, eps, lent) = (*backend, *norm_eps, self.lent);
        buffers.set_rows(backend, part.rows.len());
        let Buffers { h, attention: of_attention, result, mixing, connecting, ngrams: of_ngrams, .. } = &mut **buffers;
        let Part { batch, x, angles, chosen, shares, ngrams: rows, .. } = part;

        if let (Some(config), Some(weights), Some(i)) = (&config.ngrams, &weights.ngrams, ngrams) {
            backend.wait_for_sum(x);
            let of_layer = ngrams::Layer { config, weights, state: cache.ngrams(), rows: &rows[*i] };
            let buffers = of_ngrams.as_mut().expect("n-grams have buffers");
            let buffers = (buffers, mixing.as_mut(), eps);
            ngrams::ngrams(backend, batch, of_layer, buffers, &mut Stream::plain(&mut *x))?;
        }

        let rotary = rope.zip(config.attention.rope());
        let rotary = rotary.map(|(i, rope)| Rotary { angles: &angles[i], interleaved: rope.interleaved });
        if *norm == Norm::Layer || !matches!(weights.entries, Entries::Norms(_)) {
            backend.wait_for_sum(x); // what reads it is no RMS norm
        }
        let step = Step { backend, batch, rotary, norm_eps: eps };
        let of_layer = attention::Layer {
            config: &config.attention,
            weights: &weights.attention,
            cache: &mut **cache,
            lent,
            chosen,
        };
        let mut stream = Stream::of_term(&mut *x, weights.attention_term);
        match (&weights.entries, &mut *mixing, &mut *result) {
            (Entries::Mixers([mixer, _]), Some(mixing), Some(result)) => {
                mixing.mix(backend, mixer, eps, stream.x, h);
                stream.after = Some(After { through: Through::Shares(&mixing.inject), result });
            }
            (Entries::Mixers(_), ..) => panic!("several streams have buffers for their mixers"),
            (Entries::Connected([connection, _], norms), _, Some(result)) => {
                let ([own, before], connecting) =
                    (shares.as_mut().expect(CONNECTED), connecting.as_mut().expect(CONNECTED));
                let before = (!self.is_first).then_some(&*before);
                connection.read(backend, (&norms.attention, eps), stream.x, (connecting, before), own, h);
                stream.after = Some(After { through: Through::Connected(own), result });
            }
            (Entries::Connected(..), ..) => panic!("{CONNECTED}"),
            (Entries::Norms(norms), _, result) => {
                stream.enter(backend, *norm, (&norms.attention, eps), h);
                if config.residual == Residual::Parallel {
                    stream.settle(backend, h); // the other part reads it as well
                }
                if let (Some(after), Some(result)) = (&norms.after, result) {
                    stream.after = Some(After { through: Through::Norm((&after.attention, eps), 1.0), result });
                }
            }
        }
        attention(&step, of_layer, of_attention, h, &mut stream)
    }

    /// `x += ffn(norm(x))`, or as [`Residual`](crate::model::Residual) says.
    fn feed(&mut self, part: &mut Part<B>) -> Result<()> {
        let Self { backend, norm, norm_eps, config, weights, experts, choices, buffers, .. } = self;
        let (backend, eps) = (*backend, *norm_eps);
        buffers.set_rows(backend, part.rows.len());
        let Buffers { h, ffn: of_ffn, result, mixing, connecting, .. } = &mut **buffers;
        let Part { batch, x, shares, .. } = part;
        let of_experts = choices.zip(experts.as_ref()).map(|(choices, (_, number))| (choices, *number));
        let of_layer = ffn::Layer {
            config: &config.ffn,
            batch,
            weights: &weights.ffn,
            chosen: of_experts.map(|(choices, number)| choices.of(number, part.rows.start)),
            next: self.next.and_then(|(config, weights)| {
                let guesses = of_experts.map(|(choices, number)| choices.guesses_of(number + 1, part.rows.start));
                next_router(config, weights, (*norm, eps), guesses)
            }),
            experts: experts.as_mut().map(|(experts, number)| (&mut **experts, *number)),
        };
        if *norm == Norm::Layer || !matches!(weights.entries, Entries::Norms(_)) {
            backend.wait_for_sum(x);
        }
        let mut stream = Stream::plain(x);
        match (&weights.entries, mixing, result) {
            (Entries::Mixers([_, mixer]), Some(mixing), Some(result)) => {
                mixing.mix(backend, mixer, eps, stream.x, h);
                stream.after = Some(After { through: Through::Shares(&mixing.inject), result });
            }
            (Entries::Mixers(_), ..) => panic!("several streams have buffers for their mixers"),
            (Entries::Connected([_, connection], norms), _, Some(result)) => {
                let ([before, own], connecting) =
                    (shares.as_mut().expect(CONNECTED), connecting.as_mut().expect(CONNECTED));
                let norm = norms.ffn.as_ref().expect(CONNECTED);
                connection.read(backend, (norm, eps), stream.x, (connecting, Some(&*before)), own, h);
                stream.after = Some(After { through: Through::Connected(own), result });
            }
            (Entries::Connected(..), ..) => panic!("{CONNECTED}"),
            (Entries::Norms(norms), _, result) => {
                if let Some(ffn_norm) = &norms.ffn {
                    stream.enter(backend, *norm, (ffn_norm, eps), h);
                }
                if let (Some(after), Some(result)) = (&norms.after, result) {
                    stream.after = Some(After { through: Through::Norm((&after.ffn, eps), after.scalar), result });
                }
            }
        }
        ffn(backend, of_layer, of_ffn, h, &mut stream)
    }

    /// Where the last part's tokens went; `None`: the layer is dense.
    fn routing(&self) -> Option<&B::Routing> {
        self.buffers.ffn.routing.as_ref().filter(|_| matches!(self.config.ffn, Ffn::Moe(_)))
    }
}

/// The router of the layer that comes next, if it reads one stream through an RMS norm. `chosen` replaces its choice.
fn next_router<'a, B: Backend>(
    config: &'a LayerConfig,
    weights: &'a LayerWeights<B>,
    (kind, eps): (Norm, f32),
    chosen: Option<(&'a B::Choices, usize)>,
) -> Option<NextRouter<'a, B>> {
    match (&config.ffn, &weights.entries, &weights.ffn) {
        (Ffn::Moe(moe), Entries::Norms(norms), FfnWeights::Moe { router, norms: None, .. })
            if kind == Norm::Rms && !moe.router.by_token =>
        {
            let norm = (norms.ffn.as_ref()?, eps);
            Some(NextRouter { norm, weights: router, config: &moe.router, chosen })
        }
        _ => None,
    }
}

impl<B: Backend> Model<B> {
    /// Allocates the buffers.
    pub fn new(
        mut backend: B,
        config: ModelConfig,
        weights: Weights<B>,
        experts: Option<Box<dyn ExpertExecutor<B>>>,
        kv: KvCache<B>,
        limits: Limits,
    ) -> Result<Self> {
        let config = config.share(backend.share())?;
        // Copies of sums would stand behind those of experts: two H200 read prompts 5% faster without them. In one part
        // more than two ranks would gain nothing.
        let crosses = experts.as_ref().is_some_and(|experts| experts.crosses());
        if !crosses && (limits.chunk_tokens < limits.tokens || backend.halves_from().is_none()) {
            backend.room_for_sums(limits.chunk_tokens, config.streams().width())?;
        }
        Ok(Self {
            ropes: Ropes::new(&backend, &config)?,
            parts: Parts::new(&backend, &config, limits, !crosses)?,
            buffers: Buffers::new(&backend, &config, &kv, limits.chunk_tokens)?,
            steering: Steering::new(&backend, &config)?,
            head: Head::new(&backend, &config, if weights.head.is_some() { limits.logit_rows } else { 0 })?,
            choices: None,
            backend,
            config,
            weights,
            experts,
            kv,
        })
    }
}
