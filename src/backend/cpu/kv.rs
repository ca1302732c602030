//! Keys and values of one layer, packed as weights are: attention multiplies with them as with any other matrix.
//!
//! ```text
//! block of 64 positions and one head:
//!   keys    a matrix [64 positions, key_dim]     scores = keys . query
//!   values  a matrix [value_dim, 64 positions]   out = values . probabilities
//! ```
//!
//! They are BF16. With two parts to a number there are two such matrices, of the rounded numbers and of what rounding
//! left, whose products are added. INT8 codes lie in the same order, with a scale for each `KV_GROUP` numbers of a
//! position, and become BF16 when they are read: a number is its code times its scale, rounded. Latent attention's
//! values are the beginning of its keys: they are stored twice, once in each order.

use std::ops::Range;

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::Numbers;
use crate::Result;
use crate::backend::KV_GROUP;
use crate::backend::batch::BLOCK_SIZE;
use crate::config::KvBits;
use crate::kernel::Kernel;
use crate::machine::heap::Heap;
use crate::machine::memory::Buffer;
use crate::machine::workers::Shared;

/// Numbers of a tile of 16 values at 64 positions.
const VALUE_TILE: usize = TILE_ROWS * BLOCK_SIZE;

/// Numbers of a line of a tile: two inputs of each row.
const LINE: usize = 2 * TILE_ROWS;

/// Keys and values of one layer.
pub struct Kv {
    pub(super) heads: usize,
    pub(super) parts: usize,
    pub(super) keys: Matrices,
    pub(super) values: Matrices,
    pub(super) is_latent: bool, // values are the first numbers of the keys
}

/// The keys, or the values, of all blocks and heads.
pub(super) struct Matrices {
    pub(super) layout: MatrixLayout, // of a block and head
    groups: usize,                   // scales of a position
    bits: KvBits,
    stored: Stored,
}

enum Stored {
    Bf16(Buffer<bf16>), // [blocks, heads, parts, matrix]
    Int8 {
        codes: Buffer<i8>,    // [blocks, heads, matrix]
        scales: Buffer<bf16>, // [blocks, heads, groups, 64 positions]
    },
}

/// Matrices that workers write to, each its own.
pub(super) enum SharedMatrices<'a> {
    Bf16(Shared<'a, bf16>, usize),
    Int8([usize; 2], Shared<'a, i8>, Shared<'a, bf16>),
}

/// The matrix of a block and head, in all its parts.
pub(super) enum MatrixMut<'a> {
    Bf16(&'a mut [bf16]),
    Int8 { codes: &'a mut [i8], scales: &'a mut [bf16] },
}

/// Where workers store rows.
pub(super) struct Writer<'a> {
    parts: usize,
    layouts: [MatrixLayout; 2],
    keys: SharedMatrices<'a>,
    values: SharedMatrices<'a>,
}

impl Stored {
    /// Numbers or codes, and scales.
    fn bytes(&self) -> [&[u8]; 2] {
        match self {
            Stored::Bf16(numbers) => [bytemuck::cast_slice(numbers), &[]],
            Stored::Int8 { codes, scales } => [bytemuck::cast_slice(codes), bytemuck::cast_slice(scales)],
        }
    }

    /// The same, to write to.
    fn bytes_mut(&mut self) -> [&mut [u8]; 2] {
        match self {
            Stored::Bf16(numbers) => [bytemuck::cast_slice_mut(numbers), &mut []],
            Stored::Int8 { codes, scales } => [bytemuck::cast_slice_mut(codes), bytemuck::cast_slice_mut(scales)],
        }
    }
}

impl Matrices {
    /// Numbers of a matrix.
    fn len(layout: &MatrixLayout) -> usize {
        layout.bytes() / 2
    }

    fn new(heap: &Heap, layout: MatrixLayout, dim: usize, count: usize, bits: KvBits) -> Result<Self> {
        let (groups, len) = (dim.div_ceil(KV_GROUP), Self::len(&layout));
        let stored = match bits {
            KvBits::Bf16 | KvBits::Bf16x2 => Stored::Bf16(heap.buffer(&[count, bits.parts(), len])?),
            KvBits::Int8 => {
                Stored::Int8 { codes: heap.buffer(&[count, len])?, scales: heap.buffer(&[count, groups, BLOCK_SIZE])? }
            }
        };
        Ok(Self { layout, groups, bits, stored })
    }

