//! Every format written out by its definition, with what its weights are.

use half::{bf16, f16};
use moebius_cache::checkpoint::GgmlType;
use moebius_cache::codec::{Format, Integers, Library, Source};
use moebius_cache::pack::CodeType;
use moebius_cache::{Checkpoint, Dtype as Stored, ScaleType};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::gguf_file::File;
use super::noise;

pub const N: usize = 40; // two tiles and a half
pub const K: usize = 256;

/// A checkpoint of tensors and a quantization_config.
#[derive(Clone, Default)]
pub struct Written {
    pub tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    pub config: Value,
}

impl Written {
    pub fn new(config: Value) -> Self {
        Self { config: json!({ "quantization_config": config }), ..Self::default() }
    }

    pub fn add(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.tensors.push((name.into(), dtype, shape.to_vec(), bytes));
        self
    }

    pub fn words(self, name: &str, shape: &[usize], words: Vec<u32>) -> Self {
        self.add(name, Dtype::I32, shape, words.iter().flat_map(|w| w.to_le_bytes()).collect())
    }

    pub fn f16s(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.add(name, Dtype::F16, shape, values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect())
    }

    pub fn bf16s(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.add(name, Dtype::BF16, shape, values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect())
    }

    pub fn f32s(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.add(name, Dtype::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub fn write(&self, dir: &std::path::Path) -> Checkpoint {
        let views = self
            .tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        Checkpoint::open(dir).unwrap()
    }

    pub fn error(&self, name: &str) -> String {
        let dir = TempDir::new().unwrap();
        let checkpoint = self.write(dir.path());
        match checkpoint.source(name, [N, K]) {
            Err(error) => error.to_string(),
            Ok(source) => source.decode(0, &mut vec![0.0; N * K]).unwrap_err().to_string(),
        }
    }
}

/// Numbers from 0 to `below`, the same for the same seed.
pub fn numbers(count: usize, below: u32, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % below
    };
    (0..count).map(|_| next()).collect()
}

/// Scales that bf16 holds, both signs.
pub fn bf16_scales(count: usize) -> Vec<f32> {
    noise(count, 3).iter().map(|&v| bf16::from_f32(v * 0.01).to_f32()).collect()
}

pub fn f16_scales(count: usize) -> Vec<f32> {
    noise(count, 4).iter().map(|&v| f16::from_f32(v * 0.01).to_f32()).collect()
}

/// Fields of `bits` bits, the lowest first, packed into words.
pub fn pack(fields: &[u32], bits: usize) -> Vec<u32> {
    fields
        .chunks(32 / bits)
        .map(|chunk| chunk.iter().enumerate().fold(0, |word, (i, field)| word | field << (i * bits)))
        .collect()
}

/// `[rows, cols]` of fields packed along the first dimension: `[rows * bits / 32, cols]`.
pub fn pack_down(fields: &[u32], cols: usize, bits: usize) -> Vec<u32> {
    let per_word = 32 / bits;
    let mut words = vec![0; (fields.len() / cols).div_ceil(per_word) * cols];
    for (i, field) in fields.iter().enumerate() {
        words[i / cols / per_word * cols + i % cols] |= field << (i / cols % per_word * bits);
    }
    words
}

/// A matrix `[N, K]` in one format.
pub struct Example {
    pub written: Written,
    pub name: &'static str,
    /// What it is; `None` of GGUF's blocks, which the main crate compares with another implementation.
    pub want: Option<Vec<f32>>,
    pub integers: Option<Integers>,
    pub gguf: Option<File>,
}

impl Example {
    pub fn new(written: Written, want: Vec<f32>, integers: Option<Integers>) -> Self {
        Self { written, name: "a.weight", want: Some(want), integers, gguf: None }
    }

