//! Rows of f32 to integer codes with one bf16 scale per group.
//!
//! ```text
//! for each group:  for each candidate scale:  q = round(w / s), keep the s whose best refit leaves the least squared error
//!                  s = sum(w q) / sum(q q), rounded to bf16;  q = round(w / s)
//! ```
//!
//! With the codes fixed, the best scale is `sum(w q) / sum(q q)` and leaves `sum(w w) - sum(w q)^2 / sum(q q)`: candidates
//! are compared by the last term alone. The largest-value scale is always among the results compared at the end, so the search
//! never loses to it.

use half::bf16;

use crate::pack::{ExpertLayout, MatrixLayout, Precision, TILE_ROWS, Weights, pack_tile};
use crate::simd::multiversion;

/// Lanes of all sums; fixed, so that every machine gets the same bits.
const LANES: usize = 16;

/// Room for one tile of codes and scales, reused from tile to tile.
#[derive(Default)]
pub struct Scratch {
    codes: Vec<i8>,
    scales: Vec<bf16>,
    weights: Vec<bf16>,
}

/// Quantizes and packs the rows of one tile, 16 or, in the last tile, fewer: `rows` [<= 16, k], finite.
/// Panics: a length does not fit `layout` (a bug).
pub fn quantize_tile(layout: &MatrixLayout, rows: &[f32], scratch: &mut Scratch, out: &mut [u8]) {
    assert!(rows.len().is_multiple_of(layout.k) && rows.len() <= TILE_ROWS * layout.k, "rows");
    let Some(group_size) = layout.precision.group_size() else {
        scratch.weights.resize(rows.len(), bf16::ZERO);
        round_to_bf16(rows, &mut scratch.weights);
        return pack_tile(layout, Weights::Bf16(&scratch.weights), out);
    };
    scratch.codes.resize(rows.len(), 0);
    scratch.scales.resize(rows.len() / group_size, bf16::ZERO);
    quantize_rows(layout.precision, rows, &mut scratch.codes, &mut scratch.scales);
    pack_tile(layout, Weights::Int { codes: &scratch.codes, scales: &scratch.scales }, out);
}

/// Quantizes and packs a matrix `[n, k]`. Panics: a length does not fit `layout` (a bug).
pub fn quantize_matrix(layout: &MatrixLayout, weights: &[f32], out: &mut [u8]) {
    assert_eq!((weights.len(), out.len()), (layout.n * layout.k, layout.bytes()), "weights, out");
    let mut scratch = Scratch::default();
    let rows = weights.chunks(TILE_ROWS * layout.k);
    for (rows, tile) in rows.zip(out.chunks_exact_mut(layout.tile_bytes())) {
        quantize_tile(layout, rows, &mut scratch, tile);
    }
}

/// Quantizes and packs an expert: `gate` and `up` `[intermediate, hidden]`, `down` `[hidden, intermediate]`.
/// Panics: a length does not fit `layout` (a bug).
pub fn quantize_expert(layout: &ExpertLayout, gate: &[f32], up: &[f32], down: &[f32]) -> Vec<u8> {
    let mut out = vec![0; layout.bytes()];
    let mut scratch = Scratch::default();
    let gate_bytes = layout.gate.tile_bytes();
    for (weights, place) in [(gate, ExpertLayout::gate_tile as fn(&ExpertLayout, usize) -> usize), (up, ExpertLayout::up_tile)] {
        for (i, rows) in weights.chunks(TILE_ROWS * layout.gate.k).enumerate() {
            quantize_tile(&layout.gate, rows, &mut scratch, &mut out[place(layout, i)..][..gate_bytes]);
        }
    }
    let down_at = layout.down_tile(0);
    quantize_matrix(&layout.down, down, &mut out[down_at..][..layout.down.bytes()]);
    out
}

multiversion!(
    /// Quantizes whole rows, group after group: `weights` [n, k] finite, `codes` [n, k], `scales` [n, k / group_size].
    ///
    /// A group whose largest magnitude is below 2^-100 gets scale 0.
    /// Panics: a length does not fit, or `precision` has no groups (a bug).
    pub fn quantize_rows(precision: Precision, weights: &[f32], codes: &mut [i8], scales: &mut [bf16]) = rows_body
);

multiversion!(
    /// Rounds to nearest, ties to even.
    fn round_to_bf16(weights: &[f32], out: &mut [bf16]) = round_to_bf16_body
);

#[inline(always)]
fn round_to_bf16_body(weights: &[f32], out: &mut [bf16]) {
    for (w, out) in weights.iter().zip(out) {
        *out = round_bf16(*w);
    }
}

