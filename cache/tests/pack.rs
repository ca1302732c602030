//! Packing against its definition, and quantization against its bounds, over random shapes.
#![allow(clippy::unwrap_used)] // a test

mod common;

use common::noise;
use half::bf16;
use moebius_cache::pack::{CodeType, DOUBLED_E2M1, Weights, pack_expert, pack_matrix, unpack_expert, unpack_matrix};
use moebius_cache::quantize::{quantize_expert, quantize_matrix, quantize_rows};
use moebius_cache::{ExpertLayout, MatrixLayout, Precision, ScaleType};
use proptest::prelude::*;

fn precision() -> impl Strategy<Value = Precision> {
    prop::sample::select(Precision::all())
}

#[test]
fn every_precision_is_listed_once_under_its_own_name() {
    let names: Vec<String> = Precision::all().iter().map(ToString::to_string).collect();
    let sizes = ["g32", "g32-f16", "g64", "g64-f16", "g128", "g128-f16"];
    let of = |name: &str| sizes.map(|size| format!("{name}-{size}"));
    assert_eq!(names, [vec!["bf16".into(), "mxfp4".into()], of("int4").into(), of("int8").into()].concat());
}

#[test]
fn the_facts_of_codes_agree_with_each_other() {
    for codes in CodeType::ALL {
        let all: Vec<i8> = (0..=255u8 >> (8 - codes.bits())).map(|stored| codes.code(stored)).collect();
        assert_eq!(codes.range().map(Some), [all.iter().min().copied(), all.iter().max().copied()], "{codes:?}");
        let [low, high] = codes.range();
        assert_eq!(codes.is_table(), !(low..=high).all(|code| all.contains(&code)), "{codes:?}");
        for at in (0..8).step_by(codes.bits()) {
            assert_eq!(all[usize::from(codes.zero_byte()) >> at & (all.len() - 1)], 0, "{codes:?}");
        }
        assert_eq!(codes.precision(32).codes(), Some(codes));
        assert_eq!(CodeType::ALL[codes as usize], codes, "kernels number them so");
    }
}

#[test]
fn the_coarsest_precision_keeps_both() {
    let f16 = |precision: Precision| precision.with_scales(ScaleType::F16);
    for (a, b, both) in [
        (Precision::Mxfp4, Precision::Mxfp4, Precision::Mxfp4),
        (Precision::Mxfp4, Precision::int4(128), Precision::int8(32)),
        (f16(Precision::int4(64)), f16(Precision::int4(128)), Precision::int4(64)),
        (Precision::int8(64), Precision::int4(32), Precision::int8(32)),
        (Precision::Bf16, Precision::int4(32), Precision::Bf16),
    ] {
        assert_eq!((a.coarsest_of(b), b.coarsest_of(a)), (both, both), "{a} and {b}");
    }
    assert_eq!(Precision::Mxfp4.in_groups(64), Precision::int8(64), "MXFP4 has groups of 32 only");
}

/// Codes, scales and the weights they stand for.
fn random_weights(n: usize, k: usize, precision: Precision, seed: u64) -> (Vec<i8>, Vec<f32>, Vec<bf16>, Vec<f32>) {
    let noise = noise(n * k, seed);
    let Some(group) = precision.group_size() else {
        let weights: Vec<bf16> = noise.iter().map(|&x| bf16::from_f32(x)).collect();
        let truth = weights.iter().map(|w| w.to_f32()).collect();
        return (vec![], vec![], weights, truth);
    };
    let code = |x: &f32| match precision {
        Precision::Int4 { .. } => (x * 14.0).round().clamp(-8.0, 7.0) as i8,
        Precision::Mxfp4 => DOUBLED_E2M1[(x.to_bits() >> 8) as usize % 16],
        _ => (x * 254.0).round().clamp(-128.0, 127.0) as i8,
    };
    let codes: Vec<i8> = noise.iter().map(code).collect();
    // Not all in the normal range of F16.
    let round = |x: f32| precision.scales().from_bits(precision.scales().to_bits(x));
    let scales: Vec<f32> = noise.iter().step_by(group).map(|&x| round(x * [1.0, 1e-5][n % 2])).collect();
    let truth = codes.iter().enumerate().map(|(i, &c)| c as f32 * scales[i / group]).collect();
    (codes, scales, vec![], truth)
}

