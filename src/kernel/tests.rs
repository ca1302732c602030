//! Every instruction set of this machine against the scalar kernels, bit for bit, and the scalar kernels against plain
//! arithmetic.
#![allow(unsafe_code)]

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::pack::{CodeType, MatrixLayout, Scales, TILE_ROWS};
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

/// Runs `check` on every kernel, with activations of 8 bits and of 16.
fn each(check: impl Fn(&dyn Kernel)) {
    for simd in available() {
        println!("testing {simd}");
        let kernel = get(simd).unwrap();
        check(kernel);
        check(halves(kernel));
    }
}

/// Every kernel's results are those of the scalar one, which is slow and runs once.
fn equal<T: PartialEq + std::fmt::Debug>(run: impl Fn(&dyn Kernel) -> T) {
    let both = |kernel| [run(kernel), run(halves(kernel))];
    let want = both(get(Simd::Scalar).unwrap());
    for simd in available().into_iter().filter(|&simd| simd != Simd::Scalar) {
        println!("testing {simd}");
        assert_eq!(both(get(simd).unwrap()), want, "{simd}");
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
        equal(|k| {
            let (mut codes, mut scales, mut sums) = (vec![0; x.len()], vec![0.0; groups], vec![0; groups]);
            k.quantize(&x, group, &mut codes, &mut scales, &mut sums);
            (codes, bits(&scales), sums)
        });
    });
}

