//! Products by cuBLASLt, where it is there, whether it is faster or not.

use moebius::backend::{Dense, Load, Memory};
use moebius::config::{DenseBits, KvBits};
use moebius::model::Activation;

use crate::common;
use crate::latents::{check_latents, config};
use common::gpu::{Filled, Sides, Within, both, check, host, need_gpu, random};
use common::say_skipped;

/// A GPU that multiplies with the library; says so where there is none.
fn with_library(test: &str) -> Option<Sides> {
    let mut sides = Sides::new();
    match sides.gpu.use_library() {
        Ok(()) => Some(sides),
        Err(why) => {
            say_skipped(test, &why.to_string());
            None
        }
    }
}

/// Tensor cores cut off where f32 rounds, and the library's sums are as long as k is: 2^-24 of what they have come to
/// at each of k / 16 steps.
const LONG_SUMS: Within = Within { each: 6e-6, of_rms: 2e-5, rms: 6e-6 };

#[test]
fn library_products() {
    need_gpu!(real);
    let Some(sides) = with_library("library::library_products") else { return };
    for (n, k) in [(8, 8), (40, 136), (264, 72), (24, 1544), (2048, 512)] {
        let (weight, bias) = (random(n * k, 61), random(n, 62));
        // From 128 on products are the library's, unless there is a bias.
        for tokens in [9, 128, 129, 300, 1000] {
            let (x, before) = (random(tokens * k, 63), random(tokens * n, 64));
            for bias in [None, Some(bias.clone())] {
                let (got, want) = both!(sides, |b| {
                    let (w, x) = (
                        b.load_linear(host(k, &weight), bias.clone().map(Into::into), DenseBits::Bf16).unwrap(),
                        b.filled(k, &x),
                    );
                    let (mut narrow, mut wide) =
                        (b.filled(n, &vec![9.0; tokens * n]), b.filled_f32(n, &vec![9.0; tokens * n]));
                    let mut added = b.filled_f32(n, &before);
                    b.linear(&w, &x, &mut narrow);
                    b.linear(&w, &x, &mut wide);
                    b.linear_add(&w, &x, &mut added);
                    [&narrow, &wide, &added].map(|t| b.numbers(t))
                });
                let what = format!("{tokens} tokens, {n} x {k}, bias {}", bias.is_some());
                check(&what, &got[0], &want[0], Within { of_rms: LONG_SUMS.of_rms, ..Within::BF16 });
                check(&format!("{what}, f32"), &got[1], &want[1], LONG_SUMS);
                check(&format!("{what}, added"), &got[2], &want[2], LONG_SUMS);
            }
        }
    }
}

/// One product for each head: the absorbed queries of many sequences.
#[test]
fn library_products_of_heads() {
    need_gpu!(real);
    let Some(sides) = with_library("library::library_products_of_heads") else { return };
    let sequences: Vec<(usize, usize)> = (0..150).map(|i| (i % 70 + 1, 1)).collect();
    check_latents(&sides, &config(20, 136, (64, 32, 72)), &sequences, KvBits::Bf16);
}

/// Our kernels begin before the one in front has ended and wait for it where they read: for the library's as well, and
/// that for them.
#[test]
fn library_products_between_our_kernels() {
    need_gpu!(real);
    let Some(sides) = with_library("library::library_products_between_our_kernels") else { return };
    let (tokens, k, n) = (1000, 1024, 2048);
    let unit = 1.0 / (k as f32).sqrt();
    let weights = [(n, k, 65), (n, k, 66), (k, n, 67)]
        .map(|(n, k, seed)| (k, random(n * k, seed).iter().map(|w| unit * w).collect::<Vec<_>>()));
    let (x, norm) = (random(tokens * k, 68), vec![1.0; k]);
    let run = |sides: &Sides| {
        let b = &sides.gpu;
        let [gate, up, down] =
            [0, 1, 2].map(|i: usize| b.load_linear(host(weights[i].0, &weights[i].1), None, DenseBits::Bf16).unwrap());
        let (mut x, norm) = (b.filled_f32(k, &x), b.load_norm(norm.clone().into()).unwrap());
        let (mut h, [mut g, mut u, mut s]) =
            (b.tensor(tokens, k).unwrap(), [(); 3].map(|()| b.tensor(tokens, n).unwrap()));
        for _ in 0..20 {
            b.rms_norm(&x, &norm, 1e-6, &mut h);
            b.gated_linears(&h, (&gate, &up), Activation::Silu, (&mut g, &mut u), &mut s);
            b.linear_add(&down, &s, &mut x);
        }
        b.numbers(&x)
    };
    let first = run(&sides);
    (0..10).for_each(|_| assert!(run(&sides) == first, "other bits in another run"));
    // Our own kernels round the same numbers: what differs is the order of sums, now and then a rounding, over 20
    // layers.
    check("as our own", &first, &run(&Sides::new()), Within { each: 0.02, of_rms: 0.05, rms: 0.01 });
}
