//! Names and sizes of the kernels over packed tiles: routed experts, and dense weights in INT8 or INT4 with scales in
//! BF16.

use moebius_cache::{Precision, ScaleType};

use super::CudaBackend;
use super::product::{FEW_TOKENS, Out, Product};
use crate::cuda::{Address, DeviceInfo, launch};

/// Tokens of a tile of the grouped products.
const TOKENS: [usize; 4] = [16, 32, 64, 128];

/// What packed tiles hold, as kernels are named for it.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    names: &'static Names,
    /// Inputs that share a scale; 0 for BF16.
    pub group: i32,
    /// 1 where scales are F16, not BF16.
    pub f16: i32,
}

/// Kernels of one format.
#[derive(Debug)]
struct Names {
    gate_up: [&'static str; 4],
    down: [&'static str; 4],
    linear: Option<[&'static str; 4]>,
    gate_up_few: &'static str,
    down_few: &'static str,
    linear_few: Option<[&'static str; 2]>,
    line_inputs: usize, // inputs of a line of 64 bytes
    span: usize,        // inputs that share a scale for certain; 0: no scales
}

macro_rules! tokens {
    ($before:literal, $format:literal) => {
        [
            concat!($before, $format, "_t16"),
            concat!($before, $format, "_t32"),
            concat!($before, $format, "_t64"),
            concat!($before, $format, "_t128"),
        ]
    };
}

macro_rules! names {
    ($format:literal, $bits:literal, $linear:expr, $linear_few:expr, $line_inputs:literal, $span:literal) => {
        Names {
            gate_up: tokens!("experts_gate_up_", $format),
            down: tokens!("experts_down_", $format),
            linear: $linear,
            gate_up_few: concat!("experts_gate_up_gemv_", $bits),
            down_few: concat!("experts_down_gemv_", $bits),
            linear_few: $linear_few,
            line_inputs: $line_inputs,
            span: $span,
        }
    };
}

const INT4_FEW: Option<[&str; 2]> = Some(["packed_linear_gemv_int4_t4", "packed_linear_gemv_int4_t8"]);
const INT8_FEW: Option<[&str; 2]> = Some(["packed_linear_gemv_int8_t4", "packed_linear_gemv_int8_t8"]);
static INT4_G32: Names = names!("int4_g32", "int4", Some(tokens!("packed_linear_", "int4_g32")), INT4_FEW, 8, 32);
static INT4_G64: Names = names!("int4_g64", "int4", Some(tokens!("packed_linear_", "int4_g64")), INT4_FEW, 8, 64);
static INT8_G32: Names = names!("int8_g32", "int8", Some(tokens!("packed_linear_", "int8_g32")), INT8_FEW, 4, 32);
static INT8_G64: Names = names!("int8_g64", "int8", Some(tokens!("packed_linear_", "int8_g64")), INT8_FEW, 4, 64);
static MXFP4: Names = names!("mxfp4", "mxfp4", None, None, 8, 32);
static BF16: Names = names!("bf16", "bf16", None, None, 2, 0);

impl From<Precision> for Format {
    fn from(precision: Precision) -> Self {
        let (names, group) = match precision {
            Precision::Bf16 => (&BF16, 0),
            Precision::Int8 { group_size: 32, .. } => (&INT8_G32, 32),
            Precision::Int8 { group_size, .. } => (&INT8_G64, group_size),
            Precision::Int4 { group_size: 32, .. } => (&INT4_G32, 32),
            Precision::Int4 { group_size, .. } => (&INT4_G64, group_size),
            Precision::Mxfp4 => (&MXFP4, 32),
        };
        Self { names, group: group as i32, f16: i32::from(precision.scales() == ScaleType::F16) }
    }
}

/// Which of [`TOKENS`] suits experts with so many tokens each; measured on an H200, with wgmma and without.
fn suited(tokens: usize, wgmma: bool) -> usize {
    let most = if wgmma { [14, 24, 112] } else { [12, 40, 160] };
    most.iter().position(|&most| tokens <= most).unwrap_or(most.len())
}

impl Format {
    /// A tile's tokens, kernels for gate and up and for down, and their dynamic shared memory, for experts with so many
    /// tokens each.
    pub fn grouped(
        &self,
        device: &DeviceInfo,
        tokens_of_an_expert: usize,
    ) -> (usize, &'static str, &'static str, usize) {
        let wgmma = device.has_wgmma();
        let i = suited(tokens_of_an_expert, wgmma);
        (TOKENS[i], self.names.gate_up[i], self.names.down[i], self.shared(i, wgmma))
    }

    /// Kernels for gate and up and for down of single tokens.
    pub fn few(&self) -> (&'static str, &'static str) {
        (self.names.gate_up_few, self.names.down_few)
    }

    /// As `GemmShape::SHARED` in kernels/packed_gemm.cuh.
    fn shared(&self, i: usize, wgmma: bool) -> usize {
        let Names { line_inputs, span, .. } = *self.names;
        let (four_bits, bf16) = (line_inputs == 8, span == 0);
        let inputs = if i < 2 && !bf16 { 128 } else { 64 };
        let stages = match TOKENS[i] {
            64 if four_bits && wgmma => 6,
            128 if four_bits && wgmma => 5,
            16 => 4,
            _ if four_bits => 4,
            _ => 3,
        };
        let scales = if bf16 { 0 } else { inputs / span * 32 };
        stages * (8 * (inputs / line_inputs * 64 + scales) + TOKENS[i] * inputs * 2)
    }
}

impl CudaBackend {
    /// A product with packed INT8 or INT4 weights; `p.w` is not used.
    pub(super) fn packed_product(&self, precision: Precision, weights: Address<u8>, p: Product) {
        assert_eq!(precision.scales(), ScaleType::Bf16, "dense weights");
        let format = Format::from(precision);
        let flags = match p.out {
            Out::Bf16 => 1,
            Out::F32 => 0,
            Out::F32Add => 2,
        };
        let few = p.tokens <= FEW_TOKENS;
        let wgmma = self.cuda.info.has_wgmma();
        let i = suited(p.tokens / 2, wgmma);
        let names = (format.names.linear_few, format.names.linear);
        let (Some(linear_few), Some(linear)) = names else {
            panic!("dense weights are not packed as {precision} on the GPU")
        };
        let (name, grid, threads, shared) = match few {
            true => (linear_few[usize::from(p.tokens > 4)], [p.n.div_ceil(16), 1, 1], 256, 0),
            false => (
                linear[i],
                [p.n.div_ceil(16).div_ceil(8), p.tokens.div_ceil(TOKENS[i]), 1],
                128,
                format.shared(i, wgmma),
            ),
        };
        launch!(self.cuda, &self.cuda.compute, name, grid, threads, shared;
            weights, p.x, p.y, p.bias, p.tokens as i32, p.n as i32, p.k as i32, format.group, p.x_pitch as i32, p.y_pitch as i32, flags);
    }
}
