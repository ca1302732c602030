//! Every instruction set of this machine against the scalar kernels, bit for bit, and the scalar kernels against plain arithmetic.

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::{MatrixLayout, TILE_ROWS};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

/// A small generator: the tests need many numbers, not good ones.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// About normal, standard deviation 1.
    fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.next() as f32 / (1u64 << 31) as f32 - 0.5).sum::<f32>() * std::f32::consts::SQRT_2
    }

    fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Runs `check` on every kernel that is not scalar, beside the scalar one.
fn each(check: impl Fn(&dyn Kernel, &dyn Kernel)) {
    for simd in available() {
        println!("testing {simd}");
        check(get(simd).unwrap(), get(Simd::Scalar).unwrap());
    }
}

fn cases<S: Strategy>(n: u32, strategy: S, test: impl Fn(S::Value)) {
    let mut runner = TestRunner::new(Config { cases: n, failure_persistence: None, ..Config::default() });
    let test = |value| {
        test(value);
        Ok(())
    };
    runner.run(&strategy, test).unwrap();
}

#[test]
fn names_round_trip() {
    for simd in Simd::ALL {
        assert_eq!(simd.to_string().parse::<Simd>().unwrap(), simd);
    }
    assert!("sse9".parse::<Simd>().unwrap_err().to_string().contains("avx512"));
    assert_eq!(available()[0], Simd::Scalar);
    assert_eq!(best().simd(), *available().last().unwrap());
}

#[test]
fn quantize_gives_equal_bits() {
    cases(40, (1..5usize, prop::sample::select(vec![32usize, 64, 128]), any::<u64>()), |(groups, group, seed)| {
        let mut x = Random(seed).normals(groups * group);
        x[0] = 0.5 * 127.0; // halves, to be rounded to even
        x[1] = 127.0;
        x[2] = -2.5;
        each(|kernel, scalar| {
            let run = |k: &dyn Kernel| {
                let (mut codes, mut scales, mut sums) = (vec![0; x.len()], vec![0.0; groups], vec![0; groups]);
                k.quantize(&x, group, &mut codes, &mut scales, &mut sums);
                (codes, bits(&scales), sums)
            };
            assert_eq!(run(kernel), run(scalar));
        });
    });
}

#[test]
fn quantize_edges() {
    each(|kernel, _| {
        let mut x = vec![0.0; 32 * 4];
        x[32..64].fill(1e-40);
        x[64] = f32::NAN;
        x[96] = f32::INFINITY;
        let (mut codes, mut scales, mut sums) = (vec![1; x.len()], vec![1.0; 4], vec![1; 4]);
        kernel.quantize(&x, 32, &mut codes, &mut scales, &mut sums);
        assert_eq!((scales[0], scales[1], sums[0], sums[1]), (0.0, 0.0, 0, 0));
        assert!(codes[..64].iter().all(|&c| c == 0));
        assert!(!scales[2].is_finite() && !scales[3].is_finite());
    });
}

#[test]
fn packed_tile_gives_equal_bits() {
    let shapes = (any::<bool>(), prop::sample::select(vec![32usize, 64, 128]), 1..12usize, 1..30usize, any::<u64>());
    cases(60, shapes, |(int4, group_size, groups, n, seed)| {
        let k = group_size * groups;
        let precision = if int4 { Precision::Int4 { group_size } } else { Precision::Int8 { group_size } };
        let layout = MatrixLayout::new(TILE_ROWS, k, precision).unwrap();
        let mut random = Random(seed);
        let mut tile: Vec<u8> = (0..layout.tile_bytes()).map(|_| random.next() as u8).collect();
        // Extreme codes, where narrow sums would overflow.
        let start = layout.scale_bytes();
        let extreme = random.next() as usize % 3;
        if extreme > 0 {
            tile[start..].fill(if extreme == 1 { 0xff } else { 0 });
        }
        for (i, scale) in tile[..groups * 32].chunks_exact_mut(2).enumerate() {
            scale.copy_from_slice(&bf16::from_f32(0.01 + 0.001 * (i % 7) as f32).to_le_bytes());
        }
        let count = 5;
        let (mut codes, mut scales, mut sums) = (vec![0; count * k], vec![0.0; count * groups], vec![0; count * groups]);
        let mut x = random.normals(count * k);
        x[..k].fill(1.0);
        x[k..2 * k].fill(-1.0);
        get(Simd::Scalar).unwrap().quantize(&x, group_size, &mut codes, &mut scales, &mut sums);
        let rows: Vec<u32> = (0..n).map(|_| random.next() as u32 % count as u32).collect();
        let x = QuantizedRows { k, group: group_size, codes: &codes, scales: &scales, sums: &sums };
        each(|kernel, scalar| {
            let (mut a, mut b) = (vec![f32::NAN; n * TILE_ROWS], vec![f32::NAN; n * TILE_ROWS]);
            kernel.packed_tile(&layout, &tile, &x, &rows, &mut a);
            scalar.packed_tile(&layout, &tile, &x, &rows, &mut b);
            assert_eq!(bits(&a), bits(&b));
        });
    });
}

