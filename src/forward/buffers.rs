//! Activations of the forward pass, allocated once at their largest.

use std::ops::Range;

use super::attention::AttentionBuffers;
use super::ffn::FfnBuffers;
use super::kv_cache::KvCache;
use super::ngrams;
use super::streams::{ConnectBuffers, MixBuffers};
use crate::Result;
use crate::backend::Backend;
use crate::backend::batch::Batch;
use crate::model::{ModelConfig, Residual};

/// What a pass may hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens of a pass.
    pub tokens: usize,
    /// Tokens that go through an op at a time. A pass of more takes each layer in parts, so that a layer's experts are
    /// fetched once; several ranks may take one of fewer in two.
    pub chunk_tokens: usize,
    /// Rows of logits at a time.
    pub logit_rows: usize,
}

impl Limits {
    /// Rows that go through a product at a time.
    pub fn max_rows(&self) -> usize {
        self.chunk_tokens.max(self.logit_rows)
    }
}

/// A pass, cut into parts of at most `chunk_tokens` tokens.
pub(super) struct Parts<B: Backend> {
    all: Vec<Part<B>>,
    used: usize, // of the last pass
    limits: Limits,
    halves_from: Option<usize>, // tokens, of a pass that is no step of decode: see `Rank::halves_from`
    cut: Batch,                 // a part of the batch on its way to the device
}

/// What lasts through all layers, of one part.
pub(super) struct Part<B: Backend> {
    pub(super) rows: Range<usize>, // of the batch
    pub(super) batch: B::Batch,
    pub(super) x: B::Tensor,                   // [T, streams * hidden], the residual streams
    pub(super) ngrams: Vec<B::Tensor>,         // [T, width of their rows], one for each layer that has them
    pub(super) angles: Vec<B::Tensor>,         // [T, rope.dim], one for each distinct rope
    pub(super) chosen: Option<B::Chosen>,      // by the last layer with an indexer
    pub(super) shares: Option<[B::Tensor; 2]>, // [T, rows], f32: `pre`, `post` and `C` of the last connections
    width: usize,                              // of x
}

/// Activations within a layer, allocated once at their largest.
pub(super) struct Buffers<B: Backend> {
    pub(super) h: B::Tensor, // [T, hidden], a norm of x
    pub(super) attention: AttentionBuffers<B>,
    pub(super) ffn: FfnBuffers<B>,
    pub(super) result: Option<B::Tensor>, // [T, hidden], f32: of a part, before its norm or its shares
    pub(super) mixing: Option<MixBuffers<B>>,
    pub(super) connecting: Option<ConnectBuffers<B>>,
    pub(super) ngrams: Option<ngrams::Buffers<B>>,
}

impl<B: Backend> Parts<B> {
    /// `halves`: where ranks sum one part's results beside another's ops.
    pub(super) fn new(backend: &B, model: &ModelConfig, limits: Limits, halves: bool) -> Result<Self> {
        let (tokens, width) = (limits.chunk_tokens, model.streams().width());
        let ropes = model.ropes();
        let indexer = model.indexer();
        let part = |_| {
            Ok(Part {
                rows: 0..0,
                batch: backend.batch(tokens)?,
                x: backend.tensor_f32(tokens, width)?,
                ngrams: model.ngrams().map(|(_, n)| backend.tensor(tokens, n.width())).collect::<Result<_>>()?,
                angles: ropes.iter().map(|rope| backend.tensor_f32(tokens, rope.dim)).collect::<Result<_>>()?,
                shares: match model.connections() {
                    Some(of) => Some([backend.tensor_f32(tokens, of.rows())?, backend.tensor_f32(tokens, of.rows())?]),
                    None => None,
                },
                chosen: indexer.map(|indexer| backend.chosen(indexer, tokens)).transpose()?,
                width,
            })
        };
        let all: Vec<_> = (0..limits.tokens.div_ceil(tokens)).map(part).collect::<Result<_>>()?;
        let halves_from = backend.halves_from().filter(|_| halves && all.len() > 1);
        Ok(Self { all, used: 0, limits, halves_from, cut: Batch::default() })
    }

    /// Tokens of a pass at most.
    pub(super) fn max_tokens(&self) -> usize {
        self.limits.tokens
    }

