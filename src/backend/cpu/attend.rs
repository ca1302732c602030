//! Attention on the CPU: queries are cut into tiles, which workers claim (`softmax`).

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::heads::{self, Preparation};
use super::kv::Kv;
use super::load::LatentUp;
use super::select::{Chosen, listed};
use super::softmax::{self, SoftmaxOp, Sums, TILE, TileCut, Tokens, whole_block};
use super::{Cpu, lock};
use crate::Result;
use crate::backend::batch::{BLOCK_SIZE, Batch};
use crate::backend::tensor::Tensor;
use crate::backend::{Attend, Choice, Heads, LatentQueries, Memory, Rotary, Softmax};
use crate::config::KvBits;
use crate::machine::workers::Shared;
use crate::model::{Indexer, KvDims, Mla, PositionScale, Values};

/// Numbers in the sums of segments that are shared out, at most: 64 MiB. Beyond, one worker does all segments of a
/// tile.
const PARTIAL_SUMS: usize = 16 << 20;

/// Bytes of chosen keys and values that are side by side at a time, but at least a token's.
const GATHERED_BYTES: usize = 32 << 20;

/// Latent attention in the latent's space.
pub struct LatentScratch {
    query: Tensor, // [T, heads, kv_lora_rank + rope]
    mixed: Tensor, // [T, heads, kv_lora_rank]
}

/// Chosen keys and values, side by side.
pub struct Gathered {
    kv: RefCell<Kv>, // [tokens, KV heads] runs of blocks
    tokens: usize,
}

impl Cpu {
    /// Copies columns `[x_at, x_at + width)` of each head of `x` to `out_at` of each head of `out`.
    fn copy_heads(&self, num_heads: usize, width: usize, x: &Tensor, x_at: usize, out: &mut Tensor, out_at: usize) {
        assert_eq!(x.rows(), out.rows());
        let (from, to) = (x.cols() / num_heads, out.cols() / num_heads);
        self.each_row(out, |t, out, _| {
            for (x, out) in x.row(t).chunks_exact(from).zip(out.chunks_exact_mut(to)) {
                out[out_at..][..width].copy_from_slice(&x[x_at..][..width]);
            }
        });
    }

    /// Rotates columns `[at, at + angles.cols)` of every `head_dim` columns; `pair` does a pair.
    fn turn_heads(
        &self,
        x: &mut Tensor,
        head_dim: usize,
        at: usize,
        rotary: &Rotary<'_, Self>,
        pair: impl Fn(&mut f32, &mut f32, f32, f32) + Sync,
    ) {
        self.each_row(x, |t, row, _| {
            row.chunks_exact_mut(head_dim).for_each(|head| heads::turn(&mut head[at..], rotary, t, &pair));
        });
    }

    /// Attention of some tokens.
    fn attend_tokens(
        &self,
        tokens: Tokens<'_>,
        kv: &Kv,
        batch: &Batch,
        softmax: &Softmax<'_, Self>,
        q: &Tensor,
        out: &mut Tensor,
    ) {
        let count = tokens.count(batch);
        if count == 0 {
            return;
        }
        let (window, sinks) = (softmax.window, softmax.sinks.map(Vec::as_slice));
        let num_heads = q.cols() / kv.keys.layout.k;
        let (threads, group, dim) = (self.team.working(), num_heads / kv.heads, kv.values.layout.n);
        assert!(
            q.cols() == num_heads * kv.keys.layout.k
                && num_heads.is_multiple_of(kv.heads)
                && out.cols() == num_heads * dim
        );
        let mut cut = TileCut::new(tokens, kv.heads, group, group.min(TILE));
        let (tiles, longest) = (cut.tiles(batch), tokens.segments(batch));
        // Few queries: each worker does some segments of each tile, or, if there are few of those as well, some of its
        // heads.
        let few = tiles < 2 * threads;
        let split = few && longest > 1 && tiles * longest * Sums::len(TILE, kv.value_width()) <= PARTIAL_SUMS;
        if few && (!split || tiles * longest < threads) {
            let per_worker = (count * num_heads).div_ceil(threads);
            cut = TileCut::new(tokens, kv.heads, group, group.min(TILE).min(per_worker).max(1));
        }
        let total = cut.tiles(batch);
        let op = SoftmaxOp { kernel: self.kernel, kv, batch, num_heads, scale: softmax.scale, window, sinks, q, cut };
        let (output, kernel, scratch) = (Shared::new(out.data_mut()), self.kernel, &self.scratch);
        let next = [AtomicUsize::new(0), AtomicUsize::new(0)];
        let claim = |phase: usize, end: usize| Some(next[phase].fetch_add(1, Ordering::Relaxed)).filter(|&i| i < end);
        if !split {
            return self.team.run(&|worker| {
                let mut scratch = lock(&scratch[worker.index]);
                while let Some(i) = claim(0, total) {
                    let tile = op.cut.find(batch, i);
                    op.all(&tile, &mut scratch, &output);
                }
            });
        }
        let width = kv.value_width();
        let part = Sums::len(TILE, width);
        let mut partial = self.partial.borrow_mut();
        let partial = Shared::new(partial.take(total * longest * part));
        self.team.run(&|worker| {
            let mut scratch = lock(&scratch[worker.index]);
            while let Some(i) = claim(0, total * longest) {
                let tile = op.cut.find(batch, i / longest);
                if op.segments(&tile).contains(&(i % longest)) {
                    // SAFETY: this part belongs to whoever claimed it.
                    #[allow(unsafe_code)]
                    let memory = unsafe { partial.slice_mut(i * part..(i + 1) * part) };
                    let mut sums = Sums::new(memory, tile.rows(), width);
                    op.prepare(&tile, &mut scratch);
                    op.segment(&tile, i % longest, &mut scratch, &mut sums);
                }
            }
            worker.barrier();
            while let Some(i) = claim(1, total) {
                let tile = op.cut.find(batch, i);
                let sums = |segment: usize| {
                    let at = (i * longest + segment) * part;
                    // SAFETY: after the barrier all parts of a tile belong to whoever claimed it.
                    #[allow(unsafe_code)]
                    let memory = unsafe { partial.slice_mut(at..at + part) };
                    Sums::new(memory, tile.rows(), width)
                };
                let segments = op.segments(&tile);
                let mut first = sums(segments.start);
                for segment in segments.skip(1) {
                    first.merge(kernel, &sums(segment));
                }
                op.write(&tile, &first, &output);
            }
        });
    }

