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
use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use crate::Result;
use crate::backend::batch::BLOCK_SIZE;
use crate::machine::heap::Heap;
use crate::machine::memory::Buffer;

/// Keys and values of one layer.
pub struct Kv {
    pub(super) heads: usize,
    pub(super) parts: usize,
    pub(super) keys: MatrixLayout,   // of a block and head
    pub(super) values: MatrixLayout, // of a block and head
    pub(super) key: Buffer<bf16>,    // [blocks, heads, parts, keys]
    pub(super) value: Buffer<bf16>,  // [blocks, heads, parts, values]
    pub(super) is_latent: bool,      // values are the first numbers of the keys
}

impl Kv {
    /// Numbers of a value, in whole tiles.
    pub(super) fn value_width(&self) -> usize {
        self.values.tiles() * TILE_ROWS
    }

    /// A part of the keys of a block and head, as packed tiles.
    pub(super) fn keys(&self, block: usize, head: usize, part: usize) -> &[u8] {
        bytemuck::cast_slice(&self.key[range(&self.keys, (block * self.heads + head) * self.parts + part)])
    }

    /// An empty block of one head for each of `blocks`, like those here.
    pub(super) fn like(&self, heap: &Heap, blocks: usize) -> Result<Self> {
        let zeros = |layout: &MatrixLayout| heap.buffer(&[blocks, self.parts, layout.bytes() / 2]);
        Ok(Self { heads: 1, key: zeros(&self.keys)?, value: zeros(&self.values)?, ..*self })
    }

    /// Brings up to 64 positions of one head side by side, as a block of one head: `rows` are theirs in the storage,
    /// `key` and `value` the block's.
    pub(super) fn gather(
        &self,
        head: usize,
        rows: impl ExactSizeIterator<Item = usize> + Clone,
        key: &mut [bf16],
        value: &mut [bf16],
    ) {
        if rows.len() < BLOCK_SIZE {
            value.fill(bf16::ZERO); // attention multiplies what is not there with zero
        }
        let lines_of_values = if self.is_latent { self.values.n / 2 } else { 0 };
        for part in 0..self.parts {
            let (key, value) = (&mut key[range(&self.keys, part)], &mut value[range(&self.values, part)]);
            let (key, value) = (bytemuck::cast_slice_mut::<_, u32>(key), bytemuck::cast_slice_mut::<_, u16>(value));
            for (to, row) in rows.clone().enumerate() {
                let at = (row / BLOCK_SIZE * self.heads + head) * self.parts + part;
                let keys: &[u32] = bytemuck::cast_slice(&self.key[range(&self.keys, at)]);
                let values: &[u16] = bytemuck::cast_slice(&self.value[range(&self.values, at)]);
                let (from, tile) = (row % BLOCK_SIZE, self.keys.tile_bytes() / 4);
                let key = &mut key[to / TILE_ROWS * tile..][..tile];
                let keys = &keys[from / TILE_ROWS * tile..][..tile];
                // A key's numbers, two to a word, are a line of 64 bytes apart; a value's are neighbours' neighbours.
                for (v, (to_tile, tile)) in value
                    .chunks_exact_mut(BLOCK_SIZE * TILE_ROWS)
                    .zip(values.chunks_exact(BLOCK_SIZE * TILE_ROWS))
                    .enumerate()
                {
                    let to_line: &mut [u16; 32] = (&mut to_tile[to / 2 * 32..][..32]).try_into().expect("32");
                    let line: &[u16; 32] = tile[from / 2 * 32..][..32].try_into().expect("32");
                    for i in 0..TILE_ROWS {
                        to_line[2 * i + to % 2] = line[2 * i + from % 2];
                    }
                    let pairs = lines_of_values.saturating_sub(v * TILE_ROWS / 2).min(TILE_ROWS / 2);
                    for i in 0..pairs {
                        let pair = [line[4 * i + from % 2], line[4 * i + 2 + from % 2]];
                        key[(v * TILE_ROWS / 2 + i) * TILE_ROWS + to % TILE_ROWS] =
                            u32::from(pair[0]) | u32::from(pair[1]) << 16;
                    }
                }
                for line in lines_of_values..tile / TILE_ROWS {
                    key[line * TILE_ROWS + to % TILE_ROWS] = keys[line * TILE_ROWS + from % TILE_ROWS];
                }
            }
        }
    }

    /// A part of the values of a block and head, as packed tiles.
    pub(super) fn values(&self, block: usize, head: usize, part: usize) -> &[u8] {
        bytemuck::cast_slice(&self.value[range(&self.values, (block * self.heads + head) * self.parts + part)])
    }
}

/// Where matrix `i` lies.
pub(super) fn range(layout: &MatrixLayout, i: usize) -> Range<usize> {
    let len = layout.bytes() / 2;
    i * len..(i + 1) * len
}

/// The rounded number, or what rounding left.
fn part_of(x: f32, part: usize) -> bf16 {
    let high = bf16::from_f32(x);
    if part == 0 { high } else { bf16::from_f32(x - high.to_f32()) }
}

/// A part of row `row` of a packed matrix.
pub(super) fn put_row(to: &mut [bf16], row: usize, x: &[f32], part: usize, tile_len: usize) {
    let tile = &mut to[row / TILE_ROWS * tile_len..][..tile_len];
    for (line, pair) in tile.as_chunks_mut::<32>().0.iter_mut().zip(x.chunks(2)) {
        for (to, x) in line[row % TILE_ROWS * 2..].iter_mut().zip(pair) {
            *to = part_of(*x, part);
        }
    }
}

/// A part of input `input` of every row of a packed matrix. The first of 32 inputs clears the others: attention reads
/// them all, and whatever a block held before, zero times it must be zero.
pub(super) fn put_column(to: &mut [bf16], input: usize, x: &[f32], part: usize) {
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
