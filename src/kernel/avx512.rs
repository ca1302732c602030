//! AVX-512 with VNNI: 16 rows of a tile are the 16 lanes of one register.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::bf16;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};

use super::shared::{PREFETCH_TOKENS, prefetch};
use super::{Kernel, QuantizedRows, Rows, Simd, check_axpy, check_dot, check_packed, shared};

/// Exists only where [`Avx512::detect`] found the features: that is what every call below relies on.
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<&'static Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma");
        found.then_some(&Self(()))
    }
}

impl Kernel for Avx512 {
    fn simd(&self) -> Simd {
        Simd::Avx512
    }

    fn packed_tile(&self, layout: &MatrixLayout, tile: &[u8], x: &QuantizedRows<'_>, rows: &[u32], out: &mut [f32]) {
        let int4 = check_packed(layout, tile, x, rows, out);
        let (scales, lines) = tile.split_at(layout.scale_bytes());
        let (mut rows, mut out) = (rows, out);
        while !rows.is_empty() {
            // Even blocks: 13 tokens are 7 and 6, not 12 and 1.
            let take = rows.len().div_ceil(rows.len().div_ceil(MAX_TOKENS));
            let (now, out_now);
            (now, rows) = rows.split_at(take);
            (out_now, out) = out.split_at_mut(take * TILE_ROWS);
            // SAFETY: the features were detected; `check_packed` has checked the tile's length and every row.
            unsafe { if int4 { tokens::<true>(scales, lines, x, now, out_now) } else { tokens::<false>(scales, lines, x, now, out_now) } }
        }
    }

    fn dot_bf16(&self, w: Rows<'_, bf16>, x: Rows<'_, f32>, out: &mut [f32]) {
        check_dot(&w, &x, out);
        // SAFETY: the features were detected; `Rows` keeps its rows inside its slice.
        unsafe { dot::<bf16>(w, x, out) }
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        check_dot(&w, &x, out);
        // SAFETY: the features were detected; `Rows` keeps its rows inside its slice.
        unsafe { dot::<f32>(w, x, out) }
    }

    fn axpy_f32(&self, p: Rows<'_, f32>, v: Rows<'_, f32>, out: &mut [f32]) {
        check_axpy(&p, &v, out);
        // SAFETY: the features were detected; `check_axpy` and `Rows` keep every access inside its slice.
        unsafe { axpy(p, v, out) }
    }

    shared::elementwise!("avx512f,avx512bw,avx512vl,avx2,fma");
}

/// Tokens that share one pass over a tile: two accumulators each, and the weights, in 32 registers.
const MAX_TOKENS: usize = 12;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn tokens<const INT4: bool>(scales: &[u8], lines: &[u8], x: &QuantizedRows<'_>, rows: &[u32], out: &mut [f32]) {
    macro_rules! by_count {
        ($($n:literal $chains:literal),*) => {
            match rows.len() {
                // SAFETY: as promised to this function; `rows` has as many entries as the instance takes.
                $($n => unsafe { block::<INT4, $n, $chains>(scales, lines, x, rows, out) },)*
                n => unreachable!("{n} tokens in a block"),
            }
        };
    }
    // Few tokens need several accumulators each to cover the 5 cycles of vpdpbusd; i32 sums are exact in any order.
    by_count!(1 4, 2 4, 3 2, 4 2, 5 1, 6 1, 7 1, 8 1, 9 1, 10 1, 11 1, 12 1)
}

