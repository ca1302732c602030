//! AVX2 and FMA: the 16 rows of a tile are two registers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::bf16;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};

use super::shared::prefetch;
use super::{Kernel, QuantizedRows, Rows, Simd, check_axpy, check_dot, check_packed, shared};

/// Exists only where [`Avx2::detect`] found the features: that is what every call below relies on.
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<&'static Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(&Self(()))
    }
}

impl Kernel for Avx2 {
    fn simd(&self) -> Simd {
        Simd::Avx2
    }

    fn packed_tile(&self, layout: &MatrixLayout, tile: &[u8], x: &QuantizedRows<'_>, rows: &[u32], out: &mut [f32]) {
        let int4 = check_packed(layout, tile, x, rows, out);
        let (scales, lines) = tile.split_at(layout.scale_bytes());
        let (mut rows, mut out) = (rows, out);
        while !rows.is_empty() {
            let take = if rows.len() >= 2 { 2 } else { 1 };
            let (now, out_now);
            (now, rows) = rows.split_at(take);
            (out_now, out) = out.split_at_mut(take * TILE_ROWS);
            // SAFETY: the features were detected; `check_packed` has checked the tile's length and every row.
            unsafe {
                match (int4, take) {
                    (true, 2) => block::<true, 2>(scales, lines, x, now, out_now),
                    (true, _) => block::<true, 1>(scales, lines, x, now, out_now),
                    (false, 2) => block::<false, 2>(scales, lines, x, now, out_now),
                    (false, _) => block::<false, 1>(scales, lines, x, now, out_now),
                }
            }
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

    shared::elementwise!("avx2,fma");
}

/// `T` tokens through one tile.
///
/// INT4: products of an unsigned nibble and a signed byte, in pairs, are at most 2 * 15 * 127: eight of them fit in 16 bits.
/// INT8: vpmaddubsw would saturate on unsigned weights; |w| (at most 128) times x carrying w's sign stays below 2^15.
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const INT4: bool, const T: usize>(scales: &[u8], lines: &[u8], x: &QuantizedRows<'_>, rows: &[u32], out: &mut [f32]) {
    let groups = x.k / x.group;
    let (nibble, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let flip = _mm256_set1_epi8(-128);
    let (mut row, mut codes) = ([0; T], [std::ptr::null::<i8>(); T]);
    for t in 0..T {
        row[t] = rows[t] as usize;
        codes[t] = x.codes[row[t] * x.k..][..x.k].as_ptr();
    }
    let mut weights = lines.as_ptr();
    // The lines that prefetching from the first code on would step over.
    prefetch(weights.wrapping_sub(scales.len()), scales.len() / 64);
    let mut acc = [[_mm256_setzero_ps(); 2]; T];
    for g in 0..groups {
        let mut dot = [[_mm256_setzero_si256(); 2]; T];
        if INT4 {
            for t in 0..T {
                dot[t] = [_mm256_set1_epi32(-8 * x.sums[row[t] * groups + g]); 2];
            }
        }
        for k in (g * x.group..(g + 1) * x.group).step_by(32) {
            // 32 inputs: 4 lines of INT4, 8 of INT8.
            prefetch(weights, if INT4 { 4 } else { 8 });
            let mut pairs = [[_mm256_setzero_si256(); 2]; T];
            for line in 0..if INT4 { 4 } else { 8 } {
                for half in 0..2 {
                    // SAFETY: 32 inputs of 16 rows are 4 or 8 lines of 64 bytes, inside the tile whose length was checked.
                    let w = unsafe { _mm256_loadu_si256(weights.add(64 * line + 32 * half).cast()) };
                    if INT4 {
                        let low = _mm256_and_si256(w, nibble);
                        let high = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
                        for t in 0..T {
                            // SAFETY: 8 codes at k + 8 * line < x.k of a row.
                            let (a, b) = unsafe { (four(codes[t].add(k + 8 * line)), four(codes[t].add(k + 8 * line + 4))) };
                            pairs[t][half] = _mm256_add_epi16(pairs[t][half], _mm256_maddubs_epi16(low, a));
                            pairs[t][half] = _mm256_add_epi16(pairs[t][half], _mm256_maddubs_epi16(high, b));
                        }
                    } else {
                        let w = _mm256_xor_si256(w, flip);
                        let magnitude = _mm256_abs_epi8(w);
                        for t in 0..T {
                            // SAFETY: 4 codes at k + 4 * line < x.k of a row.
                            let a = unsafe { four(codes[t].add(k + 4 * line)) };
                            let products = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(a, w));
                            dot[t][half] = _mm256_add_epi32(dot[t][half], _mm256_madd_epi16(products, ones));
                        }
                    }
                }
            }
            weights = weights.wrapping_add(if INT4 { 256 } else { 512 });
            if INT4 {
                for t in 0..T {
                    for half in 0..2 {
                        dot[t][half] = _mm256_add_epi32(dot[t][half], _mm256_madd_epi16(pairs[t][half], ones));
                    }
                }
            }
        }
        for half in 0..2 {
            // SAFETY: a group has 16 scales of 2 bytes, before `lines`.
            let w_scale = unsafe { bf16::load8(scales.as_ptr().add(g * 32 + half * 16).cast()) };
            for t in 0..T {
                let scale = _mm256_mul_ps(w_scale, _mm256_set1_ps(x.scales[row[t] * groups + g]));
                acc[t][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t][half]), scale, acc[t][half]);
            }
        }
    }
    for t in 0..T {
        let out = &mut out[t * TILE_ROWS..][..TILE_ROWS];
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
unsafe fn four(codes: *const i8) -> __m256i {
    // SAFETY: as promised by the caller.
    _mm256_set1_epi32(unsafe { codes.cast::<i32>().read_unaligned() })
}

/// A type whose values widen to f32 in a register.
trait Weight: Copy {
    /// # Safety
    /// 8 values to read; AVX2.
    unsafe fn load8(p: *const Self) -> __m256;
    fn widen(self) -> f32;
}

impl Weight for bf16 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load8(p: *const Self) -> __m256 {
        // SAFETY: as promised by the caller.
        let bits = unsafe { _mm_loadu_si128(p.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))
    }

    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Weight for f32 {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load8(p: *const Self) -> __m256 {
        // SAFETY: as promised by the caller.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline]
    fn widen(self) -> f32 {
        self
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn dot<W: Weight>(w: Rows<'_, W>, x: Rows<'_, f32>, out: &mut [f32]) {
    shared::dot_blocks(w.rows, x.rows, x.cols, [2, 2], |r, t, block| {
        // SAFETY: `dot_blocks` stays inside the rows and tokens it was given.
        unsafe {
            match block {
                [2, 2] => dot_block::<W, 2, 2>(&w, &x, r, t, out),
                [2, _] => dot_block::<W, 2, 1>(&w, &x, r, t, out),
                [_, 2] => dot_block::<W, 1, 2>(&w, &x, r, t, out),
                _ => dot_block::<W, 1, 1>(&w, &x, r, t, out),
            }
        }
    });
}

/// `R` rows times `T` tokens in registers, 16 lanes each.
#[target_feature(enable = "avx2,fma")]
unsafe fn dot_block<W: Weight, const R: usize, const T: usize>(w: &Rows<'_, W>, x: &Rows<'_, f32>, r: usize, t: usize, out: &mut [f32]) {
    let (mut ws, mut xs) = ([std::ptr::null::<W>(); R], [std::ptr::null::<f32>(); T]);
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
        if T == 1 && (k * size_of::<W>()).is_multiple_of(64) {
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
                let w8 = unsafe { W::load8(ws[i].add(k)) };
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
                    *lane = w.widen().mul_add(x, *lane);
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

#[target_feature(enable = "avx2,fma")]
unsafe fn axpy(p: Rows<'_, f32>, v: Rows<'_, f32>, out: &mut [f32]) {
    let whole = v.cols / 32 * 32;
    let mut t = 0;
    while t < p.rows {
        let take = if p.rows - t >= 2 { 2 } else { 1 };
        for c in (0..whole).step_by(32) {
            // SAFETY: `take` tokens from t, and 32 columns from c, exist.
            unsafe { if take == 2 { axpy_block::<2>(&p, &v, t, c, out) } else { axpy_block::<1>(&p, &v, t, c, out) } }
        }
        for t in t..t + take {
            for r in 0..v.rows {
                let p = p.row(t)[r];
                for (out, v) in out[t * v.cols..][whole..v.cols].iter_mut().zip(&v.row(r)[whole..]) {
                    *out = p.mul_add(*v, *out);
                }
            }
        }
        t += take;
    }
}

/// `T` tokens and 32 columns in registers over all rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn axpy_block<const T: usize>(p: &Rows<'_, f32>, v: &Rows<'_, f32>, t: usize, c: usize, out: &mut [f32]) {
    let mut ps = [std::ptr::null::<f32>(); T];
    let mut acc = [[_mm256_setzero_ps(); 4]; T];
    for j in 0..T {
        ps[j] = p.row(t + j).as_ptr();
        let out = &out[(t + j) * v.cols + c..][..32];
        for i in 0..4 {
            // SAFETY: 32 columns, as just sliced.
            acc[j][i] = unsafe { _mm256_loadu_ps(out.as_ptr().add(8 * i)) };
        }
    }
    for r in 0..v.rows {
        let from = v.row(r)[c..][..32].as_ptr();
        for i in 0..4 {
            // SAFETY: 32 columns, as just sliced.
            let v8 = unsafe { _mm256_loadu_ps(from.add(8 * i)) };
            for j in 0..T {
                // SAFETY: r < v.rows = p.cols.
                let p8 = _mm256_set1_ps(unsafe { *ps[j].add(r) });
                acc[j][i] = _mm256_fmadd_ps(p8, v8, acc[j][i]);
            }
        }
    }
    for j in 0..T {
        let out = &mut out[(t + j) * v.cols + c..][..32];
        for i in 0..4 {
            // SAFETY: 32 columns, as just sliced.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(8 * i), acc[j][i]) };
        }
    }
}
