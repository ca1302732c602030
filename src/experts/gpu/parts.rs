//! What this rank has of every expert, on its way from RAM into VRAM.

use std::ops::Range;
use std::sync::Arc;

use moebius_cache::pack::{ExpertLayout, TilePart};

use crate::Result;
use crate::cuda::{Address, Cuda, Runs};
use crate::experts::{ExpertMemory, ExpertShape};
use crate::model::Share;

/// The experts in RAM, and the rank's run of their width.
pub(super) struct Parts {
    memory: Arc<ExpertMemory>,
    share: Share,
    shape: ExpertShape, // of the parts
    width: Range<usize>,
    down: Vec<Vec<TilePart>>, // [layers]: their bytes of a tile
}

impl Parts {
    /// Errors: ranks are too many for the width.
    pub(super) fn new(memory: Arc<ExpertMemory>, share: Share) -> Result<Self> {
        let (shape, width) = memory.shape().part(share)?;
        let whole = memory.shape();
        let down = whole.layouts.iter().map(|layout| Ok(layout.down.of_inputs(width.clone())?.1));
        Ok(Self { down: down.collect::<Result<_>>()?, memory, share, shape, width })
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

    /// By layer, equal numbers where experts are of one size, on every rank.
    pub(super) fn kinds(&self) -> Vec<usize> {
        let layouts = self.memory.cache().layouts();
        let kind = |of: &ExpertLayout| layouts.iter().position(|layout| layout == of).expect("one of them");
        layouts.iter().map(kind).collect()
    }

    /// Enqueues the copies of some experts, which come to lie one after the other.
    pub(super) fn upload(&self, cuda: &Cuda, layer: usize, experts: Range<usize>, to: Address<u8>) {
        if self.share.is_whole() {
            let put = |offset, bytes: &[u8]| cuda.upload(&cuda.copy, to.add(offset), bytes);
            return self.memory.each_run(layer, experts, put);
        }
        for (i, expert) in experts.enumerate() {
            let to = to.add(i * self.shape.layouts[layer].bytes());
            self.each(layer, expert, |offset, runs| cuda.upload_runs(&cuda.copy, to.add(offset), runs));
        }
    }

    /// The rank's bytes of an expert: `put(where, runs)` is called with what lies together, and where it belongs.
    pub(super) fn each<'a>(&'a self, layer: usize, expert: usize, mut put: impl FnMut(usize, Runs<'a>)) {
        let Self { memory, share, shape, width, down } = self;
        match share.is_whole() {
            true => memory.each_run(layer, expert..expert + 1, |offset, from| {
                put(offset, Runs { from, from_pitch: from.len(), to_pitch: from.len(), bytes: from.len(), count: 1 });
            }),
            false => memory.each_part((layer, expert), (&shape.layouts[layer], width, &down[layer]), put),
        }
    }

    /// Whether all that is copied are multiples of `bytes`.
    pub(super) fn are_multiples_of(&self, bytes: usize) -> bool {
        let tiles = |layout: &ExpertLayout| [layout.gate.tile_bytes(), layout.down.tile_bytes()];
        let layouts = self.memory.cache().layouts().iter().chain(self.shape.layouts.iter());
        let parts = self.down.iter().flatten().flat_map(|part| [part.from, part.to, part.bytes]);
        layouts.flat_map(tiles).chain(parts).all(|n| n.is_multiple_of(bytes))
    }
}
