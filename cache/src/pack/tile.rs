//! Weights into their packed order, and back.
//!
//! Packing is fast, because every conversion does it; unpacking follows the definition byte by byte, because tests
//! believe it.

use half::{bf16, f16};

use super::{CodeType, Counts, E4M3, ExpertLayout, Grid, MatrixLayout, Row, SUPER_BLOCK, Scales, TILE_ROWS};

/// Row-major weights of a matrix `[n, k]`, or of some of its rows.
#[derive(Clone, Debug)]
pub enum Weights<'a> {
    /// For `Precision::Bf16`: `[n, k]`.
    Bf16(&'a [bf16]),
    /// For precisions whose groups have a scale each.
    Int {
        /// `[n, k]`, of those that the precision's codes can be.
        codes: &'a [i8],
        /// `[n, k / group_size]`, rounded to the precision's type.
        scales: &'a [f32],
    },
    /// For the others.
    Blocks(&'a Blocks, std::ops::Range<usize>),
}

/// Rows in groups that have offsets, or scales of two levels ([`Scales`]), as they are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// `[n, k]`, of those that the precision's codes can be; empty of a grid's.
    pub codes: Vec<i8>,
    /// `[n, k / 256, words]` of a grid's codes ([`Grid`]); empty of others.
    pub words: Vec<u32>,
    /// Bits of f16 numbers: `d` and `dmin` of each super-block, or scale and offset of each group, `[n, ..]`; where
    /// scales are E4M3 the row's f32 number, `[n, 2]`, the lower half first.
    pub heads: Vec<u16>,
    /// `[n, k / group_size]`, their zero added, or E4M3; empty where there are none.
    pub counts: Vec<u8>,
    /// `[n, k / group_size]`; empty where there are none.
    pub offsets: Vec<u8>,
}

impl Blocks {
    /// Makes room for `rows` rows of `layout`. Panics: a precision of plain scales (a bug).
    pub fn resize(&mut self, layout: &MatrixLayout, rows: usize) {
        let row = layout.precision.row().expect("a precision of codes");
        let groups = rows * layout.k / layout.precision.group_size().unwrap_or(1);
        let (heads, counts, offsets) = match row.scales {
            Scales::Plain | Scales::Wide | Scales::Zeros => panic!("{} has plain scales", layout.precision),
            Scales::E4m3 => (2 * rows, groups, 0),
            Scales::WithOffset => (2 * groups, 0, 0),
            Scales::Counted { offsets, .. } => {
                (rows * layout.k / SUPER_BLOCK * (1 + usize::from(offsets)), groups, groups * usize::from(offsets))
            }
            Scales::Odd { counts, .. } => {
                (rows * layout.k / SUPER_BLOCK, if counts.bits() > 0 { groups } else { 0 }, 0)
            }
        };
        let (codes, words) = match row.codes {
            CodeType::Grid(grid) => (0, rows * layout.k / SUPER_BLOCK * grid.words()),
            _ => (rows * layout.k, 0),
        };
        self.codes.resize(codes, 0);
        self.words.resize(words, 0);
        self.heads.resize(heads, 0);
        self.counts.resize(counts, 0);
        self.offsets.resize(offsets, 0);
    }

    /// How many weights there are.
    pub(crate) fn weights(&self) -> usize {
        // Of a grid's codes there are words alone, some for each `d`.
        if self.words.is_empty() { self.codes.len() } else { self.heads.len() * SUPER_BLOCK }
    }

    /// Puts one row in the place of row `to`.
    pub(crate) fn set(&mut self, to: usize, row: &Self) {
        fn copy<T: Copy>(to: usize, row: &[T], all: &mut [T]) {
            all[to * row.len()..][..row.len()].copy_from_slice(row);
        }
        copy(to, &row.codes, &mut self.codes);
        copy(to, &row.words, &mut self.words);
        copy(to, &row.heads, &mut self.heads);
        copy(to, &row.counts, &mut self.counts);
        copy(to, &row.offsets, &mut self.offsets);
    }

