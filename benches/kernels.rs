//! Each kernel on one thread with its data in cache: how far instructions alone would let it go.
//!
//! `cargo bench --bench kernels [-- SIMD [PRECISION]]`, each a part of a name. The best of many short runs, so that
//! other processes hardly matter. A kernel reads at memory speed when its GB/s at one token exceed a core's share of
//! the memory's; FMA/cycle-like rates show at many tokens.

use std::hint::black_box;
use std::time::{Duration, Instant};

use moebius::kernel::{self, Activations, Kernel, Rows, Simd, Start};
use moebius::machine::heap::Heap;
use moebius_cache::{MatrixLayout, Precision, ScaleType};

fn best(mut f: impl FnMut()) -> f64 {
    let mut best = Duration::MAX;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(60) {
        let from = Instant::now();
        f();
        best = best.min(from.elapsed());
    }
    best.as_secs_f64()
}

fn row(name: &str, seconds: f64, bytes: usize, products: usize) {
    println!(
        "{name:<34} {:>9.1} us {:>8.1} GB/s {:>9.1} G/s",
        seconds * 1e6,
        bytes as f64 / seconds / 1e9,
        products as f64 / seconds / 1e9
    );
}

fn main() {
    let mut filters = std::env::args().skip(1).filter(|a| a != "--bench");
    let (filter, of_precision) = (filters.next().unwrap_or_default(), filters.next().unwrap_or_default());
    println!("{:<34} {:>12} {:>13} {:>13}", "kernel", "time", "weights", "products");
    for simd in kernel::available().into_iter().filter(|&s| s != Simd::Scalar && s.to_string().contains(&filter)) {
        let kernel = kernel::get(simd).expect("listed as available");
        for precision in [
            Precision::int4(128),
            Precision::int4(32),
            Precision::int4(32).with_scales(ScaleType::F16),
            Precision::Mxfp4,
            Precision::Q2K,
            Precision::Q3K,
            Precision::Q4K,
            Precision::Q5K,
            Precision::Q6K,
            Precision::Iq4Xs,
            Precision::iq4(128),
            Precision::Q5_0,
            Precision::Iq1S,
            Precision::Iq1M,
            Precision::Iq2Xxs,
            Precision::Iq2Xs,
            Precision::Iq2S,
            Precision::Iq3Xxs,
            Precision::Iq3S,
            Precision::Tq1_0,
            Precision::Tq2_0,
            Precision::Nvfp4,
            Precision::fp8(128),
            Precision::int8(128),
            Precision::int8(32),
            Precision::Bf16,
        ] {
            if precision.to_string().contains(&of_precision) {
                packed(kernel, precision);
            }
        }
        if of_precision.is_empty() {
            plain(kernel);
        }
    }
}

fn packed(kernel: &dyn Kernel, precision: Precision) {
    let k = 2048;
    let layout = MatrixLayout { n: 128, k, precision };
    let mut tiles = Heap::default().buffer::<u8>(&[layout.bytes()]).expect("a little memory");
    tiles.fill(0x3c);
    let mut activations = Activations::default();
    for tokens in [1, 2, 4, 8, 16, 32, 64] {
        activations.start(kernel, precision, k, tokens);
        let mut out = vec![0.0; tokens * 32];
        let seconds = best(|| {
            // As the executor does: a tile of gate and one of up.
            for pair in tiles.chunks_exact(2 * layout.tile_bytes()) {
                kernel.matmul(&layout, &pair.into(), &activations.rows(0..tokens), Start::Zero, black_box(&mut out));
            }
        });
        row(&format!("{} {precision} x{tokens}", kernel.simd()), seconds, layout.bytes(), layout.n * k * tokens);
    }
}

fn plain(kernel: &dyn Kernel) {
    let k = 2048;
    let w32 = vec![1.0f32; 64 * k];
    let x = vec![1.0f32; 64 * k];
    for tokens in [1, 4, 64] {
        let mut out = vec![0.0; tokens * 64];
        let xs = Rows::new(&x[..tokens * k], tokens, k);
        let seconds = best(|| kernel.dot_f32(Rows::new(&w32, 64, k), xs, black_box(&mut out)));
        row(&format!("{} dot_f32 x{tokens}", kernel.simd()), seconds, w32.len() * 4, 64 * k * tokens);
    }
    let (mut codes, mut scales, mut sums, mut out) = (vec![0; k], vec![0.0; k / 32], vec![0; k / 32], vec![0.0; k]);
    let x = &x[..k];
    let name = |op: &str| format!("{} {op}", kernel.simd());
    row(
        &name("quantize g128"),
        best(|| kernel.quantize(x, 128, &mut codes, &mut scales[..k / 128], &mut sums[..k / 128])),
        k * 4,
        k,
    );
    row(&name("quantize g32"), best(|| kernel.quantize(x, 32, &mut codes, &mut scales, &mut sums)), k * 4, k);
    row(&name("silu_mul"), best(|| kernel.silu_mul(x, x, black_box(&mut out))), k * 4, k);
    row(&name("rms_norm"), best(|| kernel.rms_norm(x, x, 1e-6, black_box(&mut out))), k * 4, k);
    out.fill(-1.0);
    let seconds = best(|| {
        black_box(kernel.exp_sub(black_box(&mut out), 0.0));
    });
    row(&name("exp_sub"), seconds, k * 4, k);
}
