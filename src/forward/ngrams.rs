//! N-grams: rows of a table, chosen by hashes of the last tokens, that are added to the residual streams. The table
//! stays in its mapped file; the rows of a pass are looked up before it begins.

use std::ops::Range;

use rayon::prelude::*;

use super::join::{Partial, Stream, join};
use super::loader::Loader;
use super::streams::MixBuffers;
use crate::backend::batch::Batch;
use crate::backend::source::Rows;
use crate::backend::{Backend, NgramInputs, NgramNorms};
use crate::model::{self, Hash, ModelConfig};
use crate::{Error, Result};

/// Tokens whose rows are brought to the device at a time.
const TOKENS: usize = 256;
/// Tokens from which on several threads look rows up: each may wait for a disk.
const PARALLEL: usize = 8;

/// The weights of a layer's n-grams, as [`model::Ngrams`] says, but for the table.
pub(super) struct Weights<B: Backend> {
    key: B::Linear,      // [streams * hidden, width of the rows]
    value: B::Linear,    // [hidden, width of the rows]
    norm_key: B::Norm,   // [streams * hidden]
    norm_query: B::Norm, // [streams * hidden]
    conv: Option<Convolution<B>>,
}

struct Convolution<B: Backend> {
    norm: B::Norm, // [streams * hidden]
    taps: B::Norm, // [conv_width, streams * hidden]
}

impl<B: Backend> Weights<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &str, config: &model::Ngrams) -> Result<Self> {
        let (hidden, width) = (loader.model.hidden_size, loader.model.streams().width());
        let Some(taps) = config.conv_width else { return Self::load_engram(loader, layer, config) };
        let of = |part: &str| format!("{layer}.ple.{part}");
        let norm = |part: &str| loader.norm(&of(&format!("{part}.weight")), width);
        let conv = loader.source.numbers(&of("conv1d.weight"), &[width, 1, taps])?;
        Ok(Self {
            key: loader.linear(&of("key_proj"), width, config.width(), false)?,
            value: loader.linear(&of("value_proj"), hidden, config.width(), false)?,
            norm_key: norm("norm_key")?,
            norm_query: norm("norm_query")?,
            conv: Some(Convolution {
                norm: norm("norm_conv")?,
                taps: loader.backend.load_norm(conv.reshaped(taps).transpose_heads(1).reshaped(1))?,
            }),
        })
    }

    /// DeepSeek-V4.1's, which have no convolution: keys and the value are one matrix, and both norms have one weight,
    /// that of the product.
    fn load_engram(loader: &Loader<'_, B>, layer: &str, config: &model::Ngrams) -> Result<Self> {
        let Loader { backend, source, bits, .. } = *loader;
        let (hidden, streams) = (loader.model.hidden_size, loader.model.streams());
        let of = |part: &str| format!("{layer}.engram.{part}");
        let width = streams.width();
        let both = source.matrix(&of("wkv.weight"), width + hidden, config.width())?;
        let rows = |from, to| backend.load_linear(both.head_rows(1, from, to), None, bits);
        let weight = |part: &str| source.numbers(&of(part), &[streams.streams, hidden]);
        let (query, key) = (weight("q_weight")?, weight("k_weight")?);
        let product = || query.to_f32().iter().zip(&*key.to_f32()).map(|(q, k)| q * k).collect();
        Ok(Self {
            key: rows(0, width)?,
            value: rows(width, width + hidden)?,
            norm_key: backend.load_made_norm(width, product)?,
            norm_query: backend.load_made_norm(width, || vec![1.0; width])?,
            conv: None,
        })
    }

    pub(super) fn bytes_per_token(&self, backend: &B) -> usize {
        backend.linear_bytes(&self.key) + backend.linear_bytes(&self.value)
    }
}