    /// The same of `count` blocks and heads, empty.
    fn like(&self, heap: &Heap, count: usize) -> Result<Self> {
        Self::new(heap, self.layout, self.groups * KV_GROUP, count, self.bits)
    }

    /// Bytes of a block and head, of numbers or codes and of scales.
    fn bytes(&self) -> [usize; 2] {
        match self.stored {
            Stored::Bf16(_) => [self.bits.parts() * self.layout.bytes(), 0],
            Stored::Int8 { .. } => [Self::len(&self.layout), 2 * self.groups * BLOCK_SIZE],
        }
    }

    /// For workers to write to.
    pub(super) fn shared(&mut self) -> SharedMatrices<'_> {
        let len = Self::len(&self.layout);
        match &mut self.stored {
            Stored::Bf16(numbers) => SharedMatrices::Bf16(Shared::new(numbers), self.bits.parts() * len),
            Stored::Int8 { codes, scales } => {
                SharedMatrices::Int8([len, self.groups * BLOCK_SIZE], Shared::new(codes), Shared::new(scales))
            }
        }
    }
}

impl SharedMatrices<'_> {
    /// The matrix of a block and head.
    ///
    /// # Safety
    /// Nobody else has it.
    #[allow(unsafe_code)]
    pub(super) unsafe fn matrix(&self, at: usize) -> MatrixMut<'_> {
        let of = |len: usize| at * len..(at + 1) * len;
        // SAFETY: as promised by the caller.
        unsafe {
            match self {
                Self::Bf16(numbers, len) => MatrixMut::Bf16(numbers.slice_mut(of(*len))),
                Self::Int8([len, groups], codes, scales) => {
                    MatrixMut::Int8 { codes: codes.slice_mut(of(*len)), scales: scales.slice_mut(of(*groups)) }
                }
            }
        }
    }
}

impl Writer<'_> {
    /// Stores the key and value of a block and head, or a latent alone, at one of 64 positions; `room` for a row.
    ///
    /// # Safety
    /// Nobody else has this block and head.
    #[allow(unsafe_code)]
    pub(super) unsafe fn put(
        &self,
        at: usize,
        position: usize,
        (key, value): (&[f32], Option<&[f32]>),
        room: &mut Numbers,
    ) {
        let [key_layout, value_layout] = &self.layouts;
        let tile_len = key_layout.tile_bytes() / 2;
        // SAFETY: as promised by the caller.
        let to = unsafe { (self.keys.matrix(at), self.values.matrix(at)) };
        match to {
            (MatrixMut::Bf16(to_key), MatrixMut::Bf16(to_value)) => {
                let value = value.unwrap_or_else(|| &key[..value_layout.n]);
                for part in 0..self.parts {
                    let stored = |x: f32| part_of(x, part);
                    put_row(&mut to_key[range(key_layout, part)], position, key, tile_len, stored);
                    put_column(&mut to_value[range(value_layout, part)], position, value, stored);
                }
            }
            (MatrixMut::Int8 { codes, scales }, MatrixMut::Int8 { codes: value_codes, scales: value_scales }) => {
                let mut row = encode(key, position, scales, room);
                put_row(codes, position, row, tile_len, |code| code as i8);
                if let Some(value) = value {
                    row = encode(value, position, value_scales, room);
                } else {
                    let groups = value_scales.as_chunks_mut::<BLOCK_SIZE>().0.iter_mut();
                    groups.zip(scales.as_chunks::<BLOCK_SIZE>().0).for_each(|(to, of)| to[position] = of[position]);
                }
                put_column(value_codes, position, &row[..value_layout.n], |code| code as i8);
            }
            _ => unreachable!("keys and values are stored alike"),
        }
    }
}

impl Kv {
    /// Storage of `blocks` blocks.
    pub(super) fn new(
        heap: &Heap,
        blocks: usize,
        heads: usize,
        [key_dim, value_dim]: [usize; 2],
        is_latent: bool,
        bits: KvBits,
    ) -> Result<Self> {
        let matrices = |layout: MatrixLayout, dim| Matrices::new(heap, layout, dim, blocks.saturating_mul(heads), bits);
        let keys = matrices(MatrixLayout::new(BLOCK_SIZE, key_dim, Precision::Bf16)?, key_dim)?;
        let values = matrices(MatrixLayout::new(value_dim, BLOCK_SIZE, Precision::Bf16)?, value_dim)?;
        Ok(Self { heads, parts: bits.parts(), keys, values, is_latent })
    }

