//! The kernels over packed tiles: routed experts, and dense weights in INT8 or INT4 with scales in BF16. Which formats
//! there are is listed in kernels/packed_tile.cuh.

use moebius_cache::pack::{CodeType, ExpertLayout, Grid};
use moebius_cache::{Precision, ScaleType};

use super::CudaBackend;
use super::product::{Out, Product};
use crate::cuda::kernels::packed_linear::{ADD, BLOCK_TILES, TILE_ROWS, Y_IS_BF16};
use crate::cuda::kernels::{self, Kernel};
use crate::cuda::{Address, DeviceBuffer, DeviceInfo, launch};

/// A kernel of the grouped products of experts.
#[derive(Clone, Copy)]
pub(crate) enum Grouped {
    /// A block for each of the tiles that the pairs were cut into.
    Tiled(Kernel<kernels::GroupedArguments>),
    /// Blocks that stay, and cut for themselves.
    Persistent(Kernel<kernels::PersistentArguments>),
}

/// Tokens of the tiles of products of many tokens.
const TILES: [usize; 4] = [16, 32, 64, 128];

/// The same where the tokens are those of one expert.
pub(crate) const EXPERT_TILES: [usize; 5] = [8, 16, 32, 64, 128];

/// From so many tokens of an expert on, on average, blocks that stay are faster on Hopper than tiles of precisions
/// without kernels of their own; measured on an H100 and an H200.
fn persistent_from(precision: Precision) -> usize {
    match precision {
        Precision::Int8 { .. } => 24,
        Precision::Int4 { group_size: 64.., .. } => 19, // whose tiles of 16 tokens scale sums
        _ => 16,
    }
}

/// The kernels for one matrix of routed experts, and what they are told of its precision.
pub(crate) struct MatrixKernels<A> {
    /// For single tokens.
    pub(crate) few: Kernel<A>,
    many: [Kernel<kernels::GroupedArguments>; 5], // by `EXPERT_TILES`
    persistent: Vec<Kernel<kernels::PersistentArguments>>, // by tokens; for cards with wgmma
    persistent_from: usize,                       // tokens of an expert
    pub(crate) packing: kernels::Packing,
}

/// The kernels for the routed experts of a layer.
pub struct ExpertKernels {
    pub(crate) gate: MatrixKernels<kernels::ExpertsGateUpArguments>, // and up
    pub(crate) down: MatrixKernels<kernels::ExpertsDownArguments>,
    /// Where `down` begins in an expert, in bytes.
    pub(crate) down_at: i32,
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

/// The kernels for many tokens of all rows that the launch tells apart.
const ANY_ROW: &str = "any_row";

/// The name of a precision in the kernels for many tokens. Those of INT4 and INT8 serve groups of 64 and 128 alike,
/// those of MXFP4 its own; what other rows are is told at the launch.
fn span(precision: Precision) -> String {
    match precision {
        Precision::Bf16 => precision.name().into(),
        Precision::Int4 { group_size, .. } | Precision::Int8 { group_size, .. } => {
            format!("{}_g{}", precision.name(), group_size.min(64))
        }
        Precision::Mxfp4 => "mxfp4_g32".into(),
        _ => ANY_ROW.into(),
    }
}

/// The name of a precision in the kernels for few tokens.
fn row_name(precision: Precision) -> String {
    match precision.scales() {
        ScaleType::F32 if precision != Precision::Nvfp4 => format!("{}_f32", precision.name()),
        _ if matches!(precision, Precision::Iq4 { .. }) => Precision::Iq4Nl.name().into(),
        _ => precision.name().into(),
    }
}

/// What a launch is told of a matrix; `grid` knows where the grid of its codes is.
fn packing(precision: Precision, grid: &impl Fn(Grid) -> Address<u32>) -> kernels::Packing {
    kernels::Packing {
        grid: match precision.codes() {
            Some(CodeType::Grid(codes)) => grid(codes),
            _ => Address::NULL,
        },
        // A Format of kernels/packed_tile.cuh: BF16, then the rows.
        format: precision.row_number().map_or(0, |row| row as i32 + 1),
        group: precision.group_size().unwrap_or(0) as i32,
        f16: i32::from(precision.scales() == ScaleType::F16),
    }
}

impl<A> MatrixKernels<A> {
    /// Those of a precision: `experts_{name}_gemv_..` of `few` and `experts_{name}_..`.
    fn of(name: &str, few: &[Kernel<A>], precision: Precision, grid: &impl Fn(Grid) -> Address<u32>) -> Self {
        let (many, row) = (span(precision), row_name(precision));
        let persistent = |name_of: &str| -> Vec<_> {
            let prefix = format!("experts_{name}_persistent_{name_of}_t");
            kernels::PERSISTENT_KERNELS.iter().filter(|kernel| kernel.name.starts_with(&prefix)).copied().collect()
        };
        // A row's own ones, and for more tokens than they are made for those of many rows.
        let own = persistent(&row);
        let most = own.iter().map(|kernel| kernel.tile[0]).max().unwrap_or(0);
        let more = persistent(&many).into_iter().filter(|kernel| kernel.tile[0] > most);
        // Its tiles would be unpacked through shared memory.
        let persistent_from = if own.is_empty() { persistent_from(precision) } else { 0 };
        let mut persistent: Vec<_> = own.into_iter().chain(more).collect();
        persistent.sort_by_key(|kernel| kernel.tile[0]);
        Self {
            few: named(few, &format!("experts_{name}_gemv_{row}")),
            many: of_tiles(kernels::GROUPED_KERNELS, &format!("experts_{name}_{many}"), EXPERT_TILES),
            persistent,
            persistent_from,
            packing: packing(precision, grid),
        }
    }

