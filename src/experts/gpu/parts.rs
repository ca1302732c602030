//! What this rank has of every expert, on its way from RAM into VRAM.

use std::ops::Range;
use std::sync::Arc;

use moebius_cache::pack::{ExpertLayout, TilePart};

use crate::Result;
use crate::cuda::kernels::pool::RUNS_OF_LAUNCH;
use crate::cuda::kernels::{RunList, RunsToCopy};
use crate::cuda::{Address, Cuda, CudaStream, Registered, Runs, kernels, launch};
use crate::experts::{ExpertMemory, ExpertShape};
use crate::model::Share;

/// Blocks that copy parts of experts, each with 32 KB on the way: what keeps PCIe busy and leaves multiprocessors to
/// products.
pub(super) const COPY_BLOCKS: usize = 8;

/// What a copy engine copies: less takes it no longer than it takes to begin.
const LARGE_BYTES: usize = 64 << 10;

/// The experts in RAM, and the rank's run of their width.
pub(super) struct Parts {
    memory: Arc<ExpertMemory>,
    regions: Option<Vec<(Range<usize>, u64)>>, // of pinned memory: the host's addresses, and the first of the device's
    share: Share,
    shape: ExpertShape, // of the parts
    width: Range<usize>,
    down: Vec<Vec<TilePart>>, // [layers]: their bytes of a tile
}

impl Parts {
    /// `registered`: the experts, pinned where they lie. Errors: ranks are too many for the width.
    pub(super) fn new(memory: Arc<ExpertMemory>, share: Share, registered: &[Registered]) -> Result<Self> {
        let (shape, width) = memory.shape().part(share)?;
        let whole = memory.shape();
        let down = whole.layouts.iter().map(|layout| Ok(layout.down.of_inputs(width.clone())?.1));
        let mut parts = Self { down: down.collect::<Result<_>>()?, regions: None, memory, share, shape, width };
        let addresses: Option<Vec<u64>> = registered.iter().map(Registered::address).collect();
        if let Some(addresses) = addresses.filter(|all| all.len() == parts.memory.regions().len())
            && parts.are_multiples_of(16)
        {
            parts.see_at(&addresses);
        }
        Ok(parts)
    }

    /// Lets kernels copy experts, whose regions they see at these [`addresses`](Parts::addresses) of their device.
    pub(super) fn see_at(&mut self, addresses: &[u64]) {
        let range = |region: &[u8]| region.as_ptr().addr()..region.as_ptr().addr() + region.len();
        self.regions = Some(self.memory.regions().into_iter().map(range).zip(addresses.iter().copied()).collect());
    }

    /// Where kernels see each region of the experts' memory, if [they can copy](Parts::are_for_kernels).
    pub(super) fn addresses(&self) -> Option<Vec<u64>> {
        Some(self.regions.as_ref()?.iter().map(|&(_, address)| address).collect())
    }

    /// Whether kernels can copy experts: all of them are pinned, and in pieces of 16 bytes.
    pub(super) fn are_for_kernels(&self) -> bool {
        self.regions.is_some()
    }

    /// What a kernel is to copy to `to`, if [`kernels can`](Parts::are_for_kernels).
    pub(super) fn for_kernels(&self, runs: &Runs<'_>, to: Address<u8>) -> Option<RunsToCopy> {
        let host = runs.from.as_ptr().addr();
        let (range, address) = self.regions.as_ref()?.iter().find(|(range, _)| range.contains(&host))?;
        Some(RunsToCopy {
            to: to.to_u64(),
            from: address + (host - range.start) as u64,
            bytes: runs.bytes as u32,
            count: runs.count as u32,
            from_pitch: runs.from_pitch as u32,
            to_pitch: runs.to_pitch as u32,
        })
    }

    /// Of the parts.
    pub(super) fn shape(&self) -> &ExpertShape {
        &self.shape
    }

    /// The rank's run of the experts' width.
    pub(super) fn width(&self) -> &Range<usize> {
        &self.width
    }

    /// Bytes of a whole expert, which cross all links together.
    pub(super) fn whole_bytes(&self, layer: usize) -> usize {
        self.memory.cache().layout(layer).bytes()
    }

    /// The rank's share.
    pub(super) fn share(&self) -> Share {
        self.share
    }