/// `T` tokens through one tile: per group, the line of weights is loaded and unpacked once for all of them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn block<const INT4: bool, const T: usize, const CHAINS: usize>(
    scales: &[u8],
    lines: &[u8],
    x: &QuantizedRows<'_>,
    rows: &[u32],
    out: &mut [f32],
) {
    let groups = x.k / x.group;
    let nibble = _mm512_set1_epi8(15);
    let bias = if INT4 { 8 } else { 128 };
    // Loops, not `array::from_fn`, around intrinsics: a library function has no target features to inline them into.
    let (mut row, mut codes) = ([0; T], [std::ptr::null::<i8>(); T]);
    for t in 0..T {
        row[t] = rows[t] as usize;
        codes[t] = x.codes[row[t] * x.k..][..x.k].as_ptr();
    }
    let mut weights = lines.as_ptr();
    if T <= PREFETCH_TOKENS {
        // The lines that prefetching from the first code on would step over.
        prefetch(weights.wrapping_sub(scales.len()), scales.len() / 64);
    }
    let mut acc = [_mm512_setzero_ps(); T];
    for g in 0..groups {
        let mut dot = [[_mm512_setzero_si512(); CHAINS]; T];
        for t in 0..T {
            dot[t][0] = _mm512_set1_epi32(-bias * x.sums[row[t] * groups + g]);
        }
        for k in (g * x.group..(g + 1) * x.group).step_by(16) {
            if T <= PREFETCH_TOKENS {
                prefetch(weights, if INT4 { 2 } else { 4 });
            }
            // SAFETY: 16 inputs of 16 rows are 2 lines of INT4 or 4 of INT8, inside the tile whose length was checked.
            let line = |i: usize| unsafe { _mm512_loadu_si512(weights.add(64 * i).cast()) };
            let w = if INT4 {
                let (a, b) = (line(0), line(1));
                weights = weights.wrapping_add(128);
                [
                    _mm512_and_si512(a, nibble),
                    _mm512_and_si512(_mm512_srli_epi16(a, 4), nibble),
                    _mm512_and_si512(b, nibble),
                    _mm512_and_si512(_mm512_srli_epi16(b, 4), nibble),
                ]
            } else {
                let w = [line(0), line(1), line(2), line(3)];
                weights = weights.wrapping_add(256);
                w
            };
            for j in 0..4 {
                for t in 0..T {
                    // SAFETY: 4 codes at k + 4j < x.k of a row.
                    let four = unsafe { codes[t].add(k + 4 * j).cast::<i32>().read_unaligned() };
                    let c = j % CHAINS;
                    dot[t][c] = _mm512_dpbusd_epi32(dot[t][c], w[j], _mm512_set1_epi32(four));
                }
            }
        }
        // SAFETY: a group has 16 scales of 2 bytes, before `lines`.
        let w_scale = unsafe { load16(scales.as_ptr().add(g * 32).cast::<bf16>()) };
        for t in 0..T {
            let mut sum = dot[t][0];
            for c in 1..CHAINS {
                sum = _mm512_add_epi32(sum, dot[t][c]);
            }
            let scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(x.scales[row[t] * groups + g]));
            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[t]);
        }
    }
    for t in 0..T {
        let out = &mut out[t * TILE_ROWS..][..TILE_ROWS];
        // SAFETY: 16 floats, as just sliced.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc[t]) };
    }
}

/// A type whose values widen to f32 in a register.
trait Weight: Copy {
    /// # Safety
    /// 16 values to read; AVX-512 F.
    unsafe fn load16(p: *const Self) -> __m512;
    /// # Safety
    /// `n` values to read; AVX-512 F, BW and VL.
    unsafe fn load_first(p: *const Self, n: usize) -> __m512;
}

