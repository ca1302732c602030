//! Every quantized safetensors format, written out by its definition: decoded to the same numbers, and packed with codes and scales unchanged.
#![allow(clippy::unwrap_used)] // a test

#[path = "../../fuzz/fuzz_targets/any_tensors.rs"]
mod any_tensors;
mod common;

use std::path::Path;

use common::noise;
use half::{bf16, f16};
use moebius_cache::codec::{Integers, kept_by_all};
use moebius_cache::convert::{Tiles, rounding};
use moebius_cache::pack::{DOUBLED_E2M1, MatrixLayout, TILE_ROWS, unpack_matrix};
use moebius_cache::{Checkpoint, Precision, ScaleType};
use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

const N: usize = 40; // two tiles and a half
const K: usize = 256;

/// A checkpoint of tensors and a quantization_config.
#[derive(Default)]
struct Written {
    tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    config: Value,
}

impl Written {
    fn new(config: Value) -> Self {
        Self { config: json!({ "quantization_config": config }), ..Self::default() }
    }

    fn add(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.tensors.push((name.into(), dtype, shape.to_vec(), bytes));
        self
    }

    fn words(self, name: &str, shape: &[usize], words: Vec<u32>) -> Self {
        self.add(name, Dtype::I32, shape, words.iter().flat_map(|w| w.to_le_bytes()).collect())
    }

    fn f16s(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.add(name, Dtype::F16, shape, values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect())
    }

    fn bf16s(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.add(name, Dtype::BF16, shape, values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect())
    }

    fn write(&self, dir: &Path) -> Checkpoint {
        let views = self.tensors.iter().map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        Checkpoint::open(dir).unwrap()
    }

    /// Decoded whole and from the middle on. Of integers the packed weights, too.
    fn check(&self, name: &str, want: &[f32], integers: Option<Integers>) {
        let dir = TempDir::new().unwrap();
        let checkpoint = self.write(dir.path());
        let k = want.len() / N;
        let source = checkpoint.source(name, [N, k]).unwrap();
        assert_eq!(source.integers(), integers, "{source:?}");
        let mut got = vec![0.0; N * k];
        source.decode(0, &mut got).unwrap();
        let wrong = got.iter().zip(want).position(|(g, w)| g.to_bits() != w.to_bits() && (*g, *w) != (0.0, 0.0));
        assert_eq!(wrong.map(|i| (i / k, i % k, got[i], want[i])), None, "{source:?}");
        let mut some = vec![0.0; 7 * k];
        source.decode(19, &mut some).unwrap();
        assert_eq!(some, got[19 * k..26 * k], "{source:?}");
        if integers.is_some() {
            assert_eq!(packed(&source, source.kept_by().unwrap()), want, "{source:?}: packed exactly");
        }
    }

    fn error(&self, name: &str) -> String {
        let dir = TempDir::new().unwrap();
        let checkpoint = self.write(dir.path());
        match checkpoint.source(name, [N, K]) {
            Err(error) => error.to_string(),
            Ok(source) => source.decode(0, &mut vec![0.0; N * K]).unwrap_err().to_string(),
        }
    }
}

/// Packed as a conversion does it, then unpacked.
fn packed(source: &moebius_cache::codec::Source<'_>, precision: Precision) -> Vec<f32> {
    let [n, k] = source.shape();
    let layout = MatrixLayout::new(n, k, precision).unwrap();
    let mut tiles = Tiles::default();
    let mut bytes = vec![0; layout.bytes()];
    for (i, tile) in bytes.chunks_exact_mut(layout.tile_bytes()).enumerate() {
        tiles.pack(&layout, source, i, tile).unwrap();
    }
    assert_eq!(layout.tiles(), n.div_ceil(TILE_ROWS));
    unpack_matrix(&layout, &bytes)
}

/// Numbers from 0 to `below`, the same for the same seed.
fn numbers(count: usize, below: u32, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % below
    };
    (0..count).map(|_| next()).collect()
}

/// Scales that bf16 holds, both signs.
fn bf16_scales(count: usize) -> Vec<f32> {
    noise(count, 3).iter().map(|&v| bf16::from_f32(v * 0.01).to_f32()).collect()
}

fn f16_scales(count: usize) -> Vec<f32> {
    noise(count, 4).iter().map(|&v| f16::from_f32(v * 0.01).to_f32()).collect()
}

