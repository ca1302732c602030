//! Packing against its definition, and quantization against its bounds, over random shapes.
#![allow(clippy::unwrap_used)] // a test

mod common;

use common::noise;
use half::{bf16, f16};
use moebius_cache::checkpoint::GgmlType;
use moebius_cache::pack::{
    Blocks, CodeType, Row, SUPER_BLOCK, Scales, TILE_ROWS, Weights, pack_expert, pack_matrix, unpack_expert,
    unpack_matrix,
};
use moebius_cache::quantize::{quantize_expert, quantize_matrix, quantize_rows};
use moebius_cache::{ExpertLayout, MatrixLayout, Precision, ScaleType};
use proptest::prelude::*;

fn precision() -> impl Strategy<Value = Precision> {
    prop::sample::select(Precision::all())
}

/// What rows are a multiple of.
fn unit(precision: Precision) -> usize {
    if precision == Precision::Bf16 { 24 } else { precision.unit() }
}

#[test]
fn every_precision_is_listed_once_under_its_own_name() {
    let names: Vec<String> = Precision::all().iter().map(ToString::to_string).collect();
    let sizes = ["g32", "g32-f16", "g64", "g64-f16", "g128", "g128-f16"];
    let of = |name: &str| sizes.map(|size| format!("{name}-{size}"));
    let blocks = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq4_nl", "q4_1", "q5_1", "q5_0"].map(String::from);
    let plain = [vec!["bf16".into(), "mxfp4".into()], of("int4").into(), of("int8").into(), of("uint4").into()];
    let grids =
        ["iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0"].map(String::from);
    let table = ["iq4-g32", "iq4-g64", "iq4-g128"].map(String::from);
    let fp8 = of("fp8").map(|name| name.replace("f16", "f32"));
    assert_eq!(
        names,
        [plain.concat(), blocks.into(), vec!["nvfp4".into()], grids.into(), table.into(), fp8.into()].concat()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_part_of_the_inputs_has_their_weights(
        precision in precision(), n in 1usize..40, units in 2usize..7, from in 0usize..6, len in 1usize..6, seed: u64,
    ) {
        let unit = precision.unit().max(32);
        let (from, end) = (from.min(units - 1) * unit, ((from + len).min(units)).max(from.min(units - 1) + 1) * unit);
        let layout = MatrixLayout::new(n, units * unit, precision).unwrap();
        // Any bytes are weights, but for the numbers that are no numbers.
        let mut state = seed | 1;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8 & 0x3b
        };
        let whole: Vec<u8> = (0..layout.bytes()).map(|_| next()).collect();
        let (part, runs) = layout.of_inputs(from..end).unwrap();
        let mut bytes = vec![0; part.bytes()];
        for (whole, to) in whole.chunks_exact(layout.tile_bytes()).zip(bytes.chunks_exact_mut(part.tile_bytes())) {
            for run in &runs {
                to[run.to..][..run.bytes].copy_from_slice(&whole[run.from..][..run.bytes]);
            }
        }
        let (all, some) = (unpack_matrix(&layout, &whole), unpack_matrix(&part, &bytes));
        for (all, some) in all.chunks_exact(layout.k).zip(some.chunks_exact(part.k)) {
            let same = all[from..end].iter().zip(some).all(|(a, b)| a.to_bits() == b.to_bits());
            prop_assert!(same, "{precision}");
        }
    }
}

#[test]
fn the_facts_of_rows_agree_with_each_other() {
    let mut rows = vec![false; Row::ALL.len()];
    for precision in Precision::all() {
        let (Some(number), Some(row)) = (precision.row_number(), precision.row()) else { continue };
        rows[number] = true;
        if let CodeType::Grid(grid) = row.codes {
            if grid.has_ones() {
                continue;
            }
            // Places do not stand alone.
            let largest = grid.magnitudes().iter().flat_map(|four| four.to_le_bytes()).max();
            assert_eq!((largest, row.codes.table()), (Some(grid.largest() as u8), None), "{precision}");
            assert_eq!(row.codes.range(), [-grid.largest(), grid.largest()], "{precision}");
            assert_eq!(grid.magnitudes().len() * 4 / grid.run(), 256 << grid.upper_bits(), "{precision}");
            continue;
        }
        let all: Vec<i8> = (0..=255u8 >> (8 - row.codes.bits())).map(|stored| row.codes.code(stored)).collect();
        assert_eq!(row.codes.range().map(Some), [all.iter().min().copied(), all.iter().max().copied()], "{precision}");
        assert!(all.iter().all(|&code| row.codes.code(row.codes.stored(code)) == code), "{precision}");
        let [low, high] = row.codes.range();
        assert_eq!(row.codes.table().is_some(), !(low..=high).all(|code| all.contains(&code)), "{precision}");
        let values = all.iter().filter(|&&code| !row.codes.value(code).is_nan());
        values.for_each(|&code| assert_eq!(row.codes.nearest(row.codes.value(code)), code, "{precision}"));
        // Records follow each other without a gap.
        let group = precision.group_size().unwrap();
        let k = 3 * SUPER_BLOCK;
        for g in 0..k / group {
            let (at, head) = row.scales.at(g, group);
            let next = row.scales.at(g + 1, group);
            let gap = if next.1 == head { 0 } else { row.scales.head_bytes() };
            assert_eq!(row.scales.bytes(k, group), {
                let (at, _) = row.scales.at(k / group - 1, group);
                at + row.scales.record_bytes()
            });
            assert_eq!(next.0 - at, row.scales.record_bytes() + gap, "{precision}: group {g}");
        }
    }
    assert!(rows.iter().all(|listed| *listed), "every row has a precision");
}

