//! The kernels over packed tiles: routed experts, and dense weights in INT8 or INT4 with scales in BF16. Which formats
//! there are is listed in kernels/packed_tile.cuh.

use moebius_cache::{Precision, ScaleType};

use super::CudaBackend;
use super::product::{Out, Product};
use crate::cuda::kernels::packed_linear::{ADD, BLOCK_TILES, TILE_ROWS, Y_IS_BF16};
use crate::cuda::kernels::{self, Kernel};
use crate::cuda::{DeviceBuffer, DeviceInfo, launch};

/// A kernel of the grouped products of experts.
pub(crate) type Grouped = Kernel<kernels::GroupedArguments>;

/// Tokens of the tiles of products of many tokens.
const TILES: [usize; 4] = [16, 32, 64, 128];

/// Tokens of the tiles of Hopper's products of still more.
const WIDE: usize = 192;

/// The kernels for routed experts of one precision, and what they are told of it.
pub struct ExpertKernels {
    gate_up: [Grouped; 4], // by `TILES`
    down: [Grouped; 4],
    wide: Option<[Grouped; 2]>, // gate and up, and down, of tiles of `WIDE`; on cards with wgmma
    /// For gate and up of single tokens.
    pub(crate) gate_up_few: Kernel<kernels::ExpertsGateUpArguments>,
    /// For down of single tokens.
    pub(crate) down_few: Kernel<kernels::ExpertsDownArguments>,
    /// Inputs that share a scale; 0 for BF16.
    pub(crate) group: i32,
    /// 1 where scales are F16, not BF16.
    pub(crate) f16: i32,
}

/// A dense weight in packed tiles.
pub(super) struct PackedLinear {
    few: [Kernel<kernels::LinearArguments>; 2], // for up to as many tokens as their tile has
    many: [Kernel<kernels::LinearArguments>; 4], // by `TILES`
    group: i32,
    pub(super) weights: DeviceBuffer<u8>,
}

/// The kernel of this name. Panics: there is none, so that `precision` lacks a row in kernels/packed_tile.cuh (a bug).
fn named<A>(kernels: &[Kernel<A>], name: &str) -> Kernel<A> {
    *kernels.iter().find(|kernel| kernel.name == name).unwrap_or_else(|| panic!("there is no kernel {name}"))
}

/// The kernels of this name for tiles of so many tokens.
fn of_tiles<A, const N: usize>(kernels: &[Kernel<A>], name: &str, tiles: [usize; N]) -> [Kernel<A>; N] {
    tiles.map(|tokens| named(kernels, &format!("{name}_t{tokens}")))
}

/// The name of a precision in the kernels for many tokens, which serve groups of 64 and 128 alike; and its groups.
fn span(precision: Precision) -> (String, i32) {
    match precision.group_size() {
        None => (precision.name().into(), 0),
        Some(group) => (format!("{}_g{}", precision.name(), group.min(64)), group as i32),
    }
}

impl ExpertKernels {
    /// Those of a precision.
    pub(crate) fn of(precision: Precision) -> Self {
        let (few, (many, group)) = (precision.name(), span(precision));
        let [gate_up, down] = ["gate_up", "down"].map(|part| {
            let name = format!("experts_{part}_{many}_t{WIDE}");
            kernels::GROUPED_KERNELS.iter().find(|kernel| kernel.name == name).copied()
        });
        Self {
            wide: gate_up.zip(down).map(|(gate_up, down)| [gate_up, down]),
            gate_up: of_tiles(kernels::GROUPED_KERNELS, &format!("experts_gate_up_{many}"), TILES),
            down: of_tiles(kernels::GROUPED_KERNELS, &format!("experts_down_{many}"), TILES),
            gate_up_few: named(kernels::EXPERTS_GATE_UP_KERNELS, &format!("experts_gate_up_gemv_{few}")),
            down_few: named(kernels::EXPERTS_DOWN_KERNELS, &format!("experts_down_gemv_{few}")),
            group,
            f16: i32::from(precision.scales() == ScaleType::F16),
        }
    }

    /// Kernels for gate and up and for down, of the same tile, for experts with so many tokens each.
    pub(crate) fn grouped(&self, device: &DeviceInfo, tokens_of_an_expert: usize) -> [Grouped; 2] {
        if let Some(wide) = self.wide.filter(|_| device.has_wgmma() && tokens_of_an_expert > 112) {
            return wide;
        }
        let i = suited(tokens_of_an_expert, device.has_wgmma());
        [self.gate_up[i], self.down[i]]
    }
}

impl PackedLinear {
    /// Weights in a precision with scales in BF16.
    pub(super) fn new(precision: Precision, weights: DeviceBuffer<u8>) -> Self {
        assert_eq!(precision.scales(), ScaleType::Bf16, "dense weights");
        let (few, (many, group)) = (precision.name(), span(precision));
        let all = kernels::LINEAR_KERNELS;
        Self {
            few: of_tiles(all, &format!("packed_linear_gemv_{few}"), [4, 8]),
            many: of_tiles(all, &format!("packed_linear_{many}"), TILES),
            group,
            weights,
        }
    }
}

/// Which of four kernels suits experts with so many tokens each; measured on an H200, with wgmma and without.
fn suited(tokens: usize, wgmma: bool) -> usize {
    let most = if wgmma { [14, 24, 112] } else { [12, 40, 160] };
    most.iter().position(|&most| tokens <= most).unwrap_or(most.len())
}

impl CudaBackend {
    /// A product with packed weights; `p.w` is not used.
    pub(super) fn packed_product(&self, linear: &PackedLinear, p: Product) {
        let flags = match p.out {
            Out::Bf16 => Y_IS_BF16,
            Out::F32 => 0,
            Out::F32Add => ADD,
        };
        let rows = p.n.div_ceil(TILE_ROWS);
        let (kernel, grid) = match linear.few.iter().find(|kernel| p.tokens <= kernel.tile[0]) {
            Some(kernel) => (*kernel, [rows, 1, 1]),
            None => {
                let kernel = linear.many[suited(p.tokens / 2, self.cuda.info.has_wgmma())];
                (kernel, [rows.div_ceil(BLOCK_TILES), p.tokens.div_ceil(kernel.tile[0]), 1])
            }
        };
        launch!(self.cuda, &self.cuda.compute, kernel, grid;
            linear.weights.address(), p.x, p.y, p.bias, p.tokens as i32, p.n as i32, p.k as i32, linear.group,
            p.x_pitch as i32, p.y_pitch as i32, flags as i32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_precision_has_its_kernels() {
        for precision in Precision::all() {
            let found = ExpertKernels::of(precision);
            assert_eq!(found.gate_up.map(|kernel| kernel.tile[0]), TILES, "{precision}");
            assert_eq!(found.down.map(|kernel| kernel.tile[0]), TILES, "{precision}");
            if let Some(wide) = found.wide {
                assert_eq!(wide.map(|kernel| kernel.tile[0]), [WIDE; 2], "{precision}");
            }
        }
        for precision in [Precision::int4(32), Precision::int4(128), Precision::int8(64)] {
            assert!(ExpertKernels::of(precision).wide.is_some(), "{precision}");
        }
    }
}
