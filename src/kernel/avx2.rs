//! AVX2, FMA and F16C: the 16 rows of a tile are two registers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, TILE_ROWS};

use super::activations::CODES as BLOCK;
use super::tiles::codes::{INT8, MXFP4};
use super::tiles::{Scales, To, bias, e2m1_table};
use super::{ActivationRows, Kernel, Rows, Simd, Start, Tiles, check_dot, shared};

/// Multiplies one tile with one or two tokens: codes with `$block`, what an instruction set brings of its own.
macro_rules! by_precision {
    ($precision:expr, $block:ident, $scales:expr, $lines:expr, $x:expr, $out:expr, $to:expr) => {
        match ($precision.codes(), $x.len()) {
            (None, 2) => $crate::kernel::avx2::split_block::<2>($lines, $x, $out, $to),
            (None, _) => $crate::kernel::avx2::split_block::<1>($lines, $x, $out, $to),
            (Some(codes), 2) => $crate::kernel::tiles::by_codes!(codes, $block[2]($scales, $lines, $x, $out, $to)),
            (Some(codes), _) => $crate::kernel::tiles::by_codes!(codes, $block[1]($scales, $lines, $x, $out, $to)),
        }
    };
}
pub(super) use by_precision;

/// Exists only where [`detect`] found the features: that is what every call below relies on.
struct Avx2;

/// Whether this CPU has AVX2, FMA and F16C.
pub(super) fn is_here() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

pub(super) fn detect() -> Option<&'static dyn Kernel> {
    is_here().then_some(&Avx2 as &dyn Kernel)
}

impl Kernel for Avx2 {
    fn simd(&self) -> Simd {
        Simd::Avx2
    }

    fn split_words(&self) -> usize {
        2 * BF16_INPUTS
    }

    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, x: &ActivationRows<'_>, start: Start, out: &mut [f32]) {
        let count = x.check(self, layout, tiles, out);
        each_block(layout, tiles, x, start, out, count, |scales, lines, x, out, to| {
            // SAFETY: the features were detected; `check` has seen to the tiles, the activations and `out`.
            unsafe { by_precision!(layout.precision, block, scales, lines, x, out, to) }
        });
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        check_dot(&w, &x, out);
        // SAFETY: the features were detected; `Rows` keeps its rows inside its slice.
        unsafe { dot(w, x, out) }
    }

    shared::elementwise! { "avx2,fma"; fn split(&self, x: &[f32], out: &mut [f32]); }
    shared::elementwise!("avx2,fma");
}

/// Each tile with two tokens at a time, or the last one: `block(scales, lines, tokens, their results, ..)`.
pub(super) fn each_block(
    layout: &MatrixLayout,
    tiles: &Tiles<'_>,
    x: &ActivationRows<'_>,
    start: Start,
    out: &mut [f32],
    count: usize,
    block: impl Fn(Scales<'_>, &[u8], &ActivationRows<'_>, &mut [f32], To),
) {
    let to = To { start, stride: count * TILE_ROWS, stream: tiles.stream() };
    for (i, tile) in tiles.bytes.chunks_exact(layout.tile_bytes()).enumerate() {
        let (scales, lines) = Scales::split(layout, tile);
        for t in (0..x.len()).step_by(2) {
            block(scales, lines, &x.part(t, 2.min(x.len() - t)), &mut out[(t * count + i) * TILE_ROWS..], to);
        }
    }
}

/// What the sums of a block of tokens begin with.
///
/// # Safety
/// AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn sums<const T: usize>(to: To, out: &[f32]) -> [[__m256; 2]; T] {
    let mut acc = [[_mm256_setzero_ps(); 2]; T];
    if to.start == Start::Out {
        for t in 0..T {
            let out = out[t * to.stride..][..TILE_ROWS].as_ptr();
            // SAFETY: 16 floats, as just sliced.
            acc[t] = unsafe { [_mm256_loadu_ps(out), _mm256_loadu_ps(out.add(8))] };
        }
    }
    acc
}

