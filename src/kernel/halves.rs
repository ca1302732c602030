//! Activations of 16 bits next to integer weights: each is the sum of two rows of codes, whose products are added.
//!
//! The first row is what others have alone, the second what its rounding left, rounded in turn. Both go through the
//! product of an instruction set as two rows would, so weights are read once.

use half::bf16;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};

use super::{ActivationRows, DeltaToken, Kernel, Rows, Simd, SsmToken, Start, Tiles};

/// The kernels of an instruction set with such activations, for as long as the process runs.
pub fn halves(of: &'static dyn Kernel) -> &'static dyn Kernel {
    Box::leak(Box::new(Halves(of)))
}

struct Halves(&'static dyn Kernel);

/// Sums of both rows at a time: 16 KiB, which stay in L1.
const SUMS: usize = 4096;

/// Those of a token and a few tiles, as decode has them: it takes longer to clear the others than to make these.
const FEW_SUMS: usize = 512;

impl Halves {
    /// [`Kernel::matmul`] of codes, with room for so many sums at a time.
    fn add_halves(
        &self,
        layout: &MatrixLayout,
        tiles: &Tiles<'_>,
        x: &ActivationRows<'_>,
        start: Start,
        out: &mut [f32],
        sums: &mut [f32],
    ) {
        let count = out.len() / x.len() / TILE_ROWS;
        // So many that there is room for two tiles.
        let tokens = sums.len() / TILE_ROWS / 4;
        for token in (0..x.len()).step_by(tokens) {
            let rows = x.part(token, (x.len() - token).min(tokens)).code_rows();
            let run = sums.len() / TILE_ROWS / rows.len() / 2 * 2; // kernels take two tiles at a time
            for first in (0..count).step_by(run) {
                let some = first..count.min(first + run);
                let width = some.len() * TILE_ROWS;
                let sums = &mut sums[..rows.len() * width];
                self.0.matmul(layout, &tiles.part(layout, some), &rows, Start::Zero, sums);
                for (t, sums) in (token..).zip(sums.chunks_exact(2 * width)) {
                    let (high, low) = sums.split_at(width);
                    let out = &mut out[(t * count + first) * TILE_ROWS..][..width];
                    for ((out, high), low) in out.iter_mut().zip(high).zip(low) {
                        let sum = high + low;
                        *out = if start == Start::Out { *out + sum } else { sum };
                    }
                }
            }
        }
    }
}

macro_rules! as_before {
    ($(fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        $(fn $name(&self $(, $arg: $type)*) $(-> $result)? {
            self.0.$name($($arg),*)
        })*
    };
}

impl Kernel for Halves {
    fn code_rows(&self) -> usize {
        2
    }

    fn matmul(&self, layout: &MatrixLayout, tiles: &Tiles<'_>, x: &ActivationRows<'_>, start: Start, out: &mut [f32]) {
        if !x.are_codes() {
            return self.0.matmul(layout, tiles, x, start, out);
        }
        x.check(self, layout, tiles, out);
        match 2 * out.len() <= FEW_SUMS {
            true => self.add_halves(layout, tiles, x, start, out, &mut [0.0; FEW_SUMS]),
            false => self.add_halves(layout, tiles, x, start, out, &mut [0.0; SUMS]),
        }
    }

    as_before! {
        fn simd(&self) -> Simd;
        fn quantize(&self, x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]);
        fn remainder(&self, x: &[f32], codes: &[i8], scales: &[f32], out: &mut [f32]);
        fn split_words(&self) -> usize;
        fn split(&self, x: &[f32], out: &mut [f32]);
        fn dot_f32(&self, w: Rows<'_, f32>, x: Rows<'_, f32>, out: &mut [f32]);
        fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]);
        fn clamped_swiglu(&self, gate: &[f32], up: &[f32], limit: f32, alpha: f32, out: &mut [f32]);
        fn clamped_silu_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]);
        fn silu_of_clamped_mul(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]);
        fn gelu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]);
        fn sigmoid_mul(&self, gate: &[f32], x: &mut [f32]);
        fn delta_step(&self, state: &mut [f32], token: &DeltaToken<'_>, out: &mut [f32]);
        fn ssm_step(&self, state: &mut [f32], token: &SsmToken<'_>, out: &mut [f32]);
        fn exp_sub(&self, x: &mut [f32], max: f32) -> f32;
        fn scale(&self, x: &mut [f32], scale: f32);
        fn widen(&self, codes: &[i8], scales: &[f32], out: &mut [bf16]);
        fn add_scaled(&self, x: &[f32], scale: f32, out: &mut [f32]);
        fn rms_norm(&self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]);
    }
}