    /// The weights of rows of `k` inputs, which fill `out`. Panics: a precision of plain scales (a bug).
    pub(crate) fn dequantize(&self, precision: super::Precision, k: usize, out: &mut [f32]) {
        let (Some(Row { codes, scales, .. }), Some(group_size)) = (precision.row(), precision.group_size()) else {
            panic!("{precision} has no groups")
        };
        if let (CodeType::Grid(grid), Scales::Odd { halvings, .. }) = (codes, scales) {
            return self.in_grid(grid, halvings, group_size, out);
        }
        assert_eq!((out.len(), out.len() % k), (self.codes.len(), 0), "out");
        let number = |at: usize| f16::from_bits(self.heads[at]).to_f32();
        let weights = out.chunks_exact_mut(group_size).zip(self.codes.chunks_exact(group_size));
        for (group, (out, codes)) in weights.enumerate() {
            let block = group * group_size / SUPER_BLOCK;
            let (scale, offset) = match scales {
                Scales::Plain | Scales::Wide | Scales::Zeros => panic!("{precision} has other scales"),
                Scales::Odd { halvings, .. } => (odd_scale(number(block), 0, halvings), None),
                Scales::E4m3 => {
                    (E4M3[usize::from(self.counts[group])] * f32_of(&self.heads, group * group_size / k), None)
                }
                Scales::WithOffset => (number(2 * group), Some(number(2 * group + 1))),
                Scales::Counted { zero, offsets, .. } => {
                    let count = f32::from(i16::from(self.counts[group]) - i16::from(zero));
                    let head = block * (1 + usize::from(offsets));
                    let offset = || -(number(head + 1) * f32::from(self.offsets[group]));
                    (number(head) * count, offsets.then(offset))
                }
            };
            let pairs = out.iter_mut().zip(codes);
            match offset {
                Some(offset) => pairs.for_each(|(out, &code)| *out = scale * f32::from(code) + offset),
                None => pairs.for_each(|(out, &code)| *out = scale * f32::from(code)),
            }
        }
    }
}

impl Blocks {
    fn in_grid(&self, grid: Grid, halvings: u8, group_size: usize, out: &mut [f32]) {
        let (blocks, groups) = (out.as_chunks_mut::<SUPER_BLOCK>().0, SUPER_BLOCK / group_size);
        for (i, (out, words)) in blocks.iter_mut().zip(self.words.chunks_exact(grid.words())).enumerate() {
            let d = f16::from_bits(self.heads[i]).to_f32();
            for (group, out) in out.chunks_exact_mut(group_size).enumerate() {
                let count = match self.counts.get(i * groups + group) {
                    Some(count) => *count,
                    None => grid.count(|word| words[word], group),
                };
                let scale = odd_scale(d, count, halvings);
                for (input, out) in (group * group_size..).zip(out) {
                    *out = scale * f32::from(grid.code(|word| words[word], input));
                }
            }
        }
    }
}

/// A scale of [`Scales::Odd`]. Exact.
fn odd_scale(d: f32, count: u8, halvings: u8) -> f32 {
    d * (2.0 * f32::from(count) + 1.0) / f32::from(1u8 << halvings)
}

impl<'a> Weights<'a> {
    /// Rows `from..from + count`.
    fn rows(&self, layout: &MatrixLayout, from: usize, count: usize) -> Self {
        let part = |per_row: usize| from * per_row..(from + count) * per_row;
        match self {
            Weights::Bf16(weights) => Weights::Bf16(&weights[part(layout.k)]),
            Weights::Int { codes, scales } => {
                Weights::Int { codes: &codes[part(layout.k)], scales: &scales[part(scales.len() / layout.n)] }
            }
            Weights::Blocks(blocks, rows) => Weights::Blocks(blocks, rows.start + from..rows.start + from + count),
        }
    }
}

/// Number `i` of f32 numbers whose halves these are, the lower ones first.
fn f32_of(halves: &[u16], i: usize) -> f32 {
    f32::from_bits(u32::from(halves[2 * i]) | u32::from(halves[2 * i + 1]) << 16)
}

/// Packs a whole matrix. Panics: a length does not fit `layout` (a bug).
pub fn pack_matrix(layout: &MatrixLayout, weights: Weights<'_>, out: &mut [u8]) {
    assert_eq!(out.len(), layout.bytes(), "out");
    for (i, tile) in out.chunks_exact_mut(layout.tile_bytes()).enumerate() {
        pack_rows(layout, &weights, i, tile);
    }
}

