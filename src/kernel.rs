//! CPU kernels behind one trait: a readable scalar truth, and one file per instruction set that gives the same bits.
//!
//! The order of every sum is part of an operation's definition, so a wider instruction set changes its speed only.
//! What has no order to exploit ([`silu_mul`](Kernel::silu_mul), quantization, norms) is written once, in `shared.rs`,
//! and compiled once per instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;
mod shared;

use half::bf16;
use moebius_cache::pack::{GROUP_SIZES, MatrixLayout, TILE_ROWS};

use crate::{Error, Result};

/// An instruction set the CPU kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Simd {
    /// Plain Rust; the truth the others are compared with.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
}

impl Simd {
    /// Every instruction set there are kernels for, slowest first.
    pub const ALL: [Simd; 3] = [Simd::Scalar, Simd::Avx2, Simd::Avx512];
}

impl std::fmt::Display for Simd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Simd::Scalar => "scalar",
            Simd::Avx2 => "avx2",
            Simd::Avx512 => "avx512",
        })
    }
}

impl std::str::FromStr for Simd {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Simd::ALL
            .into_iter()
            .find(|simd| simd.to_string() == s)
            .ok_or_else(|| Error::Invalid(format!("unknown instruction set {s:?}: choose scalar, avx2 or avx512")))
    }
}

/// The kernels of one instruction set; `None` when this CPU lacks it.
pub fn get(simd: Simd) -> Option<&'static dyn Kernel> {
    match simd {
        Simd::Scalar => Some(&scalar::Scalar),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => avx2::Avx2::detect().map(|kernel| kernel as &dyn Kernel),
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512 => avx512::Avx512::detect().map(|kernel| kernel as &dyn Kernel),
        #[cfg(not(target_arch = "x86_64"))]
        _ => None,
    }
}

/// The instruction sets this CPU has kernels for, slowest first.
pub fn available() -> Vec<Simd> {
    Simd::ALL.into_iter().filter(|&simd| get(simd).is_some()).collect()
}

/// The fastest kernels this CPU can run.
pub fn best() -> &'static dyn Kernel {
    Simd::ALL.into_iter().rev().find_map(get).expect("the scalar kernels run everywhere")
}

/// A matrix seen row by row: `rows` rows of `cols` elements, `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Contiguous rows. Panics: `data` is not `rows * cols` long.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "{rows} rows of {cols}");
        Self { data, rows, cols, stride: cols }
    }

    /// Rows `stride` elements apart. Panics: the last row ends after `data`, or rows overlap.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows <= 1 || cols <= stride, "rows of {cols} overlap at stride {stride}");
        assert!(rows == 0 || (rows - 1) * stride + cols <= data.len(), "{rows} rows of {cols} at stride {stride} in {}", data.len());
        Self { data, rows, cols, stride }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// One row.
    pub fn row(&self, i: usize) -> &'a [T] {
        assert!(i < self.rows);
        &self.data[i * self.stride..][..self.cols]
    }
}

/// Activations as [`Kernel::quantize`] leaves them.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRows<'a> {
    /// Inputs of a row; a multiple of `group`.
    pub k: usize,
    /// Inputs that share a scale.
    pub group: usize,
    /// [rows, k]
    pub codes: &'a [i8],
    /// [rows, k / group]
    pub scales: &'a [f32],
    /// [rows, k / group], the sum of a group's codes.
    pub sums: &'a [i32],
}

/// The operations a model is made of, on one thread.
///
/// Every implementation gives the bits of the scalar one. Panics everywhere: shapes disagree (a bug).
pub trait Kernel: Send + Sync {
    /// The instruction set.
    fn simd(&self) -> Simd;

