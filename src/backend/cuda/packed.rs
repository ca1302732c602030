//! The kernels over packed tiles: routed experts, and dense weights in INT8 or INT4 with scales in BF16.

use moebius_cache::{Precision, ScaleType};

use super::CudaBackend;
use super::product::{Out, Product};
use crate::cuda::kernels::packed_linear::{ADD, BLOCK_TILES, TILE_ROWS, Y_IS_BF16};
use crate::cuda::kernels::{self, Kernel};
use crate::cuda::{Address, DeviceInfo, launch};

/// What packed tiles hold.
#[derive(Clone, Copy)]
pub struct Format {
    kernels: &'static Kernels,
    /// Inputs that share a scale; 0 for BF16.
    pub group: i32,
    /// 1 where scales are F16, not BF16.
    pub f16: i32,
}

/// A kernel of the grouped products of experts.
pub(crate) type Grouped = Kernel<kernels::GroupedArguments>;

/// Kernels of one format; of those for many tokens small tiles come first.
struct Kernels {
    gate_up: [Grouped; 4],
    down: [Grouped; 4],
    gate_up_few: Kernel<kernels::ExpertsGateUpArguments>,
    down_few: Kernel<kernels::ExpertsDownArguments>,
    linear: Option<Linear>,
}

/// Kernels of dense weights.
struct Linear {
    few: [Kernel<kernels::LinearArguments>; 2], // for up to as many tokens as their tile has
    many: [Kernel<kernels::LinearArguments>; 4],
}

static INT4_G32: Kernels = Kernels {
    gate_up: [
        kernels::experts_gate_up_int4_g32_t16,
        kernels::experts_gate_up_int4_g32_t32,
        kernels::experts_gate_up_int4_g32_t64,
        kernels::experts_gate_up_int4_g32_t128,
    ],
    down: [
        kernels::experts_down_int4_g32_t16,
        kernels::experts_down_int4_g32_t32,
        kernels::experts_down_int4_g32_t64,
        kernels::experts_down_int4_g32_t128,
    ],
    gate_up_few: kernels::experts_gate_up_gemv_int4,
    down_few: kernels::experts_down_gemv_int4,
    linear: Some(Linear {
        few: [kernels::packed_linear_gemv_int4_t4, kernels::packed_linear_gemv_int4_t8],
        many: [
            kernels::packed_linear_int4_g32_t16,
            kernels::packed_linear_int4_g32_t32,
            kernels::packed_linear_int4_g32_t64,
            kernels::packed_linear_int4_g32_t128,
        ],
    }),
};
static INT4_G64: Kernels = Kernels {
    gate_up: [
        kernels::experts_gate_up_int4_g64_t16,
        kernels::experts_gate_up_int4_g64_t32,
        kernels::experts_gate_up_int4_g64_t64,
        kernels::experts_gate_up_int4_g64_t128,
    ],
    down: [
        kernels::experts_down_int4_g64_t16,
        kernels::experts_down_int4_g64_t32,
        kernels::experts_down_int4_g64_t64,
        kernels::experts_down_int4_g64_t128,
    ],
    gate_up_few: kernels::experts_gate_up_gemv_int4,
    down_few: kernels::experts_down_gemv_int4,
    linear: Some(Linear {
        few: [kernels::packed_linear_gemv_int4_t4, kernels::packed_linear_gemv_int4_t8],
        many: [
            kernels::packed_linear_int4_g64_t16,
            kernels::packed_linear_int4_g64_t32,
            kernels::packed_linear_int4_g64_t64,
            kernels::packed_linear_int4_g64_t128,
        ],
    }),
};
static INT8_G32: Kernels = Kernels {
    gate_up: [
        kernels::experts_gate_up_int8_g32_t16,
        kernels::experts_gate_up_int8_g32_t32,
        kernels::experts_gate_up_int8_g32_t64,
        kernels::experts_gate_up_int8_g32_t128,
    ],
    down: [
        kernels::experts_down_int8_g32_t16,
        kernels::experts_down_int8_g32_t32,
        kernels::experts_down_int8_g32_t64,
        kernels::experts_down_int8_g32_t128,
    ],
    gate_up_few: kernels::experts_gate_up_gemv_int8,
    down_few: kernels::experts_down_gemv_int8,
    linear: Some(Linear {
        few: [kernels::packed_linear_gemv_int8_t4, kernels::packed_linear_gemv_int8_t8],
        many: [
            kernels::packed_linear_int8_g32_t16,
            kernels::packed_linear_int8_g32_t32,
            kernels::packed_linear_int8_g32_t64,
            kernels::packed_linear_int8_g32_t128,
        ],
    }),
};
static INT8_G64: Kernels = Kernels {
    gate_up: [
        kernels::experts_gate_up_int8_g64_t16,
        kernels::experts_gate_up_int8_g64_t32,
        kernels::experts_gate_up_int8_g64_t64,
        kernels::experts_gate_up_int8_g64_t128,
    ],
    down: [
        kernels::experts_down_int8_g64_t16,
        kernels::experts_down_int8_g64_t32,
        kernels::experts_down_int8_g64_t64,
        kernels::experts_down_int8_g64_t128,
    ],
    gate_up_few: kernels::experts_gate_up_gemv_int8,
    down_few: kernels::experts_down_gemv_int8,
    linear: Some(Linear {
        few: [kernels::packed_linear_gemv_int8_t4, kernels::packed_linear_gemv_int8_t8],
        many: [
            kernels::packed_linear_int8_g64_t16,
            kernels::packed_linear_int8_g64_t32,
            kernels::packed_linear_int8_g64_t64,
            kernels::packed_linear_int8_g64_t128,
        ],
    }),
};
static MXFP4: Kernels = Kernels {
    gate_up: [
        kernels::experts_gate_up_mxfp4_t16,
        kernels::experts_gate_up_mxfp4_t32,
        kernels::experts_gate_up_mxfp4_t64,
        kernels::experts_gate_up_mxfp4_t128,
    ],
    down: [
        kernels::experts_down_mxfp4_t16,
        kernels::experts_down_mxfp4_t32,
        kernels::experts_down_mxfp4_t64,
        kernels::experts_down_mxfp4_t128,
    ],
    gate_up_few: kernels::experts_gate_up_gemv_mxfp4,
    down_few: kernels::experts_down_gemv_mxfp4,
    linear: None,
};
static BF16: Kernels = Kernels {
    gate_up: [
        kernels::experts_gate_up_bf16_t16,
        kernels::experts_gate_up_bf16_t32,
        kernels::experts_gate_up_bf16_t64,
        kernels::experts_gate_up_bf16_t128,
    ],
    down: [
        kernels::experts_down_bf16_t16,
        kernels::experts_down_bf16_t32,
        kernels::experts_down_bf16_t64,
        kernels::experts_down_bf16_t128,
    ],
    gate_up_few: kernels::experts_gate_up_gemv_bf16,
    down_few: kernels::experts_down_gemv_bf16,
    linear: None,
};