/// `T` tokens through one tile.
///
/// INT4: products of an unsigned nibble and a signed byte, in pairs, are at most 2 * 15 * 127: eight of them fit in 16
/// bits. MXFP4: the same, of codes up to 24: four of them fit.
/// INT8: vpmaddubsw would saturate on unsigned weights; |w| (at most 128) times x carrying w's sign stays below 2^15.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<const CODES: u8, const T: usize>(
    scales: Scales<'_>,
    lines: &[u8],
    x: &ActivationRows<'_>,
    out: &mut [f32],
    to: To,
) {
    let groups = x.k / x.group;
    let (nibble, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let flip = _mm256_set1_epi8(-128);
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
        let mut dot = [[_mm256_setzero_si256(); 2]; T];
        if CODES != INT8 {
            for t in 0..T {
                dot[t] = [_mm256_set1_epi32(-bias(CODES) * x.sum(g, t)); 2];
            }
        }
        for k in (g * x.group..(g + 1) * x.group).step_by(32) {
            // 32 inputs: 8 lines of INT8, 4 of the others.
            ahead.prefetch(weights, if CODES == INT8 { 8 } else { 4 });
            let at = k / BLOCK * x.stride * BLOCK + k % BLOCK;
            let mut pairs = [[_mm256_setzero_si256(); 2]; T];
            for line in 0..if CODES == INT8 { 8 } else { 4 } {
                for half in 0..2 {
                    // SAFETY: 32 inputs of 16 rows are 4 or 8 lines of 64 bytes, inside the tile whose length was
                    // checked.
                    let w = unsafe { _mm256_loadu_si256(weights.add(64 * line + 32 * half).cast()) };
                    if CODES != INT8 {
                        let (mut low, mut high) =
                            (_mm256_and_si256(w, nibble), _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble));
                        if CODES == MXFP4 {
                            (low, high) = (_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high));
                        }
                        for t in 0..T {
                            // SAFETY: 8 codes of the 32 inputs from k on.
                            let (a, b) =
                                unsafe { (four(codes[t].add(at + 8 * line)), four(codes[t].add(at + 8 * line + 4))) };
                            pairs[t][half] = _mm256_add_epi16(pairs[t][half], _mm256_maddubs_epi16(low, a));
                            pairs[t][half] = _mm256_add_epi16(pairs[t][half], _mm256_maddubs_epi16(high, b));
                            if line == 3 || CODES == MXFP4 && line == 1 {
                                dot[t][half] = _mm256_add_epi32(dot[t][half], _mm256_madd_epi16(pairs[t][half], ones));
                                pairs[t][half] = _mm256_setzero_si256();
                            }
                        }
                    } else {
                        let w = _mm256_xor_si256(w, flip);
                        let magnitude = _mm256_abs_epi8(w);
                        for t in 0..T {
                            // SAFETY: 4 codes of the 32 inputs from k on.
                            let a = unsafe { four(codes[t].add(at + 4 * line)) };
                            let products = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(a, w));
                            dot[t][half] = _mm256_add_epi32(dot[t][half], _mm256_madd_epi16(products, ones));
                        }
                    }
                }
            }
            weights = weights.wrapping_add(if CODES == INT8 { 512 } else { 256 });
        }
        for half in 0..2 {
            // SAFETY: a group has 16 scales of 2 bytes, before `lines`.
            let w_scale = unsafe { scales8(scales, g * 32 + half * 16) };
            for t in 0..T {
                let scale = _mm256_mul_ps(w_scale, _mm256_set1_ps(x.scale(g, t)));
                acc[t][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t][half]), scale, acc[t][half]);
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

/// Four codes in every dword.
///
/// # Safety
/// 4 codes to read; AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn four(codes: *const i8) -> __m256i {
    // SAFETY: as promised by the caller.
    _mm256_set1_epi32(unsafe { codes.cast::<i32>().read_unaligned() })
}

/// Eight scales from byte `at` on as f32.
///
/// # Safety
/// 16 bytes to read; AVX2 and F16C.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn scales8(scales: Scales<'_>, at: usize) -> __m256 {
    // SAFETY: as promised by the caller.
    let bits = unsafe { _mm_loadu_si128(scales.bytes.as_ptr().add(at).cast()) };
    if scales.f16 {
        _mm256_cvtph_ps(bits)
    } else {
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))
    }
}

/// A table of 16 bytes for `vpshufb`, in both halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn e2m1_lookup(table: [i8; 16]) -> __m256i {
    // SAFETY: 16 bytes of an array.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