    /// Numbers of a value, in whole tiles.
    pub(super) fn value_width(&self) -> usize {
        self.values.layout.tiles() * TILE_ROWS
    }

    /// Bytes of a block of one head.
    pub(super) fn head_bytes(&self) -> usize {
        [&self.keys, &self.values].into_iter().flat_map(Matrices::bytes).sum()
    }

    /// All bytes, in runs that have some for each block.
    pub(super) fn runs(&self) -> impl Iterator<Item = (&[u8], usize)> {
        [&self.keys, &self.values].into_iter().flat_map(|of| {
            let bytes = of.bytes().map(|bytes| self.heads * bytes);
            of.stored.bytes().into_iter().zip(bytes)
        })
    }

    /// The same, to write to.
    pub(super) fn runs_mut(&mut self) -> impl Iterator<Item = (&mut [u8], usize)> {
        let heads = self.heads;
        [&mut self.keys, &mut self.values].into_iter().flat_map(move |of| {
            let bytes = of.bytes().map(|bytes| heads * bytes);
            of.stored.bytes_mut().into_iter().zip(bytes)
        })
    }

    /// For workers to write rows to.
    pub(super) fn writer(&mut self) -> Writer<'_> {
        let Self { parts, keys, values, .. } = self;
        Writer { parts: *parts, layouts: [keys.layout, values.layout], keys: keys.shared(), values: values.shared() }
    }

    /// Room that reading takes: codes widened, of keys, or of `tiles` tiles of values.
    pub(super) fn reserve(&self, heap: &Heap, room: &mut Numbers, tiles: usize) -> Result<()> {
        match self.keys.stored {
            Stored::Bf16(_) => Ok(()),
            Stored::Int8 { .. } => {
                let len = Matrices::len(&self.keys.layout).max(tiles * VALUE_TILE);
                room.reserve(heap, &[len / 2])
            }
        }
    }

    /// A part of the keys of a block and head, as packed tiles; in `room`, where they are codes.
    pub(super) fn keys<'a>(
        &'a self,
        kernel: &dyn Kernel,
        (block, head, part): (usize, usize, usize),
        room: &'a mut Numbers,
    ) -> &'a [u8] {
        let Matrices { layout, groups, stored, .. } = &self.keys;
        let at = block * self.heads + head;
        let (codes, scales) = match stored {
            Stored::Bf16(key) => return bytemuck::cast_slice(&key[range(layout, at * self.parts + part)]),
            Stored::Int8 { codes, scales } => {
                (&codes[range(layout, at)], &scales[at * groups * BLOCK_SIZE..][..groups * BLOCK_SIZE])
            }
        };
        let tile = layout.tile_bytes() / 2;
        let out: &mut [bf16] = bytemuck::cast_slice_mut(room.take(codes.len() / 2));
        for (t, (codes, out)) in codes.chunks_exact(tile).zip(out.chunks_exact_mut(tile)).enumerate() {
            // A group is KV_GROUP / 2 lines of a tile.
            const GROUP: usize = KV_GROUP / 2 * LINE;
            for ((codes, out), scales) in
                codes.chunks(GROUP).zip(out.chunks_mut(GROUP)).zip(scales.chunks_exact(BLOCK_SIZE))
            {
                let mut line = [0.0; LINE];
                for (pair, scale) in line.as_chunks_mut::<2>().0.iter_mut().zip(&scales[t * TILE_ROWS..]) {
                    *pair = [scale.to_f32(); 2];
                }
                kernel.widen(codes, &line, out);
            }
        }
        bytemuck::cast_slice(out)
    }

    /// A part of some tiles of the values of a block and head, from a group's first one on; in `room`, where they are
    /// codes.
    pub(super) fn values<'a>(
        &'a self,
        kernel: &dyn Kernel,
        (block, head, part): (usize, usize, usize),
        tiles: Range<usize>,
        room: &'a mut Numbers,
    ) -> &'a [u8] {
        let Matrices { layout, groups, stored, .. } = &self.values;
        let (at, some) = (block * self.heads + head, tiles.start * VALUE_TILE..tiles.end * VALUE_TILE);
        let (codes, scales) = match stored {
            Stored::Bf16(value) => {
                return bytemuck::cast_slice(&value[range(layout, at * self.parts + part)][some]);
            }
            Stored::Int8 { codes, scales } => {
                (&codes[range(layout, at)][some], &scales[at * groups * BLOCK_SIZE..][..groups * BLOCK_SIZE])
            }
        };
        const TILES: usize = KV_GROUP / TILE_ROWS; // of a group
        assert!(tiles.start.is_multiple_of(TILES));
        let out: &mut [bf16] = bytemuck::cast_slice_mut(room.take(codes.len() / 2));
        let groups = scales.chunks_exact(BLOCK_SIZE).skip(tiles.start / TILES);
        for ((codes, out), scales) in
            codes.chunks(TILES * VALUE_TILE).zip(out.chunks_mut(TILES * VALUE_TILE)).zip(groups)
        {
            let mut lines = [0.0; VALUE_TILE];
            for (line, scales) in lines.as_chunks_mut::<LINE>().0.iter_mut().zip(scales.as_chunks::<2>().0) {
                let scales = scales.map(bf16::to_f32);
                line.as_chunks_mut::<2>().0.fill(scales);
            }
            kernel.widen(codes, &lines, out);
        }
        bytemuck::cast_slice(out)
    }

    /// An empty block of one head for each of `blocks`, like those here.
    pub(super) fn like(&self, heap: &Heap, blocks: usize) -> Result<Self> {
        let [keys, values] = [&self.keys, &self.values].map(|of| of.like(heap, blocks));
        Ok(Self { heads: 1, keys: keys?, values: values?, ..*self })
    }

    /// Brings up to 64 positions of one head side by side, as a block of one head: `rows` are theirs in the storage,
    /// `key` and `value` the block's.
    pub(super) fn gather(
        &self,
        head: usize,
        rows: impl ExactSizeIterator<Item = usize> + Clone,
        key: MatrixMut<'_>,
        value: MatrixMut<'_>,
    ) {
        match (key, value, &self.keys.stored, &self.values.stored) {
            (MatrixMut::Bf16(key), MatrixMut::Bf16(value), Stored::Bf16(keys), Stored::Bf16(values)) => {
                self.gather_numbers(head, rows, (keys, values), (key, value));
            }
            (
                MatrixMut::Int8 { codes: key, scales: key_scales },
                MatrixMut::Int8 { codes: value, scales: value_scales },
                Stored::Int8 { codes: keys, scales: all_key_scales },
                Stored::Int8 { codes: values, scales: all_value_scales },
            ) => {
                self.gather_numbers(head, rows.clone(), (keys, values), (key, value));
                for (to, from) in [(key_scales, all_key_scales), (value_scales, all_value_scales)] {
                    let len = to.len();
                    for (i, row) in rows.clone().enumerate() {
                        let at = row / BLOCK_SIZE * self.heads + head;
                        let from = from[at * len..][..len].as_chunks::<BLOCK_SIZE>().0;
                        for (to, from) in to.as_chunks_mut::<BLOCK_SIZE>().0.iter_mut().zip(from) {
                            to[i] = from[row % BLOCK_SIZE];
                        }
                    }
                }
            }
            _ => unreachable!("what is gathered is stored alike"),
        }
    }

    fn gather_numbers<T: Copy + Default>(
        &self,
        head: usize,
        rows: impl ExactSizeIterator<Item = usize> + Clone,
        (all_keys, all_values): (&[T], &[T]),
        (key, value): (&mut [T], &mut [T]),
    ) {
        if rows.len() < BLOCK_SIZE {
            value.fill(T::default()); // attention multiplies what is not there with zero
        }
        let (key_layout, value_layout) = (&self.keys.layout, &self.values.layout);
        let lines_of_values = if self.is_latent { value_layout.n / 2 } else { 0 };
        for part in 0..self.parts {
            let (key, value) = (&mut key[range(key_layout, part)], &mut value[range(value_layout, part)]);
            let key = key.as_chunks_mut::<2>().0;
            for (to, row) in rows.clone().enumerate() {
                let at = (row / BLOCK_SIZE * self.heads + head) * self.parts + part;
                let keys = all_keys[range(key_layout, at)].as_chunks::<2>().0;
                let values = &all_values[range(value_layout, at)];
                let (from, tile) = (row % BLOCK_SIZE, key_layout.tile_bytes() / 4);
                let key = &mut key[to / TILE_ROWS * tile..][..tile];
                let keys = &keys[from / TILE_ROWS * tile..][..tile];
                // A key's numbers, two by two, are a line apart; a value's are neighbours' neighbours.
                for (v, (to_tile, tile)) in
                    value.chunks_exact_mut(VALUE_TILE).zip(values.chunks_exact(VALUE_TILE)).enumerate()
                {
                    let to_line: &mut [T; LINE] = (&mut to_tile[to / 2 * LINE..][..LINE]).try_into().expect("a line");
                    let line: &[T; LINE] = tile[from / 2 * LINE..][..LINE].try_into().expect("a line");
                    for i in 0..TILE_ROWS {
                        to_line[2 * i + to % 2] = line[2 * i + from % 2];
                    }
                    let pairs = lines_of_values.saturating_sub(v * TILE_ROWS / 2).min(TILE_ROWS / 2);
                    for i in 0..pairs {
                        key[(v * TILE_ROWS / 2 + i) * TILE_ROWS + to % TILE_ROWS] =
                            [line[4 * i + from % 2], line[4 * i + 2 + from % 2]];
                    }
                }
                for line in lines_of_values..tile / TILE_ROWS {
                    key[line * TILE_ROWS + to % TILE_ROWS] = keys[line * TILE_ROWS + from % TILE_ROWS];
                }
            }
        }
    }
}

