//! CPU kernels behind one trait: a readable scalar truth, and one file per instruction set that gives the same bits.
//!
//! ```text
//! random          seeded numbers
//! tiles           packed weights as a kernel walks them
//! activations     rows in the form that the weights' precision asks for
//! shared          what has no order to exploit, written once and compiled for each instruction set
//! scalar          the truth
//! avx512_grids    codes that are places in a grid, in registers of 512 bits
//! unpacked        weights of many tokens as bytes, and their products
//! avx2, avx_vnni, avx512, amx
//! halves          activations of 16 bits next to integers, on any of them
//! ```
//!
//! The order of every sum is part of an operation's definition, so a wider instruction set changes its speed only.
//!
//! All weights are packed tiles of 16 rows (`moebius_cache::pack`), and [`Kernel::matmul`] is the one product over
//! them: of BF16 and FP8 weights with activations split into two bf16 numbers, of integer weights with activations
//! quantized to 8 bits, or twice. [`Activations`] are all of these.
//!
//! Numbers so small that a product of theirs is subnormal (below 2^-126) are outside of the promise of equal bits.
//!
//! Imports machine. Read `scalar` first.

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_grids;
#[cfg(target_arch = "x86_64")]
mod avx_vnni;
mod halves;
pub mod random;
mod scalar;
mod shared;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod unpacked;

use half::bf16;
use moebius_cache::pack::MatrixLayout;

pub use self::activations::{ActivationRows, Activations, ActivationsMut, FORMS, chunk, chunks, form};
pub use self::halves::halves;
pub(crate) use self::tiles::fetch;
pub use self::tiles::{Ahead, Tiles};
use crate::{Error, Result};

/// An instruction set the CPU kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Simd {
    /// Plain Rust; the truth the others are compared with.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX2 with VNNI in 256 bits.
    AvxVnni,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// AVX-512 with AMX tiles of INT8 and BF16.
    Amx,
}

/// The row of an instruction set.
struct Isa {
    simd: Simd,
    name: &'static str,
    /// Its kernels; `None` when this CPU lacks it, or the system does not let it be used.
    detect: fn() -> Option<&'static dyn Kernel>,
}

/// What a file for x86-64 detects; nothing elsewhere.
macro_rules! x86 {
    ($isa:ident) => {{
        #[cfg(target_arch = "x86_64")]
        let detect = $isa::detect;
        #[cfg(not(target_arch = "x86_64"))]
        let detect = || None;
        detect
    }};
}

/// Every instruction set there are kernels for, slowest first.
const ISAS: [Isa; 5] = [
    Isa { simd: Simd::Scalar, name: "scalar", detect: scalar::detect },
    Isa { simd: Simd::Avx2, name: "avx2", detect: x86!(avx2) },
    Isa { simd: Simd::AvxVnni, name: "avx-vnni", detect: x86!(avx_vnni) },
    Isa { simd: Simd::Avx512, name: "avx512", detect: x86!(avx512) },
    Isa { simd: Simd::Amx, name: "amx", detect: x86!(amx) },
];

impl Simd {
    /// All of them, slowest first.
    pub const ALL: [Simd; 5] = [ISAS[0].simd, ISAS[1].simd, ISAS[2].simd, ISAS[3].simd, ISAS[4].simd];

    fn row(self) -> &'static Isa {
        ISAS.iter().find(|isa| isa.simd == self).expect("every instruction set has a row")
    }
}

impl std::fmt::Display for Simd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.row().name)
    }
}

impl std::str::FromStr for Simd {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let names = ISAS.each_ref().map(|isa| isa.name);
        let found = ISAS.iter().find(|isa| isa.name == s).map(|isa| isa.simd);
        found
            .ok_or_else(|| Error::Invalid(format!("unknown instruction set {s:?}: choose one of {}", names.join(", "))))
    }
}

