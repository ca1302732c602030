//! Every format, written out by its definition: decoded to the same numbers, and packed with codes and scales
//! unchanged.
#![allow(clippy::unwrap_used)] // a test

#[path = "../../fuzz/fuzz_targets/any_tensors.rs"]
mod any_tensors;
mod common;

use common::noise;
use common::written::{
    Example, Fp4, K, N, Order, Written, awq, bf16_scales, compressed_tensors, ct, e4m3, example, f16_scales, fp4, fp8,
    gptq, mxfp4, mxfp8, numbers, nvfp4, pack_down,
};
use half::{bf16, f16};
use moebius_cache::codec::{Format, Integers, Library, Quantization, Source, kept_by_all};
use moebius_cache::convert::{Tiles, rounding};
use moebius_cache::pack::{MatrixLayout, TILE_ROWS, unpack_matrix};
use moebius_cache::{Checkpoint, Precision, ScaleType};
use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Decoded whole and from the middle on. Of integers the packed weights, too.
fn check(example: &Example) {
    example.open(|source| {
        assert_eq!(source.integers(), example.integers, "{source:?}");
        assert!(Format::all().any(|format| format == source.kind()), "{source:?} is not in the registry");
        let mut got = vec![0.0; N * K];
        source.decode(0, &mut got).unwrap();
        if let Some(want) = &example.want {
            let wrong = got.iter().zip(want).position(|(g, w)| g.to_bits() != w.to_bits() && (*g, *w) != (0.0, 0.0));
            assert_eq!(wrong.map(|i| (i / K, i % K, got[i], want[i])), None, "{source:?}");
        }
        let mut some = vec![0.0; 7 * K];
        source.decode(19, &mut some).unwrap();
        assert_eq!(some, got[19 * K..26 * K], "{source:?}");
        if source.kept_by().is_some_and(|kept| source.fits(kept)) {
            assert_eq!(packed(source, source.kept_by().unwrap()), got, "{source:?}: packed exactly");
        }
    });
}

#[test]
fn every_format_is_what_its_definition_says() {
    for format in Format::all() {
        let example = example(format);
        example.open(|source| {
            assert_eq!(source.kind(), format);
            // Before weights are there the config says the same; of compressed-tensors not whether inputs are in order.
            let foretold = Quantization::parse(&example.written.config).unwrap().kept_by(&[K]);
            if !matches!(format, Format::Gguf(_) | Format::OutOfOrder(Library::CompressedTensors)) {
                assert_eq!(foretold, source.kept_by(), "{format}");
            }
        });
        check(&example);
    }
}

/// What experts of a format become by default, and what that loses.
fn cells(source: &Source<'_>) -> String {
    let Some(precision) = source.kept_by() else {
        return "int4, the largest groups | as `moebius cache info` says".into();
    };
    let own_groups = source
        .integers()
        .map(|integers| integers.group)
        .filter(|group| *group == 64 && precision.group_size() == Some(64));
    let becomes = match (own_groups, precision) {
        (Some(_), Precision::Int4 { .. } | Precision::Uint4 { .. }) => format!("{}, the same groups", precision.name()),
        (Some(_), _) => "int8, the same groups".to_string(),
        (None, precision) if format!("GGUF {precision}").eq_ignore_ascii_case(source.format()) => {
            "the same".to_string()
        }
        (None, Precision::Fp8 { .. }) => "fp8, the largest groups of one scale".to_string(),
        (None, precision) => precision.to_string(),
    };
    let lost = rounding(source, precision).unwrap();
    let loses = match source.fits(precision) {
        true if lost == 0.0 => "nothing".to_string(),
        false if lost < 0.007 => "less than 0.7%".to_string(),
        _ => panic!("{source:?}: packing loses {lost}"),
    };
    format!("{becomes} | {loses}")
}