impl Weight for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load16(p: *const Self) -> __m512 {
        // SAFETY: as promised by the caller.
        let bits = unsafe { _mm256_loadu_si256(p.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn load_first(p: *const Self, n: usize) -> __m512 {
        // SAFETY: masked lanes are not read.
        let bits = unsafe { _mm256_maskz_loadu_epi16((1 << n) - 1, p.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))
    }
}

impl Weight for f32 {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load16(p: *const Self) -> __m512 {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_first(p: *const Self, n: usize) -> __m512 {
        // SAFETY: masked lanes are not read.
        unsafe { _mm512_maskz_loadu_ps((1 << n) - 1, p) }
    }
}

/// # Safety
/// 16 values to read; AVX-512 F, BW and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load16<W: Weight>(p: *const W) -> __m512 {
    // SAFETY: as promised by the caller.
    unsafe { W::load16(p) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn dot<W: Weight>(w: Rows<'_, W>, x: Rows<'_, f32>, out: &mut [f32]) {
    shared::dot_blocks(w.rows, x.rows, x.cols, [4, 6], |r, t, block| {
        // SAFETY: `dot_blocks` stays inside the rows and tokens it was given.
        unsafe {
            match block {
                [4, 6] => dot_block::<W, 4, 6>(&w, &x, r, t, out),
                [4, 3] => dot_block::<W, 4, 3>(&w, &x, r, t, out),
                [4, _] => dot_block::<W, 4, 1>(&w, &x, r, t, out),
                [_, 6] => dot_block::<W, 1, 6>(&w, &x, r, t, out),
                [_, 3] => dot_block::<W, 1, 3>(&w, &x, r, t, out),
                _ => dot_block::<W, 1, 1>(&w, &x, r, t, out),
            }
        }
    });
}

/// `R` rows times `T` tokens in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn dot_block<W: Weight, const R: usize, const T: usize>(w: &Rows<'_, W>, x: &Rows<'_, f32>, r: usize, t: usize, out: &mut [f32]) {
    let (mut ws, mut xs) = ([std::ptr::null::<W>(); R], [std::ptr::null::<f32>(); T]);
    for i in 0..R {
        ws[i] = w.row(r + i).as_ptr();
    }
    for j in 0..T {
        xs[j] = x.row(t + j).as_ptr();
    }
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    let whole = w.cols / 16 * 16;
    for k in (0..whole).step_by(16) {
        let mut x16 = [_mm512_setzero_ps(); T];
        for j in 0..T {
            // SAFETY: k + 16 <= cols.
            x16[j] = unsafe { _mm512_loadu_ps(xs[j].add(k)) };
        }
        for i in 0..R {
            // One token is bound by the arrival of its weights: ask for the next block of rows while this one is read.
            if T == 1 && (k * size_of::<W>()).is_multiple_of(64) {
                _mm_prefetch::<_MM_HINT_T1>(ws[i].wrapping_add(R * w.stride + k).cast());
            }
            // SAFETY: k + 16 <= cols.
            let w16 = unsafe { W::load16(ws[i].add(k)) };
            for j in 0..T {
                acc[i][j] = _mm512_fmadd_ps(w16, x16[j], acc[i][j]);
            }
        }
    }
    let tail = w.cols - whole;
    if tail > 0 {
        // Lanes beyond the tail keep their sum untouched: fma(0, 0, -0.0) would be +0.0.
        let mask = (1 << tail) - 1;
        for i in 0..R {
            // SAFETY: `tail` values are left in each row.
            let w16 = unsafe { W::load_first(ws[i].add(whole), tail) };
            for j in 0..T {
                // SAFETY: as above.
                let x16 = unsafe { f32::load_first(xs[j].add(whole), tail) };
                acc[i][j] = _mm512_mask3_fmadd_ps(w16, x16, acc[i][j], mask);
            }
        }
    }
    for j in 0..T {
        for i in 0..R {
            out[(t + j) * w.rows + r + i] = tree(acc[i][j]);
        }
    }
}

/// [`shared::tree`]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn tree(lanes: __m512) -> f32 {
    let high = _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(lanes), 1));
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), high);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn axpy(p: Rows<'_, f32>, v: Rows<'_, f32>, out: &mut [f32]) {
    let mut t = 0;
    while t < p.rows {
        let take = if p.rows - t >= 4 { 4 } else { 1 };
        for c in (0..v.cols).step_by(64) {
            // SAFETY: `take` tokens from t, and the columns from c up to 64, exist.
            unsafe { if take == 4 { axpy_block::<4>(&p, &v, t, c, out) } else { axpy_block::<1>(&p, &v, t, c, out) } }
        }
        t += take;
    }
}

/// `T` tokens and up to 64 columns in registers over all rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn axpy_block<const T: usize>(p: &Rows<'_, f32>, v: &Rows<'_, f32>, t: usize, c: usize, out: &mut [f32]) {
    let left = (v.cols - c).min(64);
    let (mut mask, mut ps) = ([0; 4], [std::ptr::null::<f32>(); T]);
    for i in 0..4 {
        mask[i] = ((1u32 << left.saturating_sub(16 * i).min(16)) - 1) as __mmask16;
    }
    for j in 0..T {
        ps[j] = p.row(t + j).as_ptr();
    }
    let mut acc = [[_mm512_setzero_ps(); 4]; T];
    for j in 0..T {
        for i in 0..4 {
            // SAFETY: masked lanes are not read; the others are columns of `out`.
            acc[j][i] = unsafe { _mm512_maskz_loadu_ps(mask[i], out.as_ptr().wrapping_add((t + j) * v.cols + c + 16 * i)) };
        }
    }
    for r in 0..v.rows {
        let from = v.row(r).as_ptr();
        let mut v16 = [_mm512_setzero_ps(); 4];
        for i in 0..4 {
            // SAFETY: masked lanes are not read; the others are columns of the row.
            v16[i] = unsafe { _mm512_maskz_loadu_ps(mask[i], from.wrapping_add(c + 16 * i)) };
        }
        for j in 0..T {
            // SAFETY: r < v.rows = p.cols.
            let p16 = _mm512_set1_ps(unsafe { *ps[j].add(r) });
            for i in 0..4 {
                acc[j][i] = _mm512_fmadd_ps(p16, v16[i], acc[j][i]);
            }
        }
    }
    for j in 0..T {
        for i in 0..4 {
            // SAFETY: masked lanes are not written; the others are columns of `out`.
            unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr().wrapping_add((t + j) * v.cols + c + 16 * i), mask[i], acc[j][i]) };
        }
    }
}