/// Packs a whole expert: `gate` and `up` `[intermediate, hidden]`, `down` `[hidden, intermediate]`.
/// Panics: a length does not fit `layout` (a bug).
pub fn pack_expert(layout: &ExpertLayout, gate: Weights<'_>, up: Weights<'_>, down: Weights<'_>, out: &mut [u8]) {
    assert_eq!(out.len(), layout.bytes(), "out");
    let (gate_tile, down_tile) = (layout.gate.tile_bytes(), layout.down.tile_bytes());
    for i in 0..layout.gate.tiles() {
        pack_rows(&layout.gate, &gate, i, &mut out[layout.gate_tile(i)..][..gate_tile]);
        pack_rows(&layout.gate, &up, i, &mut out[layout.up_tile(i)..][..gate_tile]);
    }
    for i in 0..layout.down.tiles() {
        pack_rows(&layout.down, &down, i, &mut out[layout.down_tile(i)..][..down_tile]);
    }
    out[layout.down_tile(layout.down.tiles())..].fill(0);
}

fn pack_rows(layout: &MatrixLayout, weights: &Weights<'_>, tile: usize, out: &mut [u8]) {
    let from = tile * TILE_ROWS;
    pack_tile(layout, weights.rows(layout, from, TILE_ROWS.min(layout.n - from)), out);
}

/// Packs the rows of one tile, 16 or, in the last tile, fewer. Panics: a length does not fit `layout` (a bug).
pub(crate) fn pack_tile(layout: &MatrixLayout, rows: Weights<'_>, out: &mut [u8]) {
    assert_eq!(out.len(), layout.tile_bytes(), "tile");
    match (rows, layout.precision.row()) {
        (Weights::Bf16(weights), None) => {
            out.fill(0);
            let (lines, _) = out.as_chunks_mut::<64>();
            for (row, weights) in weights.chunks_exact(layout.k).enumerate() {
                let (pairs, odd) = weights.as_chunks::<2>();
                for (line, [first, second]) in lines.iter_mut().zip(pairs) {
                    let word = first.to_bits() as u32 | (second.to_bits() as u32) << 16;
                    line[row * 4..][..4].copy_from_slice(&word.to_le_bytes());
                }
                for last in odd {
                    lines[pairs.len()][row * 4..][..2].copy_from_slice(&last.to_bits().to_le_bytes());
                }
            }
        }
        (Weights::Int { codes, scales }, Some(row)) if row.scales == Scales::Zeros => {
            let group_size = layout.precision.group_size().unwrap_or(layout.k);
            // The smallest code of a group is stored as 0, if it is negative.
            let zero = |codes: &[i8]| codes.iter().map(|code| -i32::from(*code)).fold(0, i32::max) as i8;
            let zeros: Vec<i8> = codes.chunks_exact(group_size).map(zero).collect();
            let groups = codes.chunks_exact(group_size).zip(&zeros);
            let shifted: Vec<i8> = groups.flat_map(|(codes, zero)| codes.iter().map(move |code| code + zero)).collect();
            assert!(shifted.iter().all(|&code| (0..16).contains(&code)), "codes of a group span more than 4 bits");
            let (records, lines) = out.split_at_mut(layout.scale_bytes());
            records.fill(0);
            let of_row = layout.k / group_size;
            for (i, (&scale, &zero)) in scales.iter().zip(&zeros).enumerate() {
                let (row_number, record) = (i / of_row, &mut records[row.scales.at(i % of_row, group_size).0..]);
                let bits = layout.precision.scales().to_bits(scale) as u16;
                record[2 * row_number..][..2].copy_from_slice(&bits.to_le_bytes());
                record[2 * TILE_ROWS + row_number] = zero as u8;
            }
            pack_codes(layout.k, row.codes, &shifted, lines);
        }
        (Weights::Int { codes, scales }, Some(row)) if row.scales.are_single() => {
            let lines = pack_scales(layout, scales, out);
            pack_codes(layout.k, row.codes, codes, lines);
        }
        (Weights::Blocks(blocks, rows), Some(row)) if !row.scales.are_single() => {
            let lines = pack_counts(layout, row, blocks, rows.clone(), out);
            match row.codes {
                CodeType::Grid(grid) => {
                    let words = layout.k / SUPER_BLOCK * grid.words();
                    pack_words(words, &blocks.words[rows.start * words..rows.end * words], lines);
                }
                codes => pack_codes(layout.k, codes, &blocks.codes[rows.start * layout.k..rows.end * layout.k], lines),
            }
        }
        _ => panic!("weights of another kind than {}", layout.precision),
    }
}

