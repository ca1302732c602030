//! The kernels over packed tiles: routed experts, and dense weights in INT8 or INT4 with scales in BF16. Which formats
//! there are is listed in kernels/packed_tile.cuh.

use moebius_cache::pack::{CodeType, ExpertLayout, Grid};
use moebius_cache::{Precision, ScaleType};

use super::CudaBackend;
use super::product::{Out, Product};
use crate::cuda::kernels::experts_persistent::SUM_TOKENS;
use crate::cuda::kernels::packed_linear::{ADD, BLOCK_TILES, TILE_ROWS, Y_IS_BF16};
use crate::cuda::kernels::{self, Kernel};
use crate::cuda::{Address, DeviceBuffer, DeviceInfo, launch};

/// The kernels of the grouped products of a layer's experts: gate and up, then down.
pub(crate) enum Grouped {
    /// A block for each of the tiles of so many tokens that the pairs were cut into.
    Tiled(usize, [Kernel<kernels::GroupedArguments>; 2]),
    /// Blocks that stay, and cut for themselves.
    Persistent([Kernel<kernels::PersistentArguments>; 2]),
}

/// Whether a kernel takes inputs that were dealt out (kernels/packed_dealt.cuh).
pub(crate) fn takes_dealt(kernel: &Kernel<kernels::PersistentArguments>) -> bool {
    kernel.tile[0] > SUM_TOKENS
}

/// Tokens of the tiles of products of many tokens that are those of one expert.
pub(crate) const EXPERT_TILES: [usize; 5] = [8, 16, 32, 64, 128];

/// The same of dense weights.
const TILES: [usize; 4] = [16, 32, 64, 128]; // all but the first

/// From so many tokens of an expert on, on average, blocks that stay are faster on Hopper than tiles; measured on an
/// H200. `None`: there are none.
fn persistent_from(precision: Precision) -> Option<usize> {
    match precision {
        Precision::Bf16 | Precision::Tq1_0 => None,
        Precision::Int8 { .. } => Some(12),
        Precision::Int4 { .. } => Some(15),
        Precision::Mxfp4 => Some(MXFP4_FROM),
        _ => Some(0), // tiles of other rows are unpacked through shared memory
    }
}

/// The same of MXFP4.
const MXFP4_FROM: usize = 1;