#[test]
fn weights_take_the_bytes_that_files_of_llama_cpp_have() {
    for (kind, precision) in [
        (GgmlType::Q4_0, Precision::int4(32)),
        (GgmlType::Q8_0, Precision::int8(32)),
        (GgmlType::Q2_K, Precision::Q2K),
        (GgmlType::Q3_K, Precision::Q3K),
        (GgmlType::Q4_K, Precision::Q4K),
        (GgmlType::Q5_K, Precision::Q5K),
        (GgmlType::Q6_K, Precision::Q6K),
        (GgmlType::IQ4_XS, Precision::Iq4Xs),
        (GgmlType::IQ4_NL, Precision::Iq4Nl),
        (GgmlType::Q4_1, Precision::Q4_1),
        (GgmlType::Q5_0, Precision::Q5_0),
        (GgmlType::Q5_1, Precision::Q5_1),
        (GgmlType::Q8_0, Precision::fp8(32)),
        (GgmlType::IQ2_XXS, Precision::Iq2Xxs),
        (GgmlType::IQ2_XS, Precision::Iq2Xs),
        (GgmlType::IQ2_S, Precision::Iq2S),
        (GgmlType::IQ3_XXS, Precision::Iq3Xxs),
        (GgmlType::IQ3_S, Precision::Iq3S),
        (GgmlType::IQ1_S, Precision::Iq1S),
        (GgmlType::IQ1_M, Precision::Iq1M),
        (GgmlType::TQ1_0, Precision::Tq1_0),
        (GgmlType::TQ2_0, Precision::Tq2_0),
    ] {
        let (weights, bytes) = kind.block();
        for k in [768, 2048] {
            let packed = MatrixLayout::new(TILE_ROWS, k, precision).unwrap().bytes();
            let stored = TILE_ROWS * k / weights * bytes;
            // Scales end at a whole line.
            assert!((stored..stored + 64).contains(&packed), "{precision}: {packed} for {stored}");
        }
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
        (Precision::Q4K, Precision::Q4K, Precision::Q4K),
        (Precision::Q4K, Precision::Q4_1, Precision::int8(32)),
        (Precision::Q6K, Precision::Q2K, Precision::int8(32)),
        (Precision::Nvfp4, Precision::Nvfp4, Precision::Nvfp4),
        (Precision::fp8(128), Precision::fp8(32).with_scales(ScaleType::F32), {
            Precision::fp8(32).with_scales(ScaleType::F32)
        }),
        (Precision::fp8(128), Precision::int8(64), Precision::int8(64)),
    ] {
        assert_eq!((a.coarsest_of(b), b.coarsest_of(a)), (both, both), "{a} and {b}");
    }
    assert_eq!(Precision::Mxfp4.in_groups(64), Precision::int8(64), "MXFP4 has groups of 32 only");
}

/// Weights in their parts, and what they stand for.
struct Parts {
    codes: Vec<i8>,
    scales: Vec<f32>,
    plain: Vec<bf16>,
    blocks: Blocks,
    truth: Vec<f32>,
}