#[test]
fn quantize_edges() {
    each(|kernel| {
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

fn precision() -> impl Strategy<Value = Precision> {
    prop::sample::select(Precision::all())
}

/// What rows are a multiple of.
fn unit(precision: Precision) -> usize {
    if precision == Precision::Bf16 { 24 } else { precision.unit() }
}

/// Tiles of random weights, or of extreme codes, where narrow sums would overflow.
fn tiles(layout: &MatrixLayout, random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..layout.bytes()).map(|_| random.next() as u8).collect();
    let extreme = random.next() as usize % 3;
    for tile in bytes.chunks_exact_mut(layout.tile_bytes()) {
        if layout.precision == Precision::Bf16 {
            for w in tile.chunks_exact_mut(2) {
                w.copy_from_slice(&bf16::from_f32(random.normal()).to_le_bytes());
            }
            continue;
        }
        let (scales, codes) = tile.split_at_mut(layout.scale_bytes());
        if extreme > 0 {
            codes.fill(if extreme == 1 { 0xff } else { 0 });
        }
        let (kind, group) = (layout.precision.row().unwrap().scales, layout.precision.group_size().unwrap());
        let no_nan =
            |bytes: &mut [u8]| bytes.iter_mut().filter(|byte| **byte & 0x7f == 0x7f).for_each(|byte| *byte ^= 1);
        if layout.precision.codes().unwrap().are_floats() {
            no_nan(codes);
        }
        if kind == Scales::Zeros {
            for record in scales[..layout.k / group * kind.record_bytes()].chunks_exact_mut(kind.record_bytes()) {
                for scale in record[..2 * TILE_ROWS].chunks_exact_mut(2) {
                    let bits = layout.precision.scales().to_bits(0.01 + 0.01 * random.normal());
                    scale.copy_from_slice(&(bits as u16).to_le_bytes());
                }
                record[2 * TILE_ROWS..].iter_mut().for_each(|zero| *zero %= 17);
            }
            continue;
        }
        if kind == Scales::E4m3 {
            no_nan(scales);
            let numbers = scales[..kind.head_bytes()].as_chunks_mut::<4>().0;
            numbers.iter_mut().for_each(|number| *number = (1e-4 + 1e-4 * random.normal()).to_le_bytes());
            continue;
        }
        if kind.have_offsets() || kind.head_bytes() > 0 {
            // Counts are any bytes, numbers are not.
            for g in 0..layout.k / group {
                let (at, head) = kind.at(g, group);
                let numbers =
                    if kind.head_bytes() > 0 { head..head + kind.head_bytes() } else { at..at + kind.record_bytes() };
                for number in scales[numbers].chunks_exact_mut(2) {
                    number.copy_from_slice(&half::f16::from_f32(0.01 + 0.01 * random.normal()).to_le_bytes());
                }
            }
            continue;
        }
        // Of F16 subnormal ones, too: they begin at 6e-5.
        let size = if random.next() % 4 == 0 { 1e-5 } else { 0.01 };
        let bytes = layout.precision.scales().bytes();
        for scale in scales.chunks_exact_mut(bytes) {
            let bits = layout.precision.scales().to_bits(size + size * random.normal()).to_le_bytes();
            scale.copy_from_slice(&bits[..bytes]);
        }
    }
    bytes
}

/// `x` in the form of `kernel`.
fn prepare(kernel: &dyn Kernel, layout: &MatrixLayout, x: &[f32]) -> Activations {
    let rows = x.len() / layout.k;
    let mut activations = Activations::default();
    let to = activations.start(kernel, layout.precision, layout.k, rows);
    for (t, x) in x.chunks_exact(layout.k).enumerate() {
        // SAFETY: no other thread uses it.
        unsafe { to.put(kernel, t..t + 1, x) };
    }
    activations
}

/// Rows of more than one chunk, the last of which is not full.
#[test]
fn rows_are_prepared_in_chunks() {
    each(|kernel| {
        for precision in Precision::all() {
            let (rows, k) = (5, 1300 / unit(precision) * unit(precision));
            let layout = MatrixLayout::new(TILE_ROWS, k, precision).unwrap();
            let mut random = Random(k as u64);
            let (weights, x) = (tiles(&layout, &mut random), random.normals(rows * k));
            let mut by_chunk = Activations::default();
            let to = by_chunk.start(kernel, precision, k, rows);
            for i in (0..chunks(rows, k)).rev() {
                let (t, inputs) = chunk(i, rows, k);
                // SAFETY: no other thread uses it.
                unsafe { to.put_inputs(kernel, t..t + 1, inputs.start, &x[t * k..][inputs]) };
            }
            let product = |activations: &Activations| {
                let mut out = vec![0.0; rows * TILE_ROWS];
                kernel.matmul(&layout, &weights[..].into(), &activations.rows(0..rows), Start::Zero, &mut out);
                bits(&out)
            };
            assert_eq!(product(&by_chunk), product(&prepare(kernel, &layout, &x)), "{precision}, {k} inputs");
        }
    });
}

#[test]
fn matmul_gives_equal_bits() {
    let tokens = prop_oneof![1..20usize, 1..70usize];
    cases(
        120,
        (precision(), 1..9usize, 1..6usize, tokens, 0..3usize, any::<u64>()),
        |(precision, groups, count, n, skip, seed)| {
            let k = groups * unit(precision);
            let layout = MatrixLayout::new(count * TILE_ROWS, k, precision).unwrap();
            let mut random = Random(seed);
            let weights = tiles(&layout, &mut random);
            let next = vec![0; 100];
            let mut x = random.normals((skip + n) * k);
            x[..k].fill(1.0);
            if n > 1 {
                x[(skip + 1) * k..(skip + 2) * k].fill(-1.0);
            }
            equal(|kernel| {
                let x = prepare(kernel, &layout, &x);
                let mut out = vec![f32::NAN; n * layout.n];
                let tiles = Tiles::before(&weights, &next, None);
                kernel.matmul(&layout, &tiles, &x.rows(skip..skip + n), Start::Zero, &mut out);
                let zero = bits(&out);
                kernel.matmul(&layout, &tiles, &x.rows(skip..skip + n), Start::Out, &mut out);
                (zero, bits(&out))
            });
        },
    );
}

/// As many tokens as unpack weights once for all, in blocks that are full or not, of one tile and of two.
#[test]
fn many_tokens_have_equal_bits() {
    for precision in Precision::all() {
        let unit = unit(precision);
        // More inputs than are unpacked at a time, and a last part that is as short as can be.
        let k = 1024_usize.next_multiple_of(unit) + unit;
        let layout = MatrixLayout::new(3 * TILE_ROWS, k, precision).unwrap();
        let mut random = Random(11);
        let weights = tiles(&layout, &mut random);
        let mut x = random.normals(22 * k);
        // The largest activations beside what may be the largest codes.
        x[2 * k..3 * k].fill(1.0);
        x[3 * k..4 * k].fill(-1.0);
        for n in [3, 4, 7, 9, 16, 20] {
            equal(|kernel| {
                let x = prepare(kernel, &layout, &x);
                let mut out = vec![f32::NAN; n * layout.n];
                kernel.matmul(&layout, &weights[..].into(), &x.rows(2..2 + n), Start::Zero, &mut out);
                let zero = bits(&out);
                kernel.matmul(&layout, &weights[..].into(), &x.rows(2..2 + n), Start::Out, &mut out);
                (zero, bits(&out))
            });
        }
    }
}

#[test]
fn every_place_of_a_grid_has_equal_bits() {
    let grids = Precision::all().into_iter().filter(|p| matches!(p.codes(), Some(CodeType::Grid(_))));
    for precision in grids {
        // So many places that none of 2,048 is missing.
        let layout = MatrixLayout::new(TILE_ROWS, 4096, precision).unwrap();
        let mut random = Random(7);
        let mut weights = tiles(&layout, &mut random);
        weights[layout.scale_bytes()..].fill_with(|| random.next() as u8);
        for n in [1, 2, 3, 4, 5, 6, 11] {
            let x = random.normals(n * layout.k);
            equal(|kernel| {
                let x = prepare(kernel, &layout, &x);
                let mut out = vec![0.0; n * layout.n];
                kernel.matmul(&layout, &weights[..].into(), &x.rows(0..n), Start::Zero, &mut out);
                bits(&out)
            });
        }
    }
}

/// What AVX-512 does where places are not looked up in registers, and AMX always.
#[cfg(target_arch = "x86_64")]
#[test]
fn gathered_places_are_the_codes() {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn check<const ROW: usize>() {
        let codes = moebius_cache::pack::Row::ALL[ROW].codes;
        let mut random = Random(ROW as u64);
        let words: Vec<u8> = (0..codes.bytes(1024)).map(|_| random.next() as u8).collect();
        for k in (0..1024).step_by(16) {
            // SAFETY: the words of all inputs.
            let runs = unsafe { avx512_grids::grid_runs::<ROW>(words.as_ptr(), k, _mm512_set1_epi8(3)) };
            for (j, run) in runs.into_iter().enumerate() {
                let mut bytes = [0i8; 64];
                // SAFETY: 64 bytes of an array.
                unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), run) };
                for (i, byte) in bytes.into_iter().enumerate() {
                    let code = moebius_cache::pack::unpack_code(codes, &words, i / 4, k + 4 * j + i % 4);
                    assert_eq!(byte, code.wrapping_add(3), "row {ROW}, input {}", k + 4 * j + i % 4);
                }
            }
        }
    }
    if get(Simd::Avx512).is_none() {
        eprintln!("skipped: no AVX-512");
        return;
    }
    // SAFETY: the features were detected.
    unsafe {
        check::<14>();
        check::<15>();
        check::<16>();
        check::<17>();
        check::<18>();
        check::<20>();
        check::<21>();
        check::<22>();
    }
}