/// Where matrix `i` lies.
fn range(layout: &MatrixLayout, i: usize) -> Range<usize> {
    let len = Matrices::len(layout);
    i * len..(i + 1) * len
}

/// The codes of a row, as numbers; its scales go to `position` of theirs.
fn encode<'a>(x: &[f32], position: usize, scales: &mut [bf16], room: &'a mut Numbers) -> &'a [f32] {
    let codes = room.take(x.len());
    let scales = scales.as_chunks_mut::<BLOCK_SIZE>().0;
    for ((x, codes), scales) in x.chunks(KV_GROUP).zip(codes.chunks_mut(KV_GROUP)).zip(scales) {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        // Never infinite: zero times a code must be zero.
        let scale = bf16::from_f32(largest.min(3e38) / 127.0);
        let inverse = if scale.to_f32() < 1e-30 { 0.0 } else { 1.0 / scale.to_f32() };
        for (code, x) in codes.iter_mut().zip(x) {
            *code = (x * inverse).round_ties_even().clamp(-127.0, 127.0);
        }
        scales[position] = scale;
    }
    codes
}

/// The rounded number, or what rounding left.
fn part_of(x: f32, part: usize) -> bf16 {
    let high = bf16::from_f32(x);
    if part == 0 { high } else { bf16::from_f32(x - high.to_f32()) }
}

