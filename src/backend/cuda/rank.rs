//! Sums over several devices, and tensors from one to the next.

use std::ops::Range;

use super::dense::{Write, product};
use super::load::Linear;
use super::product::{FEW_TOKENS, Form};
use super::{CudaBackend, Tensor};
use crate::Result;
use crate::backend::Rank;
use crate::cuda::kernels::RankSum;
use crate::cuda::{self, Hop};
use crate::model::Share;

/// A sum of some rows of a tensor, beside what else is computed.
pub(super) struct SumUnderWay {
    x: u64, // the tensor's address
    rows: Range<usize>,
    sum: usize,
}

impl CudaBackend {
    /// What a kernel is told that sums what it gives to `x` over all ranks; `None`: another one does.
    pub(crate) fn sum_within_kernels(&self, x: &Tensor) -> Option<RankSum> {
        self.rank.as_ref()?.within_kernels(x.rows * x.cols)
    }

    /// Called before a layer's sum is enqueued.
    pub(crate) fn keep_pace(&self) {
        if let Some(rank) = &self.rank {
            rank.keep_pace();
        }
    }

    /// Calls `make` with runs of rows of `x`, which ranks sum one after the other while the next are made. Returns
    /// whether they do: few rows are made at once, and not summed.
    pub(crate) fn sum_as_it_is_made(&self, x: &Tensor, mut make: impl FnMut(&Range<usize>)) -> bool {
        let least = if self.cuda.info.is_emulated() { EMULATED_RUN } else { LEAST_RUN };
        let enough = |rank: &&_| x.rows >= runs(rank) * least;
        let Some(rank) = self.rank.as_ref().filter(|rank| rank.has_room_for_sums()).filter(enough) else {
            make(&(0..x.rows));
            return false;
        };
        let most = x.rows.div_ceil(runs(rank)).next_multiple_of(RUN_STEP.min(least));
        for first in (0..x.rows).step_by(most) {
            let rows = first..x.rows.min(first + most);
            make(&rows);
            let sum = rank.all_reduce_beside(x.f32().add(first * x.cols), rows.len() * x.cols);
            self.under_way.borrow_mut().push(SumUnderWay { x: x.f32().to_u64(), rows, sum });
        }
        true
    }

    /// Calls `use_rows` with runs of rows of `x` as soon as they are whole: with all where no sum of them is under way.
    pub(super) fn as_it_comes(&self, x: &Tensor, mut use_rows: impl FnMut(&Range<usize>)) {
        let of_x = |sum: &mut SumUnderWay| sum.x == x.f32().to_u64();
        let sums: Vec<_> = self.under_way.borrow_mut().extract_if(.., of_x).collect();
        let Some(rank) = self.rank.as_ref().filter(|_| !sums.is_empty()) else {
            return use_rows(&(0..x.rows));
        };
        for SumUnderWay { rows, sum, .. } in sums {
            rank.wait_for_sum(sum);
            use_rows(&rows);
        }
    }
}

/// Ranks up to which a part's rows are made and summed in two runs. More take a pass in two parts, which made four H100
/// read prompts 24% faster. On two it would cost more than it gains, because experts with half the tokens are
/// multiplied 12% slower.
const RUN_RANKS: usize = 2;
/// Rows that a run is a multiple of.
const RUN_STEP: usize = 64;
/// Rows of a run for which products are as fast as for more.
const LEAST_RUN: usize = 1024;
/// The same where the GPUs are emulated.
const EMULATED_RUN: usize = 14;
/// Tokens from which a pass goes in two parts, and where the GPUs are emulated.
const HALVES_FROM: usize = 2 * LEAST_RUN;
const EMULATED_HALVES: usize = 32;

/// Runs that a part's rows are made and summed in.
fn runs(rank: &cuda::Rank) -> usize {
    if rank.of() <= RUN_RANKS { 2 } else { 1 }
}

impl Rank for CudaBackend {
    type Way = Hop;

    fn share(&self) -> Share {
        self.rank.as_ref().map_or(Share::WHOLE, |rank| Share { rank: rank.number(), of: rank.of() })
    }

    fn all_reduce(&self, x: &mut Tensor) {
        if let Some(rank) = &self.rank {
            rank.all_reduce(x.f32(), x.rows * x.cols);
        }
    }

    fn room_for_sums(&mut self, rows: usize, cols: usize) -> Result<()> {
        match &mut self.rank {
            Some(rank) => rank.room_for_sums(rows.div_ceil(runs(rank)).next_multiple_of(RUN_STEP) * cols),
            None => Ok(()),
        }
    }

    fn halves_from(&self) -> Option<usize> {
        self.rank.as_ref().filter(|rank| rank.of() > RUN_RANKS)?;
        Some(if self.cuda.info.is_emulated() { EMULATED_HALVES } else { HALVES_FROM })
    }

    fn wait_for_sum(&self, x: &Tensor) {
        self.as_it_comes(x, |_| {});
    }

    fn linear_of_rank(&self, w: &Linear, h: &Tensor, x: &mut Tensor, over: bool) -> bool {
        self.keep_pace();
        if let Some(sum) = self.sum_within_kernels(x).filter(|_| x.rows <= FEW_TOKENS && w.is_bf16()) {
            self.gemv(&[product(h, h.bf16(), w, x, Write::Add)], Form::Summed { sum, over });
            return true;
        }
        let write = if over { Write::Set } else { Write::Add };
        let product = |rows: &Range<usize>| self.apply(&h.run(rows), [(w, &mut x.run(rows))], write);
        self.sum_as_it_is_made(x, product)
    }

    fn gather_columns(&self, own: &Tensor, columns: &[Range<usize>], all: &mut Tensor) {
        if let Some(rank) = &self.rank {
            rank.gather_columns((own.f32(), own.rows), columns, (all.f32(), all.cols));
        }
    }

    fn way_to(&self, next: &Self, numbers: usize) -> Result<Hop> {
        Hop::new(&self.cuda, &next.cuda, numbers, false)
    }

    fn is_through_ram(way: &Hop) -> bool {
        way.is_through_ram()
    }

    fn bring<'a>(
        &self,
        way: &mut Hop,
        from: impl Iterator<Item = &'a Tensor>,
        to: impl Iterator<Item = &'a mut Tensor>,
    ) -> Result<()> {
        let all: Vec<_> = from.zip(to).map(|(from, to)| (from.f32(), to.f32(), from.rows * from.cols)).collect();
        way.bring(&all)
    }

    fn give_up(&self) {
        if let Some(rank) = &self.rank {
            rank.give_up();
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.cuda.synchronize()
    }
}
