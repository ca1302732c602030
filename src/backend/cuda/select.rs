//! Choosing positions on the device (kernels/select.cu), and bringing what was chosen side by side, where the kernels
//! of single rows read it as they read a cache.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::attend::{Kv, head_bytes, row_bytes};
use super::attend_latent::Single;
use super::{CudaBackend, CudaBatch, Tensor};
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::{Choice, IndexQueries, KeyNorm, KeyPool, Rotary, Select};
use crate::cuda::kernels::select::{GATHER_ROWS, LIMIT_THREADS, SCORE_PAGES};
use crate::cuda::{Address, Cuda, DeviceBuffer, kernels, launch};
use crate::model::{ChosenBy, Indexer, Score};
use crate::{Error, Result};

/// Tokens whose scores, or gathered keys, are there at a time, at most.
pub(super) const WAVE: usize = 64;

/// Tokens whose best units are chosen by several blocks each, at most: more fill a GPU.
const PARTED: usize = 16;

/// Blocks that choose for one of them: an eighth of 100,000 positions is as much as the 2,048 best of eight parts.
const PARTS: usize = 8;

/// Bytes of gathered keys and values, but at least a token's.
pub(super) const GATHERED_BYTES: usize = 192 << 20;

/// Index keys of one layer.
pub struct Index {
    pub(super) keys: DeviceBuffer<bf16>, // [blocks, keys of a block, dim]
    units: Option<Units>,                // where a key is of several positions
    of_block: usize,                     // numbers of a block's keys
    dim: usize,
}

/// What keys of several positions are made of.
struct Units {
    raw: DeviceBuffer<bf16>, // [blocks, 64, dim]: each position's; or with its gate [blocks, 64, 2, dim]
    firsts: DeviceBuffer<f32>, // [blocks, keys of a block, dim]: the angles of the first one's; none with gates
}

/// The positions that each token of a batch attends to.
pub struct Chosen {
    pub(super) most: usize,
    sets: usize,
    pub(super) len: usize,               // of a list, at most
    pub(super) lists: DeviceBuffer<i32>, // [tokens, sets, len], ascending; none of a prompt's tokens that see no more
    counts: DeviceBuffer<i32>,           // [tokens]
    blocks: DeviceBuffer<i32>,           // [tokens, candidates], ascending, of tokens that see more
}

/// Scores of a wave.
pub struct SelectScratch {
    scores: DeviceBuffer<f32>,      // [wave, sets, pitch]
    units: DeviceBuffer<f32>,       // as many, where the largest score of several positions is a unit's
    best_scores: DeviceBuffer<f32>, // [tokens, sets, parts, top_k]: of parts of a token's units
    best: DeviceBuffer<i32>,        // [tokens, sets, parts, top_k]: those units
    pitch: usize,
}

/// `count` multiples of `step`.
pub(super) fn counting(cuda: &Arc<Cuda>, count: usize, step: usize) -> Result<DeviceBuffer<i32>> {
    DeviceBuffer::from_slice(cuda, &(0..count).map(|i| (i * step) as i32).collect::<Vec<_>>())
}

impl Chosen {
    /// Waves of `wave` of the tokens that have lists, and what they see at most: single rows, which may be recorded, as
    /// much as `context`.
    pub(super) fn waves(&self, batch: &CudaBatch, context: usize, wave: usize) -> Vec<(Range<usize>, usize)> {
        let long = batch.long.iter().map(|(_, rows, start)| {
            let before = self.most.saturating_sub(*start).min(rows.len());
            (rows.start + before..rows.end, start + rows.len())
        });
        let all = std::iter::once((0..batch.decode, context)).chain(long);
        all.flat_map(|(rows, seen)| {
            let end = rows.end;
            rows.step_by(wave).map(move |first| (first..end.min(first + wave), seen))
        })
        .collect()
    }
}

/// Chosen keys and values of a wave, as a cache of single rows: copied side by side, or, where units are whole pages,
/// tables of these.
pub struct Gathered {
    copies: Option<Copies>,
    positions: DeviceBuffer<i32>,   // [wave]: the last that was gathered
    rows: DeviceBuffer<i32>,        // [wave]: 0, 1, ...
    first_pages: DeviceBuffer<i32>, // [wave]: where a row's tables begin
    tables: DeviceBuffer<u32>,      // [wave, pages], counting, of copies; [wave, sets, pages]
    most: usize,
    sets: usize,
    /// Tokens.
    pub(super) wave: usize,
}