fn random_weights(n: usize, k: usize, precision: Precision, seed: u64) -> Parts {
    let noise = noise(n * k, seed);
    let mut parts =
        Parts { codes: vec![], scales: vec![], plain: vec![], blocks: Blocks::default(), truth: vec![0.0; n * k] };
    let (Some(group), Some(row)) = (precision.group_size(), precision.row()) else {
        parts.plain = noise.iter().map(|&x| bf16::from_f32(x)).collect();
        parts.truth = parts.plain.iter().map(|w| w.to_f32()).collect();
        return parts;
    };
    let any = |x: &f32| (x.to_bits() >> 7) as u8;
    if let (CodeType::Grid(grid), Scales::Odd { halvings, .. }) = (row.codes, row.scales) {
        let blocks = &mut parts.blocks;
        blocks.resize(&MatrixLayout::new(n, k, precision).unwrap(), n);
        blocks.words.iter_mut().zip(noise.windows(2)).for_each(|(word, x)| {
            *word = x[0].to_bits() << 9 ^ x[1].to_bits();
        });
        blocks.heads.iter_mut().zip(&noise).for_each(|(head, x)| *head = f16::from_f32(*x).to_bits());
        let bits = row.scales.record_bytes() / 2; // of a count
        blocks.counts.iter_mut().zip(&noise).for_each(|(count, x)| *count = any(x) >> (8 - bits));
        for (i, w) in parts.truth.iter_mut().enumerate() {
            let words = &blocks.words[i / SUPER_BLOCK * grid.words()..][..grid.words()];
            let above = || grid.count(|word| words[word], i % SUPER_BLOCK / 32);
            let count = blocks.counts.get(i / group).copied().unwrap_or_else(above);
            let d = f16::from_bits(blocks.heads[i / SUPER_BLOCK]).to_f32();
            let scale = d * (2.0 * f32::from(count) + 1.0) / f32::from(1u8 << halvings);
            *w = scale * f32::from(grid.code(|word| words[word], i % SUPER_BLOCK));
        }
        return parts;
    }
    let number = |bits: u8| if bits & 0x7f == 0x7f { 0 } else { bits };
    let stored = |x: &f32| any(x) >> (8 - row.codes.bits());
    let stored = |x: &f32| if row.codes.are_floats() { number(stored(x)) } else { stored(x) };
    let codes: Vec<i8> = noise.iter().map(|x| row.codes.code(stored(x))).collect();
    // Not all in the normal range of F16.
    let round = |x: f32| precision.scales().from_bits(precision.scales().to_bits(x));
    // With zero points codes may have a sign.
    let codes = match row.scales {
        Scales::Zeros => codes.chunks(group).flat_map(|c| c.iter().map(move |code| code - c[0])).collect(),
        _ => codes,
    };
    if row.scales.are_single() {
        parts.scales = noise.iter().step_by(group).map(|&x| round(x * [1.0, 1e-5][n % 2])).collect();
        parts.truth = codes.iter().enumerate().map(|(i, &c)| row.codes.value(c) * parts.scales[i / group]).collect();
        parts.codes = codes;
        return parts;
    }
    let mut blocks = Blocks::default();
    blocks.resize(&MatrixLayout::new(n, k, precision).unwrap(), n);
    blocks.codes = codes;
    blocks.heads.iter_mut().zip(&noise).for_each(|(head, x)| *head = f16::from_f32(*x).to_bits());
    if let Scales::Counted { bits, .. } = row.scales {
        blocks.counts.iter_mut().zip(&noise[1..]).for_each(|(count, x)| *count = any(x) >> (8 - bits));
        blocks.offsets.iter_mut().zip(&noise[2..]).for_each(|(count, x)| *count = any(x) >> (8 - bits));
    }
    if row.scales == Scales::E4m3 {
        blocks.heads.iter_mut().for_each(|half| *half &= 0x3fff); // of F32 numbers of some size
        blocks.counts.iter_mut().zip(&noise[1..]).for_each(|(count, x)| *count = number(any(x)));
    }
    let head = |i: usize| f16::from_bits(blocks.heads[i]).to_f32();
    for (i, w) in parts.truth.iter_mut().enumerate() {
        let (code, g, block) = (f32::from(blocks.codes[i]), i / group, i / SUPER_BLOCK);
        *w = match row.scales {
            Scales::E4m3 => {
                let [low, high] = blocks.heads.as_chunks::<2>().0[i / k].map(u32::from);
                CodeType::E4m3.value(blocks.counts[g] as i8) * f32::from_bits(low | high << 16) * code
            }
            Scales::Counted { offsets: true, .. } => {
                let [scale, offset] = [&blocks.counts, &blocks.offsets].map(|counts| f32::from(counts[g]));
                head(2 * block) * scale * code - head(2 * block + 1) * offset
            }
            Scales::Counted { zero, .. } => head(block) * (f32::from(blocks.counts[g]) - f32::from(zero)) * code,
            Scales::Odd { .. } => head(block) * code,
            _ => head(2 * g) * code + head(2 * g + 1),
        };
    }
    parts.blocks = blocks;
    parts
}