/// Fields of `bits` bits, the lowest first, packed into words.
fn pack(fields: &[u32], bits: usize) -> Vec<u32> {
    fields.chunks(32 / bits).map(|chunk| chunk.iter().enumerate().fold(0, |word, (i, field)| word | field << (i * bits))).collect()
}

/// `[rows, cols]` of fields packed along the first dimension: `[rows * bits / 32, cols]`.
fn pack_down(fields: &[u32], cols: usize, bits: usize) -> Vec<u32> {
    let per_word = 32 / bits;
    let mut words = vec![0; (fields.len() / cols).div_ceil(per_word) * cols];
    for (i, field) in fields.iter().enumerate() {
        words[i / cols / per_word * cols + i % cols] |= field << (i / cols % per_word * bits);
    }
    words
}

#[test]
fn fp8_in_blocks_rows_and_whole() {
    let bytes: Vec<u8> = numbers(N * K, 256, 1).iter().map(|&b| if b & 0x7f == 0x7f { 0 } else { b as u8 }).collect();
    let value = |byte: u8| {
        let (e, m) = ((byte >> 3 & 15) as i32, (byte & 7) as f32 / 8.0);
        let size = if e == 0 { m * 2f32.powi(-6) } else { (1.0 + m) * 2f32.powi(e - 7) };
        if byte & 0x80 == 0 { size } else { -size }
    };
    // Blocks that do not divide the matrix.
    let (rows, cols) = (N.div_ceil(24), K.div_ceil(96));
    let scales = noise(rows * cols, 2);
    let of = |scale: &dyn Fn(usize, usize) -> f32| -> Vec<f32> { (0..N * K).map(|i| value(bytes[i]) * scale(i / K, i % K)).collect() };
    let fp8 = |block: Value| {
        Written::new(json!({"quant_method": "fp8", "weight_block_size": block})).add("a.weight", Dtype::F8_E4M3, &[N, K], bytes.clone())
    };
    let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let blocks = fp8(json!([24, 96])).add("a.weight_scale_inv", Dtype::F32, &[rows, cols], f32s(&scales));
    blocks.check("a.weight", &of(&|row, input| scales[row / 24 * cols + input / 96]), None);
    fp8(Value::Null).add("a.weight_scale", Dtype::F32, &[], f32s(&scales[..1])).check("a.weight", &of(&|_, _| scales[0]), None);
    let rows = bf16_scales(N);
    fp8(Value::Null).bf16s("a.weight_scale", &[N, 1], &rows).check("a.weight", &of(&|row, _| rows[row]), None);
    assert!(fp8(Value::Null).error("a.weight").contains("a.weight_scale_inv is missing"));
    let short = fp8(json!([24, 96])).add("a.weight_scale_inv", Dtype::F32, &[1, cols], f32s(&scales[..cols]));
    assert!(short.error("a.weight").contains("scales are expected"));
    let mut nan = blocks;
    nan.tensors[0].3[K + 1] = 0xff;
    assert!(nan.error("a.weight").contains("tensor a.weight holds a NaN"));
}

fn ct(bits: u32, symmetric: bool) -> Written {
    Written::new(json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}}}}))
}