#[test]
fn the_documentation_says_what_becomes_of_each_format() {
    let mut rows: Vec<(String, String)> = Vec::new();
    for format in Format::all() {
        let cells = example(format).open(cells);
        match rows.iter_mut().find(|(_, row)| *row == cells) {
            Some((formats, _)) => *formats += &format!(", {format}"),
            None => rows.push((format.to_string(), cells)),
        }
    }
    let rows: String = rows.iter().map(|(formats, cells)| format!("| {formats} | {cells} |\n")).collect();
    let table = format!("| source | experts | what is lost |\n|---|---|---|\n{rows}");
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/formats.md")).unwrap();
    assert!(page.contains(&table), "docs/formats.md should have:\n\n{table}");
}

/// Packed as a conversion does it, then unpacked.
fn packed(source: &Source<'_>, precision: Precision) -> Vec<f32> {
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

#[test]
fn fp8_in_rows_and_whole() {
    let bytes: Vec<u8> = numbers(N * K, 256, 1).iter().map(|&b| if b & 0x7f == 0x7f { 0 } else { b as u8 }).collect();
    let of = |scale: &dyn Fn(usize) -> f32| (0..N * K).map(|i| e4m3(bytes[i]) * scale(i / K)).collect();
    let scale = noise(1, 2);
    let one = fp8(Value::Null, bytes.clone()).f32s("a.weight_scale", &[], &scale);
    let integers = |scales| Some(Integers::fp8(128, scales));
    check(&Example::new(one, of(&|_| scale[0]), integers(ScaleType::F32)));
    let rows = bf16_scales(N);
    let each = fp8(Value::Null, bytes.clone()).bf16s("a.weight_scale", &[N, 1], &rows);
    check(&Example::new(each, of(&|row| rows[row]), integers(ScaleType::Bf16)));
    check(&mxfp8(Dtype::U8));
    check(&mxfp8(Dtype::F8_E8M0));
    assert!(fp8(Value::Null, bytes.clone()).error("a.weight").contains("a.weight_scale_inv is missing"));
    let short = fp8(json!([24, 96]), bytes.clone()).f32s("a.weight_scale_inv", &[1, 3], &[1.0; 3]);
    assert!(short.error("a.weight").contains("scales are expected"));
    let mut nan = example(Format::Fp8).written;
    nan.tensors[0].3[K + 1] = 0xff;
    assert!(nan.error("a.weight").contains("tensor a.weight holds a NaN"));
    // Blocks of 24 inputs have no groups: their weights are rounded.
    let (rows, cols) = (N.div_ceil(40), K.div_ceil(24));
    let scales = noise(rows * cols, 3);
    let odd = fp8(json!([40, 24]), bytes.clone()).f32s("a.weight_scale_inv", &[rows, cols], &scales);
    let want = (0..N * K).map(|i| e4m3(bytes[i]) * scales[i / K / 40 * cols + i % K / 24]).collect();
    let odd = Example::new(odd, want, None);
    check(&odd);
    odd.open(|source| assert_eq!(source.kept_by(), Some(Precision::int8(128))));
}

#[test]
fn floats_of_four_bits_as_every_library_has_them() {
    let all: Vec<Example> = [false, true].map(nvfp4).into_iter().chain(Fp4::ALL.map(fp4)).collect();
    all.iter().for_each(check);
    for by in Fp4::ALL {
        fp4(by).open(|source| assert_eq!(source.kept_by(), Some(Precision::Mxfp4)));
    }
    let list = |example: &Example| {
        let dir = TempDir::new().unwrap();
        example.written.write(dir.path()).matrices()
    };
    for example in &all {
        assert!(list(example).contains(&("a.weight".into(), [N, K])), "{:?}", list(example));
    }
    // Each of its tensors missing, misshapen, of another type, or not a number.
    for example in &all {
        let of = |change: &dyn Fn(&mut Written)| {
            let mut written = example.written.clone();
            change(&mut written);
            written.error("a.weight")
        };
        for i in 0..example.written.tensors.len() {
            let error = of(&|written| drop(written.tensors.remove(i)));
            // Without its number NVFP4 of compressed-tensors is taken for MXFP4, and misshapen.
            assert!(error.contains("is missing") || error.contains("shape"), "{error}");
            let all: usize = example.written.tensors[i].2.iter().product();
            if all > 1 {
                let error = of(&|written| written.tensors[i].2 = vec![2, all / 2]);
                assert!(error.contains("shape"), "{error}");
            }
        }
    }
    for library in [false, true] {
        for (name, at) in [("a.weight_scale", 3), ("a.weight_scale_2", 3), ("a.weight_global_scale", 3)] {
            let mut nan = nvfp4(library).written;
            let Some(tensor) = nan.tensors.iter_mut().find(|tensor| tensor.0 == name) else { continue };
            tensor.3[at] = 0x7f;
            tensor.3[at - 1] = 0xff;
            assert!(nan.error("a.weight").contains("holds a NaN"), "{name}");
        }
    }
}

#[test]
fn fp8_of_stacked_experts_has_scales_of_each() {
    let bytes: Vec<u8> =
        numbers(2 * 2 * N * K, 256, 1).iter().map(|&b| if b & 0x7f == 0x7f { 0 } else { b as u8 }).collect();
    let (rows, cols) = ((2 * N).div_ceil(24), K.div_ceil(96));
    let scales = noise(2 * rows * cols, 2);
    let written = Written::new(json!({"quant_method": "fp8", "weight_block_size": [24, 96]}))
        .add("m.experts.gate_up_proj", Dtype::F8_E4M3, &[2, 2 * N, K], bytes.clone())
        .f32s("m.experts.gate_up_proj_scale_inv", &[2, rows, cols], &scales);
    for (name, e, first) in [("m.experts.0.up_proj.weight", 0, N), ("m.experts.1.gate_proj.weight", 1, 0)] {
        let weight = |row: usize, input: usize| {
            e4m3(bytes[(e * 2 * N + row) * K + input]) * scales[(e * rows + row / 24) * cols + input / 96]
        };
        let want = (0..N * K).map(|i| weight(first + i / K, i % K)).collect();
        let integers = Some(Integers::fp8(32, ScaleType::F32));
        check(&Example { name, ..Example::new(written.clone(), want, integers) });
    }
    // One for each expert, as in Mistral-Small-4-119B.
    for shape in [&[2][..], &[2, 1, 1]] {
        let written = Written::new(json!({"quant_method": "fp8", "weight_block_size": null}))
            .add("m.experts.gate_up_proj", Dtype::F8_E4M3, &[2, 2 * N, K], bytes.clone())
            .f32s("m.experts.gate_up_proj_scale_inv", shape, &[0.25, 1.5]);
        let want = (0..N * K).map(|i| e4m3(bytes[2 * N * K + N * K + i]) * 1.5).collect();
        let integers = Some(Integers::fp8(128, ScaleType::F32));
        check(&Example { name: "m.experts.1.up_proj.weight", ..Example::new(written, want, integers) });
    }
}

/// A table of n-grams in FP8, whose tensors share a scale, as NVIDIA's and RadixArk's Qwen3.8-Flash-Next have it.
#[test]
fn a_table_of_fp8_has_one_scale() {
    let bytes: Vec<u8> = (0..5 * 16).map(|i| (i * 3 % 0x7f) as u8 | (i as u8 & 1) << 7).collect();
    let written = Written::new(Value::Null)
        .add("m.ngram_embedding.shard_0.weight", Dtype::F8_E4M3, &[3, 16], bytes[..48].to_vec())
        .add("m.ngram_embedding.shard_1.weight", Dtype::F8_E4M3, &[2, 16], bytes[48..].to_vec());
    let dir = TempDir::new().unwrap();
    let without = written.write(dir.path()).table("none", "m.ngram_embedding.shard_", 16).unwrap_err().to_string();
    assert!(without.contains("m.ngram_embedding.weight_scale is missing"), "{without}");
    let whole = written.bf16s("m.ngram_embedding.weight_scale", &[1], &[0.375]);
    let table = whole.write(dir.path()).table("none", "m.ngram_embedding.shard_", 16).unwrap();
    assert_eq!(table.rows(), 5);
    for (i, stored) in bytes.chunks(16).enumerate() {
        let mut row = [0.0; 16];
        table.row(i, &mut row).unwrap();
        assert_eq!(row.to_vec(), stored.iter().map(|&byte| e4m3(byte) * 0.375).collect::<Vec<_>>());
    }
}

/// A table of n-grams in FP8, with powers of two for runs of each row, as DeepSeek-V4.1 has it.
#[test]
fn a_table_of_fp8_has_scales_of_rows() {
    let bytes: Vec<u8> = (0..3 * 16).map(|i| (i * 5 % 0x7f) as u8 | (i as u8 & 1) << 7).collect();
    let written = Written::new(Value::Null).add("m.embed.weight", Dtype::F8_E4M3, &[3, 16], bytes.clone());
    let with = |exponents: &[u8], shape: &[usize]| {
        written.clone().add("m.embed.scale", Dtype::F8_E8M0, shape, exponents.to_vec())
    };
    let exponents = [127, 128, 120, 130, 127, 255];
    let dir = TempDir::new().unwrap();
    let table = with(&exponents, &[3, 2]).write(dir.path()).table("m.embed.weight", "none", 16).unwrap();
    for i in 0..2 {
        let mut row = [0.0; 16];
        table.row(i, &mut row).unwrap();
        let scale = |j: usize| 2f32.powi(i32::from(exponents[2 * i + j / 8]) - 127);
        let want: Vec<f32> = (0..16).map(|j| e4m3(bytes[i * 16 + j]) * scale(j)).collect();
        assert_eq!(row.to_vec(), want);
    }
    let error = table.row(2, &mut [0.0; 16]).unwrap_err().to_string();
    assert!(error.contains("no numbers"), "{error}");
    let dir = TempDir::new().unwrap();
    let other =
        with(&exponents, &[2, 3]).write(dir.path()).table("m.embed.weight", "none", 16).unwrap_err().to_string();
    assert!(other.contains("m.embed.scale"), "{other}");
}

/// As Step-3.7-Flash-NVFP4 has them: a number for each expert.
#[test]
fn nvfp4_of_stacked_experts_has_numbers_of_each() {
    let example = nvfp4(false);
    let of = |name: &str| example.written.tensors.iter().find(|tensor| tensor.0 == name).unwrap().3.clone();
    let [bytes, scales, number] = ["a.weight", "a.weight_scale", "a.weight_scale_2"].map(of);
    let behind = |first: Vec<u8>, second: &[u8]| [first, second.to_vec()].concat();
    let written = Written::new(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}))
        .add("m.moe.up_proj.weight", Dtype::U8, &[2, N, K / 2], behind(vec![0x12; bytes.len()], &bytes))
        .add("m.moe.up_proj.weight_scale", Dtype::F8_E4M3, &[2, N, K / 16], behind(vec![0x38; scales.len()], &scales))
        .add("m.moe.up_proj.weight_scale_2", Dtype::F32, &[2], behind(3f32.to_le_bytes().to_vec(), &number));
    for (name, want) in [
        ("m.moe.experts.0.up_proj.weight", (0..N * K).map(|i| if i % 2 == 0 { 3.0 } else { 1.5 }).collect()),
        ("m.moe.experts.1.up_proj.weight", example.want.clone().unwrap()),
    ] {
        check(&Example { name, ..Example::new(written.clone(), want, None) });
    }
    let dir = TempDir::new().unwrap();
    assert_eq!(written.write(dir.path()).matrices(), [("m.moe.experts.0.up_proj.weight".to_string(), [N, K])]);
    assert!(written.error("m.moe.experts.2.up_proj.weight").contains("has no expert 2"));
}

