//! Tiles of codes with VNNI in 256 bits, for processors that have it without AVX-512; the rest is AVX2's.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::activations::CODES as BLOCK;
use super::avx2::{self, e2m1_lookup, four, scales8, sums};
use super::tiles::codes::{INT8, MXFP4};
use super::tiles::{Scales, To, bias, e2m1_table};
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
        avx2::each_block(layout, tiles, x, start, out, count, |scales, lines, x, out, to| {
            // SAFETY: the features were detected; `check` has seen to the tiles, the activations and `out`.
            unsafe { avx2::by_precision!(layout.precision, block, scales, lines, x, out, to) }
        });
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        check_dot(&w, &x, out);
        // SAFETY: the features were detected; `Rows` keeps its rows inside its slice.
        unsafe { avx2::dot(w, x, out) }
    }

    shared::elementwise! { "avx2,fma"; fn split(&self, x: &[f32], out: &mut [f32]); }
    shared::elementwise!("avx2,fma");
}

/// `T` tokens through one tile: `vpdpbusd` takes the weights as they lie, unsigned, and the bias is taken off with the
/// codes' sum.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn block<const CODES: u8, const T: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    let groups = x.k / x.group;
    let nibble = _mm256_set1_epi8(15);
    let table = e2m1_lookup(e2m1_table(bias(MXFP4) as i8));
    let codes = x.codes_of::<T>();
    let mut weights = lines.as_ptr();
    // The lines that prefetching from the first code on would step over.
    let first = weights.wrapping_sub(scales.bytes.len());
    to.stream.from(first).prefetch(first, scales.bytes.len() / 64);
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for g in 0..groups {
        let ahead = to.stream.from(weights);
        let mut dot = [[[_mm256_setzero_si256(); 2]; 2]; T]; // [token][half][chain]
        for t in 0..T {
            for half in 0..2 {
                dot[t][half][0] = _mm256_set1_epi32(-bias(CODES) * x.sum(g, t));
            }
        }
        for k in (g * x.group..(g + 1) * x.group).step_by(16) {
            let at = k / BLOCK * x.stride * BLOCK + k % BLOCK;
            // 16 inputs: 4 lines of INT8, 2 of the others.
            ahead.prefetch(weights, if CODES == INT8 { 4 } else { 2 });
            for j in 0..4 {
                for half in 0..2 {
                    let line = if CODES == INT8 { j } else { j / 2 };
                    // SAFETY: 16 inputs of 16 rows are 2 or 4 lines of 64 bytes, inside the tile whose length was
                    // checked.
                    let w = unsafe { _mm256_loadu_si256(weights.add(64 * line + 32 * half).cast()) };
                    let w = match (CODES, j % 2) {
                        (INT8, _) => w,
                        (_, 0) => _mm256_and_si256(w, nibble),
                        _ => _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble),
                    };
                    let w = if CODES == MXFP4 { _mm256_shuffle_epi8(table, w) } else { w };
                    for t in 0..T {
                        // SAFETY: 4 codes of the 16 inputs from k on.
                        let a = unsafe { four(codes[t].add(at + 4 * j)) };
                        dot[t][half][j % 2] = _mm256_dpbusd_avx_epi32(dot[t][half][j % 2], w, a);
                    }
                }
            }
            weights = weights.wrapping_add(if CODES == INT8 { 256 } else { 128 });
        }
        for half in 0..2 {
            // SAFETY: a group has 16 scales of 2 bytes, before `lines`.
            let w_scale = unsafe { scales8(scales, g * 32 + half * 16) };
            for t in 0..T {
                let sum = _mm256_add_epi32(dot[t][half][0], dot[t][half][1]);
                let scale = _mm256_mul_ps(w_scale, _mm256_set1_ps(x.scale(g, t)));
                acc[t][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc[t][half]);
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