#[test]
fn matmul_is_the_product() {
    cases(40, (precision(), 1..6usize, any::<u64>()), |(precision, groups, seed)| {
        let k = groups * unit(precision);
        let layout = MatrixLayout::new(TILE_ROWS, k, precision).unwrap();
        let mut random = Random(seed);
        let weights = tiles(&layout, &mut random);
        let x = random.normals(k);
        // Activations keep 16 bits of mantissa, or 8 of the largest of their group, or 8 more.
        for (kernel, of_integers) in [(best(), 0.02), (halves(best()), 1e-4)] {
            let mut out = vec![0.0; TILE_ROWS];
            kernel.matmul(
                &layout,
                &weights[..].into(),
                &prepare(kernel, &layout, &x).rows(0..1),
                Start::Zero,
                &mut out,
            );
            for (w, y) in moebius_cache::pack::unpack_matrix(&layout, &weights).chunks_exact(k).zip(out) {
                let exact: f64 = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                let size: f64 = w.iter().zip(&x).map(|(w, x)| (f64::from(*w) * f64::from(*x)).abs()).sum();
                let error = if precision.takes_integers() { of_integers } else { 1e-5 };
                // Scales and offsets that take each other away leave their rounding.
                assert!((f64::from(y) - exact).abs() <= error * size + 1e-6, "{precision}: {y} is not {exact}");
            }
        }
    });
}