    /// Brings the keys and values of tokens' lists side by side, but for those that lie so.
    fn gather(&self, kv: &Kv, batch: &Batch, chosen: &Chosen, tokens: Range<usize>, to: &mut Kv) {
        let (run, heads) = (chosen.most().div_ceil(BLOCK_SIZE), kv.heads);
        let (key, value) = (to.keys.shared(), to.values.shared());
        self.team.run(&|worker| {
            let units = worker.share(tokens.len() * heads * run);
            let mut all = batch.spans.iter().flat_map(|span| listed(span, chosen.most()));
            let first = units.start / (heads * run);
            let mut token = None;
            let mut next = first;
            for unit in units {
                let (at, i) = (unit / run, unit % run);
                if at / heads == next {
                    token = all.nth(if next == first { tokens.start + first } else { 0 });
                    next += 1;
                }
                let token = token.as_ref().expect("as many as were counted");
                let list = chosen.list(token.row, at % heads, heads);
                if i * BLOCK_SIZE >= list.len() || whole_block(list, i).is_some() {
                    continue;
                }
                let part = &list[i * BLOCK_SIZE..list.len().min((i + 1) * BLOCK_SIZE)];
                // SAFETY: a unit is in one worker's share.
                #[allow(unsafe_code)]
                let (key, value) = unsafe { (key.matrix(unit), value.matrix(unit)) };
                kv.gather(at % heads, part.iter().map(|&p| batch.slot(token.span, p as usize)), key, value);
            }
        });
    }
}

impl Attend for Cpu {
    type Kv = Kv;
    type LatentScratch = LatentScratch;
    type Chosen = Chosen;
    type Gathered = Gathered;

    fn kv(&self, blocks: usize, (heads, key_dim, values): KvDims, bits: KvBits) -> Result<Kv> {
        let is_latent = matches!(values, Values::OfKeys(_));
        let kv = Kv::new(&self.heap, blocks, heads, [key_dim, values.dim()], is_latent, bits)?;
        self.reserve(|scratch, heap| softmax::reserve(scratch, heap, self.kernel, &kv))?;
        Ok(kv)
    }

    fn kv_block_bytes(&self, kv: &Kv) -> usize {
        kv.heads * kv.head_bytes()
    }

    fn kv_to_host(&self, kv: &Kv, block: usize, mut out: &mut [u8]) {
        for (from, len) in kv.runs() {
            let (to, rest) = out.split_at_mut(len);
            to.copy_from_slice(&from[block * len..][..len]);
            out = rest;
        }
    }

    fn kv_to_device(&self, kv: &mut Kv, block: usize, mut from: &[u8]) {
        for (to, len) in kv.runs_mut() {
            let (of_run, rest) = from.split_at(len);
            to[block * len..][..len].copy_from_slice(of_run);
            from = rest;
        }
    }