/// A config says how some layers are stored, or calls all by one name; each tensor says how it is.
#[test]
fn formats_beside_each_other() {
    let each = |kind: &str| json!({"quant_algo": kind});
    for config in [
        // NVIDIA's Qwen3.6-35B-A3B-NVFP4, MiniMax-M3-NVFP4 and DeepSeek-V4-Flash-NVFP4, and MiniMax-M3.1.
        json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers":
            {"m.layers.0.self_attn.q_proj": each("FP8"), "m.layers.0.mlp.experts": each("W4A16_NVFP4")}}),
        json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers":
            {"m.layers.0.mlp.up_proj": each("MXFP8"), "m.layers.3.block_sparse_moe.experts.0.w1": each("NVFP4")}}),
        json!({"quant_method": "fp8", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "fmt": "e4m3",
            "weight_block_size": [128, 128]}),
        json!({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"}),
        // RedHat's DeepSeek-V4-Flash-NVFP4-FP8.
        json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
            "group_0": {"format": "float-quantized", "targets": ["re:.*attn.*"], "weights": {"num_bits": 8,
                "type": "float", "block_structure": [24, 96], "strategy": "block"}},
            "group_1": {"format": "nvfp4-pack-quantized", "targets": ["re:.*ffn.*"], "weights": {"num_bits": 4,
                "type": "float", "group_size": 16, "strategy": "tensor_group"}}}}),
    ] {
        let config = json!({ "quantization_config": config });
        assert_eq!(Quantization::parse(&config).unwrap().kept_by(&[K]), Some(Precision::Nvfp4), "{config}");
        for mut example in [nvfp4(false), nvfp4(true), mxfp8(Dtype::U8)] {
            example.written.config = config.clone();
            check(&example);
        }
        if config["quantization_config"]["format"] == "mixed-precision" {
            let mut example = example(Format::Fp8);
            example.written.config = config;
            check(&example);
        }
    }
}