/// `[wave, pages, KV heads, 64, dim]` each.
struct Copies {
    keys: DeviceBuffer<u8>,
    values: Option<DeviceBuffer<u8>>,
}

impl Gathered {
    pub(super) fn new(backend: &CudaBackend, kv: &Kv, indexer: &Indexer, max_tokens: usize) -> Result<Self> {
        let (cuda, most, sets) = (&backend.cuda, indexer.most(), indexer.sets());
        let (pages, copied) = (most.div_ceil(BLOCK_SIZE), !indexer.unit.is_multiple_of(BLOCK_SIZE));
        let bytes = |dim: usize| pages * kv.heads * head_bytes(dim, kv.int8); // of a token
        let (keys, values) = (bytes(kv.key_dim), kv.values.as_ref().map(|_| bytes(kv.value_dim)));
        let fit = if copied { GATHERED_BYTES / (keys + values.unwrap_or(0)) } else { WAVE };
        let wave = WAVE.min(max_tokens).min(fit.max(1));
        let copies = || {
            let values = values.map(|bytes| DeviceBuffer::zeros(cuda, wave * bytes)).transpose()?;
            Ok::<_, Error>(Copies { keys: DeviceBuffer::zeros(cuda, wave * keys)?, values })
        };
        let table: Vec<u32> = (0..(wave * pages * if copied { 1 } else { sets }) as u32).collect();
        Ok(Self {
            copies: copied.then(copies).transpose()?,
            positions: DeviceBuffer::zeros(cuda, wave)?,
            rows: counting(cuda, wave, 1)?,
            first_pages: counting(cuda, wave, table.len() / wave.max(1))?,
            tables: DeviceBuffer::from_slice(cuda, &table)?,
            most,
            sets,
            wave,
        })
    }
}

impl CudaBackend {
    /// What a wave of tokens chose, as a cache of single rows.
    pub(super) fn side_by_side(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        choice: &Choice<'_, Self>,
        wave: &Range<usize>,
    ) -> Single {
        let Choice { chosen, gathered: to } = choice;
        assert!(wave.len() <= to.wave && (chosen.most, chosen.sets) == (to.most, to.sets), "room for what was chosen");
        let (stream, pages, first) = (&self.cuda.compute, to.most.div_ceil(BLOCK_SIZE), wave.start as i32);
        let (keys, values) = match &to.copies {
            Some(copies) => {
                let grid = [to.most.div_ceil(GATHER_ROWS), wave.len(), 1];
                let both = [
                    Some((&kv.keys, &copies.keys, kv.key_dim)),
                    kv.values.as_ref().zip(copies.values.as_ref()).map(|(from, to)| (from, to, kv.value_dim)),
                ];
                for (from, copy, dim) in both.into_iter().flatten() {
                    let (codes, scales) = row_bytes(dim, kv.int8);
                    launch!(self.cuda, stream, kernels::select_gather, grid;
                        from.address(), copy.address(), to.positions.address(), chosen.lists.address(),
                        chosen.counts.address(), batch.token_seq(), batch.seq_blocks(), batch.block_table(), first,
                        to.most as i32, chosen.sets as i32, pages as i32, kv.heads as i32, codes as i32,
                        scales as i32);
                }
                (copies.keys.address(), copies.values.as_ref().map_or(Address::NULL, DeviceBuffer::address))
            }
            None => {
                launch!(self.cuda, stream, kernels::select_pages, [wave.len(), 1, 1];
                    to.tables.address(), to.positions.address(), chosen.lists.address(), chosen.counts.address(),
                    batch.token_seq(), batch.seq_blocks(), batch.block_table(), first, to.most as i32,
                    chosen.sets as i32);
                (kv.keys.address(), kv.values())
            }
        };
        Single {
            first: wave.start,
            count: wave.len(),
            context: to.most,
            keys,
            values,
            rows: to.rows.address(),
            positions: to.positions.address(),
            token_seq: to.rows.address(),
            seq_blocks: to.first_pages.address(),
            block_table: to.tables.address(),
            table_stride: if to.copies.is_none() && to.sets > 1 { pages } else { 0 },
            early: false,
        }
    }
}

/// What is taken of the scores of a wave, as kernels/select.cu says.
struct Best {
    top_k: usize,
    unit: usize,
    most: usize,
    pooled: i32,
}

