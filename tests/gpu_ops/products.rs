//! Dense products in every precision, and those with something before or behind them.

use moebius::backend::cuda::CudaBackend;
use moebius::backend::{Dense, Load, Memory};
use moebius::config::DenseBits;
use moebius::model::Activation;
use moebius_cache::pack::{MatrixLayout, unpack_matrix};
use moebius_cache::quantize::quantize_matrix;

use crate::common;
use common::gpu::{Filled, ROUNDING, Sides, Within, both, check, host, need_gpu, random};

/// One by one, a few, the ends of tiles of 16 to 128, and tensor cores of every kind.
const TOKENS: &[usize] = &[1, 2, 3, 5, 8, 9, 17, 33, 64, 65, 127, 128, 129, 300];

/// Rows and columns of weights: multiples of 8, odd ones among them; one is long enough to be cut along k.
const SHAPES: &[(usize, usize)] = &[(8, 8), (40, 136), (264, 72), (72, 264), (24, 1544), (48, 4096)];

/// What is in the output before.
const BEFORE: f32 = 0.75;

/// A weight as it is once it is packed, unless its rows cannot be cut into groups.
fn packed(weight: &[f32], k: usize, bits: DenseBits) -> Vec<f32> {
    let Some(precision) = bits.precision_on_gpu(k) else { return weight.to_vec() };
    let layout = MatrixLayout::new(weight.len() / k, k, precision).unwrap();
    let mut bytes = vec![0; layout.bytes()];
    quantize_matrix(&layout, weight, &mut bytes);
    unpack_matrix(&layout, &bytes)
}

/// `W x + b` in f64.
fn naive(weight: &[f32], bias: Option<&[f32]>, x: &[f32], k: usize) -> Vec<f32> {
    let dot = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| *w as f64 * *x as f64).sum::<f64>();
    let row = |x: &[f32]| -> Vec<f32> {
        weight
            .chunks_exact(k)
            .enumerate()
            .map(|(i, w)| (dot(w, x) + bias.map_or(0.0, |b| b[i] as f64)) as f32)
            .collect()
    };
    x.chunks_exact(k).flat_map(row).collect()
}

#[test]
fn bf16_products_of_any_number_of_tokens() {
    need_gpu!();
    let sides = Sides::new();
    for &(n, k) in SHAPES {
        let (weight, bias) = (random(n * k, 11), random(n, 12));
        for &tokens in TOKENS {
            let x = random(tokens * k, 13);
            for bias in [None, Some(bias.clone())] {
                let (got, want) = both!(sides, |b| {
                    let (w, x) = (
                        b.load_linear(host(k, &weight), bias.clone().map(Into::into), DenseBits::Bf16).unwrap(),
                        b.filled(k, &x),
                    );
                    let (mut narrow, mut wide) = (b.tensor(tokens, n).unwrap(), b.tensor_f32(tokens, n).unwrap());
                    let mut added = b.filled_f32(n, &vec![BEFORE; tokens * n]);
                    b.linear(&w, &x, &mut narrow);
                    b.linear(&w, &x, &mut wide);
                    b.linear_add(&w, &x, &mut added);
                    [&narrow, &wide, &added].map(|t| b.numbers(t))
                });
                let what = format!("{tokens} tokens, {n} x {k}, bias {}", bias.is_some());
                // Products of bf16 numbers are exact: only the order of the sums differs.
                check(&what, &got[0], &want[0], Within::BF16);
                check(&format!("{what}, f32"), &got[1], &want[1], Within::F32);
                check(&format!("{what}, added"), &got[2], &want[2], Within::F32);
            }
        }
    }
}

#[test]
fn an_odd_number_of_outputs() {
    need_gpu!();
    let sides = Sides::new();
    let (n, k) = (1019, 72);
    let weight = random(n * k, 14);
    for tokens in [1, 7, 8, 9, 30] {
        let x = random(tokens * k, 15);
        let (got, want) = both!(sides, |b| {
            let mut out = b.tensor_f32(tokens, n).unwrap();
            b.linear(&b.load_linear(host(k, &weight), None, DenseBits::Bf16).unwrap(), &b.filled(k, &x), &mut out);
            b.numbers(&out)
        });
        check(&format!("{tokens} tokens, {n} outputs"), &got, &want, Within::F32);
    }
}

