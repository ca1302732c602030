//! Choosing positions on the device (kernels/select.cu), and bringing what was chosen side by side, where the kernels
//! of single rows read it as they read a cache.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::attend::Kv;
use super::attend_latent::Single;
use super::{CudaBackend, CudaBatch, Tensor};
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::{IndexQueries, KeyNorm, Rotary, Select};
use crate::cuda::kernels::select::{GATHER_ROWS, SCORE_PAGES};
use crate::cuda::{Address, Cuda, DeviceBuffer, kernels, launch};
use crate::model::Indexer;
use crate::{Error, Result};

/// Tokens whose scores, or gathered keys, are there at a time.
pub(super) const WAVE: usize = 64;

/// Index keys of one layer.
pub struct Index {
    keys: DeviceBuffer<bf16>, // [blocks, 64, dim]
    dim: usize,
}

/// The positions that each token of a batch attends to.
pub struct Chosen {
    pub(super) most: usize,
    sets: usize,
    lists: DeviceBuffer<i32>, // [tokens, sets, most], ascending; none of a prompt's tokens that see no more
    counts: DeviceBuffer<i32>, // [tokens]
    pages: Option<Pages>,     // where units are whole pages
}

/// Chosen pages of a wave, as block tables.
struct Pages {
    tables: DeviceBuffer<u32>,    // [wave, sets, pages]
    positions: DeviceBuffer<i32>, // [wave]: the last that was chosen, as the list counts
    rows: DeviceBuffer<i32>,      // [wave]: 0, 1, ...
    firsts: DeviceBuffer<i32>,    // [wave]: where a row's tables begin
    stride: usize,                // from one set's to the next
}

/// Scores of a wave.
pub struct SelectScratch {
    scores: DeviceBuffer<f32>, // [wave, sets, pitch]
    units: DeviceBuffer<f32>,  // as many, where several positions are a unit
    pitch: usize,
}

/// `count` multiples of `step`.
fn counting(cuda: &Arc<Cuda>, count: usize, step: usize) -> Result<DeviceBuffer<i32>> {
    DeviceBuffer::from_slice(cuda, &(0..count).map(|i| (i * step) as i32).collect::<Vec<_>>())
}

impl Chosen {
    /// Waves of the tokens that have lists, and what they see at most: single rows, which may be recorded, as much as
    /// `context`.
    pub(super) fn waves(&self, batch: &CudaBatch, context: usize) -> Vec<(Range<usize>, usize)> {
        let long = batch.long.iter().map(|(_, rows, start)| {
            let before = self.most.saturating_sub(*start).min(rows.len());
            (rows.start + before..rows.end, start + rows.len())
        });
        let all = std::iter::once((0..batch.decode, context)).chain(long);
        all.flat_map(|(rows, seen)| {
            let end = rows.end;
            rows.step_by(WAVE).map(move |first| (first..end.min(first + WAVE), seen))
        })
        .collect()
    }
}

/// Chosen keys and values of a wave, as a cache whose pages follow each other.
pub(super) struct Gathered {
    pub(super) keys: DeviceBuffer<u8>,
    pub(super) positions: DeviceBuffer<i32>, // [wave]: the last that was gathered
    pub(super) rows: DeviceBuffer<i32>,      // [wave]: 0, 1, ...
    pub(super) first_pages: DeviceBuffer<i32>, // [wave]
    pub(super) block_table: DeviceBuffer<u32>, // 0, 1, ...
    pub(super) most: usize,
}

impl Gathered {
    /// Room for `most` keys of `key_dim` numbers of each token, and no values.
    pub(super) fn new(backend: &CudaBackend, most: usize, key_dim: usize, max_tokens: usize) -> Result<Self> {
        let (cuda, wave, pages) = (&backend.cuda, WAVE.min(max_tokens), most.div_ceil(BLOCK_SIZE));
        let table: Vec<u32> = (0..(wave * pages) as u32).collect();
        Ok(Self {
            keys: DeviceBuffer::zeros(cuda, wave * pages * BLOCK_SIZE * key_dim * 2)?,
            positions: DeviceBuffer::zeros(cuda, wave)?,
            rows: counting(cuda, wave, 1)?,
            first_pages: counting(cuda, wave, pages)?,
            block_table: DeviceBuffer::from_slice(cuda, &table)?,
            most,
        })
    }
}

impl CudaBackend {
    /// Brings the keys that a wave of tokens chose side by side.
    pub(super) fn gather_chosen(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        chosen: &Chosen,
        rows: &Range<usize>,
        to: &Gathered,
    ) {
        assert!(rows.len() <= to.rows.len() && chosen.most == to.most, "room for what was chosen");
        let (pages, key_bytes) = (to.most.div_ceil(BLOCK_SIZE), kv.key_dim * if kv.fp8 { 1 } else { 2 });
        let grid = [to.most.div_ceil(GATHER_ROWS), rows.len(), 1];
        launch!(self.cuda, &self.cuda.compute, kernels::select_gather, grid;
            kv.keys.address(), to.keys.address(), to.positions.address(), chosen.lists.address(),
            chosen.counts.address(), batch.token_seq(), batch.seq_blocks(), batch.block_table(), rows.start as i32,
            to.most as i32, pages as i32, kv.heads as i32, key_bytes as i32);
    }