    /// Calls `with` the matrix in a checkpoint on disk.
    pub fn open<T>(&self, with: impl FnOnce(&Source<'_>) -> T) -> T {
        let dir = TempDir::new().unwrap();
        let checkpoint = match &self.gguf {
            None => self.written.write(dir.path()),
            Some(file) => {
                std::fs::write(dir.path().join("a.gguf"), file.bytes()).unwrap();
                Checkpoint::open(&dir.path().join("a.gguf")).unwrap()
            }
        };
        with(&checkpoint.source(self.name, [N, K]).unwrap())
    }
}

/// A matrix in each format, groups of 64 where the format leaves that open.
pub fn example(format: Format) -> Example {
    match format {
        Format::Float(dtype) => float(dtype),
        Format::Fp8 => fp8_in_blocks(),
        Format::Integers { by: Library::CompressedTensors, bits, zeros } => compressed_tensors(bits, 64, zeros, false),
        Format::OutOfOrder(Library::CompressedTensors) => compressed_tensors(4, 64, true, true),
        Format::Integers { by: Library::Gptq, bits, zeros } => gptq(bits, "gptq", !zeros, Order::AsTheyLie),
        Format::OutOfOrder(Library::Gptq) => gptq(4, "gptq", false, Order::ByActivation),
        Format::Integers { by: Library::Awq, .. } | Format::OutOfOrder(Library::Awq) => awq(),
        Format::Mxfp4 => mxfp4(1, 0, 0),
        Format::Nvfp4 => nvfp4(false),
        Format::Gguf(kind) => gguf(kind),
    }
}

fn float(dtype: Stored) -> Example {
    let values: Vec<f32> =
        noise(N * K, 1).iter().map(|&v| f16::from_f32(bf16::from_f32(v).to_f32()).to_f32()).collect();
    let written = Written { config: json!({}), ..Written::default() };
    let written = match dtype {
        Stored::BF16 => written.bf16s("a.weight", &[N, K], &values),
        Stored::F16 => written.f16s("a.weight", &[N, K], &values),
        _ => written.f32s("a.weight", &[N, K], &values),
    };
    let values = match dtype {
        Stored::BF16 => values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect(),
        _ => values,
    };
    Example::new(written, values, None)
}

/// E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa.
pub fn e4m3(byte: u8) -> f32 {
    let (e, m) = ((byte >> 3 & 15) as i32, (byte & 7) as f32 / 8.0);
    let size = if e == 0 { m * 2f32.powi(-6) } else { (1.0 + m) * 2f32.powi(e - 7) };
    if byte & 0x80 == 0 { size } else { -size }
}

pub fn fp8(block: Value, bytes: Vec<u8>) -> Written {
    Written::new(json!({"quant_method": "fp8", "weight_block_size": block})).add(
        "a.weight",
        Dtype::F8_E4M3,
        &[N, K],
        bytes,
    )
}

/// Weights as they are in models, rounded to FP8, in blocks that do not divide the matrix.
fn fp8_in_blocks() -> Example {
    let all: Vec<u8> = (0..=255).filter(|byte| byte & 0x7f != 0x7f).collect();
    let nearest = |v: f32| *all.iter().min_by(|&&a, &&b| (e4m3(a) - v).abs().total_cmp(&(e4m3(b) - v).abs())).unwrap();
    let bytes: Vec<u8> = noise(N * K, 1).iter().map(|&v| nearest(448.0 * v)).collect();
    let (rows, cols) = (N.div_ceil(24), K.div_ceil(96));
    let scales = noise(rows * cols, 2);
    let want = (0..N * K).map(|i| e4m3(bytes[i]) * scales[i / K / 24 * cols + i % K / 96]).collect();
    let written = fp8(json!([24, 96]), bytes).f32s("a.weight_scale_inv", &[rows, cols], &scales);
    Example::new(written, want, Some(Integers::fp8(32, ScaleType::F32)))
}

/// A scale of E8M0 for each 32 inputs, in bytes or of its own type.
pub fn mxfp8(dtype: Dtype) -> Example {
    let bytes: Vec<u8> = numbers(N * K, 256, 1).iter().map(|&b| if b & 0x7f == 0x7f { 0 } else { b as u8 }).collect();
    let scales: Vec<u8> = numbers(N * K / 32, 20, 2).iter().map(|&b| 110 + b as u8).collect();
    let want = (0..N * K).map(|i| e4m3(bytes[i]) * 2f32.powi(i32::from(scales[i / 32]) - 127)).collect();
    let written = Written::new(json!({"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}))
        .add("a.weight", Dtype::F8_E4M3, &[N, K], bytes)
        .add("a.weight_scale", dtype, &[N, K / 32], scales);
    Example::new(written, want, Some(Integers::fp8(32, ScaleType::Bf16)))
}

const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// NVFP4 as ModelOpt has it, or as compressed-tensors.
pub fn nvfp4(compressed_tensors: bool) -> Example {
    let bytes: Vec<u8> = numbers(N * K / 2, 256, 43).iter().map(|&b| b as u8).collect();
    let scales: Vec<u8> = numbers(N * K / 16, 0x7f, 44).iter().map(|&b| b as u8).collect();
    let number = if compressed_tensors { 1.0 / 2345.6f32 } else { 0.000_456_7 };
    let weight = |i: usize| e4m3(scales[i / 16]) * number * E2M1[usize::from(bytes[i / 2] >> (i % 2 * 4) & 15)];
    let want = (0..N * K).map(weight).collect();
    let written = match compressed_tensors {
        true => Written::new(json!({"quant_method": "compressed-tensors", "config_groups": {"g": {
            "format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}))
        .add("a.weight_packed", Dtype::U8, &[N, K / 2], bytes.clone())
        .f32s("a.weight_global_scale", &[1], &[2345.6]),
        false => Written::new(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}))
            .add("a.weight", Dtype::U8, &[N, K / 2], bytes.clone())
            .f32s("a.weight_scale_2", &[], &[number]),
    };
    Example::new(written.add("a.weight_scale", Dtype::F8_E4M3, &[N, K / 16], scales.clone()), want, None)
}

/// Whose names FP4 with an exponent for 32 weights has.
#[derive(Clone, Copy)]
pub enum Fp4 {
    CompressedTensors,
    DeepSeek,
    Ling,
    Mimo,
}

impl Fp4 {
    pub const ALL: [Self; 4] = [Self::CompressedTensors, Self::DeepSeek, Self::Ling, Self::Mimo];
}

pub fn fp4(by: Fp4) -> Example {
    let bytes: Vec<u8> = numbers(N * K / 2, 256, 45).iter().map(|&b| b as u8).collect();
    let scales: Vec<u8> = numbers(N * K / 32, 20, 46).iter().map(|&b| 110 + b as u8).collect();
    let weight =
        |i: usize| E2M1[usize::from(bytes[i / 2] >> (i % 2 * 4) & 15)] * 2f32.powi(i32::from(scales[i / 32]) - 127);
    let want = (0..N * K).map(weight).collect();
    let ct = json!({"quant_method": "compressed-tensors", "config_groups": {"g": {
        "format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "group_size": 32}}}});
    let fp8 = |name: &str, value: &str| json!({"quant_method": "fp8", name: value});
    let (config, weights, scale) = match by {
        Fp4::CompressedTensors => (ct, ("a.weight_packed", Dtype::U8), ("a.weight_scale", Dtype::U8)),
        Fp4::DeepSeek => (json!({"quant_method": "fp8"}), ("a.weight", Dtype::I8), ("a.scale", Dtype::F8_E8M0)),
        Fp4::Ling => {
            let config = fp8("routed_experts_quant_method", "mxfp4");
            (config, ("a.weight", Dtype::U8), ("a.weight_scale_inv", Dtype::U8))
        }
        Fp4::Mimo => (fp8("store_dtype", "mxfp4"), ("a.weight", Dtype::U8), ("a.weight_scale", Dtype::U8)),
    };
    let mut written = Written::new(config).add(weights.0, weights.1, &[N, K / 2], bytes.clone()).add(
        scale.0,
        scale.1,
        &[N, K / 32],
        scales.clone(),
    );
    if let Fp4::DeepSeek = by {
        written.config["expert_dtype"] = "fp4".into();
    }
    let table = Some(CodeType::E2m1);
    Example::new(
        written,
        want,
        Some(Integers { low: -12, high: 12, group: 32, zeros: false, scales: ScaleType::Bf16, table }),
    )
}

pub fn ct(bits: usize, symmetric: bool) -> Written {
    Written::new(json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "type": "int", "symmetric": symmetric,
            "strategy": "group", "group_size": 64}}}}))
}

/// Rows packed into words; zero points, if there are any, packed down the rows.
pub fn compressed_tensors(bits: usize, group: usize, zeros: bool, out_of_order: bool) -> Example {
    let (half, groups) = (1i32 << (bits - 1), K / group);
    let (fields, scales) = (numbers(N * K, 1 << bits, 5), bf16_scales(N * groups));
    let points = if zeros { numbers(N * groups, 1 << bits, 7) } else { vec![half as u32; N * groups] };
    let index = numbers(K, groups as u32, 8);
    let of = |i: usize| i / K * groups + if out_of_order { index[i % K] as usize } else { i % K / group };
    let want = (0..N * K).map(|i| (fields[i] as i32 - points[of(i)] as i32) as f32 * scales[of(i)]).collect();
    let rows = fields.chunks(K).flat_map(|row| pack(row, bits)).collect();
    let mut written = ct(bits, !zeros).words("a.weight_packed", &[N, K * bits / 32], rows).bf16s(
        "a.weight_scale",
        &[N, groups],
        &scales,
    );
    if zeros {
        written = written.words("a.weight_zero_point", &[N * bits / 32, groups], pack_down(&points, groups, bits));
    }
    if out_of_order {
        written = written.words("a.weight_g_idx", &[K], index.clone());
    }
    let (low, high) = if zeros { (-2 * half + 1, 2 * half - 1) } else { (-half, half - 1) };
    let values = out_of_order || bits == 8 && zeros;
    Example::new(
        written,
        want,
        (!values).then_some(Integers {
            low,
            high,
            group,
            zeros: zeros && bits == 4,
            scales: ScaleType::Bf16,
            table: None,
        }),
    )
}

/// How GPTQ took inputs.
#[derive(Clone, Copy, PartialEq)]
pub enum Order {
    AsTheyLie,
    /// The most important first, in groups of neighbours in that order.
    ByActivation,
    /// The most important first, in groups as they lie.
    StaticGroups,
}

pub fn gptq(bits: usize, version: &str, symmetric: bool, order: Order) -> Example {
    let act_order = order == Order::ByActivation;
    let (groups, group, half) = (4, K / 4, 1u32 << (bits - 1));
    let less = (version == "gptq") as u32;
    let fields = numbers(K * N, 1 << bits, 11); // [k, n]
    // Stored zeros; of the first version one less than they mean.
    let zeros: Vec<u32> = match symmetric {
        true => vec![half - less; groups * N],
        false => numbers(groups * N, 1 << bits, 12),
    };
    let (scales, index) = (f16_scales(groups * N), numbers(K, groups as u32, 13));
    let of = |input: usize| if act_order { index[input] as usize } else { input / group };
    let weight = |row: usize, input: usize| {
        let at = of(input) * N + row;
        (fields[input * N + row] as i32 - (zeros[at] + less) as i32) as f32 * scales[at]
    };
    let want: Vec<f32> = (0..N * K).map(|i| weight(i / K, i % K)).collect();
    let plain = (0..K as u32).map(|input| input / group as u32).collect();
    let config = json!({"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": order != Order::AsTheyLie, "static_groups": order == Order::StaticGroups,
        "checkpoint_format": version});
    let written = Written::new(config)
        .words("a.qweight", &[K * bits / 32, N], pack_down(&fields, N, bits))
        .words("a.qzeros", &[groups, N * bits / 32], zeros.chunks(N).flat_map(|row| pack(row, bits)).collect())
        .f16s("a.scales", &[groups, N], &scales)
        .words("a.g_idx", &[K], if act_order { index.clone() } else { plain });
    let (low, high) =
        if symmetric { (-(half as i32), half as i32 - 1) } else { (-2 * half as i32, 2 * half as i32 - 1) };
    let values = act_order || bits == 8 && !symmetric;
    let zeros = bits == 4 && !symmetric;
    let integers = Integers { low, high, group, zeros, scales: ScaleType::F16, table: None };
    Example::new(written, want, (!values).then_some(integers))
}

pub fn awq() -> Example {
    let (group, groups) = (64, K / 64);
    let (fields, zeros, scales) = (numbers(K * N, 16, 21), numbers(groups * N, 16, 22), f16_scales(groups * N));
    let want: Vec<f32> = (0..N * K)
        .map(|i| {
            let (row, input) = (i / K, i % K);
            (fields[input * N + row] as i32 - zeros[input / group * N + row] as i32) as f32
                * scales[input / group * N + row]
        })
        .collect();
    // Nibble i of a word is output ORDER[i] of its eight.
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let words = |fields: &[u32]| {
        fields.chunks(8).map(|eight| (0..8).fold(0, |word, i| word | eight[ORDER[i]] << (4 * i))).collect()
    };
    let written = Written::new(
        json!({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": true, "version": "gemm"}),
    )
    .words("a.qweight", &[K, N / 8], words(&fields))
    .words("a.qzeros", &[groups, N / 8], words(&zeros))
    .f16s("a.scales", &[groups, N], &scales);
    Example::new(
        written,
        want,
        Some(Integers { low: -15, high: 15, group, zeros: true, scales: ScaleType::F16, table: None }),
    )
}

/// Gate (`second` 0) or up (1) of an expert among `experts`, whose rows alternate.
pub fn mxfp4(experts: usize, expert: usize, second: usize) -> Example {
    let bytes: Vec<u8> = numbers(experts * 2 * N * K / 2, 256, 41).iter().map(|&b| b as u8).collect();
    // From the smallest exponent, half of which is no normal number, to near the largest.
    let scales: Vec<u8> =
        numbers(experts * 2 * N * K / 32, 20, 42).iter().map(|&b| if b == 0 { 0 } else { 110 + b as u8 }).collect();
    let weight = |row: usize, input: usize| {
        let at = (expert * 2 * N + row) * K + input;
        let nibble = bytes[at / 2] >> (input % 2 * 4) & 15;
        E2M1[nibble as usize] * 2f64.powi(scales[at / 32] as i32 - 127) as f32
    };
    let want = (0..N * K).map(|i| weight(2 * (i / K) + second, i % K)).collect();
    let written = Written::new(json!({"quant_method": "mxfp4"}))
        .add("m.experts.gate_up_proj_blocks", Dtype::U8, &[experts, 2 * N, K / 32, 16], bytes.clone())
        .add("m.experts.gate_up_proj_scales", Dtype::U8, &[experts, 2 * N, K / 32], scales.clone())
        .bf16s("m.experts.gate_up_proj_bias", &[experts, 2 * N], &vec![0.0; experts * 2 * N]);
    let name: &'static str = ["m.experts.0", "m.experts.1", "m.experts.2"][expert];
    let name = format!("{name}.{}_proj.weight", ["gate", "up"][second]).leak();
    Example {
        name,
        ..Example::new(
            written,
            want,
            Some(Integers {
                low: -12,
                high: 12,
                group: 32,
                zeros: false,
                scales: ScaleType::Bf16,
                table: Some(CodeType::E2m1),
            }),
        )
    }
}

/// Random codes, with scales and offsets as they are in models.
fn gguf(kind: GgmlType) -> Example {
    use GgmlType::*;
    let (elements, size) = kind.block();
    let mut bytes: Vec<u8> = numbers(N * K / elements * size, 256, 61).iter().map(|&b| b as u8).collect();
    // Scales, then offsets, of which the middle of the codes is 0.
    let halves: &[(usize, f32)] = match kind {
        Q4_0 | Q5_0 | Q8_0 | IQ4_NL | IQ4_XS | IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => &[(0, 1.0)],
        TQ1_0 => &[(52, 1.0)],
        TQ2_0 => &[(64, 1.0)],
        Q4_1 => &[(0, 1.0), (2, -7.5)],
        Q5_1 => &[(0, 1.0), (2, -15.5)],
        Q2_K => &[(80, 1.0), (82, 1.5)],
        Q3_K => &[(108, 1.0)],
        Q4_K => &[(0, 1.0), (2, 7.5)],
        Q5_K => &[(0, 1.0), (2, 15.5)],
        Q6_K => &[(208, 1.0)],
        MXFP4 | IQ1_M => &[],
    };
    for (block, scale) in bytes.chunks_mut(size).zip(noise(N * K / elements, 62)) {
        for &(at, factor) in halves {
            block[at..at + 2].copy_from_slice(&f16::from_f32(scale * 0.01 * factor).to_le_bytes());
        }
        if kind == IQ1_M {
            // Its scale is in four places.
            let bits = f16::from_f32(scale * 0.01).to_bits();
            (0..4).for_each(|i| block[49 + 2 * i] = block[49 + 2 * i] & 15 | ((bits >> (4 * i) & 15) as u8) << 4);
        }
        if kind == MXFP4 {
            block[0] = 120 + block[0] % 8;
        }
    }
    let number = [2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 19, 29, 16, 17, 22, 18, 21, 20, 23, 34, 35, 39]
        [GgmlType::ALL.iter().position(|&k| k == kind).unwrap()];
    let file =
        File::default().text("general.architecture", "none").tensor("a.weight", &[K as u64, N as u64], number, &bytes);
    let of = |low, high| Some(Integers { low, high, group: 32, zeros: false, scales: ScaleType::F16, table: None });
    let integers = match kind {
        Q4_0 => of(-8, 7),
        Q5_0 => of(-16, 15),
        MXFP4 => Some(Integers {
            low: -12,
            high: 12,
            group: 32,
            zeros: false,
            scales: ScaleType::Bf16,
            table: Some(CodeType::E2m1),
        }),
        IQ4_NL => of(-127, 113).map(|integers| Integers { table: Some(CodeType::Iq4), ..integers }),
        Q8_0 => of(-128, 127),
        _ => None,
    };
    Example { want: None, gguf: Some(file), ..Example::new(Written::default(), Vec::new(), integers) }
}