    /// Activations to 8 bits: `scale = max|x| / 127` per group, `code = round_half_even(x / scale)`, `sum` of the codes.
    ///
    /// Shapes: `x` and `codes` `[n]`, `scales` and `sums` [n / group]. A group too small to invert (below 1e-35) becomes zeros;
    /// one that is not finite keeps a scale that is not finite.
    fn quantize(&self, x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]);

    /// One packed INT4 or INT8 tile times some rows of `x`: `out[i][r] = W[r] . x[rows[i]]`.
    ///
    /// Shapes: `tile` [layout.tile_bytes()], `rows` `[n]` indices of rows of `x`, `out` [n, 16].
    /// Order: exact i32 dot per group, then `acc = fma(dot, w_scale * x_scale, acc)`, groups ascending.
    fn packed_tile(&self, layout: &MatrixLayout, tile: &[u8], x: &QuantizedRows<'_>, rows: &[u32], out: &mut [f32]);

    /// `out[t][r] = w[r] . x[t]`, bf16 weights.
    ///
    /// Shapes: `w` [rows, k], `x` [tokens, k], `out` [tokens, rows].
    /// Order: 16 accumulators, lane `l` takes inputs `k = l (mod 16)` ascending by fma; then lanes 8 apart are added, then 4, 2, 1.
    fn dot_bf16(&self, w: Rows<'_, bf16>, x: Rows<'_, f32>, out: &mut [f32]);

    /// [`dot_bf16`](Kernel::dot_bf16) with f32 weights: the router, attention scores.
    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]);

    /// `out[t][c] = fma(p[t][r], v[r][c], out[t][c])`, `r` ascending: attention values.
    ///
    /// Shapes: `p` [tokens, rows], `v` [rows, cols], `out` [tokens, cols].
    fn axpy_f32(&self, p: Rows<'_, f32>, v: Rows<'_, f32>, out: &mut [f32]);

    /// `out = silu(gate) * up`; all `[n]`.
    fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]);

    /// `x = exp(x - max)`; returns the sum, in the order of [`dot_bf16`](Kernel::dot_bf16).
    ///
    /// Within 2 ulp of exp; 0 for -inf and wherever the result would be subnormal.
    fn exp_sub(&self, x: &mut [f32], max: f32) -> f32;

    /// `out += scale * x` by fma; both `[n]`.
    fn add_scaled(&self, x: &[f32], scale: f32, out: &mut [f32]);

    /// `out = x / sqrt(mean(x^2) + eps) * w`; all `[n]`. The sum of squares has the order of [`dot_bf16`](Kernel::dot_bf16).
    fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]);
}

/// The door of [`Kernel::packed_tile`]: everything an implementation may rely on. Returns whether the codes are 4 bits.
fn check_packed(layout: &MatrixLayout, tile: &[u8], x: &QuantizedRows<'_>, rows: &[u32], out: &[f32]) -> bool {
    use moebius_cache::Precision;
    let (group, int4) = match layout.precision {
        Precision::Int4 { group_size } => (group_size, true),
        Precision::Int8 { group_size } => (group_size, false),
        Precision::Bf16 => panic!("a BF16 matrix has no packed tiles"),
    };
    assert!(GROUP_SIZES.contains(&group) && layout.k.is_multiple_of(group));
    assert_eq!((x.k, x.group), (layout.k, group), "activations quantized for another matrix");
    assert_eq!(tile.len(), layout.tile_bytes());
    assert_eq!(out.len(), rows.len() * TILE_ROWS);
    let count = x.codes.len() / x.k;
    assert!(x.scales.len() >= count * (x.k / group) && x.sums.len() >= count * (x.k / group));
    assert!(rows.iter().all(|&row| (row as usize) < count), "a row beyond the {count} quantized");
    int4
}

/// The door of the dot products.
fn check_dot<W>(w: &Rows<'_, W>, x: &Rows<'_, f32>, out: &[f32]) {
    assert_eq!(w.cols, x.cols);
    assert_eq!(out.len(), w.rows * x.rows);
}

/// The door of [`Kernel::axpy_f32`].
fn check_axpy(p: &Rows<'_, f32>, v: &Rows<'_, f32>, out: &[f32]) {
    assert_eq!(p.cols, v.rows);
    assert_eq!(out.len(), p.rows * v.cols);
}

#[cfg(test)]
mod tests;
