//! `Rank`: one of several devices that have a share of a model, or a run of its layers each.

use std::ops::Range;

use super::dense::Dense;
use crate::Result;
use crate::model::Share;

/// What ranks do together. A device that is alone has nothing to do here.
pub trait Rank: Dense {
    /// What brings rows from one device to another.
    type Way: Send;

    /// What it has of the model.
    fn share(&self) -> Share {
        Share::WHOLE
    }

    /// `x = x_0 + x_1 + ...` over all ranks, f32, in their order: all have the same bits afterwards. Every rank does
    /// the same sums in the same order.
    fn all_reduce(&self, _x: &mut Self::Tensor) {}

    /// Takes room for sums of up to `rows` rows of `cols` numbers that are under way beside other ops. Errors:
    /// `Error::Resources`.
    fn room_for_sums(&mut self, _rows: usize, _cols: usize) -> Result<()> {
        Ok(())
    }

    /// Tokens from which a pass that has room for parts goes in two, so that ranks sum what one gives beside the ops of
    /// the other; `None`: it is faster in one.
    fn halves_from(&self) -> Option<usize> {
        None
    }

    /// Lets all ops that follow see the sum of `x`, if one is under way. RMS norms do without.
    fn wait_for_sum(&self, _x: &Self::Tensor) {}

    /// `x += W h + b`, f32, or `x = W h + b`, `over` what was there. Returns whether `x` is the sum over all ranks now;
    /// it may be under way, until [`wait_for_sum`](Rank::wait_for_sum).
    fn linear_of_rank(&self, w: &Self::Linear, h: &Self::Tensor, x: &mut Self::Tensor, over: bool) -> bool {
        match over {
            false => self.linear_add(w, h, x),
            true => self.linear(w, h, x),
        }
        false
    }

    /// Brings the ranks' columns `[R, columns of a rank]` side by side into `all`, `[R, columns]`, f32, on all of them.
    /// `columns`: each rank's.
    fn gather_columns(&self, _own: &Self::Tensor, _columns: &[Range<usize>], _all: &mut Self::Tensor) {}

    /// A way from this device to the `next` one, for `numbers` numbers at a time. Errors: `Error::Resources`.
    fn way_to(&self, next: &Self, numbers: usize) -> Result<Self::Way>;

    /// Whether a way leads through RAM, because the devices have no other.
    fn is_through_ram(way: &Self::Way) -> bool;

    /// Copies tensors `from` the device that the `way` comes from `to` others of the same sizes on this one: behind all
    /// ops of that one, and before all that follow on this one. Errors: `Error::Device`.
    fn bring<'a>(
        &self,
        way: &mut Self::Way,
        from: impl Iterator<Item = &'a Self::Tensor>,
        to: impl Iterator<Item = &'a mut Self::Tensor>,
    ) -> Result<()>;

    /// Says that this rank has failed: nobody waits for it any longer, and what is summed means nothing.
    fn give_up(&self) {}

    /// Waits for all ops. Errors: one of them failed.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}