#[test]
fn dots_give_equal_bits() {
    cases(60, (1..11usize, 1..16usize, 1..100usize, 0..3usize, any::<u64>()), |(rows, tokens, k, pad, seed)| {
        let mut random = Random(seed);
        let stride = k + pad;
        let w = random.normals(rows * stride);
        let w16: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
        let x = random.normals(tokens * stride);
        each(|kernel, scalar| {
            let run = |kernel: &dyn Kernel| {
                let (mut a, mut b) = (vec![0.0; rows * tokens], vec![0.0; rows * tokens]);
                let x = Rows::strided(&x, tokens, k, stride);
                kernel.dot_f32(Rows::strided(&w, rows, k, stride), x, &mut a);
                kernel.dot_bf16(Rows::strided(&w16, rows, k, stride), x, &mut b);
                (bits(&a), bits(&b))
            };
            assert_eq!(run(kernel), run(scalar));
        });
        let mut out = vec![0.0; rows * tokens];
        best().dot_f32(Rows::strided(&w, rows, k, stride), Rows::strided(&x, tokens, k, stride), &mut out);
        let exact: f64 = (0..k).map(|i| f64::from(w[i]) * f64::from(x[i])).sum();
        assert!((f64::from(out[0]) - exact).abs() < 1e-4);
    });
}

#[test]
fn axpy_gives_equal_bits() {
    cases(40, (0..20usize, 1..12usize, 1..150usize, any::<u64>()), |(rows, tokens, cols, seed)| {
        let mut random = Random(seed);
        let (p, v, start) = (random.normals(tokens * (rows + 3)), random.normals(rows * (cols + 1)), random.normals(tokens * cols));
        each(|kernel, scalar| {
            let run = |kernel: &dyn Kernel| {
                let mut out = start.clone();
                kernel.axpy_f32(Rows::strided(&p, tokens, rows, rows + 3), Rows::strided(&v, rows, cols, cols + 1), &mut out);
                bits(&out)
            };
            assert_eq!(run(kernel), run(scalar));
        });
    });
}

#[test]
fn elementwise_gives_equal_bits() {
    cases(60, (1..200usize, any::<u64>()), |(n, seed)| {
        let mut random = Random(seed);
        let (x, y): (Vec<f32>, _) = (random.normals(n).iter().map(|v| v * 30.0).collect(), random.normals(n));
        each(|kernel, scalar| {
            let run = |kernel: &dyn Kernel| {
                let mut exp = x.clone();
                let sum = kernel.exp_sub(&mut exp, 20.0);
                let (mut silu, mut norm, mut add) = (vec![0.0; n], vec![0.0; n], y.clone());
                kernel.silu_mul(&x, &y, &mut silu);
                kernel.rms_norm(&x, &y, 1e-6, &mut norm);
                kernel.add_scaled(&x, 0.3, &mut add);
                [bits(&exp), bits(&[sum]), bits(&silu), bits(&norm), bits(&add)]
            };
            assert_eq!(run(kernel), run(scalar));
        });
    });
}

#[test]
fn exp_is_within_two_ulp() {
    each(|kernel, _| {
        let inputs: Vec<f32> = (0..100_000).map(|i| -87.0 + i as f32 * 0.00175).collect();
        let mut x = inputs.clone();
        kernel.exp_sub(&mut x, 0.0);
        for (input, got) in inputs.iter().zip(&x) {
            let exact = f64::from(*input).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            assert!((f64::from(*got) - exact).abs() <= 2.0 * ulp, "exp({input}) = {got}, exactly {exact}");
        }
        let mut edges = [f32::NEG_INFINITY, -1e30, -88.0, 0.0, f32::NAN];
        kernel.exp_sub(&mut edges, 0.0);
        assert_eq!(edges[..4], [0.0, 0.0, 0.0, 1.0]);
        assert!(edges[4].is_nan());
        let mut silu = [0.0; 4];
        kernel.silu_mul(&[-1e30, -100.0, 1e30, 1.0], &[1.0; 4], &mut silu);
        assert!(silu[0].abs() <= 1e-7 * 1e30 && silu[1].abs() < 1e-30 && silu[2] == 1e30);
        assert!((silu[3] - 0.731_058_6).abs() < 1e-6);
    });
}