/// `T` tokens through one BF16 tile; of a block of 32 inputs first the lower 8 rows, then the upper, so that all sums
/// are in registers.
///
/// # Safety
/// AVX2 and FMA; what `ActivationRows::check` promises.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn split_block<const T: usize>(lines: &[u8], x: &ActivationRows<'_>, out: &mut [f32], to: To) {
    let odd_mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    // SAFETY: as promised to this function.
    let mut acc = unsafe { sums::<T>(to, out) };
    for (block, lines) in lines.chunks_exact(BF16_INPUTS / 2 * 64).enumerate() {
        to.stream.from(lines.as_ptr()).prefetch(lines.as_ptr(), BF16_INPUTS / 2);
        let at = x.parts_of::<T>(block);
        for half in 0..2 {
            let mut sums = [[[_mm256_setzero_ps(); 2]; 2]; T]; // [token][high, low][even, odd]
            for pair in 0..BF16_INPUTS / 2 {
                // SAFETY: 32 bytes of a line.
                let w = unsafe { _mm256_loadu_si256(lines.as_ptr().add(64 * pair + 32 * half).cast()) };
                let (even, odd) =
                    (_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_castsi256_ps(_mm256_and_si256(w, odd_mask)));
                for t in 0..T {
                    for part in 0..2 {
                        // SAFETY: a row has 64 numbers in each block.
                        let (x_even, x_odd) =
                            unsafe { (*at[t].add(32 * part + 2 * pair), *at[t].add(32 * part + 2 * pair + 1)) };
                        sums[t][part][0] = _mm256_fmadd_ps(_mm256_set1_ps(x_even), even, sums[t][part][0]);
                        sums[t][part][1] = _mm256_fmadd_ps(_mm256_set1_ps(x_odd), odd, sums[t][part][1]);
                    }
                }
            }
            for t in 0..T {
                for part in 0..2 {
                    acc[t][half] = _mm256_add_ps(acc[t][half], _mm256_add_ps(sums[t][part][0], sums[t][part][1]));
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

/// [`Kernel::dot_f32`]
///
/// # Safety
/// AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn dot(w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
    shared::dot_blocks(w.rows, x.rows, x.cols, [2, 2], |r, t, block| {
        // SAFETY: `dot_blocks` stays inside the rows and tokens it was given.
        unsafe {
            match block {
                [2, 2] => dot_block::<2, 2>(&w, &x, r, t, out),
                [2, _] => dot_block::<2, 1>(&w, &x, r, t, out),
                [_, 2] => dot_block::<1, 2>(&w, &x, r, t, out),
                _ => dot_block::<1, 1>(&w, &x, r, t, out),
            }
        }
    });
}

/// `R` rows times `T` tokens in registers, 16 lanes each.
#[target_feature(enable = "avx2,fma")]
unsafe fn dot_block<const R: usize, const T: usize>(
    w: &Rows<'_, f32>,
    x: &Rows<'_, f32>,
    r: usize,
    t: usize,
    out: &mut [f32],
) {
    let (mut ws, mut xs) = ([std::ptr::null::<f32>(); R], [std::ptr::null::<f32>(); T]);
    for i in 0..R {
        ws[i] = w.row(r + i).as_ptr();
    }
    for j in 0..T {
        xs[j] = x.row(t + j).as_ptr();
    }
    let mut acc = [[[_mm256_setzero_ps(); 2]; T]; R];
    let whole = w.cols / 16 * 16;
    for k in (0..whole).step_by(16) {
        // One token is bound by the arrival of its weights: ask for the next block of rows while this one is read.
        if T == 1 {
            for row in ws {
                _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(R * w.stride + k).cast());
            }
        }
        for half in 0..2 {
            let k = k + 8 * half;
            let mut x8 = [_mm256_setzero_ps(); T];
            for j in 0..T {
                // SAFETY: k + 8 <= cols.
                x8[j] = unsafe { _mm256_loadu_ps(xs[j].add(k)) };
            }
            for i in 0..R {
                // SAFETY: k + 8 <= cols.
                let w8 = unsafe { _mm256_loadu_ps(ws[i].add(k)) };
                for j in 0..T {
                    acc[i][j][half] = _mm256_fmadd_ps(w8, x8[j], acc[i][j][half]);
                }
            }
        }
    }
    for j in 0..T {
        for i in 0..R {
            let [low, high] = acc[i][j];
            out[(t + j) * w.rows + r + i] = if whole == w.cols {
                tree(low, high)
            } else {
                let mut lanes = [0.0; 16];
                // SAFETY: 16 floats.
                unsafe {
                    _mm256_storeu_ps(lanes.as_mut_ptr(), low);
                    _mm256_storeu_ps(lanes.as_mut_ptr().add(8), high);
                }
                for (lane, (&w, &x)) in lanes.iter_mut().zip(w.row(r + i)[whole..].iter().zip(&x.row(t + j)[whole..])) {
                    *lane = w.mul_add(x, *lane);
                }
                shared::tree(lanes)
            };
        }
    }
}

/// [`shared::tree`]
#[inline]
#[target_feature(enable = "avx2")]
fn tree(low: __m256, high: __m256) -> f32 {
    let eight = _mm256_add_ps(low, high);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
