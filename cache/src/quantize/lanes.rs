//! Sixteen f32 at once, as one AVX-512 register, two AVX ones, or an array: the compiler alone makes poor code of the
//! search.
//!
//! All three do the same operations in the same order, so they give the same bits: no fused multiply-add, one order of
//! summation.
#![allow(unsafe_code)] // intrinsics

use crate::pack::IQ4;

/// Sixteen f32.
pub(super) trait Lanes: Copy {
    fn load(x: &[f32; 16]) -> Self;
    fn splat(x: f32) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// `by` more where `x` is above `limit`.
    fn add_above(self, x: Self, limit: f32, by: f32) -> Self;
    /// The nearest values of [`IQ4`].
    #[inline(always)]
    fn nearest_iq4(self) -> Self {
        let mut code = Self::splat(f32::from(IQ4[0]));
        for i in 0..15 {
            let (below, above) = (f32::from(IQ4[i]), f32::from(IQ4[i + 1]));
            code = code.add_above(self, (below + above) / 2.0, above - below);
        }
        code
    }
    /// Integers within i8 to codes.
    fn store(self, codes: &mut [i8; 16]);
    fn lanes(self) -> [f32; 16];

    /// Lane i with lane i + 8, then i + 4, i + 2, i + 1.
    #[inline(always)]
    fn sum(self) -> f32 {
        reduce(self.lanes(), |a, b| a + b)
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        reduce(self.lanes(), |a, b| if a > b { a } else { b })
    }
}

#[inline(always)]
fn reduce(mut lanes: [f32; 16], merge: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = merge(lanes[i], lanes[i + half]);
        }
    }
    lanes[0]
}

/// A plain loop: the closure of an array's `map` is a call.
#[inline(always)]
fn store_lanes(lanes: &[f32; 16], codes: &mut [i8; 16]) {
    for i in 0..16 {
        codes[i] = lanes[i] as i32 as i8;
    }
}

/// For any machine.
#[derive(Clone, Copy)]
pub(super) struct Scalar([f32; 16]);

impl Scalar {
    #[inline(always)]
    fn zip(self, other: Self, merge: impl Fn(f32, f32) -> f32) -> Self {
        Scalar(std::array::from_fn(|i| merge(self.0[i], other.0[i])))
    }
}

