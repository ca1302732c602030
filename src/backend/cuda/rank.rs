//! Sums over several devices.

use super::dense::{Write, product};
use super::load::Linear;
use super::product::{FEW_TOKENS, Form};
use super::{CudaBackend, Tensor};
use crate::Result;
use crate::backend::{Dense, Memory, Rank};
use crate::cuda::kernels::RankSum;
use crate::cuda::terms;
use crate::model::Share;

impl CudaBackend {
    /// What a kernel is told that sums what it gives to `x` over all ranks; `None`: another one does.
    pub(crate) fn sum_within_kernels(&self, x: &Tensor) -> Option<RankSum> {
        self.rank.as_ref()?.within_kernels(x.rows * x.cols)
    }
}

impl Rank for CudaBackend {
    fn share(&self) -> Share {
        self.rank.as_ref().map_or(Share::WHOLE, |rank| Share { rank: rank.number(), of: rank.of() })
    }

    fn all_reduce(&self, x: &mut Tensor) {
        if let Some(rank) = &self.rank {
            rank.all_reduce(x.f32(), x.rows * x.cols);
        }
    }

    fn all_reduce_beside(&self, x: &mut Tensor, terms: &Tensor) {
        if let Some(rank) = &self.rank {
            rank.all_reduce_beside(x.f32(), x.rows * x.cols, terms.f32());
        }
    }

    fn wait_for_sum(&self, x: &Tensor) {
        if let Some(rank) = &self.rank {
            rank.wait_for_sum(x.f32());
        }
    }

    fn room_for_terms(&self, rows: usize, cols: usize) -> Result<Option<Tensor>> {
        let numbers = self.rank.as_ref().map(|rank| terms(rows * cols, rank.of()));
        numbers.map(|numbers| self.tensor_f32(numbers.div_ceil(cols), cols)).transpose()
    }

    fn linear_of_rank(&self, w: &Linear, h: &Tensor, x: &mut Tensor, over: bool) -> bool {
        let sum = self.sum_within_kernels(x).filter(|_| x.rows <= FEW_TOKENS && w.is_bf16());
        match (sum, over) {
            (Some(sum), _) => self.gemv(&[product(h, h.bf16(), w, x, Write::Add)], Form::Summed { sum, over }),
            (None, false) => self.linear_add(w, h, x),
            (None, true) => self.linear(w, h, x),
        }
        sum.is_some()
    }

    fn gather_columns(&self, own: &Tensor, first: usize, all: &mut Tensor) {
        if let Some(rank) = &self.rank {
            rank.gather_columns((own.f32(), own.rows, own.cols), first, (all.f32(), all.cols));
        }
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
