//! Sums over several devices.

use super::{CudaBackend, Tensor};
use crate::Result;
use crate::backend::Rank;
use crate::model::Share;

impl Rank for CudaBackend {
    fn share(&self) -> Share {
        self.rank.as_ref().map_or(Share::WHOLE, |rank| Share { rank: rank.number(), of: rank.of() })
    }

    fn all_reduce(&self, x: &mut Tensor) {
        if let Some(rank) = &self.rank {
            rank.all_reduce(x.f32(), x.rows * x.cols);
        }
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