#[test]
fn compressed_tensors_of_4_and_8_bits() {
    for (bits, group) in [(4usize, 32), (4, 128), (4, K), (8, 64)] {
        let half = 1 << (bits - 1);
        let fields = numbers(N * K, 1 << bits, 5);
        let scales = bf16_scales(N * K / group);
        let want: Vec<f32> = (0..N * K).map(|i| (fields[i] as i32 - half) as f32 * scales[i / K * (K / group) + i % K / group]).collect();
        let rows: Vec<u32> = fields.chunks(K).flat_map(|row| pack(row, bits)).collect();
        let integers = Integers { low: -half, high: half - 1, group, scales: ScaleType::Bf16, e2m1: false };
        let whole = |scales: &[f32]| {
            ct(bits as u32, true).words("a.weight_packed", &[N, K * bits / 32], rows.clone()).bf16s(
                "a.weight_scale",
                &[N, K / group],
                scales,
            )
        };
        whole(&scales).check("a.weight", &want, Some(integers));
        let mut infinite = scales.clone();
        infinite[3] = f32::INFINITY;
        assert!(whole(&infinite).error("a.weight").contains("holds a NaN"));
    }
    // Zero points, packed down the rows; 4 bits less 4 bits is at most 15.
    let (fields, zeros, scales) = (numbers(N * K, 16, 6), numbers(N * 8, 16, 7), bf16_scales(N * 8));
    let want: Vec<f32> =
        (0..N * K).map(|i| (fields[i] as i32 - zeros[i / K * 8 + i % K / 32] as i32) as f32 * scales[i / K * 8 + i % K / 32]).collect();
    let asymmetric = ct(4, false).words("a.weight_packed", &[N, K / 8], fields.chunks(K).flat_map(|row| pack(row, 4)).collect()).bf16s(
        "a.weight_scale",
        &[N, 8],
        &scales,
    );
    assert!(asymmetric.error("a.weight").contains("no weight_zero_point"));
    let asymmetric = asymmetric.words("a.weight_zero_point", &[N / 8, 8], pack_down(&zeros, 8, 4));
    asymmetric.check("a.weight", &want, Some(Integers { low: -15, high: 15, group: 32, scales: ScaleType::Bf16, e2m1: false }));
    // Inputs grouped out of order.
    let index = numbers(K, 8, 8);
    let want: Vec<f32> = (0..N * K)
        .map(|i| (fields[i] as i32 - zeros[i / K * 8 + index[i % K] as usize] as i32) as f32 * scales[i / K * 8 + index[i % K] as usize])
        .collect();
    asymmetric.words("a.weight_g_idx", &[K], index).check("a.weight", &want, None);
    // 8 bits, one to a byte, a scale for each row.
    let (bytes, scales) = (numbers(N * K, 256, 9), bf16_scales(N));
    let want: Vec<f32> = (0..N * K).map(|i| bytes[i] as u8 as i8 as f32 * scales[i / K]).collect();
    let plain = Written::new(json!({"quant_method": "compressed-tensors",
        "config_groups": {"g": {"format": "int-quantized", "weights": {"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"}}}}));
    plain.add("a.weight", Dtype::I8, &[N, K], bytes.iter().map(|&b| b as u8).collect()).bf16s("a.weight_scale", &[N, 1], &scales).check(
        "a.weight",
        &want,
        Some(Integers { low: -128, high: 127, group: K, scales: ScaleType::Bf16, e2m1: false }),
    );
}

#[test]
fn gptq_of_both_versions_with_zero_points_and_act_order() {
    for (bits, format, symmetric, order) in [
        (4usize, "gptq", true, false),
        (4, "gptq", false, false),
        (4, "gptq_v2", false, false),
        (4, "gptq", false, true),
        (8, "gptq", true, false),
        (8, "gptq_v2", false, false),
    ] {
        let (groups, group, half) = (4, K / 4, 1u32 << (bits - 1));
        let less = (format == "gptq") as u32;
        let fields = numbers(K * N, 1 << bits, 11); // [k, n]
        // Stored zeros; of the first version one less than they mean.
        let zeros: Vec<u32> = match symmetric {
            true => vec![half - less; groups * N],
            false => numbers(groups * N, 1 << bits, 12),
        };
        let (scales, index) = (f16_scales(groups * N), numbers(K, groups as u32, 13));
        let of = |input: usize| if order { index[input] as usize } else { input / group };
        let weight = |row: usize, input: usize| {
            let at = of(input) * N + row;
            (fields[input * N + row] as i32 - (zeros[at] + less) as i32) as f32 * scales[at]
        };
        let want: Vec<f32> = (0..N * K).map(|i| weight(i / K, i % K)).collect();
        let plain = (0..K as u32).map(|input| input / group as u32).collect();
        let written = Written::new(json!({"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": order, "checkpoint_format": format}))
            .words("a.qweight", &[K * bits / 32, N], pack_down(&fields, N, bits))
            .words("a.qzeros", &[groups, N * bits / 32], zeros.chunks(N).flat_map(|row| pack(row, bits)).collect())
            .f16s("a.scales", &[groups, N], &scales)
            .words("a.g_idx", &[K], if order { index.clone() } else { plain });
        let (low, high) = if symmetric { (-(half as i32), half as i32 - 1) } else { (-2 * half as i32, 2 * half as i32 - 1) };
        let values = order || bits == 8 && !symmetric;
        written.check("a.weight", &want, (!values).then_some(Integers { low, high, group, scales: ScaleType::F16, e2m1: false }));
        if symmetric {
            let mut lying = written;
            lying.tensors[1].3[5] ^= 1;
            assert!(lying.error("a.weight").contains("although config.json says `sym`"));
        } else if order {
            let mut beyond = written;
            beyond.tensors[3].3[2] = 1;
            assert!(beyond.error("a.weight").contains("does not name a group below 4"));
        }
    }
}