    /// Brings the parts of `batch` to the device.
    pub(super) fn cut(&mut self, backend: &B, batch: &Batch) -> &mut [Part<B>] {
        let Self { all, used, limits: Limits { tokens, chunk_tokens, .. }, halves_from, cut } = self;
        assert!(batch.len() <= *tokens, "a batch larger than was allocated for");
        let halves = halves_from.is_some_and(|least| batch.len() >= least) && batch.spans.len() < batch.len();
        let rows = if halves { batch.len().div_ceil(2).min(*chunk_tokens) } else { *chunk_tokens };
        *used = batch.len().div_ceil(rows);
        let parts = &mut all[..*used];
        for (i, part) in parts.iter_mut().enumerate() {
            part.rows = i * rows..batch.len().min((i + 1) * rows);
            if *used == 1 {
                backend.set_batch(&mut part.batch, batch);
            } else {
                batch.part(part.rows.clone(), cut);
                backend.set_batch(&mut part.batch, cut);
            }
            let shares = part.shares.iter_mut().flatten();
            for t in part.angles.iter_mut().chain(&mut part.ngrams).chain(shares).chain([&mut part.x]) {
                backend.set_rows(t, part.rows.len());
            }
        }
        parts
    }

    /// The parts of the last batch.
    pub(super) fn of_batch(&self) -> &[Part<B>] {
        &self.all[..self.used]
    }

    /// Copies rows of a tensor that the parts of the last batch have, `out[i] = of[rows[i]]`.
    pub(super) fn gather(&self, backend: &B, rows: &[usize], of: impl Fn(&Part<B>) -> &B::Tensor, out: &mut B::Tensor) {
        let parts = self.of_batch();
        let part_of =
            |row: &usize| parts.iter().position(|part| part.rows.contains(row)).expect("a row of the last batch");
        let mut at = 0;
        for same in rows.chunk_by(|a, b| part_of(a) == part_of(b)) {
            let part = &parts[part_of(&same[0])];
            backend.gather(of(part), same, part.rows.start, out, at);
            at += same.len();
        }
    }
}

impl<B: Backend> Part<B> {
    /// What the last connection of a pass made, `[T, rows]`.
    pub(super) fn last_shares(&self) -> &B::Tensor {
        &self.shares.as_ref().expect("connected streams have shares")[1]
    }

    /// What goes from one layer to the next: the residual streams, and what the last connections made.
    pub(super) fn streams(&self) -> impl Iterator<Item = &B::Tensor> {
        std::iter::once(&self.x).chain(self.shares.iter().flatten())
    }

    pub(super) fn streams_mut(&mut self) -> impl Iterator<Item = &mut B::Tensor> {
        std::iter::once(&mut self.x).chain(self.shares.iter_mut().flatten())
    }

    /// Appends those of the batch's `rows` that are in this part to `out`, `[rows, streams * hidden]`.
    pub(super) fn read(&self, backend: &B, rows: &Range<usize>, out: &mut Vec<f32>) -> Result<()> {
        let (start, end) = (rows.start.max(self.rows.start), rows.end.min(self.rows.end));
        if start >= end {
            return Ok(());
        }
        let before = out.len();
        out.resize(before + (end - start) * self.width, 0.0);
        backend.read_rows(&self.x, start - self.rows.start..end - self.rows.start, &mut out[before..])
    }
}

impl<B: Backend> Buffers<B> {
    pub(super) fn new(backend: &B, model: &ModelConfig, kv: &KvCache<B>, max_tokens: usize) -> Result<Self> {
        let waits = |r: Residual| matches!(r, Residual::Sandwich | Residual::Streams(_) | Residual::Connected(_));
        let waits = model.layers.iter().any(|layer| waits(layer.residual));
        Ok(Self {
            h: backend.tensor(max_tokens, model.hidden_size)?,
            attention: AttentionBuffers::new(backend, model, kv, max_tokens)?,
            ffn: FfnBuffers::new(backend, model, max_tokens)?,
            result: if waits { Some(backend.tensor_f32(max_tokens, model.hidden_size)?) } else { None },
            mixing: MixBuffers::new(backend, model, max_tokens)?,
            connecting: ConnectBuffers::new(backend, model, max_tokens)?,
            ngrams: ngrams::Buffers::new(backend, model, max_tokens)?,
        })
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        self.result.iter_mut().chain([&mut self.h]).for_each(|t| backend.set_rows(t, rows));
        self.ffn.set_rows(backend, rows);
        self.mixing.iter_mut().for_each(|mixing| mixing.set_rows(backend, rows));
        self.connecting.iter_mut().for_each(|connecting| connecting.set_rows(backend, rows));
        self.ngrams.iter_mut().for_each(|ngrams| ngrams.set_rows(backend, rows));
        self.attention.set_rows(backend, rows);
    }
}