#[test]
fn compressed_tensors_of_4_and_8_bits() {
    for (bits, group) in [(4, 32), (4, 128), (4, K), (8, 64)] {
        let example = compressed_tensors(bits, group, false, false);
        check(&example);
        let mut infinite = example.written;
        infinite.tensors[1].3[6..8].copy_from_slice(&bf16::INFINITY.to_le_bytes());
        assert!(infinite.error("a.weight").contains("holds a NaN"));
    }
    let mut without = compressed_tensors(4, 32, true, false).written;
    without.tensors.pop();
    assert!(without.error("a.weight").contains("no weight_zero_point"));
    // Of 8 bits, and out of order without zero points.
    check(&compressed_tensors(8, 32, true, true));
    check(&compressed_tensors(8, 128, false, true));
    // Zero points one to a byte, with a sign and without.
    for (dtype, sign) in [(Dtype::I8, true), (Dtype::U8, false)] {
        let (fields, points, scales) = (numbers(N * K, 256, 5), numbers(N * 4, 256, 7), bf16_scales(N * 4));
        let point = |i: usize| if sign { points[i] as u8 as i8 as i32 } else { points[i] as i32 };
        let of = |i: usize| i / K * 4 + i % K / 64;
        let want = (0..N * K).map(|i| (fields[i] as u8 as i8 as i32 - point(of(i))) as f32 * scales[of(i)]).collect();
        let bytes = |values: &[u32]| values.iter().map(|&v| v as u8).collect();
        let written =
            ct(8, false).add("a.weight", Dtype::I8, &[N, K], bytes(&fields)).bf16s("a.weight_scale", &[N, 4], &scales);
        check(&Example::new(written.add("a.weight_zero_point", dtype, &[N, 4], bytes(&points)), want, None));
    }
    // 8 bits, one to a byte, a scale for each row.
    let (bytes, scales) = (numbers(N * K, 256, 9), bf16_scales(N));
    let want: Vec<f32> = (0..N * K).map(|i| bytes[i] as u8 as i8 as f32 * scales[i / K]).collect();
    let plain = Written::new(json!({"quant_method": "compressed-tensors",
        "config_groups": {"g": {"format": "int-quantized", "weights": {"num_bits": 8, "type": "int", "symmetric": true,
            "strategy": "channel"}}}}));
    let written = plain.add("a.weight", Dtype::I8, &[N, K], bytes.iter().map(|&b| b as u8).collect()).bf16s(
        "a.weight_scale",
        &[N, 1],
        &scales,
    );
    let integers =
        Some(Integers { low: -128, high: 127, group: K, zeros: false, scales: ScaleType::Bf16, table: None });
    check(&Example::new(written, want, integers));
}

