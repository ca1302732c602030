//! Products of experts that are in VRAM, for good or in passing: as they are read, or sorted by expert and in tiles or
//! by blocks that stay (kernels/experts_gemv.cu, experts_sort.cu, experts_gemm.cu, experts_deal.cu,
//! experts_persistent.cuh).

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use moebius_cache::pack::{CodeType, ExpertLayout, Grid};

use super::epilogue::DeviceEpilogue;
use super::parts::COPY_BLOCKS;
use super::{FEW_TOKENS, Sizes};
use crate::Result;
use crate::backend::cuda::packed::{EXPERT_TILES, ExpertKernels, Grouped, takes_dealt};
use crate::backend::cuda::{CudaRouting, Tensor};
use crate::cuda::kernels::Kernel;
use crate::cuda::kernels::experts_deal::DEAL_THREADS;
use crate::cuda::kernels::experts_gemm::{BLOCK_TILES, COMBINED, TILE_ROWS};
use crate::cuda::kernels::experts_gemv::{DOWN_WARPS, MIN_DOWN_WARPS, VECTORS};
use crate::cuda::kernels::{Packing, RankSum};
use crate::cuda::{ALONE, Address, Cuda, CudaStream, DeviceBuffer, kernels, launch};
use crate::experts::ExpertShape;

const _: () = assert!(FEW_TOKENS <= VECTORS, "the kernels of few tokens take no more");

/// What the products need beside weights and tokens.
pub(super) struct Products {
    cuda: Arc<Cuda>,
    layout: ExpertLayout,                   // of any layer: for its dimensions
    kernels: Vec<ExpertKernels>,            // [layers]
    _grids: Vec<(Grid, DeviceBuffer<u32>)>, // held: launches have their addresses
    epilogue: DeviceEpilogue,
    experts: usize,
    blocks: usize,                // that stay, each with a multiprocessor to itself
    pair_slot: DeviceBuffer<i32>, // [pairs]
    offsets: DeviceBuffer<i32>,   // [experts + 1]
    tiles: DeviceBuffer<i32>,     // [pairs / 8 + experts + 1, 4]
    dealt: DeviceBuffer<bf16>,    // [tokens, hidden], for kernels that take x so
    h: DeviceBuffer<bf16>,        // [pairs, intermediate]
    y: DeviceBuffer<bf16>,        // [pairs, hidden]
}

/// What a layer's experts are given.
#[derive(Clone, Copy)]
pub(super) struct LayerInput<'a> {
    pub(super) layer: usize,
    pub(super) x: &'a Tensor, // [tokens, hidden]
    pub(super) routing: &'a CudaRouting,
}

/// What ends a layer, after its input is gone.
#[derive(Clone, Copy)]
pub(super) struct Choices {
    pub(super) layer: usize,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    pub(super) ids: Address<i32>,     // [tokens, top_k]
    pub(super) weights: Address<f32>, // [tokens, top_k]
}

/// How what few tokens' experts give comes to where it belongs.
#[derive(Clone, Copy)]
pub(super) struct Sink {
    /// What was there does not count.
    pub(super) over: bool,
    /// Ranks whose sum it is.
    pub(super) sum: RankSum,
}

impl Sink {
    /// It is added, and is the whole.
    pub(super) const ADD: Self = Self { over: false, sum: ALONE };
}

impl From<&LayerInput<'_>> for Choices {
    fn from(LayerInput { layer, routing, .. }: &LayerInput<'_>) -> Self {
        let (tokens, top_k) = (routing.tokens(), routing.top_k());
        Self { layer: *layer, tokens, top_k, ids: routing.ids(), weights: routing.weights() }
    }
}