    /// The pages that a wave of tokens chose, as a cache of single rows.
    pub(super) fn chosen_pages(&self, kv: &Kv, batch: &CudaBatch, chosen: &Chosen, rows: &Range<usize>) -> Single {
        let pages = chosen.pages.as_ref().expect("other units are refused when loading");
        launch!(self.cuda, &self.cuda.compute, kernels::select_pages, [rows.len(), 1, 1];
            pages.tables.address(), pages.positions.address(), chosen.lists.address(), chosen.counts.address(),
            batch.token_seq(), batch.seq_blocks(), batch.block_table(), rows.start as i32, chosen.most as i32,
            chosen.sets as i32);
        Single {
            first: rows.start,
            count: rows.len(),
            context: chosen.most,
            keys: kv.keys.address(),
            rows: pages.rows.address(),
            positions: pages.positions.address(),
            token_seq: pages.rows.address(),
            seq_blocks: pages.firsts.address(),
            block_table: pages.tables.address(),
            table_stride: if chosen.sets > 1 { pages.stride } else { 0 },
        }
    }
}

impl Select for CudaBackend {
    type Index = Index;
    type SelectScratch = SelectScratch;

    fn index(&self, blocks: usize, indexer: &Indexer) -> Result<Index> {
        let dim = indexer.head_dim;
        Ok(Index { keys: DeviceBuffer::zeros(&self.cuda, blocks * BLOCK_SIZE * dim)?, dim })
    }

    fn index_block_bytes(&self, index: &Index) -> usize {
        BLOCK_SIZE * index.dim * size_of::<bf16>()
    }

    fn index_to_host(&self, index: &Index, block: usize, out: &mut [u8]) {
        let from = index.keys.address().add(block * BLOCK_SIZE * index.dim);
        self.cuda.download(&self.cuda.compute, from.cast(), out);
    }

    fn index_to_device(&self, index: &mut Index, block: usize, from: &[u8]) {
        let to = index.keys.address().add(block * BLOCK_SIZE * index.dim);
        self.cuda.upload(&self.cuda.compute, to.cast(), from);
    }

    fn chosen(&self, indexer: &Indexer, max_tokens: usize) -> Result<Chosen> {
        let (most, sets, wave, cuda) = (indexer.most(), indexer.sets(), WAVE.min(max_tokens), &self.cuda);
        let stride = most / BLOCK_SIZE;
        let pages = || {
            Ok::<_, Error>(Pages {
                tables: DeviceBuffer::zeros(cuda, wave * sets * stride)?,
                positions: DeviceBuffer::zeros(cuda, wave)?,
                rows: counting(cuda, wave, 1)?,
                firsts: counting(cuda, wave, sets * stride)?,
                stride,
            })
        };
        Ok(Chosen {
            most,
            sets,
            lists: DeviceBuffer::new(cuda, max_tokens * sets * most)?,
            counts: DeviceBuffer::zeros(cuda, max_tokens)?,
            pages: indexer.unit.is_multiple_of(BLOCK_SIZE).then(pages).transpose()?,
        })
    }

    fn select_scratch(&self, indexer: &Indexer, max_tokens: usize) -> Result<SelectScratch> {
        let pitch = self.limits.context.next_multiple_of(BLOCK_SIZE);
        let scores = WAVE.min(max_tokens) * indexer.sets() * pitch;
        Ok(SelectScratch {
            scores: DeviceBuffer::new(&self.cuda, scores)?,
            units: DeviceBuffer::new(&self.cuda, if indexer.unit > 1 { scores } else { 1 })?,
            pitch,
        })
    }

    fn index_write(
        &self,
        index: &mut Index,
        batch: &CudaBatch,
        _: &Indexer,
        rotary: &Rotary<'_, Self>,
        norm: &KeyNorm<'_, Self>,
        keys: &Tensor,
    ) {
        let bias = norm.bias.map_or(Address::NULL, DeviceBuffer::address);
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
        let weights = queries.weights.map_or(Address::NULL, Tensor::f32);
        for (rows, seen) in chosen.waves(batch, self.limits.context) {
            let grid = [seen.div_ceil(BLOCK_SIZE * SCORE_PAGES), rows.len(), 1];
            launch!(self.cuda, &self.cuda.compute, kernels::index_scores, grid;
                queries.q.bf16(), weights, index.keys.address(), scratch.scores.address(), batch.positions(),
                batch.token_seq(), batch.seq_blocks(), batch.block_table(), rows.start as i32,
                indexer.num_heads as i32, index.dim as i32, scratch.pitch as i32);
            launch!(self.cuda, &self.cuda.compute, kernels::index_best, [rows.len(), chosen.sets, 1];
                scratch.scores.address(), scratch.units.address(), batch.positions(), chosen.lists.address(),
                chosen.counts.address(), rows.start as i32, indexer.top_k as i32, indexer.unit as i32,
                scratch.pitch as i32);
        }
    }
}
