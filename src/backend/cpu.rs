//! The CPU backend: a product for boxes without a GPU, and the oracle for those with one.
//!
//! ```text
//! memory, load             activations; weights
//! dense                    ops on rows
//! heads                    what queries and keys go through before attention
//! attend on kv, softmax    attention; its cache, its tiles
//! select                   the positions that queries attend to
//! recur, kda, mamba2       DeltaNet, Kimi delta attention, Mamba-2
//! compress                 entries of several positions
//! streams                  several residual streams
//! route, record            experts for each token; steering
//! shortlist                the largest logits
//! rank                     no sums over devices
//! ```

mod attend;
mod compress;
mod dense;
mod heads;
mod kda;
mod kv;
mod load;
mod mamba2;
mod memory;
mod rank;
mod record;
mod recur;
mod route;
mod select;
mod shortlist;
mod softmax;
mod streams;

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::backend::tensor::Tensor;
use crate::kernel::{self, Activations, FORMS, Kernel};
use crate::machine::heap::Heap;
use crate::machine::workers::Team;

pub use attend::{Gathered, LatentScratch};
pub use compress::Entries;
pub(crate) use dense::activate;
pub use kv::Kv;
#[cfg(feature = "cuda")]
pub(crate) use load::packed;
pub use load::{DeltaNet, Embedding, Heads, LatentUp, Linear};
pub(crate) use record::op_times;
pub use recur::State;
pub use select::{Chosen, Index};
pub use shortlist::Shortlister;

/// Ops on host memory, run by a team of pinned workers.
pub struct Cpu {
    team: Arc<Team>,
    kernel: &'static dyn Kernel,
    heap: Heap,
    max_rows: usize, // of a batch: what scratch memory is taken for; 0: as much as ops turn out to need
    // Scratch memory that is taken as weights and caches come, so that a decode step does not allocate.
    activations: RefCell<[Activations; FORMS]>,
    router_scratch: RefCell<Numbers>, // [tokens, experts]
    partial: RefCell<Numbers>,        // attention's sums of segments and scores of keys, which grow with the context
    scratch: Vec<Mutex<Scratch>>,     // one per worker
}

impl Cpu {
    /// A backend whose ops run on `team` with `kernel`.
    pub fn new(team: Arc<Team>, kernel: &'static dyn Kernel) -> Self {
        let scratch = (0..team.threads()).map(|_| Mutex::default()).collect();
        Self {
            team,
            kernel,
            heap: Heap::default(),
            max_rows: 0,
            activations: Default::default(),
            router_scratch: Default::default(),
            partial: Default::default(),
            scratch,
        }
    }

    /// One that takes no scratch memory and computes nothing, and the heap that counts what is put onto it. Errors: the
    /// system refuses a thread.
    pub(crate) fn counting() -> Result<(Heap, Self)> {
        let heap = Heap::plan();
        let backend = Self::new(Arc::new(Team::new(&[0])?), kernel::best()).with(&heap, 0);
        Ok((heap, backend))
    }

    /// Takes memory of `heap`, and scratch memory for batches of up to `max_rows` rows while it loads.
    pub fn with(self, heap: &Heap, max_rows: usize) -> Self {
        Self { heap: heap.clone(), max_rows, ..self }
    }

    /// Takes what each worker needs, unless nobody knows how many rows there will be.
    fn reserve(&self, take: impl Fn(&mut Scratch, &Heap) -> Result<()>) -> Result<()> {
        let workers = if self.max_rows == 0 { &[] } else { &self.scratch[..] };
        workers.iter().try_for_each(|scratch| take(&mut lock(scratch), &self.heap))
    }
}

/// Numbers of a tensor below which an op on its rows is not worth a dispatch. Few: rows come from the caches of other
/// cores, which one thread alone would wait for one after the other.
const PARALLEL: usize = 1 << 13;

impl Cpu {
    /// `work(t, row t of out, scratch)` for every row, on all workers if there is much to do.
    #[track_caller]
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

    /// `work` on all numbers, in parts of all workers if there are many.
    #[track_caller]
    fn each_number(&self, x: &mut Tensor, work: impl Fn(&mut [f32]) + Sync) {
        match x.data().len() < PARALLEL {
            true => work(x.data_mut()),
            false => self.team.each_share(x.data_mut(), 1, |_, _, part| work(part)),
        }
    }
}

/// Memory whose contents last for one op; it only grows.
#[derive(Default)]
struct Scratch {
    values: Numbers,
    activations: Activations,
    // Attention's own.
    row: Numbers,
    scores: Numbers,
    probabilities: Activations,
    tiles: Numbers, // keys or values as bf16, where they are codes
}

/// f32 numbers of memory that only grows.
#[derive(Default)]
struct Numbers {
    data: Vec<f32>,
    reserved: usize, // also where it is only counted
}

impl Numbers {
    /// Of a cache line.
    const LINE: usize = 16;

    /// Makes room for `shape`. Errors: `Error::Resources`.
    fn reserve(&mut self, heap: &Heap, shape: &[usize]) -> Result<()> {
        let len = shape.iter().fold(1, |all: usize, &n| all.saturating_mul(n)).saturating_add(Self::LINE);
        if self.reserved < len {
            self.data = heap.zeros_for::<f32>(self.reserved, len)?;
            self.reserved = len;
        }
        Ok(())
    }

    /// `len` numbers, whatever they are, from the boundary of a cache line on: AMX takes twice as long elsewhere.
    fn take(&mut self, len: usize) -> &mut [f32] {
        let Self { data, .. } = self;
        if data.len() < len + Self::LINE {
            data.resize(len + Self::LINE, 0.0);
        }
        let first = data.as_ptr().align_offset(Self::LINE * size_of::<f32>());
        &mut data[first..first + len]
    }
}

/// A worker's own scratch memory; no other worker holds it.
fn lock(scratch: &Mutex<Scratch>) -> MutexGuard<'_, Scratch> {
    scratch.lock().unwrap_or_else(PoisonError::into_inner)
}