impl Products {
    /// Allocates for `sizes`.
    pub(super) fn new(cuda: &Arc<Cuda>, shape: &ExpertShape, epilogue: DeviceEpilogue, sizes: &Sizes) -> Result<Self> {
        let (layout, experts) = (shape.layouts[0], shape.experts);
        // Kernels copy parts of experts beside these: two H200 read prompts 3% faster than with smaller blocks.
        let beside = if sizes.ring > 0 && !sizes.share.is_whole() { COPY_BLOCKS } else { 0 };
        let pairs = sizes.tokens * sizes.top_k;
        let grids = grids(cuda, &shape.layouts)?;
        let grid = |of: Grid| {
            let found = grids.iter().find(|(grid, _)| *grid == of);
            found.map_or(Address::NULL, |(_, words)| words.address())
        };
        let kernels: Vec<_> = shape.layouts.iter().map(|layout| ExpertKernels::of(layout, grid)).collect();
        let deal = kernels.iter().any(|kernels| kernels.may_stay(&cuda.info));
        Ok(Self {
            layout,
            kernels,
            epilogue,
            experts,
            blocks: cuda.info.multiprocessors.saturating_sub(beside).max(1),
            pair_slot: DeviceBuffer::new(cuda, pairs)?,
            offsets: DeviceBuffer::new(cuda, experts + 1)?,
            tiles: DeviceBuffer::new(cuda, 4 * (pairs / EXPERT_TILES[0] + experts + 1))?,
            dealt: DeviceBuffer::new(cuda, if deal { sizes.tokens * layout.gate.k } else { 0 })?,
            h: DeviceBuffer::new(cuda, pairs * layout.down.k)?,
            y: DeviceBuffer::new(cuda, pairs * layout.down.n)?,
            cuda: cuda.clone(),
            _grids: grids,
        })
    }

    /// `h` of few tokens, weighted, by the experts in `table`.
    pub(super) fn few_gate_up(&self, stream: &CudaStream, table: Address<u64>, x: Address<bf16>, choices: Choices) {
        let Choices { layer, tokens, top_k, ids, weights } = choices;
        let (hidden, intermediate) = (self.layout.gate.k as i32, self.layout.down.k as i32);
        let grid = [self.layout.gate.n.div_ceil(TILE_ROWS), tokens * top_k, 1];
        let kernels = &self.kernels[layer].gate;
        launch!(self.cuda, stream, kernels.few, grid;
            ids, weights, table, x, self.h.address(), hidden, intermediate, self.experts as i32, top_k as i32,
            kernels.packing, self.epilogue.of(layer));
    }

    /// The products of that `h` with `down`, into `out`.
    pub(super) fn few_down(
        &self,
        stream: &CudaStream,
        table: Address<u64>,
        choices: Choices,
        out: Address<f32>,
        Sink { over, sum }: Sink,
    ) {
        let Choices { layer, tokens, top_k, ids, weights } = choices;
        let (hidden, intermediate) = (self.layout.gate.k, self.layout.down.k);
        let kernels = &self.kernels[layer];
        let (tiles, down) = (hidden.div_ceil(TILE_ROWS), kernels.down.few);
        let warps = down_warps(down.warps(), tiles, self.cuda.info.multiprocessors);
        launch!(self.cuda, stream, down.with_warps(warps), [tiles, 1, 1];
            ids, weights, table, self.h.address(), out, tokens as i32, hidden as i32, intermediate as i32,
            kernels.down_at, self.experts as i32, top_k as i32, kernels.down.packing, self.epilogue.of(layer),
            i32::from(over), sum);
    }

    /// `y` of all pairs of `x` [tokens, hidden] whose expert is in `table`, counted in `used` unless that is null.
    pub(super) fn grouped(
        &self,
        stream: &CudaStream,
        table: Address<u64>,
        x: Address<bf16>,
        choices: Choices,
        used: Address<u32>,
    ) {
        let Choices { layer, tokens, top_k, ids, .. } = choices;
        let (cuda, layout, experts) = (&self.cuda, &self.layout, self.experts);
        let pairs = tokens * top_k;
        let kernels = &self.kernels[layer];
        let grouped = kernels.grouped(&cuda.info, pairs / experts);
        let tile = if let Grouped::Tiled(tokens, _) = grouped { tokens } else { 0 };
        launch!(cuda, stream, kernels::experts_sort, [experts, 1, 1];
            ids, table, self.pair_slot.address(), self.offsets.address(), self.tiles.address(),
            pairs as i32, experts as i32, tile as i32, used);
        let (hidden, intermediate) = (layout.gate.k, layout.down.k);
        let (h, y, epilogue) = (self.h.address(), self.y.address(), self.epilogue.of(layer));
        match grouped {
            Grouped::Tiled(_, by) => {
                // Tiles of gate and of up take turns, or are all of up.
                let tiles = [2 * layout.gate.n.div_ceil(TILE_ROWS), hidden.div_ceil(TILE_ROWS)];
                let multiply = |i: usize, packing: Packing, from: Address<bf16>, to: Address<bf16>| {
                    launch!(cuda, stream, by[i], [tiles[i].div_ceil(BLOCK_TILES), pairs / tile + experts, 1];
                        self.tiles.address(), self.pair_slot.address(), table, from, to, hidden as i32,
                        intermediate as i32, kernels.down_at, top_k as i32, packing, epilogue);
                };
                multiply(0, kernels.gate.packing, x, h);
                multiply(1, kernels.down.packing, h, y);
            }
            Grouped::Persistent([gate_up, down]) => {
                let x = if takes_dealt(&gate_up) { self.deal(stream, x, tokens) } else { x };
                let multiply = |by: Kernel<_>, packing: Packing, from: Address<bf16>, to: Address<bf16>| {
                    launch!(cuda, stream, by, [self.blocks, 1, 1];
                        self.offsets.address(), self.pair_slot.address(), table, from, to, hidden as i32,
                        intermediate as i32, kernels.down_at, top_k as i32, experts as i32,
                        i32::from(takes_dealt(&down)), packing, epilogue);
                };
                multiply(gate_up, kernels.gate.packing, x, h);
                multiply(down, kernels.down.packing, h, y);
            }
        }
    }