impl CudaBackend {
    /// Lists the best of a wave.
    fn best(
        &self,
        of: &Best,
        batch: &CudaBatch,
        rows: &Range<usize>,
        scratch: &SelectScratch,
        (lists, chosen): (&DeviceBuffer<i32>, &Chosen),
    ) {
        let parts = if rows.len() <= PARTED { PARTS } else { 1 };
        if parts > 1 {
            launch!(self.cuda, &self.cuda.compute, kernels::index_best_parts, [rows.len(), chosen.sets, parts];
                scratch.scores.address(), scratch.units.address(), batch.positions(), scratch.best_scores.address(),
                scratch.best.address(), rows.start as i32, of.top_k as i32, of.unit as i32, of.most as i32, of.pooled,
                scratch.pitch as i32);
        }
        launch!(self.cuda, &self.cuda.compute, kernels::index_best, [rows.len(), chosen.sets, 1];
            scratch.scores.address(), scratch.units.address(), batch.positions(), scratch.best_scores.address(),
            scratch.best.address(), lists.address(), chosen.counts.address(), rows.start as i32, of.top_k as i32,
            of.unit as i32, of.most as i32, of.pooled, scratch.pitch as i32, parts as i32);
    }
}

impl Select for CudaBackend {
    type Index = Index;
    type SelectScratch = SelectScratch;

    fn index(&self, blocks: usize, indexer: &Indexer) -> Result<Index> {
        let (dim, of_block) = (indexer.head_dim, indexer.keys_of(BLOCK_SIZE) * indexer.head_dim);
        let keys = blocks * of_block;
        let units = |of_position: usize, firsts: usize| {
            let raw = DeviceBuffer::zeros(&self.cuda, blocks * BLOCK_SIZE * of_position)?;
            Ok::<_, Error>(Some(Units { raw, firsts: DeviceBuffer::zeros(&self.cuda, firsts)? }))
        };
        let units = match indexer.score {
            Score::Pooled => units(dim, keys)?,
            Score::Gated { .. } => units(2 * dim, 1)?,
            Score::Weighted { .. } | Score::Largest | Score::Entries { .. } => None,
        };
        Ok(Index { keys: DeviceBuffer::zeros(&self.cuda, keys)?, units, of_block, dim })
    }

    fn index_block_bytes(&self, index: &Index) -> usize {
        index.of_block * size_of::<bf16>()
    }

    // Of a full block nothing but the keys is read again.
    fn index_to_host(&self, index: &Index, block: usize, out: &mut [u8]) {
        let from = index.keys.address().add(block * index.of_block);
        self.cuda.download(&self.cuda.compute, from.cast(), out);
    }

    fn index_to_device(&self, index: &mut Index, block: usize, from: &[u8]) {
        let to = index.keys.address().add(block * index.of_block);
        self.cuda.upload(&self.cuda.compute, to.cast(), from);
    }

    fn chosen(&self, indexer: &Indexer, max_tokens: usize) -> Result<Chosen> {
        let (most, len, sets, cuda) = (indexer.most(), indexer.listed(), indexer.sets(), &self.cuda);
        Ok(Chosen {
            most,
            sets,
            len,
            lists: DeviceBuffer::new(cuda, max_tokens * sets * len)?,
            counts: DeviceBuffer::zeros(cuda, max_tokens)?,
            blocks: DeviceBuffer::new(cuda, max_tokens * indexer.candidates.map_or(0, |of| of.blocks).max(1))?,
        })
    }

    fn select_scratch(&self, indexer: &Indexer, max_tokens: usize) -> Result<SelectScratch> {
        let pitch = self.limits.context.next_multiple_of(BLOCK_SIZE);
        let scores = WAVE.min(max_tokens) * indexer.sets() * pitch;
        let blocks = indexer.candidates.filter(|of| of.by == ChosenBy::Own).map_or(0, |of| of.blocks);
        let best = PARTED.min(max_tokens) * indexer.sets() * PARTS * indexer.top_k.max(blocks);
        let of_several = indexer.score == Score::Largest || blocks > 0;
        Ok(SelectScratch {
            best_scores: DeviceBuffer::new(&self.cuda, best)?,
            best: DeviceBuffer::new(&self.cuda, best)?,
            scores: DeviceBuffer::new(&self.cuda, scores)?,
            units: DeviceBuffer::new(&self.cuda, if of_several { scores } else { 1 })?,
            pitch,
        })
    }