/// The kernels of one instruction set; `None` when this CPU lacks it, or the system does not let it be used.
pub fn get(simd: Simd) -> Option<&'static dyn Kernel> {
    (simd.row().detect)()
}

/// The instruction sets this CPU has kernels for, slowest first.
pub fn available() -> Vec<Simd> {
    Simd::ALL.into_iter().filter(|&simd| get(simd).is_some()).collect()
}

/// The fastest kernels this CPU can run.
pub fn best() -> &'static dyn Kernel {
    ISAS.iter().rev().find_map(|isa| (isa.detect)()).expect("the scalar kernels run everywhere")
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
        assert!(
            rows == 0 || (rows - 1) * stride + cols <= data.len(),
            "{rows} rows of {cols} at stride {stride} in {}",
            data.len()
        );
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

/// What a product's sums begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Nothing: whatever was in the output is forgotten.
    Zero,
    /// What is in the output.
    Out,
}

/// What one token brings to one head of the gated delta rule.
#[derive(Clone, Copy, Debug)]
pub struct DeltaToken<'a> {
    /// Query, normalized and scaled.
    pub q: &'a [f32],
    /// Key, normalized.
    pub k: &'a [f32],
    /// Value.
    pub v: &'a [f32],
    /// What stays of each row of the state.
    pub decay: &'a [f32],
    /// How much of the difference to the value is stored.
    pub beta: f32,
}

/// What one token brings to one head of Mamba-2.
#[derive(Clone, Copy, Debug)]
pub struct SsmToken<'a> {
    /// What is written where.
    pub b: &'a [f32],
    /// What is read.
    pub c: &'a [f32],
    /// What is written, times the step.
    pub x: &'a [f32],
    /// What stays of the state.
    pub decay: f32,
}

/// The operations a model is made of, on one thread.
///
/// Every implementation gives the bits of the scalar one. Panics everywhere: shapes disagree (a bug).
pub trait Kernel: Send + Sync {
    /// The instruction set.
    fn simd(&self) -> Simd;