#[test]
fn gptq_of_both_versions_with_zero_points_and_act_order() {
    use Order::*;
    for (bits, version, symmetric, order) in [
        (4usize, "gptq", true, AsTheyLie),
        (4, "gptq_v2", false, AsTheyLie),
        (4, "gptq", false, ByActivation),
        (4, "gptq_v2", true, ByActivation),
        (4, "gptq", false, StaticGroups),
        (4, "gptq_v2", true, StaticGroups),
        (8, "gptq", true, AsTheyLie),
        (8, "gptq_v2", false, AsTheyLie),
    ] {
        let example = gptq(bits, version, symmetric, order);
        check(&example);
        let mut wrong = example.written;
        if order == StaticGroups {
            wrong.tensors[3].3[0] = 1;
            assert!(wrong.error("a.weight").contains("although config.json says `static_groups`"));
        } else if order == ByActivation {
            wrong.tensors[3].3[2] = 1;
            assert!(wrong.error("a.weight").contains("does not name a group below 4"));
            wrong.tensors.pop();
            assert!(wrong.error("a.weight").contains("g_idx"));
        } else if symmetric {
            wrong.tensors[1].3[5] ^= 1;
            assert!(wrong.error("a.weight").contains("although config.json says `sym`"));
        }
    }
}

#[test]
fn words_that_no_config_explains_are_refused() {
    let unsaid = Written { config: json!({}), ..awq().written };
    assert!(unsaid.error("a.weight").contains("no quantization_config that says which"));
}

