//! Entries of several positions on the device (kernels/compress.cu): what a token attends to of them and of its window
//! is brought side by side, where the kernels of latents read it as they read a cache.

use half::bf16;

use super::attend_latent::{KeyValues, Queries, Single};
use super::recur::State;
use super::select::{GATHERED_BYTES, Index, WAVE, counting};
use super::{CudaBackend, CudaBatch, Tensor};
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::{Compress, CompressRule, Seen};
use crate::config::KvBits;
use crate::cuda::kernels::compress::{ENTRY_DIM, ENTRY_ROWS, KEEP_THREADS};
use crate::cuda::kernels::{self, Gather, Sequences};
use crate::cuda::{Address, DeviceBuffer, launch};
use crate::model::{Compressed, Compressor};
use crate::{Error, Result};

/// Entries of one layer.
pub struct Entries {
    data: DeviceBuffer<bf16>, // [blocks, entries of a block, dim]
    of: Compressor,
    of_block: usize, // numbers
}

/// What a wave of tokens attends to, as a cache of single rows.
pub struct EntriesScratch {
    rows: DeviceBuffer<bf16>,       // [wave, pages, 64, dim]
    positions: DeviceBuffer<i32>,   // [wave]: the last row of each
    tokens: DeviceBuffer<i32>,      // [wave]: 0, 1, ...
    first_pages: DeviceBuffer<i32>, // [wave]: where a token's table begins
    tables: DeviceBuffer<u32>,      // [wave, pages], counting
    pages: usize,
    wave: usize, // tokens
}

impl CudaBatch {
    fn all_sequences(&self) -> Sequences {
        Sequences { first: self.seq_first(), slots: self.seq_slots(), positions: self.positions() }
    }
}

impl CudaBackend {
    /// Stores rows of tokens that end an entry of `ratio` positions.
    fn store_entries(&self, to: Address<bf16>, batch: &CudaBatch, ratio: usize, rows: &Tensor) {
        launch!(self.cuda, &self.cuda.compute, kernels::entries_write, [batch.rows(), 1, 1];
            rows.bf16(), to, batch.positions(), batch.token_seq(), batch.seq_blocks(), batch.block_table(),
            rows.cols as i32, ratio as i32);
    }
}

impl Compress for CudaBackend {
    type Entries = Entries;
    type EntriesScratch = EntriesScratch;

    fn entries(&self, blocks: usize, of: Compressor, bits: KvBits) -> Result<Entries> {
        if bits != KvBits::Bf16 {
            return Err(Error::Invalid("entries of several positions are BF16 on a GPU: use --kv bf16".into()));
        }
        let of_block = BLOCK_SIZE.div_ceil(of.ratio) * of.dim;
        Ok(Entries { data: DeviceBuffer::zeros(&self.cuda, blocks * of_block)?, of, of_block })
    }

    fn entries_block_bytes(&self, entries: &Entries) -> usize {
        entries.of_block * size_of::<bf16>()
    }

    fn entries_to_host(&self, entries: &Entries, block: usize, out: &mut [u8]) {
        let from = entries.data.address().add(block * entries.of_block);
        self.cuda.download(&self.cuda.compute, from.cast(), out);
    }

    fn entries_to_device(&self, entries: &mut Entries, block: usize, from: &[u8]) {
        let to = entries.data.address().add(block * entries.of_block);
        self.cuda.upload(&self.cuda.compute, to.cast(), from);
    }

    fn entries_scratch(&self, config: &Compressed, max_tokens: usize) -> Result<EntriesScratch> {
        let entries = match (&config.selection, config.compressor) {
            (Some(selection), _) => selection.indexer.top_k,
            (None, Some(of)) => of.ended(self.limits.context),
            (None, None) => 0,
        };
        let pages = (config.window + entries).div_ceil(BLOCK_SIZE);
        let of_token = pages * BLOCK_SIZE * config.head_dim;
        let wave = WAVE.min(max_tokens).min((GATHERED_BYTES / (of_token * size_of::<bf16>())).max(1));
        let cuda = &self.cuda;
        Ok(EntriesScratch {
            rows: DeviceBuffer::zeros(cuda, wave * of_token)?,
            positions: DeviceBuffer::zeros(cuda, wave)?,
            tokens: counting(cuda, wave, 1)?,
            first_pages: counting(cuda, wave, pages)?,
            tables: DeviceBuffer::from_slice(cuda, &(0..(wave * pages) as u32).collect::<Vec<_>>())?,
            pages,
            wave,
        })
    }