/// The tables of a model, and the last tokens of its sequences.
pub(super) struct Tables<B: Backend> {
    all: Vec<Table>,
    config: Option<model::Ngrams>, // of all of them
    history: Vec<Vec<u32>>,        // by slot: the tokens before the next one, the newest first
    saved: Vec<Vec<u32>>,          // the same by snapshot
    rows: Vec<usize>,              // of some tokens
    numbers: Option<B::Host>,      // the same, [TOKENS, width of the rows]
}

struct Table {
    rows: Box<dyn Rows>,
    hash: Hash,
}

impl<B: Backend> Tables<B> {
    pub(super) fn load(loader: &Loader<'_, B>) -> Result<Self> {
        let Loader { source, model, backend, .. } = loader;
        let table = |(layer, config): (usize, &model::Ngrams)| {
            let layer = format!("{}layers.{layer}", model.names.body);
            let name = match config.conv_width {
                Some(_) => format!("{layer}.ple.ple_embedding"),
                None => format!("{layer}.engram.embed"),
            };
            let numbers = |part: &str, len| source.integers(&format!("{name}.{part}"), len);
            let shards = format!("{name}.ngram_embedding.shard_");
            let whole = match config.conv_width {
                Some(_) => "per_layer_token_embd.weight", // as in GGUF files
                None => &format!("{name}.weight"),
            };
            let rows = source.table(whole, &shards, config.row_dim)?;
            if config.kinds.is_some() && config.alike.is_none() && source.has(whole) {
                return Err(Error::Model(format!(
                    "{name}: nothing says which tokens are alike: copy engram_token_map.json or tokenizer.json from \
                     the model's page"
                )));
            }
            let hash = match &config.hash {
                Some(hash) => hash.clone(),
                None => Hash {
                    multipliers: numbers("layer_multipliers", config.max_tokens)?,
                    sizes: numbers("ngram_heads_vocab_sizes", config.rows())?,
                    offsets: numbers("ngram_heads_offsets", config.rows())?,
                },
            };
            match hash.wrong(rows.count()) {
                Some(what) => Err(Error::Model(format!("{name}: {what}: download the checkpoint again"))),
                None => Ok(Table { rows, hash }),
            }
        };
        let config = model.ngrams().next().map(|(_, config)| config.clone());
        Ok(Self {
            all: model.ngrams().map(table).collect::<Result<_>>()?,
            history: Vec::new(),
            saved: Vec::new(),
            rows: Vec::new(),
            numbers: config.as_ref().map(|config| backend.host(TOKENS * config.width())).transpose()?,
            config,
        })
    }

    /// Brings the rows of a pass to its parts: rows of the batch, and a tensor for each table. Errors: a row holds NaN.
    pub(super) fn look_up<'p>(
        &mut self,
        backend: &B,
        batch: &Batch,
        parts: impl Iterator<Item = (Range<usize>, &'p mut [B::Tensor])>,
    ) -> Result<()> {
        let Self { all, config: Some(config), history, rows, numbers: Some(numbers), .. } = self else { return Ok(()) };
        let tokens = Windows { batch, history, config };
        for (of_part, tensors) in parts {
            for (table, to) in all.iter().zip(tensors) {
                for first in of_part.clone().step_by(TOKENS) {
                    let some = first..of_part.end.min(first + TOKENS);
                    rows.clear();
                    tokens.each(some.clone(), |window| {
                        let at = rows.len();
                        rows.resize(at + config.rows(), 0);
                        table.hash.rows(window, &mut rows[at..]);
                    });
                    let numbers = &mut numbers[..rows.len() * config.row_dim];
                    let read = |(row, out): (&usize, &mut [f32])| table.rows.read(*row, out);
                    match some.len() < PARALLEL {
                        true => rows.iter().zip(numbers.chunks_exact_mut(config.row_dim)).try_for_each(read)?,
                        false => {
                            rows.par_iter().zip(numbers.par_chunks_exact_mut(config.row_dim)).try_for_each(read)?
                        }
                    }
                    backend.write_rows(to, some.start - of_part.start, numbers)?;
                }
            }
        }
        let last: Vec<(usize, Vec<u32>)> = tokens.last().collect();
        for (slot, tokens) in last {
            put(&mut self.history, slot, tokens);
        }
        Ok(())
    }

