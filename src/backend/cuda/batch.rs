//! A batch on the device: tokens, positions and block tables at addresses that stay.

use std::ops::Range;
use std::sync::Arc;

use super::RECORDED_TOKENS;
use crate::Result;
use crate::backend::batch::{BLOCK_SIZE, Batch};
use crate::cuda::{Address, Cuda, DeviceBuffer, kernels};

/// Rows of a sequence up to which they are read one by one, the context split among blocks; beyond, in tiles.
const FEW_ROWS: usize = 4;

/// Rows of a batch that may be read one by one.
pub(super) const DECODE_ROWS: usize = 256;

/// Rows of a tile of queries; the largest head dimensions take 64.
pub(super) const TILE_ROWS: [usize; 2] =
    [kernels::attend_prefill_64_64_bf16.tile[2], kernels::attend_prefill_256_256_bf16.tile[2]];

/// What ops need of a batch.
///
/// The leading sequences of few rows are read one by one (`decode`), all others in tiles.
pub struct CudaBatch {
    data: DeviceBuffer<u32>,
    staged: Vec<u32>,
    max_tokens: usize,
    table: usize,
    /// Rows that are read one by one.
    pub(super) decode: usize,
    /// Tiles of the rest, for each of [`TILE_ROWS`].
    pub(super) tiles: [usize; 2],
    /// The sequences that are read in tiles: number, rows, and position of the first.
    pub(super) long: Vec<(usize, Range<usize>, usize)>,
    rows: usize,
    sequences: usize,
    longest: usize,
    shortest: usize,
}

/// Where the parts lie, in words.
struct Offsets {
    tokens: usize,
    positions: usize,
    token_seq: usize,
    seq_first: usize,
    seq_blocks: usize,
    seq_slots: usize,
    decode_rows: usize,
    tiles: [usize; 2],
    table: usize,
    end: usize,
}

impl CudaBatch {
    pub(super) fn new(cuda: &Arc<Cuda>, max_tokens: usize, table: usize) -> Result<Self> {
        let mut batch = Self {
            data: DeviceBuffer::new(cuda, 1)?,
            staged: Vec::new(),
            max_tokens,
            table,
            decode: 0,
            tiles: [0; 2],
            long: Vec::new(),
            rows: max_tokens,
            sequences: 0,
            longest: 0,
            shortest: 0,
        };
        batch.data = DeviceBuffer::zeros(cuda, batch.offsets().end)?;
        Ok(batch)
    }

    /// The same for all batches that may be recorded, so that recorded passes find everything again.
    fn offsets(&self) -> Offsets {
        let t = if self.rows <= RECORDED_TOKENS { self.max_tokens.min(RECORDED_TOKENS) } else { self.max_tokens };
        let tiles = |rows: usize| t + t.div_ceil(rows);
        let mut at = 0;
        let mut take = |words: usize| {
            at += words.next_multiple_of(4);
            at - words.next_multiple_of(4)
        };
        Offsets {
            tokens: take(t),
            positions: take(t),
            token_seq: take(t),
            seq_first: take(t + 1),
            seq_blocks: take(t),
            seq_slots: take(t),
            decode_rows: take(DECODE_ROWS),
            tiles: TILE_ROWS.map(|rows| take(2 * tiles(rows))),
            table: take(self.table),
            end: at,
        }
    }

    pub(super) fn set(&mut self, cuda: &Cuda, batch: &Batch) {
        (self.rows, self.sequences) = (batch.len(), batch.spans.len());
        let lengths = || batch.spans.iter().map(|span| span.rows.len());
        (self.longest, self.shortest) = (lengths().max().unwrap_or(0), lengths().min().unwrap_or(0));
        let offsets = self.offsets();
        assert!(
            batch.len() <= self.max_tokens && batch.block_table.len() <= self.table,
            "a batch larger than was allocated for"
        );
        let mut staged = std::mem::take(&mut self.staged);
        staged.resize(offsets.table, 0);
        let mut put = |at: usize, i: usize, value: usize| staged[at + i] = value as u32;
        self.long.clear();
        (self.decode, self.tiles) = (0, [0; 2]);
        for t in 0..batch.len() {
            put(offsets.tokens, t, batch.tokens[t] as usize);
            put(offsets.positions, t, batch.positions[t] as usize);
        }
        for (s, span) in batch.spans.iter().enumerate() {
            put(offsets.seq_first, s, span.rows.start);
            put(offsets.seq_first, s + 1, span.rows.end);
            put(offsets.seq_blocks, s, span.blocks.start);
            put(offsets.seq_slots, s, span.slot);
            span.rows.clone().for_each(|t| put(offsets.token_seq, t, s));
            if self.long.is_empty() && span.rows.len() <= FEW_ROWS && span.rows.end <= DECODE_ROWS {
                span.rows.clone().for_each(|t| put(offsets.decode_rows, t, t));
                self.decode = span.rows.end;
            } else {
                self.long.push((s, span.rows.clone(), span.start));
            }
        }
        for (i, rows) in TILE_ROWS.into_iter().enumerate() {
            // Tiles that see most positions first, so that they do not end last.
            for (s, span, _) in self.long.iter().rev() {
                for first in span.clone().step_by(rows).rev() {
                    put(offsets.tiles[i], 2 * self.tiles[i], *s);
                    put(offsets.tiles[i], 2 * self.tiles[i] + 1, first);
                    self.tiles[i] += 1;
                }
            }
        }
        staged.extend_from_slice(&batch.block_table);
        cuda.upload(&cuda.compute, self.data.address(), &staged);
        staged.truncate(offsets.table);
        self.staged = staged;
    }

    fn at<T>(&self, words: usize) -> Address<T> {
        self.data.address().add(words).cast()
    }

    /// Tokens in the batch.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn tokens(&self) -> Address<u32> {
        self.at(self.offsets().tokens)
    }

    pub(super) fn positions(&self) -> Address<i32> {
        self.at(self.offsets().positions)
    }

    pub(super) fn token_seq(&self) -> Address<i32> {
        self.at(self.offsets().token_seq)
    }

    pub(super) fn seq_first(&self) -> Address<i32> {
        self.at(self.offsets().seq_first)
    }

    pub(super) fn seq_blocks(&self) -> Address<i32> {
        self.at(self.offsets().seq_blocks)
    }

    /// Where each sequence's recurrent state is.
    pub(super) fn seq_slots(&self) -> Address<i32> {
        self.at(self.offsets().seq_slots)
    }

    /// Sequences in the batch.
    pub(super) fn sequences(&self) -> usize {
        self.sequences
    }

    /// Rows of the sequence that has the most.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// Rows of the sequence that has the fewest.
    pub(super) fn shortest(&self) -> usize {
        self.shortest
    }

    pub(super) fn decode_rows(&self) -> Address<i32> {
        self.at(self.offsets().decode_rows)
    }

    /// Of [`TILE_ROWS`]`[which]`: sequence and first row of each.
    pub(super) fn tile_table(&self, which: usize) -> Address<i32> {
        self.at(self.offsets().tiles[which])
    }

    pub(super) fn block_table(&self) -> Address<u32> {
        self.at(self.offsets().table)
    }
}

/// Blocks that hold `positions`.
pub(super) fn blocks(positions: usize) -> usize {
    positions.div_ceil(BLOCK_SIZE)
}
