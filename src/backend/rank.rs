//! `Rank`: one of several devices that have a share of a model each.

use super::memory::Memory;
use crate::Result;
use crate::model::Share;

/// What ranks do together. A device that is alone has nothing to do here.
pub trait Rank: Memory {
    /// What it has of the model.
    fn share(&self) -> Share {
        Share::WHOLE
    }

    /// `x = x_0 + x_1 + ...` over all ranks, f32, in their order: all have the same bits afterwards. Every rank does
    /// the same sums in the same order.
    fn all_reduce(&self, _x: &mut Self::Tensor) {}

    /// Brings the ranks' columns `[R, columns of a rank]` side by side into `all`, `[R, columns]`, f32, on all of them;
    /// those of this rank begin at `first`.
    fn gather_columns(&self, _own: &Self::Tensor, _first: usize, _all: &mut Self::Tensor) {}

    /// Says that this rank has failed: nobody waits for it any longer, and what is summed means nothing.
    fn give_up(&self) {}

    /// Waits for all ops. Errors: one of them failed.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}