    fn index_write(
        &self,
        index: &mut Index,
        batch: &CudaBatch,
        indexer: &Indexer,
        (rotary, norm, pool): (Option<&Rotary<'_, Self>>, &KeyNorm<'_, Self>, Option<KeyPool<'_, Self>>),
        keys: &Tensor,
    ) {
        let bias = norm.bias.map_or(Address::NULL, DeviceBuffer::address);
        if let (Some(units), Some(pool)) = (&index.units, pool) {
            launch!(self.cuda, &self.cuda.compute, kernels::index_pool_gates, [batch.rows(), 1, 1];
                keys.bf16(), pool.gate.bf16(), norm.weight.address(), bias, norm.eps, pool.bias.address(),
                index.keys.address(), units.raw.address(), batch.positions(), batch.token_seq(), batch.seq_first(),
                batch.seq_blocks(), batch.block_table(), index.dim as i32, indexer.unit as i32);
            return;
        }
        let rotary = rotary.expect("keys that gates do not pool rotate");
        if let Some(units) = &index.units {
            launch!(self.cuda, &self.cuda.compute, kernels::index_pool, [batch.rows(), 1, 1];
                keys.bf16(), norm.weight.address(), norm.eps, rotary.angles.f32(), (rotary.angles.cols / 2) as i32,
                i32::from(rotary.interleaved), index.keys.address(), units.raw.address(), units.firsts.address(),
                batch.positions(), batch.token_seq(), batch.seq_first(), batch.seq_blocks(), batch.block_table(),
                index.dim as i32, indexer.unit as i32);
            return;
        }
        launch!(self.cuda, &self.cuda.compute, kernels::index_write, [batch.rows(), 1, 1];
            keys.bf16(), norm.weight.address(), bias, norm.eps, rotary.angles.f32(),
            (rotary.angles.cols / 2) as i32, i32::from(rotary.interleaved), index.keys.address(), batch.positions(),
            batch.token_seq(), batch.seq_blocks(), batch.block_table(), index.dim as i32);
    }

    fn select(
        &self,
        index: &Index,
        batch: &CudaBatch,
        indexer: &Indexer,
        queries: &IndexQueries<'_, Self>,
        scratch: &mut SelectScratch,
        chosen: &mut Chosen,
    ) {
        chosen.most = indexer.most(); // layers may have other units
        let weights = queries.weights.map_or(Address::NULL, Tensor::f32);
        let in_block = indexer.keys_of(BLOCK_SIZE);
        let pooled = match indexer.score {
            Score::Weighted { .. } | Score::Largest => 0,
            Score::Pooled | Score::Gated { .. } => 1,
            Score::Entries { .. } => 2,
        };
        for (rows, seen) in chosen.waves(batch, self.limits.context, WAVE) {
            let grid = [(seen.div_ceil(BLOCK_SIZE) * in_block).div_ceil(BLOCK_SIZE * SCORE_PAGES), rows.len(), 1];
            launch!(self.cuda, &self.cuda.compute, kernels::index_scores, grid;
                queries.q.bf16(), weights, index.keys.address(), scratch.scores.address(), batch.positions(),
                batch.token_seq(), batch.seq_blocks(), batch.block_table(), rows.start as i32,
                indexer.num_heads as i32, index.dim as i32, scratch.pitch as i32, in_block as i32,
                i32::from(indexer.score == Score::Largest));
            match indexer.candidates {
                Some(of) if of.by == ChosenBy::Own => {
                    let blocks = Best { top_k: of.blocks, unit: of.size, most: of.blocks * of.size, pooled: 3 };
                    self.best(&blocks, batch, &rows, scratch, (&chosen.blocks, chosen));
                }
                Some(of) => {
                    launch!(self.cuda, &self.cuda.compute, kernels::index_limit,
                        [seen.div_ceil(LIMIT_THREADS), rows.len(), 1];
                        scratch.scores.address(), chosen.blocks.address(), batch.positions(), rows.start as i32,
                        of.blocks as i32, of.size as i32, scratch.pitch as i32);
                }
                None => {}
            }
            let units = Best { top_k: indexer.top_k, unit: indexer.unit, most: chosen.most, pooled };
            self.best(&units, batch, &rows, scratch, (&chosen.lists, chosen));
        }
    }
}