/// The kernels for one matrix of routed experts, and what they are told of its precision.
pub(crate) struct MatrixKernels<A> {
    /// For single tokens.
    pub(crate) few: Kernel<A>,
    many: [Kernel<kernels::GroupedArguments>; 5], // by `EXPERT_TILES`
    persistent: Vec<Kernel<kernels::PersistentArguments>>, // by tokens; for cards with wgmma
    persistent_from: Option<usize>,               // tokens of an expert
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
        let prefix = format!("experts_{name}_persistent_{}_t", if many == ANY_ROW { &row } else { &many });
        let persistent = kernels::PERSISTENT_KERNELS.iter().filter(|kernel| kernel.name.starts_with(&prefix));
        let mut persistent: Vec<_> = persistent.copied().collect();
        persistent.sort_by_key(|kernel| kernel.tile[0]);
        Self {
            few: named(few, &format!("experts_{name}_gemv_{row}")),
            many: of_tiles(kernels::GROUPED_KERNELS, &format!("experts_{name}_{many}"), EXPERT_TILES),
            persistent,
            persistent_from: persistent_from(precision),
            packing: packing(precision, grid),
        }
    }

    /// The kernel whose blocks stay, for experts with so many tokens on average.
    fn persistent(&self, tokens_of_an_expert: usize) -> Kernel<kernels::PersistentArguments> {
        // Some experts have more tokens than the average: not many shall need a second piece.
        let holds = |kernel: &&Kernel<_>| tokens_of_an_expert * 6 / 5 <= kernel.tile[0];
        *self.persistent.iter().find(holds).or(self.persistent.last()).expect("persistent_from says there are some")
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

    /// From so many tokens of an expert on, on average, blocks stay: for both matrices or for neither, because tiles
    /// write and read `h` as it lies. What one of them loses while it has few tokens is less than what the other gains,
    /// but for MXFP4, whose tiles are not far behind.
    fn persistent_from(&self, device: &DeviceInfo) -> Option<usize> {
        let from = self.gate.persistent_from.zip(self.down.persistent_from).filter(|_| device.has_wgmma());
        from.map(|(gate, down)| if gate.min(down) == MXFP4_FROM { gate.max(down) } else { gate.min(down) })
    }

    /// Whether blocks stay for some number of tokens.
    pub(crate) fn may_stay(&self, device: &DeviceInfo) -> bool {
        self.persistent_from(device).is_some()
    }

    /// Those for experts with so many tokens on average.
    pub(crate) fn grouped(&self, device: &DeviceInfo, tokens_of_an_expert: usize) -> Grouped {
        let (gate, down) = (&self.gate, &self.down);
        if self.persistent_from(device).is_some_and(|from| tokens_of_an_expert >= from) {
            return Grouped::Persistent([gate.persistent(tokens_of_an_expert), down.persistent(tokens_of_an_expert)]);
        }
        let i = suited(tokens_of_an_expert, device.has_wgmma());
        Grouped::Tiled(EXPERT_TILES[i], [gate.many[i], down.many[i]])
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

/// Which of `EXPERT_TILES` suits experts with so many tokens each; measured on an H200, with wgmma and without.
fn suited(tokens: usize, wgmma: bool) -> usize {
    let most = if wgmma { [7, 14, 24, 112] } else { [5, 12, 40, 160] };
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
                let i = suited(p.tokens / 2, self.cuda.info.has_wgmma()).saturating_sub(1); // TILES lacks the first
                let kernel = linear.many[i];
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
    use moebius_cache::pack::{ExpertKind, ExpertPrecision};

    use super::*;

    #[test]
    fn every_precision_has_its_kernels() {
        for precision in Precision::all() {
            let found =
                ExpertKernels::of(&ExpertLayout::new(256, 256, precision).expect("an expert"), |_| Address::NULL);
            assert_eq!(found.gate.many.map(|kernel| kernel.tile[0]), EXPERT_TILES, "{precision}");
            assert_eq!(found.down.many.map(|kernel| kernel.tile[0]), EXPERT_TILES, "{precision}");
            assert_eq!(found.gate.persistent.is_empty(), persistent_from(precision).is_none(), "{precision}");
            assert_eq!(found.down.persistent.is_empty(), persistent_from(precision).is_none(), "{precision}");
            // Tiles of rows would be unpacked through shared memory.
            let of_few = persistent_from(precision) == Some(0);
            assert_eq!(of_few, span(precision) == ANY_ROW && precision != Precision::Tq1_0, "{precision}");
            let has_16 = found.gate.persistent.first().is_some_and(|kernel| kernel.tile[0] == 16);
            assert_eq!(has_16, of_few || precision == Precision::Mxfp4, "{precision}");
        }
        let (more, groups_of_16) = (&[48, 96, 176][..], &[16, 48, 96, 176][..]);
        let (rows, none) = (&[16, 32, 48, 96, 176][..], &[][..]);
        for (precision, expected) in [
            (Precision::int4(32), more),
            (Precision::int4(128), more),
            (Precision::int8(64), more),
            (Precision::Mxfp4, rows),
            (Precision::Q4K, rows),
            (Precision::Q5K, rows),
            (Precision::Q6K, rows),
            (Precision::Q3K, groups_of_16),
            (Precision::Nvfp4, groups_of_16),
            (Precision::Iq3Xxs, rows),
            (Precision::fp8(128), rows),
            (Precision::Tq1_0, none),
            (Precision::Bf16, none),
        ] {
            let found =
                ExpertKernels::of(&ExpertLayout::new(256, 256, precision).expect("an expert"), |_| Address::NULL);
            let tiles = |kernels: &[Kernel<_>]| kernels.iter().map(|kernel| kernel.tile[0]).collect::<Vec<_>>();
            assert_eq!(tiles(&found.gate.persistent), expected, "{precision}");
            assert_eq!(tiles(&found.down.persistent), expected, "{precision}");
        }
    }

    #[test]
    fn matrices_stay_together() {
        let stays = |gate, down, capability, tokens| {
            let layout = ExpertKind::Gated.layout(256, 256, ExpertPrecision { gate, down }).expect("an expert");
            let device = DeviceInfo {
                name: String::new(),
                capability,
                multiprocessors: 1,
                shared_bytes: 0,
                total_bytes: 0,
                free_bytes: 0,
            };
            let found = ExpertKernels::of(&layout, |_| Address::NULL).grouped(&device, tokens);
            matches!(found, Grouped::Persistent(_))
        };
        let (hopper, ampere, int4, int8) = ((9, 0), (8, 0), Precision::int4(128), Precision::int8(64));
        assert!(stays(Precision::Q4K, Precision::Q6K, hopper, 1));
        assert!(!stays(Precision::Q4K, Precision::Q6K, ampere, 100), "there is no wgmma");
        assert!(!stays(Precision::Q4K, Precision::Bf16, hopper, 100), "BF16 has no such kernels");
        assert!(stays(Precision::Q4K, int8, hopper, 1), "tiles of Q4_K would cost more");
        assert!(!stays(int4, int8, hopper, 11) && stays(int4, int8, hopper, 12) && !stays(int4, int4, hopper, 14));
        assert!(!stays(Precision::Mxfp4, Precision::Mxfp4, hopper, 0));
        assert!(
            stays(Precision::Mxfp4, Precision::Mxfp4, hopper, 1) && stays(Precision::Mxfp4, Precision::Q4K, hopper, 0)
        );
        assert!(!stays(Precision::Mxfp4, int8, hopper, 11) && stays(Precision::Mxfp4, int8, hopper, 12));
    }
}
