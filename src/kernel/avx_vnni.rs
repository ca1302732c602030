//! Tiles of codes with VNNI in 256 bits, for processors that have it without AVX-512; the rest is AVX2's.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::activations::CODES as BLOCK;
use super::avx2::{self, grid_runs, lookup, runs, scales8, sums};
use super::tiles::{INTEGER_ROWS, Scales, To, bias, by_row, half_lines, is_grid, row, step, table};
use super::unpacked::{add_vnni, each_part, four};
use super::{ActivationRows, Kernel, Rows, Simd, Start, Tiles, check_dot, shared};

/// Exists only where [`detect`] found the features: that is what every call below relies on.
struct AvxVnni;

pub(super) fn detect() -> Option<&'static dyn Kernel> {
    (avx2::is_here() && is_x86_feature_detected!("avxvnni")).then_some(&AvxVnni as &dyn Kernel)
}

impl Kernel for AvxVnni {
    fn simd(&self) -> Simd {
        Simd::AvxVnni
    }

    fn split_words(&self) -> usize {
        2 * BF16_INPUTS
    }

    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, x: &ActivationRows<'_>, start: Start, out: &mut [f32]) {
        let count = x.check(self, layout, tiles, out);
        let to = To { start, stride: count * TILE_ROWS, stream: tiles.stream(layout, x.len()) };
        // SAFETY: the features were detected; `check` has seen to the tiles, the activations and `out`.
        unsafe {
            match layout.precision.row_number() {
                Some(row @ ..INTEGER_ROWS) if x.len() >= avx2::least_tokens(row, x.group) => {
                    by_row!(row, many_tokens[](layout, tiles.bytes, x, out, to))
                }
                _ => avx2::each_block(layout, tiles, x, out, to, |scales, lines, x, out, to| {
                    avx2::by_precision!(layout.precision, block, scales, lines, x, out, to)
                }),
            }
        }
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        check_dot(&w, &x, out);
        // SAFETY: the features were detected; `Rows` keeps its rows inside its slice.
        unsafe { avx2::dot(w, x, out) }
    }

    shared::elementwise! { "avx2,fma"; fn split(&self, x: &[f32], out: &mut [f32]); }
    shared::elementwise!("avx2,fma");
}

/// Tokens of a block: two sums each in registers, and two that wait in memory for the end of a group.
const MOST_TOKENS: usize = 4;

/// Many tokens through some tiles, which are unpacked once for all.
///
/// # Safety
/// AVX2, FMA, F16C and VNNI in 256 bits; what `ActivationRows::check` promises.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn many_tokens<const ROW: usize>(
    layout: &MatrixLayout,
    tiles: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    each_part::<1>(
        (layout, tiles),
        x,
        (MOST_TOKENS, bias(ROW)),
        out,
        to,
        // SAFETY: as promised to this function.
        |scales, lines, inputs, unpacked| unsafe { avx2::unpack_part::<ROW>(scales, lines, inputs, false, unpacked) },
        |part, x, out, to| {
            // SAFETY: as promised to this function; the part is unpacked.
            unsafe {
                match (x.len(), row(ROW).scales.have_offsets()) {
                    (..=3, false) => add_vnni::<3, false, 0>(part, x, out, to),
                    (..=3, true) => add_vnni::<3, true, 0>(part, x, out, to),
                    (_, false) => add_vnni::<MOST_TOKENS, false, 0>(part, x, out, to),
                    (_, true) => add_vnni::<MOST_TOKENS, true, 0>(part, x, out, to),
                }
            }
        },
    );
}

/// `T` tokens through one tile: `vpdpbusd` takes the weights as they lie, unsigned, and the bias is taken off with the
/// codes' sum.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn block<const ROW: usize, const T: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    let groups = x.k / x.group;
    let values = lookup(const { table(row(ROW).codes, bias(ROW)) });
    let codes = x.codes_of::<T>();
    let mut weights = lines.as_ptr();
    // The lines that prefetching from the first code on would step over.
    let first = weights.wrapping_sub(scales.bytes.len());
    to.stream.from(first).prefetch(first, scales.bytes.len() / 64);
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for g in 0..groups {
        let ahead = to.stream.from(weights);
        let mut dot = [[[_mm256_setzero_si256(); 2]; 2]; T]; // [token][half of the rows][chain]
        if bias(ROW) != 0 {
            for t in 0..T {
                for upper in 0..2 {
                    dot[t][upper][0] = _mm256_set1_epi32(-bias(ROW) * x.sum(g, t));
                }
            }
        }
        for k in (g * x.group..(g + 1) * x.group).step_by(16) {
            let (half, at) = (k / 16 % 2, k / BLOCK * x.stride * BLOCK + k % BLOCK);
            ahead.prefetch(weights, half_lines(ROW, half));
            for upper in 0..2 {
                // SAFETY: 16 inputs of 16 rows, inside the tile whose length was checked.
                let w = unsafe {
                    match is_grid(ROW) {
                        true => grid_runs::<ROW>(lines.as_ptr(), k, upper, values),
                        false => runs::<ROW>(weights, half, upper, values),
                    }
                };
                for j in 0..4 {
                    for t in 0..T {
                        // SAFETY: 4 codes of the 16 inputs from k on.
                        let a = unsafe { four(codes[t].add(at + 4 * j)) };
                        dot[t][upper][j % 2] = _mm256_dpbusd_avx_epi32(dot[t][upper][j % 2], w[j], a);
                    }
                }
            }
            weights = weights.wrapping_add(step(ROW, half));
        }
        for upper in 0..2 {
            // SAFETY: the scales of group `g`, before `lines`.
            let [w_scale, w_offset] = unsafe { scales8::<ROW>(scales, g, upper) };
            for t in 0..T {
                let sum = _mm256_add_epi32(dot[t][upper][0], dot[t][upper][1]);
                let scale = _mm256_mul_ps(w_scale, _mm256_set1_ps(x.scale(g, t)));
                acc[t][upper] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc[t][upper]);
                if row(ROW).scales.have_offsets() {
                    acc[t][upper] = _mm256_fmadd_ps(w_offset, _mm256_set1_ps(x.total(g, t)), acc[t][upper]);
                }
            }
        }
    }
    for t in 0..T {
        let out = &mut out[t * to.stride..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), acc[t][0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), acc[t][1]);
        }
    }
}