impl From<Precision> for Format {
    fn from(precision: Precision) -> Self {
        let (kernels, group) = match precision {
            Precision::Bf16 => (&BF16, 0),
            Precision::Int8 { group_size: 32, .. } => (&INT8_G32, 32),
            Precision::Int8 { group_size, .. } => (&INT8_G64, group_size),
            Precision::Int4 { group_size: 32, .. } => (&INT4_G32, 32),
            Precision::Int4 { group_size, .. } => (&INT4_G64, group_size),
            Precision::Mxfp4 => (&MXFP4, 32),
        };
        Self { kernels, group: group as i32, f16: i32::from(precision.scales() == ScaleType::F16) }
    }
}

/// Which of four kernels suits experts with so many tokens each; measured on an H200, with wgmma and without.
fn suited(tokens: usize, wgmma: bool) -> usize {
    let most = if wgmma { [14, 24, 112] } else { [12, 40, 160] };
    most.iter().position(|&most| tokens <= most).unwrap_or(most.len())
}

impl Format {
    /// Kernels for gate and up and for down, of the same tile, for experts with so many tokens each.
    pub(crate) fn grouped(&self, device: &DeviceInfo, tokens_of_an_expert: usize) -> [Grouped; 2] {
        let i = suited(tokens_of_an_expert, device.has_wgmma());
        [self.kernels.gate_up[i], self.kernels.down[i]]
    }

    /// The kernel for gate and up of single tokens.
    pub(crate) fn gate_up_few(&self) -> Kernel<kernels::ExpertsGateUpArguments> {
        self.kernels.gate_up_few
    }

    /// The kernel for down of single tokens.
    pub(crate) fn down_few(&self) -> Kernel<kernels::ExpertsDownArguments> {
        self.kernels.down_few
    }
}

impl CudaBackend {
    /// A product with packed INT8 or INT4 weights; `p.w` is not used.
    pub(super) fn packed_product(&self, precision: Precision, weights: Address<u8>, p: Product) {
        assert_eq!(precision.scales(), ScaleType::Bf16, "dense weights");
        let format = Format::from(precision);
        let flags = match p.out {
            Out::Bf16 => Y_IS_BF16,
            Out::F32 => 0,
            Out::F32Add => ADD,
        };
        let Some(Linear { few, many }) = &format.kernels.linear else {
            panic!("dense weights are not packed as {precision} on the GPU")
        };
        let rows = p.n.div_ceil(TILE_ROWS);
        let (kernel, grid) = match few.iter().find(|kernel| p.tokens <= kernel.tile[0]) {
            Some(kernel) => (*kernel, [rows, 1, 1]),
            None => {
                let kernel = many[suited(p.tokens / 2, self.cuda.info.has_wgmma())];
                (kernel, [rows.div_ceil(BLOCK_TILES), p.tokens.div_ceil(kernel.tile[0]), 1])
            }
        };
        launch!(self.cuda, &self.cuda.compute, kernel, grid;
            weights, p.x, p.y, p.bias, p.tokens as i32, p.n as i32, p.k as i32, format.group, p.x_pitch as i32,
            p.y_pitch as i32, flags as i32);
    }
}