#[test]
fn splitting_keeps_16_bits() {
    each(|kernel| {
        let mut words = vec![f32::NAN; kernel.split_words()];
        let x = Random(3).normals(20);
        kernel.split(&x, &mut words);
        let part = |i: usize| match kernel.simd() {
            Simd::Amx => f32::from_bits(words[i / 2].to_bits() >> (16 * (i % 2)) << 16),
            _ => words[i],
        };
        for (i, x) in x.iter().enumerate() {
            let (high, low) = (part(i), part(32 + i));
            assert_eq!(high, bf16::from_f32(*x).to_f32());
            assert!((high + low - x).abs() <= x.abs() / 65536.0);
        }
        assert!((20..32).all(|i| part(i) == 0.0 && part(32 + i) == 0.0));
    });
}

#[test]
fn a_number_that_is_none_stays_one() {
    each(|kernel| {
        let layout = MatrixLayout::new(TILE_ROWS, 64, Precision::Bf16).unwrap();
        let weights = tiles(&layout, &mut Random(1));
        let mut x = vec![1.0; 64];
        x[40] = f32::from_bits(0x7f80_0001);
        let mut out = vec![0.0; TILE_ROWS];
        kernel.matmul(&layout, &weights[..].into(), &prepare(kernel, &layout, &x).rows(0..1), Start::Zero, &mut out);
        assert!(out.iter().all(|y| y.is_nan()));
    });
}

#[test]
fn dots_give_equal_bits() {
    cases(60, (1..11usize, 1..16usize, 1..100usize, 0..3usize, any::<u64>()), |(rows, tokens, k, pad, seed)| {
        let mut random = Random(seed);
        let stride = k + pad;
        let w = random.normals(rows * stride);
        let x = random.normals(tokens * stride);
        equal(|kernel| {
            let mut out = vec![0.0; rows * tokens];
            kernel.dot_f32(Rows::strided(&w, rows, k, stride), Rows::strided(&x, tokens, k, stride), &mut out);
            bits(&out)
        });
        let mut out = vec![0.0; rows * tokens];
        best().dot_f32(Rows::strided(&w, rows, k, stride), Rows::strided(&x, tokens, k, stride), &mut out);
        let exact: f64 = (0..k).map(|i| f64::from(w[i]) * f64::from(x[i])).sum();
        assert!((f64::from(out[0]) - exact).abs() < 1e-4);
    });
}

#[test]
fn elementwise_gives_equal_bits() {
    cases(60, (1..200usize, any::<u64>()), |(n, seed)| {
        let mut random = Random(seed);
        let (x, y): (Vec<f32>, _) = (random.normals(n).iter().map(|v| v * 30.0).collect(), random.normals(n));
        let codes: Vec<i8> = y.iter().map(|y| (y * 40.0) as i8).collect();
        equal(|kernel| {
            let mut exp = x.clone();
            let sum = kernel.exp_sub(&mut exp, 20.0);
            let (mut silu, mut norm, mut add) = (vec![0.0; n], vec![0.0; n], y.clone());
            kernel.silu_mul(&x, &y, &mut silu);
            kernel.rms_norm(&x, &y, 1e-6, &mut norm);
            kernel.scale(&mut add, 0.7);
            kernel.add_scaled(&x, 0.3, &mut add);
            let mut wide = vec![bf16::ZERO; n];
            kernel.widen(&codes, &x[..n.min(32)], &mut wide);
            let wide: Vec<f32> = wide.into_iter().map(bf16::to_f32).collect();
            [bits(&exp), bits(&[sum]), bits(&silu), bits(&norm), bits(&add), bits(&wide)]
        });
    });
}

