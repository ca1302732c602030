//! Weights into their packed order, and back.
//!
//! Packing is fast, because every conversion does it; unpacking follows the definition byte by byte, because tests
//! believe it.

use half::bf16;

use super::{CodeType, ExpertLayout, MatrixLayout, TILE_ROWS};

/// Row-major weights of a matrix `[n, k]`, or of some of its rows.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// For `Precision::Bf16`: `[n, k]`.
    Bf16(&'a [bf16]),
    /// For the others.
    Int {
        /// `[n, k]`, -128..=127 for INT8, -8..=7 for INT4, of [`DOUBLED_E2M1`](super::DOUBLED_E2M1) for MXFP4.
        codes: &'a [i8],
        /// `[n, k / group_size]`, rounded to the precision's type.
        scales: &'a [f32],
    },
}

impl<'a> Weights<'a> {
    /// Rows `from..from + count`.
    fn rows(self, layout: &MatrixLayout, from: usize, count: usize) -> Self {
        let part = |per_row: usize| from * per_row..(from + count) * per_row;
        match self {
            Weights::Bf16(weights) => Weights::Bf16(&weights[part(layout.k)]),
            Weights::Int { codes, scales } => {
                Weights::Int { codes: &codes[part(layout.k)], scales: &scales[part(scales.len() / layout.n)] }
            }
        }
    }
}

/// Packs a whole matrix. Panics: a length does not fit `layout` (a bug).
pub fn pack_matrix(layout: &MatrixLayout, weights: Weights<'_>, out: &mut [u8]) {
    assert_eq!(out.len(), layout.bytes(), "out");
    for (i, tile) in out.chunks_exact_mut(layout.tile_bytes()).enumerate() {
        pack_rows(layout, weights, i, tile);
    }
}

/// Packs a whole expert: `gate` and `up` `[intermediate, hidden]`, `down` `[hidden, intermediate]`.
/// Panics: a length does not fit `layout` (a bug).
pub fn pack_expert(layout: &ExpertLayout, gate: Weights<'_>, up: Weights<'_>, down: Weights<'_>, out: &mut [u8]) {
    assert_eq!(out.len(), layout.bytes(), "out");
    let (gate_tile, down_tile) = (layout.gate.tile_bytes(), layout.down.tile_bytes());
    for i in 0..layout.gate.tiles() {
        pack_rows(&layout.gate, gate, i, &mut out[layout.gate_tile(i)..][..gate_tile]);
        pack_rows(&layout.gate, up, i, &mut out[layout.up_tile(i)..][..gate_tile]);
    }
    for i in 0..layout.down.tiles() {
        pack_rows(&layout.down, down, i, &mut out[layout.down_tile(i)..][..down_tile]);
    }
    out[layout.down_tile(layout.down.tiles())..].fill(0);
}

fn pack_rows(layout: &MatrixLayout, weights: Weights<'_>, tile: usize, out: &mut [u8]) {
    let from = tile * TILE_ROWS;
    pack_tile(layout, weights.rows(layout, from, TILE_ROWS.min(layout.n - from)), out);
}

/// Packs the rows of one tile, 16 or, in the last tile, fewer. Panics: a length does not fit `layout` (a bug).
pub(crate) fn pack_tile(layout: &MatrixLayout, rows: Weights<'_>, out: &mut [u8]) {
    assert_eq!(out.len(), layout.tile_bytes(), "tile");
    match (rows, layout.precision.codes()) {
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
        (Weights::Int { codes, scales }, Some(code_type)) => {
            let lines = pack_scales(layout, scales, out);
            lines.fill(code_type.zero_byte());
            match code_type {
                // Adding 128 to an i8 is flipping its highest bit.
                CodeType::Int8 => pack_codes::<4>(layout.k, codes, lines, |&codes| {
                    u32::from_le_bytes(bytemuck::cast(codes)) ^ 0x8080_8080
                }),
                // Adding 8 to a code of 4 bits is flipping the highest of them.
                CodeType::Int4 => pack_codes::<8>(layout.k, codes, lines, |codes| {
                    let word = u64::from_le_bytes(bytemuck::cast(*codes)) & 0x0f0f_0f0f_0f0f_0f0f;
                    (word as u32 | (word >> 32 << 4) as u32) ^ 0x8888_8888
                }),
                CodeType::E2m1 => pack_codes::<8>(layout.k, codes, lines, |codes| {
                    (0..4).fold(0, |word, j| word | (e2m1(codes[j]) | e2m1(codes[j + 4]) << 4) << (8 * j))
                }),
            }
        }
        _ => panic!("weights of another kind than {}", layout.precision),
    }
}

/// The four bits of E2M1 that stand for half of a code. Panics: there are none (a bug).
fn e2m1(code: i8) -> u32 {
    /// By magnitude; 16 is none.
    const BITS: [u8; 13] = [0, 1, 2, 3, 4, 16, 5, 16, 6, 16, 16, 16, 7];
    let bits = BITS.get(code.unsigned_abs() as usize).copied().unwrap_or(16);
    assert!(bits < 16, "{code} is not twice a number of E2M1");
    u32::from(bits) | u32::from(code < 0) << 3
}

/// Writes the scales of a tile and returns the place of its codes.
fn pack_scales<'o>(layout: &MatrixLayout, scales: &[f32], out: &'o mut [u8]) -> &'o mut [u8] {
    let (bytes, codes) = out.split_at_mut(layout.scale_bytes());
    bytes.fill(0);
    let (scale_type, groups) =
        (layout.precision.scales(), layout.k / layout.precision.group_size().unwrap_or(layout.k));
    for (row, scales) in scales.chunks_exact(groups).enumerate() {
        for (group, &scale) in scales.iter().enumerate() {
            bytes[(group * TILE_ROWS + row) * 2..][..2].copy_from_slice(&scale_type.to_bits(scale).to_le_bytes());
        }
    }
    codes
}

/// Writes each row's runs of `N` codes, `word` making four bytes of a run, to their places: run `c` of row `r` is word
/// `16 c + r`.
fn pack_codes<const N: usize>(k: usize, codes: &[i8], lines: &mut [u8], word: impl Fn(&[i8; N]) -> u32) {
    let (lines, _) = lines.as_chunks_mut::<64>();
    for (row, codes) in codes.chunks_exact(k).enumerate() {
        for (line, run) in lines.iter_mut().zip(codes.as_chunks::<N>().0) {
            line[row * 4..][..4].copy_from_slice(&word(run).to_le_bytes());
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
    let (Some(codes), Some(group_size)) = (layout.precision.codes(), layout.precision.group_size()) else {
        return bf16::from_bits(bits_at(input / 2 * 64 + row * 4 + input % 2 * 2)).to_f32();
    };
    let code = unpack_code(codes, &tile[layout.scale_bytes()..], row, input);
    layout.precision.scales().from_bits(bits_at((input / group_size * TILE_ROWS + row) * 2)) * code as f32
}

/// The code of one row and input of a tile, of which `lines` are what follows the scales, by the definition of the
/// layout.
pub fn unpack_code(codes: CodeType, lines: &[u8], row: usize, input: usize) -> i8 {
    let stored = match codes {
        CodeType::Int8 => lines[(input / 4 * TILE_ROWS + row) * 4 + input % 4],
        CodeType::Int4 | CodeType::E2m1 => {
            let byte = lines[(input / 8 * TILE_ROWS + row) * 4 + input % 4];
            if input % 8 < 4 { byte & 15 } else { byte >> 4 }
        }
    };
    codes.code(stored)
}