/// The GPU multiplies bf16 activations with the codes, the CPU 8-bit ones: what both stand for is the dequantized
/// weight.
#[test]
fn packed_products_equal_the_dequantized_weights() {
    need_gpu!();
    let sides = Sides::new();
    let b = &sides.gpu;
    for bits in [DenseBits::Int8, DenseBits::Int4, DenseBits::Out, DenseBits::Down] {
        // Groups of 32, 64 and 128, and rows that no group divides, which stay bf16; rows of several units for a warp.
        for (n, k) in [(8, 32), (40, 96), (72, 192), (136, 384), (40, 136), (24, 4256), (24, 4480)] {
            let (weight, bias) = (random(n * k, 16), random(n, 17));
            let stands_for = packed(&weight, k, bits);
            let w = b.load_linear(host(k, &weight), Some(bias.clone().into()), bits).unwrap();
            for &tokens in TOKENS {
                let x = random(tokens * k, 18);
                let want = naive(&stands_for, Some(&bias), &x, k);
                let (mut narrow, mut wide) = (b.tensor(tokens, n).unwrap(), b.tensor_f32(tokens, n).unwrap());
                let mut added = b.filled_f32(n, &vec![BEFORE; tokens * n]);
                let x = b.filled(k, &x);
                b.linear(&w, &x, &mut narrow);
                b.linear(&w, &x, &mut wide);
                b.linear_add(&w, &x, &mut added);
                let what = format!("{bits}, {tokens} tokens, {n} x {k}");
                // A scaled weight is rounded to bf16 where scales do not wait for the sums: at most a rounding of each
                // product, half of one in the mean, of which signs leave the root of their sum.
                let products = Within { each: 0.0, of_rms: 4.0 * 0.5 * ROUNDING, rms: 0.5 * ROUNDING };
                check(&what, &b.numbers(&wide), &want, products);
                check(&what, &b.numbers(&narrow), &want, Within { each: ROUNDING, rms: 0.75 * ROUNDING, ..products });
                let want: Vec<f32> = want.iter().map(|w| w + BEFORE).collect();
                check(&format!("{what}, added"), &b.numbers(&added), &want, products);
            }
        }
    }
}

/// As dense layers call them: one input, several weights of different heights.
#[test]
fn products_together_equal_each_alone() {
    need_gpu!();
    let sides = Sides::new();
    let b = &sides.gpu;
    let k = 192;
    for bits in [DenseBits::Bf16, DenseBits::Int8, DenseBits::Int4] {
        let heights = [264, 40, 8, 72];
        let weights = heights
            .map(|n| b.load_linear(host(k, &random(n * k, n as u64)), Some(random(n, 19).into()), bits).unwrap());
        for tokens in [1, 8, 9, 33, 64, 150, 300] {
            let x = b.filled(k, &random(tokens * k, 20));
            let mut alone = heights.map(|n| b.tensor(tokens, n).unwrap());
            weights.iter().zip(&mut alone).for_each(|(w, out)| b.linear(w, &x, out));
            let mut together = heights.map(|n| b.tensor(tokens, n).unwrap());
            let mut jobs = weights.iter().zip(&mut together);
            b.linears(&x, std::array::from_fn::<_, 4, _>(|_| jobs.next().unwrap()));
            for (n, (alone, together)) in heights.iter().zip(alone.iter().zip(&together)) {
                assert_eq!(b.numbers(together), b.numbers(alone), "{bits}, {tokens} tokens, {n} outputs");
            }
        }
    }
}

/// Products of one input in one launch, of which some are cut along k: the emulator cuts what has few tiles.
fn check_together<const N: usize>(b: &CudaBackend, heights: [usize; N], k: usize) {
    let matrices = heights.map(|n| (random(n * k, n as u64), random(n, 19)));
    let weights = matrices
        .each_ref()
        .map(|(w, bias)| b.load_linear(host(k, w), Some(bias.clone().into()), DenseBits::Bf16).unwrap());
    // Tiles of every kind.
    for tokens in [9, 33, 64, 128, 129, 300] {
        let numbers = random(tokens * k, 20);
        let x = b.filled(k, &numbers);
        let mut narrow = heights.map(|n| b.filled(n, &vec![BEFORE; tokens * n]));
        let mut wide = heights.map(|n| b.filled_f32(n, &vec![BEFORE; tokens * n]));
        for (outs, within) in [(&mut narrow, Within::BF16), (&mut wide, Within::F32)] {
            let mut jobs = weights.iter().zip(&mut *outs);
            b.linears(&x, std::array::from_fn::<_, N, _>(|_| jobs.next().unwrap()));
            for ((w, bias), out) in matrices.iter().zip(outs) {
                let what = format!("{tokens} tokens of {k}, {} outputs of {heights:?}", bias.len());
                check(&what, &b.numbers(out), &naive(w, Some(bias), &numbers, k), within);
            }
        }
    }
}