#[test]
fn scales_of_16_bit_floats_pass_exactly_unless_they_are_to_be_bf16() {
    let (group, groups) = (128, K / 128);
    // Some of them subnormal.
    let scales: Vec<f32> = f16_scales(groups * N)
        .iter()
        .enumerate()
        .map(|(i, &s)| if i % 3 == 0 { f16::from_f32(s * 1e-3).to_f32() } else { s })
        .collect();
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
        (0..N * K)
            .map(|i| (fields[i % K * N + i / K] as i32 - 8) as f32 * round(scales[i % K / group * N + i / K]))
            .collect()
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
        if bf16 {
            written.bf16s("a.scales", &[groups, N], &scales)
        } else {
            written.f16s("a.scales", &[groups, N], &scales)
        }
    };
    let mxfp4 = Written::new(json!({"quant_method": "mxfp4"}))
        .add("a.experts.down_proj_blocks", Dtype::U8, &[1, N, K / 32, 16], vec![0; N * K / 2])
        .add("a.experts.down_proj_scales", Dtype::U8, &[1, N, K / 32], vec![127; N * K / 32]);
    let plain = Written { config: json!({}), ..Written::default() }.bf16s("a.weight", &[N, K], &vec![1.0; N * K]);
    let dirs: Vec<TempDir> = (0..5).map(|_| TempDir::new().unwrap()).collect();
    let written = [gptq(128, false), gptq(64, false), gptq(128, true), mxfp4, plain];
    let checkpoints: Vec<Checkpoint> =
        written.iter().zip(&dirs).map(|(written, dir)| written.write(dir.path())).collect();
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
    for (expert, second) in [(0, 0), (0, 1), (1, 0), (2, 1)] {
        check(&mxfp4(3, expert, second));
    }
    let written = mxfp4(3, 0, 0).written;
    assert!(written.error("m.experts.3.gate_proj.weight").contains("has no expert 3"));
    let mut nan = written;
    nan.tensors[1].3[0] = 255;
    assert!(nan.error("m.experts.0.gate_proj.weight").contains("holds a NaN"));
}