    /// Keeps the last tokens of the sequence in `slot` with a snapshot of its state.
    pub(super) fn save(&mut self, slot: usize, snapshot: usize) {
        if let Some(tokens) = self.history.get(slot) {
            put(&mut self.saved, snapshot, tokens.clone());
        }
    }

    /// The sequence in `slot` goes on after those tokens.
    pub(super) fn restore(&mut self, slot: usize, snapshot: usize) {
        if let Some(tokens) = self.saved.get(snapshot) {
            put(&mut self.history, slot, tokens.clone());
        }
    }
}

fn put(all: &mut Vec<Vec<u32>>, at: usize, tokens: Vec<u32>) {
    all.resize(all.len().max(at + 1), Vec::new());
    all[at] = tokens;
}

/// The tokens that n-grams of a batch are made of.
struct Windows<'a> {
    batch: &'a Batch,
    history: &'a [Vec<u32>],
    config: &'a model::Ngrams,
}

impl Windows<'_> {
    /// Calls `use_window` with what each row's token and those before it count as, the newest first. What is beyond an
    /// end token, or the sequence's start, is the filler.
    fn each(&self, rows: Range<usize>, mut use_window: impl FnMut(&[u32])) {
        let mut window = vec![0; self.config.max_tokens];
        for span in &self.batch.spans {
            for t in rows.start.max(span.rows.start)..rows.end.min(span.rows.end) {
                window[0] = self.counts_as(self.batch.tokens[t]);
                let mut ended = false;
                for back in 1..window.len() {
                    let token = self.before(span, t, back);
                    ended |= token == self.config.end_token;
                    window[back] = self.counts_as(if ended { self.config.filler } else { token });
                }
                use_window(&window);
            }
        }
    }

    /// A token that no tokenizer has counts as the first.
    fn counts_as(&self, token: u32) -> u32 {
        self.config.alike.as_ref().map_or(token, |alike| alike.get(token as usize).copied().unwrap_or(0))
    }

    /// The token so many rows before row `t`; beyond the sequence's start the end token.
    fn before(&self, span: &crate::backend::batch::Span, t: usize, back: usize) -> u32 {
        match (t - span.rows.start).checked_sub(back) {
            Some(row) => self.batch.tokens[span.rows.start + row],
            None if span.start == 0 => self.config.end_token,
            None => self.history[span.slot][back - (t - span.rows.start) - 1],
        }
    }

    /// Of each sequence: its slot, and what stands before its next token.
    fn last(&self) -> impl Iterator<Item = (usize, Vec<u32>)> {
        self.batch.spans.iter().map(|span| {
            (span.slot, (1..self.config.max_tokens).map(|back| self.before(span, span.rows.end, back)).collect())
        })
    }
}

/// Activations of n-grams.
pub(super) struct Buffers<B: Backend> {
    value: B::Tensor,       // [T, hidden]
    key: Option<B::Tensor>, // [T, streams * hidden], where no mixer has a buffer for it
    hidden_size: usize,
}

impl<B: Backend> Buffers<B> {
    /// `None`: no layer has them.
    pub(super) fn new(backend: &B, model: &ModelConfig, max_tokens: usize) -> Result<Option<Self>> {
        if model.ngrams().next().is_none() {
            return Ok(None);
        }
        let tensor = |cols| backend.tensor(max_tokens, cols);
        let key = if model.mixer().is_none() { Some(tensor(model.streams().width())?) } else { None };
        Ok(Some(Self { value: tensor(model.hidden_size)?, key, hidden_size: model.hidden_size }))
    }

    pub(super) fn set_rows(&mut self, backend: &B, rows: usize) {
        [&mut self.value].into_iter().chain(&mut self.key).for_each(|t| backend.set_rows(t, rows));
    }
}

