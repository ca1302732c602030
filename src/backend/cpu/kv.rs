//! Keys and values of one layer in BF16, packed as weights are: attention multiplies with them as with any other
//! matrix.
//!
//! ```text
//! block of 64 positions and one head:
//!   keys    a matrix [64 positions, key_dim]     scores = keys . query
//!   values  a matrix [value_dim, 64 positions]   out = values . probabilities
//! ```
//!
//! With two parts to a number there are two such matrices, of the rounded numbers and of what rounding left, whose
//! products are added. Latent attention's values are the beginning of its keys: they are stored twice, once in each
//! order.

use std::ops::Range;

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::Cpu;
use crate::Result;
use crate::backend::batch::{BLOCK_SIZE, Batch};
use crate::backend::tensor::Tensor;
use crate::config::KvBits;
use crate::machine::memory::Buffer;
use crate::machine::workers::Shared;

/// Positions of a batch from which on all workers store them.
const PARALLEL_POSITIONS: usize = 32;

/// Keys and values of one layer.
pub struct Kv {
    heads: usize,
    pub(super) parts: usize,
    pub(super) keys: MatrixLayout,   // of a block and head
    pub(super) values: MatrixLayout, // of a block and head
    key: Buffer<bf16>,               // [blocks, heads, parts, keys]
    value: Buffer<bf16>,             // [blocks, heads, parts, values]
}

impl Kv {
    pub(super) fn new(blocks: usize, heads: usize, key_dim: usize, value_dim: usize, bits: KvBits) -> Result<Self> {
        let keys = MatrixLayout::new(BLOCK_SIZE, key_dim, Precision::Bf16)?;
        let values = MatrixLayout::new(value_dim, BLOCK_SIZE, Precision::Bf16)?;
        let zeros = |layout: &MatrixLayout| Buffer::zeros(blocks * heads * bits.parts() * layout.bytes() / 2);
        Ok(Self { heads, parts: bits.parts(), keys, values, key: zeros(&keys)?, value: zeros(&values)? })
    }

    /// KV heads.
    pub(super) fn heads(&self) -> usize {
        self.heads
    }

    /// Numbers of a value, in whole tiles.
    pub(super) fn value_width(&self) -> usize {
        self.values.tiles() * TILE_ROWS
    }

    /// A part of the keys of a block and head, as packed tiles.
    pub(super) fn keys(&self, block: usize, head: usize, part: usize) -> &[u8] {
        bytemuck::cast_slice(&self.key[range(&self.keys, (block * self.heads + head) * self.parts + part)])
    }

    /// A part of the values of a block and head, as packed tiles.
    pub(super) fn values(&self, block: usize, head: usize, part: usize) -> &[u8] {
        bytemuck::cast_slice(&self.value[range(&self.values, (block * self.heads + head) * self.parts + part)])
    }
}

/// Where matrix `i` lies.
fn range(layout: &MatrixLayout, i: usize) -> Range<usize> {
    let len = layout.bytes() / 2;
    i * len..(i + 1) * len
}

impl Cpu {
    /// Stores the batch's rows; `value: None` takes values from the beginning of each key.
    pub(super) fn store(&self, kv: &mut Kv, batch: &Batch, key: &Tensor, value: Option<&Tensor>) {
        let (heads, parts, keys, values) = (kv.heads, kv.parts, kv.keys, kv.values);
        let (key_data, value_data) = (Shared::new(&mut kv.key), Shared::new(&mut kv.value));
        let (value_rows, value_stride) = (value.unwrap_or(key), if value.is_some() { values.n } else { keys.k });
        // One worker stores all positions of a block: neighbours share words.
        let store = |worker: usize, workers: usize| {
            for span in &batch.spans {
                for (t, position) in span.rows.clone().zip(span.start..) {
                    if position / BLOCK_SIZE % workers != worker {
                        continue;
                    }
                    let block = batch.slot(span, position) / BLOCK_SIZE;
                    for head in 0..heads {
                        for part in 0..parts {
                            let at = (block * heads + head) * parts + part;
                            // SAFETY: a block belongs to one sequence, and in it to one worker.
                            #[allow(unsafe_code)]
                            let (key_block, value_block) = unsafe {
                                (key_data.slice_mut(range(&keys, at)), value_data.slice_mut(range(&values, at)))
                            };
                            let key = &key.row(t)[head * keys.k..][..keys.k];
                            put_row(key_block, position % BLOCK_SIZE, key, part, keys.tile_bytes() / 2);
                            put_column(
                                value_block,
                                position % BLOCK_SIZE,
                                &value_rows.row(t)[head * value_stride..][..values.n],
                                part,
                            );
                        }
                    }
                }
            }
        };
        if batch.len() < PARALLEL_POSITIONS {
            store(0, 1);
        } else {
            self.team.run(&|worker| store(worker.index, worker.count));
        }
    }
}

/// The rounded number, or what rounding left.
fn part_of(x: f32, part: usize) -> bf16 {
    let high = bf16::from_f32(x);
    if part == 0 { high } else { bf16::from_f32(x - high.to_f32()) }
}

/// A part of row `row` of a packed matrix.
fn put_row(to: &mut [bf16], row: usize, x: &[f32], part: usize, tile_len: usize) {
    let tile = &mut to[row / TILE_ROWS * tile_len..][..tile_len];
    for (line, pair) in tile.as_chunks_mut::<32>().0.iter_mut().zip(x.chunks(2)) {
        for (to, x) in line[row % TILE_ROWS * 2..].iter_mut().zip(pair) {
            *to = part_of(*x, part);
        }
    }
}

/// A part of input `input` of every row of a packed matrix. The first of 32 inputs clears the others: attention reads
/// them all, and whatever a block held before, zero times it must be zero.
fn put_column(to: &mut [bf16], input: usize, x: &[f32], part: usize) {
    const TILE: usize = BLOCK_SIZE * TILE_ROWS;
    for (tile, x) in to.as_chunks_mut::<TILE>().0.iter_mut().zip(x.chunks(TILE_ROWS)) {
        if input.is_multiple_of(BF16_INPUTS) {
            // The rest of the block: positions come in order.
            tile[input * TILE_ROWS..].fill(bf16::ZERO);
        }
        let line = &mut tile[input / 2 * 32..][..32];
        for (pair, x) in line.as_chunks_mut::<2>().0.iter_mut().zip(x) {
            pair[input % 2] = part_of(*x, part);
        }
    }
}