impl Lanes for Scalar {
    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        Scalar(*x)
    }
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Scalar([x; 16])
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn add_above(self, x: Self, limit: f32, by: f32) -> Self {
        self.zip(x, |sum, x| if x > limit { sum + by } else { sum })
    }
    #[inline(always)]
    fn store(self, codes: &mut [i8; 16]) {
        store_lanes(&self.0, codes);
    }
    #[inline(always)]
    fn lanes(self) -> [f32; 16] {
        self.0
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Lanes;
    use crate::pack::IQ4;

    /// Runs of 8 numbers from `FIRST` on, of which each holds at most one limit between values of [`IQ4`], and the
    /// nearest is half a number or more from its ends: of each the limit, and the value up to it and above it.
    struct Bins {
        limit: [f32; 32],
        below: [f32; 32],
        above: [f32; 32],
    }

    const FIRST: f32 = -126.0;
    const WIDTH: f32 = 8.0;
    static BINS: Bins = {
        let mut bins = Bins { limit: [f32::INFINITY; 32], below: [0.0; 32], above: [0.0; 32] };
        let (mut bin, mut value) = (0, 0);
        while bin < 32 {
            bins.below[bin] = IQ4[value] as f32;
            bins.above[bin] = IQ4[value] as f32;
            if value < 15 {
                let limit = (IQ4[value] as f32 + IQ4[value + 1] as f32) / 2.0;
                let end = FIRST + WIDTH * (bin + 1) as f32;
                if limit < end {
                    assert!(limit + 0.5 <= end && limit - 0.5 >= end - WIDTH);
                    value += 1;
                    bins.limit[bin] = limit;
                    bins.above[bin] = IQ4[value] as f32;
                }
            }
            bin += 1;
        }
        assert!(value == 15);
        bins
    };

    /// Only for functions compiled for AVX2, which is what makes each block here sound.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256, __m256);

    /// Only for functions compiled for AVX-512 F and BW, which is what makes each block here sound.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    macro_rules! binary {
        ($($name:ident = $avx:ident, $avx512:ident;)*) => {
            impl Avx2 {
                $(#[inline(always)] fn $name(self, other: Self) -> Self {
                    // SAFETY: see `Avx2`.
                    unsafe { Avx2($avx(self.0, other.0), $avx(self.1, other.1)) }
                })*
            }
            impl Avx512 {
                $(#[inline(always)] fn $name(self, other: Self) -> Self {
                    // SAFETY: see `Avx512`.
                    unsafe { Avx512($avx512(self.0, other.0)) }
                })*
            }
        };
    }
    binary! {
        add_ = _mm256_add_ps, _mm512_add_ps;
        sub_ = _mm256_sub_ps, _mm512_sub_ps;
        mul_ = _mm256_mul_ps, _mm512_mul_ps;
        min_ = _mm256_min_ps, _mm512_min_ps;
        max_ = _mm256_max_ps, _mm512_max_ps;
    }

    macro_rules! lanes {
        () => {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.add_(other)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.sub_(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.mul_(other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                self.min_(other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                self.max_(other)
            }
        };
    }

    /// The eight lanes of a register, `merge`d as [`Lanes::sum`] says from the second step on.
    macro_rules! reduce8 {
        ($x:expr, $merge:ident, $merge_scalar:ident) => {{
            let x = $merge(_mm256_castps256_ps128($x), _mm256_extractf128_ps::<1>($x));
            let x = $merge(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32($merge_scalar(x, _mm_movehdup_ps(x)))
        }};
    }

    impl Lanes for Avx2 {
        lanes!();
        #[inline(always)]
        fn load(x: &[f32; 16]) -> Self {
            // SAFETY: see `Avx2`; sixteen f32 are there to be read, at any alignment.
            unsafe { Avx2(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())) }
        }
        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: see `Avx2`.
            unsafe { Avx2(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
        }
        #[inline(always)]
        fn add_above(self, x: Self, limit: f32, by: f32) -> Self {
            // SAFETY: see `Avx2`.
            unsafe {
                let (limit, by) = (_mm256_set1_ps(limit), _mm256_set1_ps(by));
                let more = |x| _mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x, limit), by);
                Avx2(_mm256_add_ps(self.0, more(x.0)), _mm256_add_ps(self.1, more(x.1)))
            }
        }
        #[inline(always)]
        fn store(self, codes: &mut [i8; 16]) {
            super::store_lanes(&self.lanes(), codes);
        }
        #[inline(always)]
        fn lanes(self) -> [f32; 16] {
            let mut out = [0.0; 16];
            // SAFETY: see `Avx2`; there is room for sixteen f32, at any alignment.
            unsafe {
                _mm256_storeu_ps(out.as_mut_ptr(), self.0);
                _mm256_storeu_ps(out[8..].as_mut_ptr(), self.1);
            }
            out
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: see `Avx2`.
            unsafe { reduce8!(_mm256_add_ps(self.0, self.1), _mm_add_ps, _mm_add_ss) }
        }
        #[inline(always)]
        fn largest(self) -> f32 {
            // SAFETY: see `Avx2`.
            unsafe { reduce8!(_mm256_max_ps(self.0, self.1), _mm_max_ps, _mm_max_ss) }
        }
    }

    impl Lanes for Avx512 {
        lanes!();
        #[inline(always)]
        fn load(x: &[f32; 16]) -> Self {
            // SAFETY: see `Avx512`; sixteen f32 are there to be read, at any alignment.
            unsafe { Avx512(_mm512_loadu_ps(x.as_ptr())) }
        }
        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: see `Avx512`.
            unsafe { Avx512(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        fn add_above(self, x: Self, limit: f32, by: f32) -> Self {
            // SAFETY: see `Avx512`.
            unsafe {
                let above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x.0, _mm512_set1_ps(limit));
                Avx512(_mm512_mask_add_ps(self.0, above, self.0, _mm512_set1_ps(by)))
            }
        }
        #[inline(always)]
        fn nearest_iq4(self) -> Self {
            // SAFETY: see `Avx512`; a bin has 32 numbers of each kind.
            unsafe {
                // No closure: it would not be compiled for the instruction set around it.
                macro_rules! of {
                    ($table:ident, $bin:expr) => {{
                        let table = BINS.$table.as_ptr();
                        _mm512_permutex2var_ps(_mm512_loadu_ps(table), $bin, _mm512_loadu_ps(table.add(16)))
                    }};
                }
                let from_first = _mm512_sub_ps(self.0, _mm512_set1_ps(FIRST));
                let place = _mm512_mul_ps(from_first, _mm512_set1_ps(1.0 / WIDTH));
                let place = _mm512_min_ps(_mm512_max_ps(place, _mm512_setzero_ps()), _mm512_set1_ps(31.0));
                let bin = _mm512_cvttps_epi32(place);
                let is_above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, of!(limit, bin));
                Avx512(_mm512_mask_blend_ps(is_above, of!(below, bin), of!(above, bin)))
            }
        }
        #[inline(always)]
        fn store(self, codes: &mut [i8; 16]) {
            // SAFETY: see `Avx512`; sixteen bytes are there to be written, at any alignment.
            unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0))) }
        }
        #[inline(always)]
        fn lanes(self) -> [f32; 16] {
            let mut out = [0.0; 16];
            // SAFETY: see `Avx512`; there is room for sixteen f32, at any alignment.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), self.0) };
            out
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: see `Avx512`.
            unsafe {
                let upper = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b1110>(
                    _mm512_castps_pd(self.0),
                    _mm512_castps_pd(self.0),
                ));
                reduce8!(
                    _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_castps512_ps256(upper)),
                    _mm_add_ps,
                    _mm_add_ss
                )
            }
        }
        #[inline(always)]
        fn largest(self) -> f32 {
            // SAFETY: see `Avx512`.
            unsafe {
                let upper = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b1110>(
                    _mm512_castps_pd(self.0),
                    _mm512_castps_pd(self.0),
                ));
                reduce8!(
                    _mm256_max_ps(_mm512_castps512_ps256(self.0), _mm512_castps512_ps256(upper)),
                    _mm_max_ps,
                    _mm_max_ss
                )
            }
        }
    }
}