    fn gathered(&self, kv: &Kv, indexer: &Indexer, max_tokens: usize) -> Result<Gathered> {
        let blocks = kv.heads.saturating_mul(indexer.most().div_ceil(BLOCK_SIZE)); // of a token
        let bytes = blocks.saturating_mul(kv.head_bytes());
        let tokens = (GATHERED_BYTES / bytes).clamp(1, max_tokens.max(1));
        Ok(Gathered { kv: RefCell::new(kv.like(&self.heap, tokens.saturating_mul(blocks))?), tokens })
    }

    fn rope_angles(&self, inv_freq: &Vec<f32>, factor: f32, batch: &Batch, out: &mut Tensor) {
        let half = inv_freq.len();
        for (t, &position) in batch.positions.iter().enumerate() {
            let (cos, sin) = out.row_mut(t).split_at_mut(half);
            for i in 0..half {
                let angle = position as f32 * inv_freq[i];
                (cos[i], sin[i]) = (angle.cos() * factor, angle.sin() * factor);
            }
        }
    }

    fn scale_by_position(&self, x: &mut Tensor, batch: &Batch, scale: &PositionScale) {
        let kernel = self.kernel;
        self.each_row(x, |t, x, _| kernel.scale(x, scale.at(batch.positions[t] as usize)));
    }

    fn rope(&self, x: &mut Tensor, head_dim: usize, at: usize, rotary: &Rotary<'_, Self>) {
        self.turn_heads(x, head_dim, at, rotary, heads::forward);
    }

    fn rope_back(&self, x: &mut Tensor, head_dim: usize, at: usize, rotary: &Rotary<'_, Self>) {
        self.turn_heads(x, head_dim, at, rotary, heads::back);
    }

    fn kv_write(&self, kv: &mut Kv, batch: &Batch, key: &Tensor, value: Option<&Tensor>) {
        let of_keys = Preparation::none(kv.keys.layout.k);
        self.prepare_and_store(kv, batch, None, (key, of_keys), value);
    }

    fn prepare_heads(
        &self,
        kv: &mut Kv,
        batch: &Batch,
        rotary: Option<&Rotary<'_, Self>>,
        q: Heads<'_, Self>,
        k: Heads<'_, Self>,
        v: Option<&Tensor>,
    ) {
        let (of_queries, of_keys) = (Preparation::of(&q, rotary), Preparation::of(&k, rotary));
        let queries = (!of_queries.is_nothing()).then_some((q.x, of_queries));
        self.prepare_and_store(kv, batch, queries, (k.x, of_keys), v);
    }

    fn attend(&self, kv: &Kv, batch: &Batch, softmax: &Softmax<'_, Self>, q: &Tensor, out: &mut Tensor) {
        let Some(Choice { chosen, gathered }) = softmax.choice else {
            return self.attend_tokens(Tokens::Before(usize::MAX), kv, batch, softmax, q, out);
        };
        self.attend_tokens(Tokens::Before(chosen.most()), kv, batch, softmax, q, out);
        let total: usize = batch.spans.iter().map(|span| listed(span, chosen.most()).len()).sum();
        let mut to = gathered.kv.borrow_mut();
        for first in (0..total).step_by(gathered.tokens) {
            let count = gathered.tokens.min(total - first);
            self.gather(kv, batch, chosen, first..first + count, &mut to);
            self.attend_tokens(Tokens::Listed { chosen, gathered: &to, first, count }, kv, batch, softmax, q, out);
        }
    }

    fn latent_scratch(&self, config: &Mla, max_tokens: usize) -> Result<LatentScratch> {
        Ok(LatentScratch {
            query: self.tensor(max_tokens, config.num_heads * config.cache_dim())?,
            mixed: self.tensor(max_tokens, config.num_heads * config.kv_lora_rank)?,
        })
    }

    fn attend_latent(
        &self,
        kv: &Kv,
        batch: &Batch,
        up: &LatentUp,
        LatentScratch { query, mixed }: &mut LatentScratch,
        (q, choice): LatentQueries<'_, Self>,
        out: &mut Tensor,
    ) {
        let config = &up.config;
        query.set_rows(q.rows());
        mixed.set_rows(q.rows());
        // Absorbed, whatever the number of tokens: one way of computing, hence equal bits.
        self.apply_heads(&up.key, q, 0, query, 0);
        self.copy_heads(
            config.num_heads,
            config.qk_rope_head_dim,
            q,
            config.qk_nope_head_dim,
            query,
            config.kv_lora_rank,
        );
        let softmax = Softmax { scale: config.scale, window: None, sinks: None, choice };
        self.attend(kv, batch, &softmax, query, mixed);
        self.apply_heads(&up.value, mixed, 0, out, 0);
    }
}