    /// The kernel for experts with so many tokens on average, whose blocks may `stay`; else that of the `i`-th of
    /// [`EXPERT_TILES`].
    fn grouped(&self, tokens_of_an_expert: usize, stay: bool, i: usize) -> Grouped {
        // Some experts have more tokens than the average: not many shall need a second piece.
        let holds = |kernel: &&Kernel<_>| tokens_of_an_expert * 6 / 5 <= kernel.tile[0];
        let persistent = self.persistent.iter().find(holds).or(self.persistent.last());
        match persistent.filter(|_| stay && tokens_of_an_expert >= self.persistent_from) {
            Some(kernel) => Grouped::Persistent(*kernel),
            None => Grouped::Tiled(self.many[i]),
        }
    }
}

impl ExpertKernels {
    /// Those of a layer; `grid` knows where the grid of codes is.
    pub(crate) fn of(layout: &ExpertLayout, grid: impl Fn(Grid) -> Address<u32>) -> Self {
        Self {
            gate: MatrixKernels::of("gate_up", kernels::EXPERTS_GATE_UP_KERNELS, layout.gate.precision, &grid),
            down: MatrixKernels::of("down", kernels::EXPERTS_DOWN_KERNELS, layout.down.precision, &grid),
            down_at: layout.down_tile(0) as i32,
        }
    }

    /// Kernels for gate and up and for down, for experts with so many tokens on average, and the tokens of the tiles
    /// that pairs are cut into: 0 where no kernel takes tiles.
    pub(crate) fn grouped(&self, device: &DeviceInfo, tokens_of_an_expert: usize) -> (usize, [Grouped; 2]) {
        let stay = device.has_wgmma();
        let i = match tokens_of_an_expert {
            ..=5 => 0,
            ..=18 if stay && tokens_of_an_expert < self.gate.persistent_from.max(self.down.persistent_from) => 1,
            more => 1 + suited(more, stay),
        };
        let kernels =
            [self.gate.grouped(tokens_of_an_expert, stay, i), self.down.grouped(tokens_of_an_expert, stay, i)];
        let tiled = kernels.iter().any(|kernel| matches!(kernel, Grouped::Tiled(_)));
        (if tiled { EXPERT_TILES[i] } else { 0 }, kernels)
    }
}

impl PackedLinear {
    /// Weights in a precision with scales in BF16.
    pub(super) fn new(precision: Precision, weights: DeviceBuffer<u8>) -> Self {
        assert_eq!(precision.scales(), ScaleType::Bf16, "dense weights");
        let (few, many) = (precision.name(), span(precision));
        let all = kernels::LINEAR_KERNELS;
        Self {
            few: of_tiles(all, &format!("packed_linear_gemv_{few}"), [4, 8]),
            many: of_tiles(all, &format!("packed_linear_{many}"), TILES),
            group: precision.group_size().unwrap_or(0) as i32,
            weights,
        }
    }
}

/// Which of `TILES` suits experts with so many tokens each; measured on an H200, with wgmma and without.
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
            let found =
                ExpertKernels::of(&ExpertLayout::new(256, 256, precision).expect("an expert"), |_| Address::NULL);
            assert_eq!(found.gate.many.map(|kernel| kernel.tile[0]), EXPERT_TILES, "{precision}");
            assert_eq!(found.down.many.map(|kernel| kernel.tile[0]), EXPERT_TILES, "{precision}");
            // Rows have kernels of their own for few tokens; the digits of TQ1_0 are not read by lines.
            let of_few = span(precision) == ANY_ROW && precision != Precision::Tq1_0;
            assert_eq!(found.gate.persistent.first().is_some_and(|kernel| kernel.tile[0] == 16), of_few, "{precision}");
        }
        let (four_bits, eight_bits) = (&[48, 96, 176][..], &[96, 176][..]);
        let (k_types, none) = (&[16, 32, 48, 96, 176][..], &[][..]);
        for (precision, expected) in [
            (Precision::int4(32), four_bits),
            (Precision::int4(128), four_bits),
            (Precision::Mxfp4, four_bits),
            (Precision::int8(64), eight_bits),
            (Precision::Q4K, k_types),
            (Precision::Q5K, &[16, 32, 48, 96, 144]),
            (Precision::Q6K, k_types),
            (Precision::Q3K, &[16, 80, 144]),
            (Precision::Nvfp4, &[16, 80, 144]),
            (Precision::Iq3Xxs, &[16, 32, 80, 144]),
            (Precision::fp8(128), &[16, 32, 80, 144]),
            (Precision::Tq1_0, &[80, 144]),
            (Precision::Bf16, none),
        ] {
            let found =
                ExpertKernels::of(&ExpertLayout::new(256, 256, precision).expect("an expert"), |_| Address::NULL);
            let tiles = |kernels: &[Kernel<_>]| kernels.iter().map(|kernel| kernel.tile[0]).collect::<Vec<_>>();
            assert_eq!(tiles(&found.gate.persistent), expected, "{precision}");
            assert_eq!(tiles(&found.down.persistent), expected, "{precision}");
        }
    }
}
