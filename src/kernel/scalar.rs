//! The kernels in plain Rust: the definition of every bit, not fast.

use half::bf16;
use moebius_cache::pack::{BF16_INPUTS, MatrixLayout, Row, TILE_ROWS, unpack_code, unpack_scale};

use super::activations::CODES;
use super::{ActivationRows, DeltaToken, Kernel, Rows, Simd, SsmToken, Start, Tiles, check_dot, shared};

/// Plain Rust.
struct Scalar;

/// Every CPU has it.
pub(super) fn detect() -> Option<&'static dyn Kernel> {
    Some(&Scalar)
}

impl Kernel for Scalar {
    fn simd(&self) -> Simd {
        Simd::Scalar
    }

    fn quantize(&self, x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
        shared::quantize(x, group, codes, scales, sums);
    }

    fn remainder(&self, x: &[f32], codes: &[i8], scales: &[f32], out: &mut [f32]) {
        shared::remainder(x, codes, scales, out);
    }

    fn split_words(&self) -> usize {
        2 * BF16_INPUTS
    }

    fn split(&self, x: &[f32], out: &mut [f32]) {
        shared::split(x, out);
    }

    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, x: &ActivationRows<'_>, start: Start, out: &mut [f32]) {
        let count = x.check(self, layout, tiles, out);
        for (i, tile) in tiles.bytes.chunks_exact(layout.tile_bytes()).enumerate() {
            for t in 0..x.len() {
                for r in 0..TILE_ROWS {
                    let out = &mut out[(t * count + i) * TILE_ROWS + r];
                    let acc = if start == Start::Out { *out } else { 0.0 };
                    *out = match layout.precision.row() {
                        None => split_dot(tile, x, r, t, acc),
                        Some(row) if row.codes.are_floats() => float_dot(layout, row, tile, x, r, t, acc),
                        Some(row) => packed_dot(layout, row, tile, x, r, t, acc),
                    };
                }
            }
        }
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        dot(w, x, out);
    }

    fn scale(&self, x: &mut [f32], scale: f32) {
        shared::scale(x, scale);
    }

    fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        shared::silu_mul(gate, up, out);
    }

    fn clamped_swiglu(&self, gate: &[f32], up: &[f32], limit: f32, alpha: f32, out: &mut [f32]) {
        shared::clamped_swiglu(gate, up, limit, alpha, out);
    }

    fn clamped_silu_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]) {
        shared::clamped_silu_mul(gate, up, limit, out);
    }

    fn silu_of_clamped_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]) {
        shared::silu_of_clamped_mul(gate, up, limit, out);
    }

    fn gelu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        shared::gelu_mul(gate, up, out);
    }

    fn sigmoid_mul(&self, gate: &[f32], x: &mut [f32]) {
        shared::sigmoid_mul(gate, x);
    }

    fn delta_step(&self, state: &mut [f32], token: &DeltaToken<'_>, out: &mut [f32]) {
        shared::delta_step(state, token, out);
    }

    fn ssm_step(&self, state: &mut [f32], token: &SsmToken<'_>, out: &mut [f32]) {
        shared::ssm_step(state, token, out);
    }

    fn exp_sub(&self, x: &mut [f32], max: f32) -> f32 {
        shared::exp_sub(x, max)
    }

    fn widen(&self, codes: &[i8], scales: &[f32], out: &mut [bf16]) {
        shared::widen(codes, scales, out);
    }

    fn add_scaled(&self, x: &[f32], scale: f32, out: &mut [f32]) {
        shared::add_scaled(x, scale, out);
    }

    fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        shared::rms_norm(x, w, eps, out);
    }
}

/// Row `r` of a tile of codes times row `t` of the activations.
fn packed_dot(
    layout: &MatrixLayout,
    row: Row,
    tile: &[u8],
    x: &ActivationRows<'_>,
    r: usize,
    t: usize,
    mut acc: f32,
) -> f32 {
    let lines = &tile[layout.scale_bytes()..];
    let weight = |k: usize| i32::from(unpack_code(row.codes, lines, r, k));
    // SAFETY: `check` has seen that all inputs of the row can be read.
    #[allow(unsafe_code)]
    let code = |k: usize| i32::from(unsafe { *x.codes(t).add(k / CODES * x.stride * CODES + k % CODES) });
    for g in 0..x.k / x.group {
        let dot: i32 = (g * x.group..(g + 1) * x.group).map(|k| weight(k) * code(k)).sum();
        let (scale, offset) = unpack_scale(layout, tile, r, g);
        acc = (dot as f32).mul_add(scale * x.scale(g, t), acc);
        if row.scales.have_offsets() {
            acc = offset.mul_add(x.total(g, t), acc);
        }
    }
    acc
}

/// Row `r` of a BF16 tile times row `t` of the activations.
fn split_dot(tile: &[u8], x: &ActivationRows<'_>, r: usize, t: usize, mut acc: f32) -> f32 {
    let weight = |k: usize| {
        let at = k / 2 * 64 + r * 4 + k % 2 * 2;
        bf16::from_le_bytes([tile[at], tile[at + 1]]).to_f32()
    };
    for block in 0..x.k.div_ceil(BF16_INPUTS) {
        acc = block_dot(x, t, block, weight, acc);
    }
    acc
}

/// The same of a tile of floats of 8 bits, whose groups have scales.
fn float_dot(
    layout: &MatrixLayout,
    row: Row,
    tile: &[u8],
    x: &ActivationRows<'_>,
    r: usize,
    t: usize,
    mut acc: f32,
) -> f32 {
    let lines = &tile[layout.scale_bytes()..];
    let blocks = layout.precision.group_size().unwrap_or(x.k) / BF16_INPUTS;
    for g in 0..x.k / BF16_INPUTS / blocks {
        let weight = |k: usize| row.codes.value(unpack_code(row.codes, lines, r, k));
        let sum = (g * blocks..(g + 1) * blocks).fold(0.0, |sum, block| block_dot(x, t, block, weight, sum));
        acc = sum.mul_add(unpack_scale(layout, tile, r, g).0, acc);
    }
    acc
}

/// 32 weights times row `t` of the activations.
fn block_dot(x: &ActivationRows<'_>, t: usize, block: usize, weight: impl Fn(usize) -> f32, mut acc: f32) -> f32 {
    // SAFETY: `check` has seen that all parts of the row can be read.
    #[allow(unsafe_code)]
    let part = |i: usize| unsafe { *x.parts(t).add(block * x.stride * x.words + i) };
    for from in [0, BF16_INPUTS] {
        let mut sums = [0.0f32; 2];
        for i in 0..BF16_INPUTS {
            sums[i % 2] = part(from + i).mul_add(weight(block * BF16_INPUTS + i), sums[i % 2]);
        }
        acc += sums[0] + sums[1];
    }
    acc
}

fn dot(w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
    check_dot(&w, &x, out);
    for t in 0..x.rows() {
        for r in 0..w.rows() {
            let mut lanes = [0.0f32; 16];
            for (k, (&w, &x)) in w.row(r).iter().zip(x.row(t)).enumerate() {
                lanes[k % 16] = w.mul_add(x, lanes[k % 16]);
            }
            out[t * w.rows() + r] = shared::tree(lanes);
        }
    }
}