/// `bf16::from_f32` of a finite value, without its branches.
#[inline(always)]
fn round_bf16(w: f32) -> bf16 {
    let bits = w.to_bits();
    bf16::from_bits(((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16)
}

#[inline(always)]
fn rows_body(precision: Precision, weights: &[f32], codes: &mut [i8], scales: &mut [bf16]) {
    let group_size = precision.group_size().expect("an integer precision");
    assert_eq!((weights.len(), weights.len()), (codes.len(), scales.len() * group_size), "codes, scales");
    let groups = weights.chunks_exact(group_size).zip(codes.chunks_exact_mut(group_size)).zip(scales);
    match precision {
        Precision::Int4 { .. } => groups.for_each(|((w, q), s)| *s = group_int4(w.as_chunks().0, q.as_chunks_mut().0)),
        _ => groups.for_each(|((w, q), s)| *s = group_int8(w.as_chunks().0, q.as_chunks_mut().0)),
    }
}

type Lanes = [f32; LANES];

/// Magnitudes between which squares and their sums neither overflow nor vanish in f32; outside, the largest value sets the scale.
const SEARCHED: std::ops::Range<f32> = f32::from_bits((127 - 50) << 23)..f32::from_bits((127 + 50) << 23);
const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);

/// What the largest magnitude maps to, for the candidates of INT4: up to 8 it fits, beyond it is cut.
const INT4_CANDIDATES: [f32; 6] = [6.5, 7.0, 7.5, 8.0, 8.5, 9.0];

#[inline(always)]
fn group_int4(w: &[Lanes], codes: &mut [[i8; LANES]]) -> bf16 {
    let largest = largest_magnitude(w);
    if largest < SMALLEST {
        codes.as_flattened_mut().fill(0);
        return bf16::ZERO;
    }
    let plain = round_bf16(largest / 7.0);
    let mut scale = plain;
    if SEARCHED.contains(&largest) {
        let (mut best, mut best_scale) = (-1.0, 0.0);
        for candidate in INT4_CANDIDATES {
            for inverse in [candidate / largest, -candidate / largest] {
                let (wq, qq) = fit::<-8, 7>(w, inverse);
                if wq * wq > best * qq {
                    (best, best_scale) = (wq * wq / qq, wq / qq);
                }
            }
        }
        let refit = round_bf16(best_scale);
        if squared_error::<-8, 7>(w, refit.to_f32()) < squared_error::<-8, 7>(w, plain.to_f32()) {
            scale = refit;
        }
    }
    encode::<-8, 7>(w, scale.to_f32(), codes);
    scale
}

#[inline(always)]
fn group_int8(w: &[Lanes], codes: &mut [[i8; LANES]]) -> bf16 {
    let largest = largest_magnitude(w);
    if largest < SMALLEST {
        codes.as_flattened_mut().fill(0);
        return bf16::ZERO;
    }
    let plain = round_bf16(largest / 127.0);
    let mut scale = plain;
    if SEARCHED.contains(&largest) {
        let (wq, qq) = fit::<-127, 127>(w, 127.0 / largest);
        let refit = round_bf16(wq / qq);
        if squared_error::<-127, 127>(w, refit.to_f32()) < squared_error::<-127, 127>(w, plain.to_f32()) {
            scale = refit;
        }
    }
    encode::<-127, 127>(w, scale.to_f32(), codes);
    scale
}

#[inline(always)]
fn largest_magnitude(w: &[Lanes]) -> f32 {
    let mut largest = [0.0f32; LANES];
    for x in w {
        for i in 0..LANES {
            let a = x[i].abs();
            largest[i] = if a > largest[i] { a } else { largest[i] };
        }
    }
    largest.iter().fold(0.0, |a, &b| if b > a { b } else { a })
}

/// The nearest code, as a float. Adding 1.5 * 2^23 rounds to an integer, ties to even, in one instruction that every set has.
#[inline(always)]
fn code<const MIN: i32, const MAX: i32>(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    let x = if x < MIN as f32 { MIN as f32 } else { x };
    let x = if x > MAX as f32 { MAX as f32 } else { x };
    (x + MAGIC) - MAGIC
}

/// `sum(w q)` and `sum(q q)` for the codes that `1 / inverse` as scale gives.
#[inline(always)]
fn fit<const MIN: i32, const MAX: i32>(w: &[Lanes], inverse: f32) -> (f32, f32) {
    let (mut wq, mut qq) = ([0.0; LANES], [0.0; LANES]);
    for x in w {
        for i in 0..LANES {
            let q = code::<MIN, MAX>(x[i] * inverse);
            wq[i] += x[i] * q;
            qq[i] += q * q;
        }
    }
    (sum(wq), sum(qq))
}

#[inline(always)]
fn squared_error<const MIN: i32, const MAX: i32>(w: &[Lanes], scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    let mut error = [0.0; LANES];
    for x in w {
        for i in 0..LANES {
            let e = x[i] - scale * code::<MIN, MAX>(x[i] * inverse);
            error[i] += e * e;
        }
    }
    sum(error)
}

#[inline(always)]
fn encode<const MIN: i32, const MAX: i32>(w: &[Lanes], scale: f32, codes: &mut [[i8; LANES]]) {
    let inverse = 1.0 / scale;
    for (x, codes) in w.iter().zip(codes) {
        for i in 0..LANES {
            codes[i] = code::<MIN, MAX>(x[i] * inverse) as i32 as i8;
        }
    }
}

/// Pairwise, so that it takes four steps instead of sixteen.
#[inline(always)]
fn sum(mut lanes: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}