    fn compress(
        &self,
        state: &mut State,
        batch: &CudaBatch,
        rule: &CompressRule<'_, Self>,
        x: &Tensor,
        out: &mut Tensor,
    ) {
        let Compressor { dim, ratio, overlaps, .. } = rule.compressor;
        let (first, of_slot) = rule.state;
        assert!(dim <= ENTRY_DIM && x.cols == 2 * rule.compressor.width() && out.cols == dim);
        assert_eq!(state.heads.len(), state.slots * of_slot);
        let (stream, all) = (&self.cuda.compute, batch.all_sequences());
        let of = kernels::Compressor {
            x: x.bf16(),
            state: state.heads.address(),
            bias: rule.bias.address(),
            dim: dim as i32,
            ratio: ratio as i32,
            overlaps: i32::from(overlaps),
            first: first as i32,
            of_slot: of_slot as i32,
        };
        let ends = batch.longest().div_ceil(ratio); // at most, of a sequence
        launch!(self.cuda, stream, kernels::compress, [ends, batch.sequences(), 1];
            of, all, rule.norm.address(), rule.inv_freq.map_or(Address::NULL, DeviceBuffer::address), out.bf16(),
            rule.inv_freq.map_or(0, DeviceBuffer::len) as i32, rule.eps);
        launch!(self.cuda, stream, kernels::compress_keep, [dim.div_ceil(KEEP_THREADS), batch.sequences(), 1];
            of, all);
    }

    fn rope_entries(&self, batch: &CudaBatch, ratio: usize, inv_freq: &DeviceBuffer<f32>, rows: &mut Tensor) {
        assert!(rows.cols <= ENTRY_DIM && 2 * inv_freq.len() <= rows.cols);
        launch!(self.cuda, &self.cuda.compute, kernels::rope_entries, [batch.rows(), 1, 1];
            rows.bf16(), inv_freq.address(), batch.positions(), rows.cols as i32, inv_freq.len() as i32,
            ratio as i32);
    }

    fn entries_write(&self, entries: &mut Entries, batch: &CudaBatch, rows: &Tensor) {
        self.store_entries(entries.data.address(), batch, entries.of.ratio, rows);
    }

    fn index_entries(&self, index: &mut Index, batch: &CudaBatch, ratio: usize, rows: &Tensor) {
        self.store_entries(index.keys.address(), batch, ratio, rows);
    }

    fn attend_entries(
        &self,
        state: &mut State,
        batch: &CudaBatch,
        seen: &Seen<'_, Self>,
        (q, kv): (&Tensor, &Tensor),
        out: &mut Tensor,
    ) {
        let (dim, window, scratch, stream) = (kv.cols, seen.window, seen.scratch, &self.cuda.compute);
        let (heads, all) = (q.cols / dim, batch.all_sequences());
        assert!(state.inputs.len() == state.slots * window * dim && out.cols == q.cols);
        let shape = KeyValues { heads, key_dim: dim, value_dim: dim, scale: seen.scale, int8: false };
        let rows = scratch.pages * BLOCK_SIZE;
        for first in (0..batch.rows()).step_by(scratch.wave) {
            let count = scratch.wave.min(batch.rows() - first);
            let gather = Gather {
                kv: kv.bf16(),
                ring: state.inputs.address(),
                entries: seen.entries.map_or(Address::NULL, |entries| entries.data.address()),
                to: scratch.rows.address(),
                to_positions: scratch.positions.address(),
                lists: seen.chosen.map_or(Address::NULL, |chosen| chosen.lists.address()),
                token_seq: batch.token_seq(),
                seq_blocks: batch.seq_blocks(),
                block_table: batch.block_table(),
                token: first as i32,
                window: window as i32,
                dim: dim as i32,
                ratio: seen.entries.map_or(1, |entries| entries.of.ratio) as i32,
                most: seen.chosen.map_or(0, |chosen| chosen.most) as i32,
                len: seen.chosen.map_or(0, |chosen| chosen.len) as i32,
                pages: scratch.pages as i32,
            };
            launch!(self.cuda, stream, kernels::entries_gather, [rows.div_ceil(ENTRY_ROWS), count, 1]; gather, all);
            let single = Single {
                first: 0,
                count,
                context: rows,
                keys: scratch.rows.address().cast(),
                values: Address::NULL,
                rows: scratch.tokens.address(),
                positions: scratch.positions.address(),
                token_seq: scratch.tokens.address(),
                seq_blocks: scratch.first_pages.address(),
                block_table: scratch.tables.address(),
                table_stride: 0,
                early: false,
            };
            let at = first * q.cols;
            let queries = Queries { first: q.bf16().add(at), most: shape.key_dim, rest: Address::NULL, rest_pitch: 0 };
            self.attend_key_values(&shape, &single, seen.sinks.address(), &queries, out.bf16().add(at));
        }
        let kept = window.min(batch.longest());
        launch!(self.cuda, stream, kernels::window_keep, [kept, batch.sequences(), 1];
            kv.bf16(), state.inputs.address(), all, window as i32, dim as i32);
    }
}