impl Parts {
    fn weights(&self, n: usize) -> Weights<'_> {
        let Self { codes, scales, plain, blocks, .. } = self;
        match (plain.is_empty(), codes.is_empty()) {
            (false, _) => Weights::Bf16(plain),
            (_, false) => Weights::Int { codes, scales },
            _ => Weights::Blocks(blocks, 0..n),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_packed_matrix_unpacks_to_its_weights(n in 1usize..70, groups in 1usize..5, precision in precision(),
        seed: u64) {
        let k = groups * unit(precision);
        let layout = MatrixLayout::new(n, k, precision).unwrap();
        let parts = random_weights(n, k, precision, seed);
        let mut bytes = vec![0x55; layout.bytes()];
        pack_matrix(&layout, parts.weights(n), &mut bytes);
        prop_assert_eq!(unpack_matrix(&layout, &bytes), parts.truth);
        // Rows that fill the last tile are zero weights with zero scales.
        let padded = MatrixLayout::new(layout.tiles() * 16, k, precision).unwrap();
        let filled = unpack_matrix(&padded, &bytes);
        prop_assert!(filled[n * k..].iter().all(|w| *w == 0.0));
    }

    #[test]
    fn a_packed_expert_unpacks_to_its_matrices(h in 1usize..4, i in 1usize..4, precision in precision(), seed: u64) {
        let unit = unit(precision);
        let (hidden, intermediate) = (h * unit, i * unit);
        let layout = ExpertLayout::new(hidden, intermediate, precision).unwrap();
        let gate = random_weights(intermediate, hidden, precision, seed);
        let up = random_weights(intermediate, hidden, precision, seed ^ 1);
        let down = random_weights(hidden, intermediate, precision, seed ^ 2);
        let mut bytes = vec![0x55; layout.bytes()];
        let (wide, tall) = (intermediate, hidden);
        pack_expert(&layout, gate.weights(wide), up.weights(wide), down.weights(tall), &mut bytes);
        prop_assert_eq!(unpack_expert(&layout, &bytes), [gate.truth, up.truth, down.truth]);
    }

    #[test]
    fn quantized_weights_are_near_their_source(n in 1usize..20, groups in 1usize..4, precision in precision(),
        seed: u64, exponent in -40i32..40) {
        let k = groups * precision.unit().max(32);
        let layout = MatrixLayout::new(n, k, precision).unwrap();
        let exponent = if precision.scales() == ScaleType::F16 { exponent.min(15) } else { exponent };
        let source: Vec<f32> = noise(n * k, seed).iter().map(|x| x * 2f32.powi(exponent)).collect();
        let mut bytes = vec![0; layout.bytes()];
        quantize_matrix(&layout, &source, &mut bytes);
        let back = unpack_matrix(&layout, &bytes);
        let group = precision.group_size().unwrap_or(1);
        prop_assert!(back.iter().all(|w| w.is_finite()), "{precision}");
        let of_blocks = |row: &Row| matches!(row.scales, Scales::Counted { .. } | Scales::WithOffset);
        if let Some(row) = precision.row().filter(|row| of_blocks(row) && exponent > -4) {
            // Of two levels: the largest scale of a super-block is nearly exact, and half a step more for the counts.
            let [low, high] = row.codes.range().map(f32::from);
            for (w, q) in source.chunks(SUPER_BLOCK).zip(back.chunks(SUPER_BLOCK)) {
                let [least, most] = [f32::min, f32::max].map(|pick| w.iter().copied().fold(0f32, pick));
                let step = if row.scales.have_offsets() { (most - least) / high } else { most.max(-least) / high };
                let step = step * if row.codes.table().is_some() { 25.0 } else { 1.0 } * 1.3;
                let error = w.iter().zip(q).map(|(w, q)| (w - q).abs()).fold(0.0, f32::max);
                prop_assert!(low <= 0.0 && error <= step, "{precision}: {error} of {step}");
            }
        }
        for (w, q) in source.chunks(group).zip(back.chunks(group)) {
            let largest = w.iter().fold(0f32, |a, x| a.max(x.abs()));
            // Half a step of the largest-value scale bounds the root mean square of its error; the search never does
            // worse.
            // F16 ends at 6e-8, and is coarse before.
            let least = if precision.scales() == ScaleType::F16 { 127.0 * 6e-8 } else { 0.0 };
            let step = match precision {
                Precision::Bf16 => largest / 128.0,
                Precision::Int8 { .. } => largest / 126.0,
                Precision::Int4 { .. } | Precision::Uint4 { .. } => largest / 6.9,
                Precision::Mxfp4 | Precision::Nvfp4 => largest / 2.7,
                Precision::Fp8 { .. } => largest / 7.5,
                Precision::Q5_0 => largest / 14.9,
                Precision::Iq4Nl | Precision::Iq4 { .. } => largest / 4.2,
                _ => continue,
            };
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