    /// `x` [tokens, hidden] dealt out.
    fn deal(&self, stream: &CudaStream, x: Address<bf16>, tokens: usize) -> Address<bf16> {
        let chunks = tokens * self.layout.gate.k / 8;
        launch!(self.cuda, stream, kernels::experts_deal, [chunks.div_ceil(DEAL_THREADS), 1, 1];
            x, self.dealt.address(), chunks as i32);
        self.dealt.address()
    }

    /// Adds `y` of some tokens, weighted, to `out`, of the experts that are not 0 in `table`, or puts it `over` what
    /// was there.
    pub(super) fn combine(
        &self,
        stream: &CudaStream,
        table: Address<u64>,
        choices: Choices,
        tokens: &Range<usize>,
        out: Address<f32>,
        over: bool,
    ) {
        let Choices { top_k, ids, weights, .. } = choices;
        let (hidden, first) = (self.layout.gate.k, tokens.start * top_k);
        launch!(self.cuda, stream, kernels::experts_combine, [tokens.len(), hidden.div_ceil(COMBINED), 1];
            ids.add(first), weights.add(first), table, self.y.address().add(first * hidden),
            out.add(tokens.start * hidden), hidden as i32, self.experts as i32, top_k as i32, i32::from(over));
    }
}

/// Warps of a block of `down` for few tokens, which multiplies one of `tiles`. `most` warps have all registers of a
/// multiprocessor, which as many blocks of at least 8 share as end soonest, if each takes that much longer. A block
/// alone has `DOWN_WARPS`. Where that leaves registers, it begins beside the last block of gate_up, but no second one
/// does beside it, by which some multiprocessors would have two and others none.
fn down_warps(most: usize, tiles: usize, multiprocessors: usize) -> usize {
    let time = |blocks: &usize| tiles.div_ceil(blocks * multiprocessors) * blocks;
    let blocks = (1..=most / 8).rev().min_by_key(time).unwrap_or(1);
    (most / blocks).clamp(MIN_DOWN_WARPS, DOWN_WARPS)
}

/// The grids of all layers' codes, each once.
fn grids(cuda: &Arc<Cuda>, layouts: &[ExpertLayout]) -> Result<Vec<(Grid, DeviceBuffer<u32>)>> {
    let mut found = Vec::<(Grid, DeviceBuffer<u32>)>::new();
    for codes in layouts.iter().flat_map(|layout| [layout.gate, layout.down]).filter_map(|of| of.precision.codes()) {
        let CodeType::Grid(grid) = codes else { continue };
        if found.iter().any(|(known, _)| *known == grid) {
            continue;
        }
        let places = grid.places();
        let words = match cuda.is_plan() {
            true => DeviceBuffer::new(cuda, places.len())?,
            false => DeviceBuffer::from_slice(cuda, &places)?,
        };
        found.push((grid, words));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_down_fill_multiprocessors_evenly() {
        // Of 128, 256, 320 and 448 tiles one, two, three and two share a multiprocessor, or at most two.
        let warps = |most| [128, 256, 320, 448].map(|tiles| down_warps(most, tiles, 132));
        assert_eq!((warps(24), warps(16)), ([16, 12, 8, 12], [16, 8, 16, 8]));
    }
}