#[test]
fn products_together_that_are_cut() {
    need_gpu!();
    let sides = Sides::new();
    check_together(&sides.gpu, [40, 24], 1544);
    check_together(&sides.gpu, [40, 24, 8], 1544);
    check_together(&sides.gpu, [136, 24, 72], 192);
    check_together(&sides.gpu, [1000, 8, 136], 72);
}

#[test]
fn products_of_a_norm() {
    need_gpu!();
    let sides = Sides::new();
    for (k, bits) in [(136, DenseBits::Bf16), (1032, DenseBits::Bf16), (192, DenseBits::Int8), (192, DenseBits::Int4)] {
        let heights = [72, 40, 8];
        let norm: Vec<f32> = random(k, 21).iter().map(|w| 1.0 + 0.5 * w).collect();
        let weights = heights.map(|n| packed(&random(n * k, n as u64), k, bits));
        for tokens in [1, 3, 8, 9, 70] {
            let x: Vec<f32> = random(tokens * k, 22).iter().map(|x| 3.0 * x).collect();
            let b = &sides.gpu;
            let on_device = heights.map(|n| b.load_linear(host(k, &random(n * k, n as u64)), None, bits).unwrap());
            let (mut h, mut outs) = (b.tensor(tokens, k).unwrap(), heights.map(|n| b.tensor(tokens, n).unwrap()));
            let mut jobs = on_device.iter().zip(&mut outs);
            let jobs = std::array::from_fn::<_, 3, _>(|_| jobs.next().unwrap());
            b.norm_linears(&b.filled_f32(k, &x), (&b.load_norm(norm.clone().into()).unwrap(), 1e-6), &mut h, jobs);
            let normed: Vec<f32> = {
                let b = &sides.cpu;
                let mut h = b.tensor(tokens, k).unwrap();
                b.rms_norm(&b.filled_f32(k, &x), &norm, 1e-6, &mut h);
                b.numbers(&h)
            };
            for (weight, out) in weights.iter().zip(&outs) {
                let what = format!("{bits}, {tokens} tokens of {k}, {} outputs", weight.len() / k);
                // The normed input, a packed weight and the output are rounded: half of a rounding in the mean each, in
                // roots of sums of squares.
                check(
                    &what,
                    &b.numbers(out),
                    &naive(weight, None, &normed, k),
                    Within { each: ROUNDING, of_rms: 4.0 * ROUNDING, rms: ROUNDING },
                );
            }
        }
    }
}

#[test]
fn gated_products() {
    need_gpu!();
    let sides = Sides::new();
    for (n, k) in [(8, 8), (40, 136), (136, 264)] {
        let scale = 3.0 / (k as f32).sqrt();
        let weights = [23, 24].map(|seed| -> Vec<f32> { random(n * k, seed).iter().map(|w| scale * w).collect() });
        for tokens in [1, 2, 8, 9, 40, 130] {
            let x = random(tokens * k, 25);
            let (got, want) = both!(sides, |b| {
                let [gate, up] = [0, 1].map(|i| b.load_linear(host(k, &weights[i]), None, DenseBits::Bf16).unwrap());
                let [mut g, mut u, mut out] = [(); 3].map(|()| b.tensor(tokens, n).unwrap());
                b.gated_linears(&b.filled(k, &x), (&gate, &up), Activation::Silu, (&mut g, &mut u), &mut out);
                b.numbers(&out)
            });
            // Of up to 8 tokens only the result is rounded. Else gate and up are as well, and silu turns a relative
            // error e of a gate g into up to (1 + g) e: below 4 here.
            let each = if tokens <= 8 { ROUNDING } else { (4.0 + 1.0 + 1.0) * ROUNDING };
            let rms = if tokens <= 8 { 0.5 } else { 1.0 } * ROUNDING;
            check(&format!("{tokens} tokens, {n} x {k}"), &got, &want, Within { each, of_rms: 4e-6, rms });
        }
    }
}