    /// Activations to 8 bits: `scale = max|x| / 127` per group, `code = round_half_even(x / scale)`, `sum` of the
    /// codes.
    ///
    /// Shapes: `x` and `codes` `[n]`, `scales` and `sums` [n / group]. A group too small to invert (below 1e-35)
    /// becomes zeros; one that is not finite keeps a scale that is not finite.
    fn quantize(&self, x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]);

    /// What rounding to codes left: `out = x - code * scale`.
    ///
    /// Shapes: `x`, `codes` and `out` `[n]`, `scales` [n / group].
    fn remainder(&self, x: &[f32], codes: &[i8], scales: &[f32], out: &mut [f32]);

    /// Rows of codes whose sum a row of activations is, next to integer weights: 1 or 2.
    fn code_rows(&self) -> usize {
        1
    }

    /// f32 numbers that hold 32 split inputs of a row, see [`split`](Kernel::split).
    fn split_words(&self) -> usize;

    /// Each input as the sum of two bf16 numbers, `high = round(x)` and `low = round(x - high)`: 16 bits of mantissa.
    ///
    /// Shapes: `x` `[n]`, `out` `[ceil(n / 32), split_words()]`. How 32 inputs lie in `out` is this kernel's own
    /// business; those that the last 32 lack become zeros.
    fn split(&self, x: &[f32], out: &mut [f32]);

    /// Some tiles of packed weights times some rows of activations: `acc = W_i[r] . x[t]` is `out[t][16 i + r]`, or is
    /// summed onto it.
    ///
    /// Shapes: `tiles` [n, layout.tile_bytes()], `x` prepared by the same kernel for `layout`, `out` [x.len(), n * 16].
    /// Order, codes: exact i32 dot per group, then `acc = fma(dot, w_scale * x_scale, acc)` and, of groups with
    /// offsets, `acc = fma(w_offset, x_sum * x_scale, acc)`, groups ascending. Order, BF16, that of `tdpbf16ps`: for 32
    /// inputs at a time and of them the high, then the low parts, `even` sums the even inputs by fma from zero,
    /// ascending, `odd` the odd ones; `acc = acc + (even + odd)`. Order, FP8: the same for the sum of a group, from
    /// zero; then `acc = fma(sum, w_scale, acc)`, groups ascending.
    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, x: &ActivationRows<'_>, start: Start, out: &mut [f32]);

    /// `out[t][r] = w[r] . x[t]`: the router.
    ///
    /// Shapes: `w` [rows, k], `x` [tokens, k], `out` [tokens, rows].
    /// Order: 16 accumulators, lane `l` takes inputs `k = l (mod 16)` ascending by fma; then lanes 8 apart are added,
    /// then 4, 2, 1.
    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]);

    /// `out = silu(gate) * up`; all `[n]`.
    fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]);

    /// `out = (up + 1) * gate * sigmoid(alpha * gate)`, with `gate` at most `limit` and `up` within `limit` of 0; all
    /// `[n]`.
    fn clamped_swiglu(&self, gate: &[f32], up: &[f32], limit: f32, alpha: f32, out: &mut [f32]);

    /// `out = silu(gate) * up`, with `silu(gate)` at most `limit` and `up` within `limit` of 0; all `[n]`.
    fn clamped_silu_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]);

    /// `out = silu(gate) * up`, with `gate` at most `limit` and `up` within `limit` of 0; all `[n]`.
    fn silu_of_clamped_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]);

    /// `out = gelu(gate) * up`, GELU by its approximation with tanh; all `[n]`.
    fn gelu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]);

    /// `x = x * sigmoid(gate)`; both `[n]`.
    fn sigmoid_mul(&self, gate: &[f32], x: &mut [f32]);

    /// One token of one head of the gated delta rule: `state *= decay; delta = beta * (v - state^T k); state += k
    /// delta^T; out = state^T q`.
    ///
    /// Shapes: `state` `[k.len(), v.len()]`, `q` and `k` of one length, `out` as `v`. Order: sums over `k` ascending,
    /// by fma from zero.
    fn delta_step(&self, state: &mut [f32], token: &DeltaToken<'_>, out: &mut [f32]);

    /// `state = decay * state + b x^T; out = state^T c`.
    ///
    /// Shapes: `state` `[b.len(), x.len()]`, `b` and `c` of one length, `out` as `x`. Order: sums over `b` ascending,
    /// by fma from zero.
    fn ssm_step(&self, state: &mut [f32], token: &SsmToken<'_>, out: &mut [f32]);

    /// `x = exp(x - max)`; returns the sum, in the order of [`dot_f32`](Kernel::dot_f32).
    ///
    /// Within 2 ulp of exp; 0 for -inf and wherever the result would be subnormal.
    fn exp_sub(&self, x: &mut [f32], max: f32) -> f32;

    /// `x *= scale`.
    fn scale(&self, x: &mut [f32], scale: f32);

    /// `out[i] = codes[i] * scales[i % scales.len()]`, rounded to bf16; both `[n]`. Scales are finite.
    fn widen(&self, codes: &[i8], scales: &[f32], out: &mut [bf16]);

    /// `out += scale * x` by fma; both `[n]`.
    fn add_scaled(&self, x: &[f32], scale: f32, out: &mut [f32]);

    /// `out = x / sqrt(mean(x^2) + eps) * w`; all `[n]`. The sum of squares has the order of
    /// [`dot_f32`](Kernel::dot_f32).
    fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]);
}

/// The door of [`Kernel::dot_f32`].
fn check_dot(w: &Rows<'_, f32>, x: &Rows<'_, f32>, out: &[f32]) {
    assert_eq!(w.cols, x.cols);
    assert_eq!(out.len(), w.rows * x.rows);
}

#[cfg(test)]
mod tests;