/// Writes the scales of a tile and returns the place of its codes.
fn pack_scales<'o>(layout: &MatrixLayout, scales: &[f32], out: &'o mut [u8]) -> &'o mut [u8] {
    let (bytes, codes) = out.split_at_mut(layout.scale_bytes());
    bytes.fill(0);
    let (scale_type, groups) =
        (layout.precision.scales(), layout.k / layout.precision.group_size().unwrap_or(layout.k));
    for (row, scales) in scales.chunks_exact(groups).enumerate() {
        for (group, &scale) in scales.iter().enumerate() {
            let (at, size) = ((group * TILE_ROWS + row) * scale_type.bytes(), scale_type.bytes());
            bytes[at..][..size].copy_from_slice(&scale_type.to_bits(scale).to_le_bytes()[..size]);
        }
    }
    codes
}

/// As [`pack_scales`], where they are not plain.
fn pack_counts<'o>(
    layout: &MatrixLayout,
    Row { scales, .. }: Row,
    blocks: &Blocks,
    rows: std::ops::Range<usize>,
    out: &'o mut [u8],
) -> &'o mut [u8] {
    let (bytes, codes) = out.split_at_mut(layout.scale_bytes());
    bytes.fill(0);
    let group_size = layout.precision.group_size().unwrap_or(layout.k);
    let groups = layout.k / group_size;
    for (row, source) in rows.enumerate() {
        if scales == Scales::E4m3 {
            let head = f32_of(&blocks.heads, source).to_le_bytes();
            bytes[4 * row..][..4].copy_from_slice(&head);
            for group in 0..groups {
                bytes[scales.at(group, group_size).0 + row] = blocks.counts[source * groups + group];
            }
            continue;
        }
        if let Scales::Odd { counts, .. } = scales {
            let heads = blocks.heads.chunks_exact(layout.k / SUPER_BLOCK).nth(source).unwrap_or_default();
            for (i, head) in heads.iter().enumerate() {
                let (_, at) = scales.at(i * (SUPER_BLOCK / group_size), group_size);
                bytes[at + 2 * row..][..2].copy_from_slice(&head.to_le_bytes());
            }
            for group in (0..groups).filter(|_| counts.bits() > 0) {
                let (at, count) = (scales.at(group, group_size).0, blocks.counts[source * groups + group]);
                match counts {
                    Counts::Apart(4) => bytes[at + row % 8] |= count << (row / 8 * 4),
                    _ => (0..3).for_each(|bit| bytes[at + 2 * bit + row / 8] |= (count >> bit & 1) << (row % 8)),
                }
            }
            continue;
        }
        let mut put = |at: usize, bits: u16| bytes[at + 2 * row..][..2].copy_from_slice(&bits.to_le_bytes());
        let Scales::Counted { bits, offsets, .. } = scales else {
            for group in 0..groups {
                let (at, _) = scales.at(group, group_size);
                let [scale, offset] = blocks.heads.as_chunks::<2>().0[source * groups + group];
                put(at, scale);
                put(at + 2 * TILE_ROWS, offset);
            }
            continue;
        };
        let numbers = 1 + usize::from(offsets);
        let heads = blocks.heads.chunks_exact(numbers).skip(source * layout.k / SUPER_BLOCK);
        for (i, heads) in heads.take(layout.k / SUPER_BLOCK).enumerate() {
            let (_, at) = scales.at(i * (SUPER_BLOCK / group_size), group_size);
            heads.iter().enumerate().for_each(|(j, &head)| put(at + j * 2 * TILE_ROWS, head));
        }
        for group in 0..groups {
            let record = &mut bytes[scales.at(group, group_size).0..];
            let count = blocks.counts[source * groups + group];
            let offset = if offsets { blocks.offsets[source * groups + group] } else { 0 };
            match (bits, offsets) {
                (8, _) => record[row] = count,
                (6, true) => {
                    record[row] = count | offset << 6;
                    record[TILE_ROWS + row % 8] |= offset >> 2 << (row / 8 * 4);
                }
                (6, false) => {
                    record[row % 8] |= (count & 15) << (row / 8 * 4);
                    record[8 + row % 4] |= count >> 4 << (row / 4 * 2);
                }
                _ => record[row] = count | offset << 4,
            }
        }
    }
    codes
}