#[test]
fn stacked_floats_in_every_order() {
    let (experts, values) = (2, |count: usize, seed: u64| -> Vec<f32> {
        noise(count, seed).iter().map(|&v| bf16::from_f32(v).to_f32()).collect()
    });
    let down = values(experts * N * K, 51); // [experts, hidden N, width K]
    let pair = values(experts * 2 * K * N, 52); // [experts, 2 width, hidden]
    let turned = |all: &[f32], rows: usize, cols: usize| -> Vec<f32> {
        all.chunks(rows * cols)
            .flat_map(|m| (0..cols).flat_map(move |c| (0..rows).map(move |r| m[r * cols + c])))
            .collect()
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
            false => written.bf16s("m.experts.down_proj", &[experts, N, K], &down).bf16s(
                "m.experts.gate_up_proj",
                &[experts, 2 * K, N],
                &pair,
            ),
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
            assert_eq!(
                decoded(&checkpoint, &format!("m.experts.{e}.down_proj.weight"), [N, K]),
                down[e * N * K..][..N * K]
            );
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
            false => written.bf16s("m.experts.down_proj", &[experts, N, N], &square).bf16s(
                "m.experts.gate_up_proj",
                &[experts, 2 * N, N],
                &pair,
            ),
            true => written.bf16s("m.experts.down_proj", &[experts, N, N], &turned(&square, N, N)).bf16s(
                "m.experts.gate_up_proj",
                &[experts, N, 2 * N],
                &turned(&pair, 2 * N, N),
            ),
        };
        let (checkpoint, _dir) = open(&written);
        assert_eq!(
            decoded(&checkpoint, "m.experts.1.down_proj.weight", [N, N]),
            square[N * N..],
            "transposed: {transposed}"
        );
        assert_eq!(decoded(&checkpoint, "m.experts.1.up_proj.weight", [N, N]), pair[3 * N * N..]);
        // Gate and up together are square when experts are half as wide as the model.
        let (half, down) = (N / 2, &values(experts * N * N / 2, 55));
        let (shape, down) =
            if transposed { ([experts, half, N], turned(down, N, half)) } else { ([experts, N, half], down.clone()) };
        let both = if transposed { turned(&square, N, N) } else { square.clone() };
        let written = Written { config: json!({}), ..Written::default() };
        let written = written.bf16s("m.experts.down_proj", &shape, &down).bf16s(
            "m.experts.gate_up_proj",
            &[experts, N, N],
            &both,
        );
        let (checkpoint, _dir) = open(&written);
        assert_eq!(
            decoded(&checkpoint, "m.experts.1.up_proj.weight", [half, N]),
            square[3 * half * N..],
            "transposed: {transposed}"
        );
    }
}

#[test]
fn a_shape_that_does_not_fit_is_named() {
    let (n, k) = (N, K);
    let written = ct(4, true).words("a.weight_packed", &[n, k / 8 - 1], vec![0; n * (k / 8 - 1)]).bf16s(
        "a.weight_scale",
        &[n, 8],
        &vec![1.0; n * 8],
    );
    assert!(written.error("a.weight").contains("tensor a.weight_packed has shape [40, 31]"));
    let written = ct(4, true).words("a.weight_packed", &[n, k / 8], vec![0; n * k / 8]).bf16s(
        "a.weight_scale",
        &[n, 7],
        &vec![1.0; n * 7],
    );
    assert!(written.error("a.weight").contains("7 groups for rows of 256"));
    let written = ct(4, true).words("a.weight_packed", &[n, k / 8], vec![0; n * k / 8]);
    assert!(written.error("a.weight").contains("tensor a.weight_scale is missing"));
    assert!(ct(4, true).bf16s("b.weight", &[1, 1], &[0.0]).error("a.weight").contains("tensor a.weight is missing"));
    let gptq = Written::new(json!({"quant_method": "gptq", "bits": 4, "sym": true}));
    let written = gptq
        .words("a.qweight", &[k / 8, n + 8], vec![0; k / 8 * (n + 8)])
        .words("a.qzeros", &[2, n / 8], vec![0; n / 4])
        .f16s("a.scales", &[2, n], &vec![1.0; 2 * n]);
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