    /// Enqueues the copies of some experts, in ascending order, which come to lie one after the other.
    ///
    /// A part of an expert is in many pieces. A copy engine takes microseconds to begin with another one, so it copies
    /// the large ones, neighbours' at once, and a kernel beside it, which takes from products, the others.
    pub(super) fn upload(&self, cuda: &Cuda, layer: usize, experts: &[usize], to: Address<u8>) {
        let bytes = self.shape.layouts[layer].bytes();
        let places = experts.iter().enumerate().map(|(i, &expert)| (expert, to.add(i * bytes)));
        if !self.share.is_whole() {
            return cuda.copy_side_by_side(|beside| self.upload_parts(cuda, beside, layer, places));
        }
        // Neighbours in the file cross together.
        for run in places.collect::<Vec<_>>().chunk_by(|a, b| a.0 + 1 == b.0) {
            let put = |offset, bytes: &[u8]| cuda.upload(&cuda.copy, run[0].1.add(offset), bytes);
            self.memory.each_run(layer, run[0].0..run[0].0 + run.len(), put);
        }
    }

    fn upload_parts(
        &self,
        cuda: &Cuda,
        beside: &CudaStream,
        layer: usize,
        places: impl Iterator<Item = (usize, Address<u8>)>,
    ) {
        let mut list = NO_RUNS;
        let mut large: Option<(Runs<'_>, Address<u8>)> = None;
        for (expert, to) in places {
            self.each(layer, expert, |offset, runs| {
                let to = to.add(offset);
                match self.for_kernels(&runs, to) {
                    Some(small) if runs.count > 1 || runs.bytes < LARGE_BYTES => list.add(cuda, beside, small),
                    _ if large.as_mut().is_some_and(|large| self.join(large, &runs, to)) => {}
                    _ => {
                        if let Some((runs, to)) = large.replace((runs, to)) {
                            cuda.upload_runs(&cuda.copy, to, runs);
                        }
                    }
                }
            });
        }
        if let Some((runs, to)) = large {
            cuda.upload_runs(&cuda.copy, to, runs);
        }
        list.copy(cuda, beside);
    }

    /// Makes one of two, if `next` goes on as the runs of `all` do.
    fn join<'a>(&'a self, (all, to): &mut (Runs<'a>, Address<u8>), next: &Runs<'a>, next_to: Address<u8>) -> bool {
        let (start, end) = (all.from.as_ptr().addr(), next.from.as_ptr().addr());
        let (Some(from), Some(to)) = (end.checked_sub(start), next_to.to_u64().checked_sub(to.to_u64())) else {
            return false;
        };
        let (from_pitch, to_pitch) = match all.count {
            1 => (from, to as usize),
            _ => (all.from_pitch, all.to_pitch),
        };
        let goes_on = next.count == 1
            && next.bytes == all.bytes
            && from == all.count * from_pitch
            && to as usize == all.count * to_pitch
            && from_pitch.min(to_pitch) >= all.bytes;
        if goes_on && let Some(from) = self.memory.between(all.from, next.from) {
            *all = Runs { from, from_pitch, to_pitch, bytes: all.bytes, count: all.count + 1 };
            return true;
        }
        false
    }

    /// The rank's bytes of an expert: `put(where, runs)` is called with what lies together, and where it belongs.
    pub(super) fn each<'a>(&'a self, layer: usize, expert: usize, mut put: impl FnMut(usize, Runs<'a>)) {
        let Self { memory, share, shape, width, down, .. } = self;
        match share.is_whole() {
            true => memory.each_run(layer, expert..expert + 1, |offset, from| {
                put(offset, Runs { from, from_pitch: from.len(), to_pitch: from.len(), bytes: from.len(), count: 1 });
            }),
            false => memory.each_part((layer, expert), (&shape.layouts[layer], width, &down[layer]), put),
        }
    }

    /// Whether all that is copied are multiples of `bytes`.
    fn are_multiples_of(&self, bytes: usize) -> bool {
        let tiles = |layout: &ExpertLayout| [layout.gate.tile_bytes(), layout.down.tile_bytes()];
        let layouts = self.memory.cache().layouts().iter().chain(self.shape.layouts.iter());
        let parts = self.down.iter().flatten().flat_map(|part| [part.from, part.to, part.bytes]);
        layouts.flat_map(tiles).chain(parts).all(|n| n.is_multiple_of(bytes))
    }
}

const NO_RUNS: RunList = RunList {
    runs: [RunsToCopy { to: 0, from: 0, bytes: 0, count: 0, from_pitch: 0, to_pitch: 0 }; RUNS_OF_LAUNCH],
    count: 0,
};

impl RunList {
    fn add(&mut self, cuda: &Cuda, stream: &CudaStream, runs: RunsToCopy) {
        self.runs[self.count as usize] = runs;
        self.count += 1;
        if self.count as usize == RUNS_OF_LAUNCH {
            self.copy(cuda, stream);
        }
    }

    /// Enqueues the copies of what was added, and forgets it.
    fn copy(&mut self, cuda: &Cuda, stream: &CudaStream) {
        if self.count > 0 {
            launch!(cuda, stream, kernels::copy_runs, [COPY_BLOCKS, 1, 1]; *self);
        }
        self.count = 0;
    }
}
