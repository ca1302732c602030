//! The kernels in plain Rust: the definition of every bit, not fast.

use half::bf16;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};

use super::{Kernel, QuantizedRows, Rows, Simd, check_axpy, check_dot, check_packed, shared};

/// Plain Rust.
pub(super) struct Scalar;

impl Kernel for Scalar {
    fn simd(&self) -> Simd {
        Simd::Scalar
    }

    fn quantize(&self, x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
        shared::quantize(x, group, codes, scales, sums);
    }

    fn packed_tile(&self, layout: &MatrixLayout, tile: &[u8], x: &QuantizedRows<'_>, rows: &[u32], out: &mut [f32]) {
        let int4 = check_packed(layout, tile, x, rows, out);
        let groups = x.k / x.group;
        let (w_scales, lines) = tile.split_at(layout.scale_bytes());
        let weight = |r: usize, k: usize| -> i32 {
            if int4 {
                let byte = lines[k / 8 * 64 + r * 4 + k % 4];
                i32::from(if k % 8 < 4 { byte & 15 } else { byte >> 4 })
            } else {
                i32::from(lines[k / 4 * 64 + r * 4 + k % 4])
            }
        };
        let bias = if int4 { 8 } else { 128 };
        for (out, &row) in out.chunks_exact_mut(TILE_ROWS).zip(rows) {
            let row = row as usize;
            for (r, out) in out.iter_mut().enumerate() {
                let mut acc = 0.0;
                for g in 0..groups {
                    let span = g * x.group..(g + 1) * x.group;
                    let dot: i32 = span.map(|k| weight(r, k) * i32::from(x.codes[row * x.k + k])).sum();
                    let dot = dot - bias * x.sums[row * groups + g];
                    let s = (g * TILE_ROWS + r) * 2;
                    let w_scale = bf16::from_le_bytes([w_scales[s], w_scales[s + 1]]).to_f32();
                    acc = (dot as f32).mul_add(w_scale * x.scales[row * groups + g], acc);
                }
                *out = acc;
            }
        }
    }

    fn dot_bf16(&self, w: Rows<'_, bf16>, x: Rows<'_, f32>, out: &mut [f32]) {
        dot(w, x, out, |w| w.to_f32());
    }

    fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]) {
        dot(w, x, out, |w| w);
    }

    fn axpy_f32(&self, p: Rows<'_, f32>, v: Rows<'_, f32>, out: &mut [f32]) {
        check_axpy(&p, &v, out);
        for t in 0..p.rows() {
            for r in 0..v.rows() {
                for (out, v) in out[t * v.cols()..][..v.cols()].iter_mut().zip(v.row(r)) {
                    *out = p.row(t)[r].mul_add(*v, *out);
                }
            }
        }
    }

    fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        shared::silu_mul(gate, up, out);
    }

    fn exp_sub(&self, x: &mut [f32], max: f32) -> f32 {
        shared::exp_sub(x, max)
    }

    fn add_scaled(&self, x: &[f32], scale: f32, out: &mut [f32]) {
        shared::add_scaled(x, scale, out);
    }

    fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        shared::rms_norm(x, w, eps, out);
    }
}

fn dot<W: Copy>(w: Rows<'_, W>, x: Rows<'_, f32>, out: &mut [f32], to_f32: impl Fn(W) -> f32) {
    check_dot(&w, &x, out);
    for t in 0..x.rows() {
        for r in 0..w.rows() {
            let mut lanes = [0.0f32; 16];
            for (k, (&w, &x)) in w.row(r).iter().zip(x.row(t)).enumerate() {
                lanes[k % 16] = to_f32(w).mul_add(x, lanes[k % 16]);
            }
            out[t * w.rows() + r] = shared::tree(lanes);
        }
    }
}