#[test]
fn awq_in_the_order_of_its_kernels() {
    let (group, groups) = (64, K / 64);
    let (fields, zeros, scales) = (numbers(K * N, 16, 21), numbers(groups * N, 16, 22), f16_scales(groups * N));
    let want: Vec<f32> = (0..N * K)
        .map(|i| {
            let (row, input) = (i / K, i % K);
            (fields[input * N + row] as i32 - zeros[input / group * N + row] as i32) as f32 * scales[input / group * N + row]
        })
        .collect();
    // Nibble i of a word is output ORDER[i] of its eight.
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let words = |fields: &[u32]| fields.chunks(8).map(|eight| (0..8).fold(0, |word, i| word | eight[ORDER[i]] << (4 * i))).collect();
    let written = Written::new(json!({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": true, "version": "gemm"}))
        .words("a.qweight", &[K, N / 8], words(&fields))
        .words("a.qzeros", &[groups, N / 8], words(&zeros))
        .f16s("a.scales", &[groups, N], &scales);
    written.check("a.weight", &want, Some(Integers { low: -15, high: 15, group, scales: ScaleType::F16, e2m1: false }));
    let unsaid = Written { config: json!({}), ..written };
    assert!(unsaid.error("a.weight").contains("no quantization_config that says which"));
}

#[test]
fn scales_of_16_bit_floats_pass_exactly_unless_they_are_to_be_bf16() {
    let (group, groups) = (128, K / 128);
    // Some of them subnormal.
    let scales: Vec<f32> =
        f16_scales(groups * N).iter().enumerate().map(|(i, &s)| if i % 3 == 0 { f16::from_f32(s * 1e-3).to_f32() } else { s }).collect();
    let fields = numbers(K * N, 16, 31);
    let written = Written::new(json!({"quant_method": "gptq", "bits": 4, "group_size": group, "sym": true}))
        .words("a.qweight", &[K / 8, N], pack_down(&fields, N, 4))
        .words("a.qzeros", &[groups, N / 8], vec![0x7777_7777; groups * N / 8])
        .f16s("a.scales", &[groups, N], &scales);
    let dir = TempDir::new().unwrap();
    let checkpoint = written.write(dir.path());
    let source = checkpoint.source("a.weight", [N, K]).unwrap();
    let f16 = |precision: Precision| precision.with_scales(ScaleType::F16);
    assert_eq!(source.kept_by(), Some(f16(Precision::int4(128))));
    let want = |round: fn(f32) -> f32| -> Vec<f32> {
        (0..N * K).map(|i| (fields[i % K * N + i / K] as i32 - 8) as f32 * round(scales[i % K / group * N + i / K])).collect()
    };
    // In smaller groups scales repeat.
    for precision in [Precision::int4(128), Precision::int4(32), Precision::int8(64)] {
        assert_eq!(packed(&source, f16(precision)), want(|scale| scale), "{precision}");
        assert_eq!(rounding(&source, f16(precision)).unwrap(), 0.0, "{precision}");
        assert_eq!(packed(&source, precision), want(|scale| bf16::from_f32(scale).to_f32()), "{precision}");
    }
}

#[test]
fn matrices_are_kept_together_by_the_coarsest_precision_that_keeps_each() {
    let gptq = |group: usize, bf16: bool| {
        let groups = K / group;
        let scales = vec![0.5; groups * N];
        let written = Written::new(json!({"quant_method": "gptq", "bits": 4, "group_size": group, "sym": true}))
            .words("a.qweight", &[K / 8, N], vec![0; K / 8 * N])
            .words("a.qzeros", &[groups, N / 8], vec![0x7777_7777; groups * N / 8]);
        if bf16 { written.bf16s("a.scales", &[groups, N], &scales) } else { written.f16s("a.scales", &[groups, N], &scales) }
    };
    let mxfp4 = Written::new(json!({"quant_method": "mxfp4"}))
        .add("a.experts.down_proj_blocks", Dtype::U8, &[1, N, K / 32, 16], vec![0; N * K / 2])
        .add("a.experts.down_proj_scales", Dtype::U8, &[1, N, K / 32], vec![127; N * K / 32]);
    let plain = Written { config: json!({}), ..Written::default() }.bf16s("a.weight", &[N, K], &vec![1.0; N * K]);
    let dirs: Vec<TempDir> = (0..5).map(|_| TempDir::new().unwrap()).collect();
    let written = [gptq(128, false), gptq(64, false), gptq(128, true), mxfp4, plain];
    let checkpoints: Vec<Checkpoint> = written.iter().zip(&dirs).map(|(written, dir)| written.write(dir.path())).collect();
    let kept = |which: &[usize]| {
        let name = |i: usize| if i == 3 { "a.experts.0.down_proj.weight" } else { "a.weight" };
        kept_by_all(&which.iter().map(|&i| checkpoints[i].source(name(i), [N, K]).unwrap()).collect::<Vec<_>>())
    };
    let f16 = |precision: Precision| Some(precision.with_scales(ScaleType::F16));
    assert_eq!(kept(&[0, 0]), f16(Precision::int4(128)));
    assert_eq!(kept(&[0, 1, 4]), f16(Precision::int4(64)));
    assert_eq!(kept(&[0, 2]), Some(Precision::int4(128)));
    assert_eq!(kept(&[3, 3]), Some(Precision::Mxfp4));
    assert_eq!(kept(&[3, 0]), Some(Precision::int8(32)));
    assert_eq!(kept(&[4, 4]), None);
}

#[test]
fn mxfp4_of_stacked_experts_whose_gate_and_up_alternate() {
    const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let experts = 3;
    let bytes: Vec<u8> = numbers(experts * 2 * N * K / 2, 256, 41).iter().map(|&b| b as u8).collect();
    // From the smallest exponent, half of which is no normal number, to near the largest.
    let scales: Vec<u8> = numbers(experts * 2 * N * K / 32, 20, 42).iter().map(|&b| if b == 0 { 0 } else { 110 + b as u8 }).collect();
    let weight = |e: usize, row: usize, input: usize| {
        let at = (e * 2 * N + row) * K + input;
        let nibble = bytes[at / 2] >> (input % 2 * 4) & 15;
        VALUES[nibble as usize] * 2f64.powi(scales[at / 32] as i32 - 127) as f32
    };
    let written = Written::new(json!({"quant_method": "mxfp4"}))
        .add("m.experts.gate_up_proj_blocks", Dtype::U8, &[experts, 2 * N, K / 32, 16], bytes.clone())
        .add("m.experts.gate_up_proj_scales", Dtype::U8, &[experts, 2 * N, K / 32], scales.clone())
        .bf16s("m.experts.gate_up_proj_bias", &[experts, 2 * N], &vec![0.0; experts * 2 * N]);
    assert_eq!(DOUBLED_E2M1.map(f32::from), VALUES.map(|value| 2.0 * value));
    let integers = Some(Integers { low: -12, high: 12, group: 32, scales: ScaleType::Bf16, e2m1: true });
    for e in 0..experts {
        for (second, part) in ["gate", "up"].into_iter().enumerate() {
            let want: Vec<f32> = (0..N * K).map(|i| weight(e, 2 * (i / K) + second, i % K)).collect();
            written.check(&format!("m.experts.{e}.{part}_proj.weight"), &want, integers);
        }
    }
    assert!(written.error("m.experts.3.gate_proj.weight").contains("has no expert 3"));
    let mut nan = written;
    nan.tensors[1].3[0] = 255;
    assert!(nan.error("m.experts.0.gate_proj.weight").contains("holds a NaN"));
}

#[test]
fn stacked_floats_in_every_order() {
    let (experts, values) =
        (2, |count: usize, seed: u64| -> Vec<f32> { noise(count, seed).iter().map(|&v| bf16::from_f32(v).to_f32()).collect() });
    let down = values(experts * N * K, 51); // [experts, hidden N, width K]
    let pair = values(experts * 2 * K * N, 52); // [experts, 2 width, hidden]
    let turned = |all: &[f32], rows: usize, cols: usize| -> Vec<f32> {
        all.chunks(rows * cols).flat_map(|m| (0..cols).flat_map(move |c| (0..rows).map(move |r| m[r * cols + c]))).collect()
    };
    let gate = |e: usize, second: usize, interleaved: bool| -> Vec<f32> {
        let row = |r: usize| if interleaved { 2 * r + second } else { second * K + r };
        (0..K).flat_map(|r| pair[(e * 2 * K + row(r)) * N..][..N].to_vec()).collect()
    };
    let open = |written: &Written| {
        let dir = TempDir::new().unwrap();
        (written.write(dir.path()), dir)
    };
    let decoded = |checkpoint: &Checkpoint, name: &str, shape: [usize; 2]| {
        let mut out = vec![0.0; shape[0] * shape[1]];
        checkpoint.source(name, shape).unwrap().decode(0, &mut out).unwrap();
        out
    };
    for (transposed, bias) in [(false, false), (true, false), (true, true)] {
        let mut written = Written { config: json!({}), ..Written::default() };
        written = match transposed {
            false => {
                written.bf16s("m.experts.down_proj", &[experts, N, K], &down).bf16s("m.experts.gate_up_proj", &[experts, 2 * K, N], &pair)
            }
            true => written.bf16s("m.experts.down_proj", &[experts, K, N], &turned(&down, N, K)).bf16s(
                "m.experts.gate_up_proj",
                &[experts, N, 2 * K],
                &turned(&pair, 2 * K, N),
            ),
        };
        if bias {
            written = written.bf16s("m.experts.gate_up_proj_bias", &[experts, 2 * K], &vec![0.0; experts * 2 * K]);
        }
        let (checkpoint, _dir) = open(&written);
        for e in 0..experts {
            assert_eq!(decoded(&checkpoint, &format!("m.experts.{e}.down_proj.weight"), [N, K]), down[e * N * K..][..N * K]);
            assert_eq!(decoded(&checkpoint, &format!("m.experts.{e}.gate_proj.weight"), [K, N]), gate(e, 0, bias));
            assert_eq!(decoded(&checkpoint, &format!("m.experts.{e}.up_proj.weight"), [K, N]), gate(e, 1, bias));
        }
    }
    // A square matrix says nothing of its order; the other one does.
    let square = values(experts * N * N, 53);
    let pair = values(experts * 2 * N * N, 54);
    for transposed in [false, true] {
        let written = Written { config: json!({}), ..Written::default() };
        let written = match transposed {
            false => {
                written.bf16s("m.experts.down_proj", &[experts, N, N], &square).bf16s("m.experts.gate_up_proj", &[experts, 2 * N, N], &pair)
            }
            true => written.bf16s("m.experts.down_proj", &[experts, N, N], &turned(&square, N, N)).bf16s(
                "m.experts.gate_up_proj",
                &[experts, N, 2 * N],
                &turned(&pair, 2 * N, N),
            ),
        };
        let (checkpoint, _dir) = open(&written);
        assert_eq!(decoded(&checkpoint, "m.experts.1.down_proj.weight", [N, N]), square[N * N..], "transposed: {transposed}");
        assert_eq!(decoded(&checkpoint, "m.experts.1.up_proj.weight", [N, N]), pair[3 * N * N..]);
    }
}

#[test]
fn a_shape_that_does_not_fit_is_named() {
    let (n, k) = (N, K);
    let written =
        ct(4, true).words("a.weight_packed", &[n, k / 8 - 1], vec![0; n * (k / 8 - 1)]).bf16s("a.weight_scale", &[n, 8], &vec![1.0; n * 8]);
    assert!(written.error("a.weight").contains("tensor a.weight_packed has shape [40, 31]"));
    let written = ct(4, true).words("a.weight_packed", &[n, k / 8], vec![0; n * k / 8]).bf16s("a.weight_scale", &[n, 7], &vec![1.0; n * 7]);
    assert!(written.error("a.weight").contains("7 groups for rows of 256"));
    let written = ct(4, true).words("a.weight_packed", &[n, k / 8], vec![0; n * k / 8]);
    assert!(written.error("a.weight").contains("tensor a.weight_scale is missing"));
    assert!(ct(4, true).bf16s("b.weight", &[1, 1], &[0.0]).error("a.weight").contains("tensor a.weight is missing"));
    let gptq = Written::new(json!({"quant_method": "gptq", "bits": 4, "sym": true}));
    let written = gptq.words("a.qweight", &[k / 8, n + 8], vec![0; k / 8 * (n + 8)]).words("a.qzeros", &[2, n / 8], vec![0; n / 4]).f16s(
        "a.scales",
        &[2, n],
        &vec![1.0; 2 * n],
    );
    assert!(written.error("a.weight").contains("tensor a.qweight is I32 of shape [32, 48] where 32 x 40 words"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// As the fuzz target `codecs`, for a moment.
    #[test]
    fn any_tensors_are_refused_or_decoded(bytes in proptest::collection::vec(any::<u8>(), 3..600)) {
        any_tensors::check(&bytes);
    }
}
