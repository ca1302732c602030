//! The CPU backend: a product for boxes without a GPU, and the oracle for those with one.
//!
//! ```text
//! memory, load             activations; weights
//! dense                    ops on rows
//! attend on kv, softmax    attention; its cache, its tiles
//! recur, route, record     DeltaNet; experts for each token; steering
//! ```

mod attend;
mod dense;
mod kv;
mod load;
mod memory;
mod record;
mod recur;
mod route;
mod softmax;

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::tensor::Tensor;
use crate::kernel::{Activations, Kernel};
use crate::machine::workers::Team;

pub use attend::LatentScratch;
pub(crate) use dense::activate;
pub use kv::Kv;
#[cfg(feature = "cuda")]
pub(crate) use load::packed;
pub use load::{DeltaNet, Embedding, LatentUp, Linear};
pub use recur::State;

/// Ops on host memory, run by a team of pinned workers.
pub struct Cpu {
    team: Arc<Team>,
    kernel: &'static dyn Kernel,
    // Scratch memory that grows to the largest batch once, so that a decode step does not allocate.
    activations: RefCell<Activations>,
    router_scratch: RefCell<Vec<f32>>, // [tokens, experts]
    partial: RefCell<Vec<f32>>,        // attention's sums of segments
    scratch: Vec<Mutex<Scratch>>,      // one per worker
}

impl Cpu {
    /// A backend whose ops run on `team` with `kernel`.
    pub fn new(team: Arc<Team>, kernel: &'static dyn Kernel) -> Self {
        let scratch = (0..team.threads()).map(|_| Mutex::default()).collect();
        Self {
            team,
            kernel,
            activations: Default::default(),
            router_scratch: Default::default(),
            partial: Default::default(),
            scratch,
        }
    }
}

/// Numbers of a tensor below which an op on its rows is not worth waking the team for.
const PARALLEL: usize = 1 << 15;

impl Cpu {
    /// `work(t, row t of out, scratch)` for every row, on all workers if there is much to do.
    fn each_row(&self, out: &mut Tensor, work: impl Fn(usize, &mut [f32], &mut Scratch) + Sync) {
        let (rows, cols) = (out.rows(), out.cols());
        if rows == 1 || rows * cols < PARALLEL {
            let mut scratch = lock(&self.scratch[0]);
            return (0..rows).for_each(|t| work(t, out.row_mut(t), &mut scratch));
        }
        let scratch = &self.scratch;
        self.team.each_share(out.data_mut(), cols, |worker, mine, out| {
            let mut scratch = lock(&scratch[worker.index]);
            mine.zip(out.chunks_exact_mut(cols)).for_each(|(t, row)| work(t, row, &mut scratch));
        });
    }
}

/// Memory whose contents last for one op; it only grows.
#[derive(Default)]
struct Scratch {
    values: Vec<f32>,
    activations: Activations,
    // Attention's own.
    row: Vec<f32>,
    scores: Vec<f32>,
    probabilities: Activations,
}

/// `len` numbers of memory that only grows, whatever they are, from the boundary of a cache line on: AMX takes twice as
/// long elsewhere.
fn take(memory: &mut Vec<f32>, len: usize) -> &mut [f32] {
    const LINE: usize = 16;
    if memory.len() < len + LINE {
        memory.resize(len + LINE, 0.0);
    }
    let first = memory.as_ptr().align_offset(LINE * size_of::<f32>());
    &mut memory[first..first + len]
}

/// A worker's own scratch memory; no other worker holds it.
fn lock(scratch: &Mutex<Scratch>) -> MutexGuard<'_, Scratch> {
    scratch.lock().unwrap_or_else(PoisonError::into_inner)
}