/// What a group counts of its super-block's numbers: of `d`, its zero added, and of `dmin`.
fn unpack_counts(bits: u8, offsets: bool, record: &[u8], row: usize) -> (u8, u8) {
    let upper = |at: usize| record[at + row % 8] >> (row / 8 * 4) & 15;
    match (bits, offsets) {
        (8, _) => (record[row], 0),
        (6, true) => (record[row] & 63, record[row] >> 6 | upper(TILE_ROWS) << 2),
        (6, false) => (upper(0) | (record[8 + row % 4] >> (row / 4 * 2) & 3) << 4, 0),
        _ => (record[row] & 15, record[row] >> 4),
    }
}

/// Writes the words of up to 16 rows, `words` of each; of the others they are zero.
fn pack_words(words: usize, rows: &[u32], lines: &mut [u8]) {
    lines.fill(0);
    let (lines, _) = lines.as_chunks_mut::<64>();
    for (row, all) in rows.chunks_exact(words).enumerate() {
        for (line, word) in lines.iter_mut().zip(all) {
            line[4 * row..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Writes the codes of up to 16 rows; of the others they are zero.
fn pack_codes(k: usize, code_type: CodeType, codes: &[i8], lines: &mut [u8]) {
    lines.fill(0);
    if !codes.len().is_multiple_of(TILE_ROWS * k) {
        // Their scales are zero; what they are does not matter, but they shall be the same ones always.
        let zeros = vec![0; (TILE_ROWS - codes.len() / k) * k];
        if code_type.table().is_none_or(|table| table.contains(&0)) {
            pack_rows_of_codes(k, codes.len() / k, code_type, &zeros, lines);
        }
    }
    pack_rows_of_codes(k, 0, code_type, codes, lines);
}

fn pack_rows_of_codes(k: usize, first: usize, code_type: CodeType, codes: &[i8], lines: &mut [u8]) {
    match code_type {
        CodeType::Grid(_) => panic!("codes of a grid are packed as words"),
        CodeType::E4m3 => pack_runs::<8>(k, first, codes, lines, |word| word),
        // Adding 128 to an i8 is flipping its highest bit.
        CodeType::Int { bits: 8, .. } => pack_runs::<8>(k, first, codes, lines, |word| word ^ 0x8080_8080),
        CodeType::Int { bits, zero } => {
            // Bytes that do not carry into each other.
            let (zeros, mask) = (u32::from(zero) * 0x0101_0101, ((1u32 << bits) - 1) * 0x0101_0101);
            let stored = |word: u32| (word & 0x7f7f_7f7f).wrapping_add(zeros) & mask;
            match bits {
                2 => pack_runs::<2>(k, first, codes, lines, stored),
                3 => pack_runs::<3>(k, first, codes, lines, stored),
                4 => pack_runs::<4>(k, first, codes, lines, stored),
                5 => pack_runs::<5>(k, first, codes, lines, stored),
                6 => pack_runs::<6>(k, first, codes, lines, stored),
                other => unreachable!("codes of {other} bits"),
            }
        }
        CodeType::E2m1 | CodeType::Iq4 => {
            let mut bits = [u8::MAX; 256];
            for &code in code_type.table().into_iter().flatten() {
                bits[usize::from(code as u8)] = code_type.stored(code);
            }
            pack_runs::<4>(k, first, codes, lines, |word| {
                let stored = word.to_le_bytes().map(|code| bits[usize::from(code)]);
                assert!(stored.iter().all(|&bits| bits < 16), "codes that are not in the table of {code_type:?}");
                u32::from_le_bytes(stored)
            });
        }
    }
}

/// Writes the codes of rows from `first` on, `stored` making of 4 codes what is stored for them.
fn pack_runs<const BITS: usize>(k: usize, first: usize, codes: &[i8], lines: &mut [u8], stored: impl Fn(u32) -> u32) {
    const RUNS: usize = 8; // of 4 inputs in a block
    for (row, codes) in (first..).zip(codes.chunks_exact(k)) {
        for (block, codes) in lines.chunks_exact_mut(BITS * 64).zip(codes.as_chunks::<32>().0) {
            let mut runs = [0u32; RUNS];
            for (run, codes) in runs.iter_mut().zip(codes.as_chunks::<4>().0) {
                *run = stored(u32::from_le_bytes(bytemuck::cast(*codes)));
            }
            let mut line = 0;
            let mut put = |word: u32| {
                block[line * 64 + row * 4..][..4].copy_from_slice(&word.to_le_bytes());
                line += 1;
            };
            // Bits from `from` on of some runs, `bits` of each, in one word.
            let some = |runs: &[u32], from: usize, bits: usize| {
                let mask = (0xff >> (8 - bits)) * 0x0101_0101;
                runs.iter().enumerate().fold(0, |word, (i, run)| word | (run >> from & mask) << (i * bits))
            };
            for half in runs.as_chunks::<{ RUNS / 2 }>().0 {
                match BITS {
                    8 => half.iter().for_each(|&run| put(run)),
                    4 | 5 => half.as_chunks::<2>().0.iter().for_each(|runs| put(some(runs, 0, 4))),
                    6 => {
                        half.as_chunks::<2>().0.iter().for_each(|runs| put(some(runs, 0, 4)));
                        put(some(half, 4, 2));
                    }
                    _ => put(some(half, 0, 2)),
                }
            }
            if BITS % 2 == 1 {
                put(some(&runs, BITS - 1, 1));
            }
        }
    }
}

/// The weights `[n, k]` of a packed matrix, dequantized. Slow. Panics: `bytes` does not fit `layout` (a bug).
pub fn unpack_matrix(layout: &MatrixLayout, bytes: &[u8]) -> Vec<f32> {
    assert_eq!(bytes.len(), layout.bytes(), "bytes");
    let tile_bytes = layout.tile_bytes();
    unpack_tiles(layout, |i| &bytes[i * tile_bytes..][..tile_bytes])
}

/// `gate`, `up` and `down` of a packed expert, dequantized. Slow. Panics: `bytes` does not fit `layout` (a bug).
pub fn unpack_expert(layout: &ExpertLayout, bytes: &[u8]) -> [Vec<f32>; 3] {
    assert_eq!(bytes.len(), layout.bytes(), "bytes");
    let (gate_tile, down_tile) = (layout.gate.tile_bytes(), layout.down.tile_bytes());
    [
        unpack_tiles(&layout.gate, |i| &bytes[layout.gate_tile(i)..][..gate_tile]),
        unpack_tiles(&layout.gate, |i| &bytes[layout.up_tile(i)..][..gate_tile]),
        unpack_tiles(&layout.down, |i| &bytes[layout.down_tile(i)..][..down_tile]),
    ]
}

fn unpack_tiles<'a>(layout: &MatrixLayout, tile: impl Fn(usize) -> &'a [u8]) -> Vec<f32> {
    let mut out = Vec::with_capacity(layout.n * layout.k);
    for row in 0..layout.n {
        let tile = tile(row / TILE_ROWS);
        out.extend((0..layout.k).map(|input| unpack_weight(layout, tile, row % TILE_ROWS, input)));
    }
    out
}

/// The weight of one row and input of a tile, by the definition of the layout.
fn unpack_weight(layout: &MatrixLayout, tile: &[u8], row: usize, input: usize) -> f32 {
    let bits_at = |at: usize| u16::from_le_bytes([tile[at], tile[at + 1]]);
    let (Some(row_kind), Some(group_size)) = (layout.precision.row(), layout.precision.group_size()) else {
        return bf16::from_bits(bits_at(input / 2 * 64 + row * 4 + input % 2 * 2)).to_f32();
    };
    let code = unpack_code(row_kind.codes, &tile[layout.scale_bytes()..], row, input);
    let (scale, offset) = unpack_scale(layout, tile, row, input / group_size);
    let value = row_kind.codes.value(code);
    if row_kind.scales.have_offsets() { scale * value + offset } else { scale * value }
}

/// Scale and offset of a group of one row of a tile, by the definition of the layout; exact. Panics: a precision
/// without codes (a bug).
pub fn unpack_scale(layout: &MatrixLayout, tile: &[u8], row: usize, group: usize) -> (f32, f32) {
    let (Some(Row { scales, .. }), Some(group_size)) = (layout.precision.row(), layout.precision.group_size()) else {
        panic!("{} has no scales", layout.precision)
    };
    let (at, head) = scales.at(group, group_size);
    let number = |at: usize| u16::from_le_bytes([tile[at + 2 * row], tile[at + 2 * row + 1]]);
    let half = |at: usize| f16::from_bits(number(at)).to_f32();
    let float = |at: usize| tile[at + 4 * row..].first_chunk().map_or(0.0, |bytes| f32::from_le_bytes(*bytes));
    match scales {
        Scales::Plain => (layout.precision.scales().from_bits(number(at).into()), 0.0),
        Scales::Wide => (float(at), 0.0),
        Scales::Zeros => {
            let scale = layout.precision.scales().from_bits(number(at).into());
            (scale, -(scale * f32::from(tile[at + 2 * TILE_ROWS + row])))
        }
        Scales::E4m3 => (E4M3[usize::from(tile[at + row])] * float(head), 0.0),
        Scales::WithOffset => (half(at), half(at + 2 * TILE_ROWS)),
        Scales::Odd { halvings, counts } => {
            let lines = &tile[layout.scale_bytes()..];
            let count = match (counts, layout.precision.codes()) {
                (Counts::Within, Some(CodeType::Grid(grid))) => {
                    let blocks = SUPER_BLOCK / group_size;
                    grid.count(|word| word_of(lines, group / blocks * grid.words() + word, row), group % blocks)
                }
                (Counts::Apart(4), _) => tile[at + row % 8] >> (row / 8 * 4) & 15,
                (Counts::Apart(_), _) => {
                    (0..3).fold(0, |count, bit| count | (tile[at + 2 * bit + row / 8] >> (row % 8) & 1) << bit)
                }
                _ => 0,
            };
            (odd_scale(half(head), count, halvings), 0.0)
        }
        Scales::Counted { bits, zero, offsets } => {
            let (count, offset) = unpack_counts(bits, offsets, &tile[at..], row);
            let scale = half(head) * f32::from(i16::from(count) - i16::from(zero));
            (scale, if offsets { -(half(head + 2 * TILE_ROWS) * f32::from(offset)) } else { 0.0 })
        }
    }
}

/// The word of one row in line `line`.
fn word_of(lines: &[u8], line: usize, row: usize) -> u32 {
    lines[64 * line + 4 * row..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// The code of one row and input of a tile, of which `lines` are what follows the scales, by the definition of the
/// layout.
pub fn unpack_code(codes: CodeType, lines: &[u8], row: usize, input: usize) -> i8 {
    if let CodeType::Grid(grid) = codes {
        let first = input / SUPER_BLOCK * grid.words();
        return grid.code(|word| word_of(lines, first + word, row), input % SUPER_BLOCK);
    }
    let bits = codes.bits();
    let block = &lines[input / 32 * bits * 64..];
    // Of line `line`, which holds `bits` of each of a run of codes, those of run `run`.
    let some = |line: usize, run: usize, bits: usize| {
        block[line * 64 + row * 4 + input % 4] >> (run % (8 / bits) * bits) & (0xff >> (8 - bits)) as u8
    };
    let (half, run) = (input / 16 % 2, input / 4 % 4); // of the block, of the half
    let even = bits / 2 * 2;
    let first = half * even / 2;
    let stored = match even {
        8 => some(first + run, 0, 8),
        6 => some(first + run / 2, run, 4) | some(first + 2, run, 2) << 4,
        4 => some(first + run / 2, run, 4),
        _ => some(first, run, 2),
    };
    codes.code(if bits == even { stored } else { stored | some(even, 4 * half + run, 1) << even })
}
