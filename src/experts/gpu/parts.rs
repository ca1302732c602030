//! What this rank has of every expert, on its way from RAM into VRAM.

use std::ops::Range;
use std::sync::Arc;

use moebius_cache::pack::TilePart;

use crate::Result;
use crate::cuda::{Address, Cuda};
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

    /// Enqueues the copies of some experts, which come to lie one after the other.
    pub(super) fn upload(&self, cuda: &Cuda, layer: usize, experts: Range<usize>, to: Address<u8>) {
        let Self { memory, share, shape, width, down } = self;
        if share.is_whole() {
            memory.each_run(layer, experts, |offset, bytes| cuda.upload(&cuda.copy, to.add(offset), bytes));
            return;
        }
        let part = &shape.layouts[layer];
        for (i, expert) in experts.enumerate() {
            let to = to.add(i * part.bytes());
            memory.each_part((layer, expert), (part, width, &down[layer]), |offset, runs| {
                cuda.upload_runs(&cuda.copy, to.add(offset), runs)
            });
        }
    }
}