#[test]
fn exp_is_within_two_ulp() {
    each(|kernel| {
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

#[test]
fn gates_and_delta_steps_have_the_bits_of_scalar() {
    cases(40, (1..70usize, 1..100usize, any::<u64>()), |(rows, cols, seed)| {
        let mut random = Random(seed);
        let (gate, up) = (random.normals(cols), random.normals(cols));
        let (q, k, v) = (random.normals(rows), random.normals(rows), random.normals(cols));
        let (state, decay) = (random.normals(rows * cols), random.normals(rows));
        equal(|kernel| {
            let (mut glu, mut gated) = (vec![0.0; cols], up.clone());
            kernel.clamped_swiglu(&gate, &up, 1.5, 1.702, &mut glu);
            let (mut gelu, mut clamped) = (glu.clone(), glu.clone());
            kernel.gelu_mul(&gate, &up, &mut gelu);
            kernel.clamped_silu_mul(&gate, &up, 0.5, &mut clamped);
            let mut of_clamped = glu.clone();
            kernel.silu_of_clamped_mul(&gate, &up, 0.5, &mut of_clamped);
            kernel.sigmoid_mul(&gate, &mut gated);
            let (mut state, mut out) = (state.clone(), vec![0.0; cols]);
            kernel.delta_step(&mut state, &DeltaToken { q: &q, k: &k, v: &v, decay: &decay, beta: 0.3 }, &mut out);
            let (mut of_ssm, mut read) = (state.clone(), vec![0.0; cols]);
            kernel.ssm_step(&mut of_ssm, &SsmToken { b: &k, c: &q, x: &v, decay: 0.9 }, &mut read);
            [&glu, &gelu, &clamped, &of_clamped, &gated, &state, &out, &of_ssm, &read].map(|numbers| bits(numbers))
        });
    });
}

#[test]
fn gates_and_delta_steps_are_what_they_say() {
    let kernel = get(Simd::Scalar).unwrap();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let near = |got: f32, want: f64| {
        assert!((f64::from(got) - want).abs() < 1e-5 * (1.0 + want.abs()), "{got}, exactly {want}")
    };
    let gate = [-30.0f32, -8.0, -0.5, 0.0, 0.7, 6.9, 7.1, 50.0];
    for up in [-50.0f32, -7.1, -6.9, 0.0, 3.0, 7.1] {
        let (mut glu, mut gated) = ([0.0; 8], [up; 8]);
        kernel.clamped_swiglu(&gate, &[up; 8], 7.0, 1.702, &mut glu);
        kernel.sigmoid_mul(&gate, &mut gated);
        let (mut gelu, mut clamped) = ([0.0; 8], [0.0; 8]);
        kernel.gelu_mul(&gate, &[up; 8], &mut gelu);
        kernel.clamped_silu_mul(&gate, &[up; 8], 6.95, &mut clamped);
        for i in 0..gate.len() {
            let (g, u) = (f64::from(gate[i]), f64::from(up));
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
            near(gelu[i], 0.5 * g * (1.0 + inner.tanh()) * u);
            near(clamped[i], (g * sigmoid(g)).min(6.95) * u.clamp(-6.95, 6.95));
            let mut of_clamped = [0.0];
            kernel.silu_of_clamped_mul(&gate[i..=i], &[up], 6.95, &mut of_clamped);
            near(of_clamped[0], g.min(6.95) * sigmoid(g.min(6.95)) * u.clamp(-6.95, 6.95));
            let (g, u) = (f64::from(gate[i]).min(7.0), f64::from(up).clamp(-7.0, 7.0));
            near(glu[i], (u + 1.0) * g * sigmoid(1.702 * g));
            near(gated[i], f64::from(up) * sigmoid(f64::from(gate[i])));
        }
    }
    let mut random = Random(3);
    let (rows, cols) = (24, 40);
    let (q, k, v) = (random.normals(rows), random.normals(rows), random.normals(cols));
    let (before, decay) = (random.normals(rows * cols), random.normals(rows));
    let (mut state, mut out) = (before.clone(), vec![0.0; cols]);
    kernel.delta_step(&mut state, &DeltaToken { q: &q, k: &k, v: &v, decay: &decay, beta: 0.3 }, &mut out);
    for c in 0..cols {
        let decayed = |r: usize| f64::from(decay[r]) * f64::from(before[r * cols + c]);
        let known: f64 = (0..rows).map(|r| decayed(r) * f64::from(k[r])).sum();
        let delta = 0.3 * (f64::from(v[c]) - known);
        let after = |r: usize| decayed(r) + f64::from(k[r]) * delta;
        (0..rows).for_each(|r| near(state[r * cols + c], after(r)));
        near(out[c], (0..rows).map(|r| after(r) * f64::from(q[r])).sum());
    }
    let mut state = before.clone();
    kernel.ssm_step(&mut state, &SsmToken { b: &k, c: &q, x: &v, decay: 0.9 }, &mut out);
    for c in 0..cols {
        let after = |r: usize| 0.9 * f64::from(before[r * cols + c]) + f64::from(k[r]) * f64::from(v[c]);
        (0..rows).for_each(|r| near(state[r * cols + c], after(r)));
        near(out[c], (0..rows).map(|r| after(r) * f64::from(q[r])).sum());
    }
}