/// Row `row` of a packed matrix, each number as `stored` makes it.
fn put_row<T>(to: &mut [T], row: usize, x: &[f32], tile_len: usize, stored: impl Fn(f32) -> T) {
    let tile = &mut to[row / TILE_ROWS * tile_len..][..tile_len];
    for (line, pair) in tile.as_chunks_mut::<LINE>().0.iter_mut().zip(x.chunks(2)) {
        for (to, x) in line[row % TILE_ROWS * 2..].iter_mut().zip(pair) {
            *to = stored(*x);
        }
    }
}

/// Input `input` of every row of a packed matrix, each number as `stored` makes it. The first of 32 inputs clears the
/// others: attention reads them all, and whatever a block held before, zero times it must be zero.
fn put_column<T: Copy + Default>(to: &mut [T], input: usize, x: &[f32], stored: impl Fn(f32) -> T) {
    for (tile, x) in to.as_chunks_mut::<VALUE_TILE>().0.iter_mut().zip(x.chunks(TILE_ROWS)) {
        if input.is_multiple_of(BF16_INPUTS) {
            // The rest of the block: positions come in order.
            tile[input * TILE_ROWS..].fill(T::default());
        }
        let line = &mut tile[input / 2 * LINE..][..LINE];
        for (pair, x) in line.as_chunks_mut::<2>().0.iter_mut().zip(x) {
            pair[input % 2] = stored(*x);
        }
    }
}