/// The n-grams of one layer: what it is, what it has, and what it keeps of its sequences.
pub(super) struct Layer<'a, B: Backend> {
    pub(super) config: &'a model::Ngrams,
    pub(super) weights: &'a Weights<B>,
    pub(super) state: Option<&'a mut B::State>, // of a convolution
    pub(super) rows: &'a B::Tensor,             // [T, width of the rows]
}

/// Adds them to `stream`.
pub(super) fn ngrams<B: Backend>(
    backend: &B,
    batch: &B::Batch,
    Layer { config, weights: w, state, rows }: Layer<'_, B>,
    (Buffers { value, key, hidden_size }, mixing, eps): (&mut Buffers<B>, Option<&mut MixBuffers<B>>, f32),
    stream: &mut Stream<'_, B>,
) -> Result<()> {
    let (key, normed) = match (mixing, key) {
        (Some(MixBuffers { normed, gate, .. }), _) => (gate, Some(normed)),
        (None, Some(key)) => (key, None),
        (None, None) => panic!("n-grams have buffers"),
    };
    backend.linears(rows, [(&w.key, &mut *key), (&w.value, &mut *value)]);
    let norms = NgramNorms { key: &w.norm_key, query: &w.norm_query, eps };
    backend.gate_ngrams(&norms, stream.x, value, key);
    let (Some(conv), Some(normed), Some(state)) = (&w.conv, normed, state) else {
        return join(backend, Partial::Ngrams(key), stream);
    };
    backend.norm_streams(key, &conv.norm, eps, *hidden_size, normed);
    let inputs = NgramInputs { gated: key, normed, taps: &conv.taps, dilation: config.max_tokens };
    join(backend, Partial::ConvolvedNgrams(state, batch, inputs), stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> model::Ngrams {
        model::Ngrams {
            max_tokens: 3,
            heads: 1,
            row_dim: 8,
            conv_width: Some(4),
            end_token: 9,
            filler: 9,
            kinds: None,
            alike: None,
            table_rows: 0,
            hash: None,
        }
    }

    fn windows(history: &[Vec<u32>], tokens: &[u32], start: usize) -> (Vec<Vec<u32>>, Vec<u32>) {
        let mut batch = Batch::default();
        batch.push(tokens, start, &[0]);
        let config = config();
        let windows = Windows { batch: &batch, history, config: &config };
        let mut all = Vec::new();
        windows.each(0..tokens.len(), |window| all.push(window.to_vec()));
        let last = windows.last().next().unwrap().1;
        (all, last)
    }

    #[test]
    fn no_ngram_goes_across_an_end() {
        let (all, last) = windows(&[], &[1, 2, 9, 4, 5, 6], 0);
        let want = [[1, 9, 9], [2, 1, 9], [9, 2, 1], [4, 9, 9], [5, 4, 9], [6, 5, 4]];
        assert_eq!((all, last), (want.map(Vec::from).to_vec(), vec![6, 5]));
    }

    #[test]
    fn a_sequence_goes_on_where_it_stood() {
        let tokens = [1, 2, 9, 4, 5, 6];
        let whole = windows(&[], &tokens, 0).0;
        let mut history = vec![];
        let parts = tokens.iter().enumerate().flat_map(|(i, token)| {
            let (all, last) = windows(&history, &[*token], i);
            history = vec![last];
            all
        });
        assert_eq!(parts.collect::<Vec<_>>(), whole);
    }

    #[test]
    fn hashes_wrap_around_and_choose_rows_of_their_heads() {
        let hash = Hash { multipliers: vec![i64::MAX, 3, -5], sizes: vec![7, 11], offsets: vec![0, 7] };
        let mut rows = [0; 2];
        hash.rows(&[5, 2, 4], &mut rows);
        let two = 5i64.wrapping_mul(i64::MAX) ^ 6;
        assert_eq!(rows, [two.rem_euclid(7) as usize, (two ^ -20).rem_euclid(11) as usize + 7]);
        assert!(hash.wrong(18).is_none() && hash.wrong(17).is_some());
        assert!(Hash { sizes: vec![0, 11], ..hash }.wrong(18).is_some());
    }
}