fn weights<'a>(codes: &'a [i8], scales: &'a [f32], plain: &'a [bf16]) -> Weights<'a> {
    if plain.is_empty() { Weights::Int { codes, scales } } else { Weights::Bf16(plain) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_packed_matrix_unpacks_to_its_weights(n in 1usize..70, groups in 1usize..5, precision in precision(),
        seed: u64) {
        let k = groups * precision.group_size().unwrap_or(24);
        let layout = MatrixLayout::new(n, k, precision).unwrap();
        let (codes, scales, plain, truth) = random_weights(n, k, precision, seed);
        let mut bytes = vec![0x55; layout.bytes()];
        pack_matrix(&layout, weights(&codes, &scales, &plain), &mut bytes);
        prop_assert_eq!(unpack_matrix(&layout, &bytes), truth);
        // Rows that fill the last tile are zero weights with zero scales.
        let padded = MatrixLayout::new(layout.tiles() * 16, k, precision).unwrap();
        let filled = unpack_matrix(&padded, &bytes);
        prop_assert!(filled[n * k..].iter().all(|w| *w == 0.0));
    }

    #[test]
    fn a_packed_expert_unpacks_to_its_matrices(h in 1usize..4, i in 1usize..4, precision in precision(), seed: u64) {
        let unit = precision.group_size().unwrap_or(24);
        let (hidden, intermediate) = (h * unit, i * unit);
        let layout = ExpertLayout::new(hidden, intermediate, precision).unwrap();
        let gate = random_weights(intermediate, hidden, precision, seed);
        let up = random_weights(intermediate, hidden, precision, seed ^ 1);
        let down = random_weights(hidden, intermediate, precision, seed ^ 2);
        let mut bytes = vec![0x55; layout.bytes()];
        let view = |m: &'static str| match m { "gate" => weights(&gate.0, &gate.1, &gate.2), "up" => weights(&up.0,
            &up.1, &up.2), _ => weights(&down.0, &down.1, &down.2) };
        pack_expert(&layout, view("gate"), view("up"), view("down"), &mut bytes);
        prop_assert_eq!(unpack_expert(&layout, &bytes), [gate.3, up.3, down.3]);
    }

    #[test]
    fn quantized_weights_are_near_their_source(n in 1usize..20, groups in 1usize..4, precision in precision(),
        seed: u64, exponent in -40i32..40) {
        let k = groups * precision.group_size().unwrap_or(32);
        let layout = MatrixLayout::new(n, k, precision).unwrap();
        let exponent = if precision.scales() == ScaleType::F16 { exponent.min(15) } else { exponent };
        let source: Vec<f32> = noise(n * k, seed).iter().map(|x| x * 2f32.powi(exponent)).collect();
        let mut bytes = vec![0; layout.bytes()];
        quantize_matrix(&layout, &source, &mut bytes);
        let back = unpack_matrix(&layout, &bytes);
        let group = precision.group_size().unwrap_or(1);
        for (w, q) in source.chunks(group).zip(back.chunks(group)) {
            let largest = w.iter().fold(0f32, |a, x| a.max(x.abs()));
            // Half a step of the largest-value scale bounds the root mean square of its error; the search never does
            // worse.
            // F16 ends at 6e-8, and is coarse before.
            let least = if precision.scales() == ScaleType::F16 { 127.0 * 6e-8 } else { 0.0 };
            let step = match precision { Precision::Bf16 => largest / 128.0, Precision::Int8 { .. } => largest / 126.0,
                Precision::Int4 { .. } => largest / 6.9, Precision::Mxfp4 => largest / 2.9 };
            let step = step.max(least);
            let squares: f32 = w.iter().zip(q).map(|(w, q)| ((w - q) / step).powi(2)).sum();
            prop_assert!(squares <= 0.25 * group as f32, "{squares} of {group}");
        }
    }
}

/// The plain way: the largest magnitude maps to 7 (or 127).
fn largest_value_error(w: &[f32], top: f32) -> f64 {
    let scale = bf16::from_f32(w.iter().fold(0f32, |a, x| a.max(x.abs())) / top).to_f32();
    w.iter().map(|x| (x - scale * (x / scale).round().clamp(-top - 1.0, top)) as f64).map(|e| e * e).sum()
}

#[test]
fn searched_scales_beat_the_largest_value() {
    for (precision, top, gain) in [(Precision::int4(128), 7.0, 0.85), (Precision::int8(128), 127.0, 1.0)] {
        let source = noise(128 * 512, 7);
        let (mut codes, mut scales) = (vec![0; source.len()], vec![0.0; source.len() / 128]);
        quantize_rows(precision, &source, &mut codes, &mut scales);
        let (mut searched, mut plain) = (0.0, 0.0);
        for (i, w) in source.chunks(128).enumerate() {
            let scale = scales[i];
            let error: f64 =
                w.iter().zip(&codes[i * 128..]).map(|(w, &c)| (w - scale * c as f32) as f64).map(|e| e * e).sum();
            let bound = largest_value_error(w, top);
            assert!(error <= bound * 1.000_01, "group {i}: {error} against {bound}");
            searched += error;
            plain += bound;
        }
        assert!(searched < plain * gain, "{precision}: {searched} against {plain}");
    }
}

#[test]
fn groups_of_zeros_and_of_vanishing_weights_get_scale_zero() {
    for precision in [Precision::int4(32), Precision::int8(32)] {
        let mut source = vec![0f32; 96];
        source[40] = 1e-38;
        source[70] = 3.0e38;
        source[71] = -1.0;
        let (mut codes, mut scales) = (vec![9; 96], vec![1.0; 3]);
        quantize_rows(precision, &source, &mut codes, &mut scales);
        assert_eq!((scales[0], scales[1]), (0.0, 0.0));
        assert!(codes[..64].iter().all(|&c| c == 0));
        let back = codes[70] as f32 * scales[2];
        assert!((back / 3.0e38 - 1.0).abs() < 0.01, "{back}");
    }
}

#[test]
fn an_expert_of_real_numbers_comes_back() {
    let layout = ExpertLayout::new(64, 96, Precision::int8(32)).unwrap();
    let [gate, up, down] = [1, 2, 3].map(|seed| noise(64 * 96, seed));
    let back = unpack_expert(&layout, &quantize_expert(&layout, &gate, &up, &down));
    for (w, q) in [gate, up, down].iter().zip(&back) {
        assert!(w.iter().zip(q).all(|(w, q)| (w - q).abs() < 0.01));
    }
}
