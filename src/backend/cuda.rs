//! The CUDA backend: every op as one or two kernels on the compute stream.
//!
//! ```text
//! memory, batch                  activations; tokens, positions and block tables
//! load                           weights
//! dense                          ops on rows, on top of
//!   product, packed, library       products of BF16, of packed tiles, and by cuBLASLt
//!   measure                        their rate
//! attend                         attention, on top of
//!   attend_latent, attend_wgmma    the two ways of latent attention; Hopper's kernels
//!   select                         the positions that queries attend to
//! recur, streams                 DeltaNet; several residual streams
//! compress                       entries of several positions, and a window
//! route, record                  experts for each token; graphs and steering
//! rank                           sums over several devices
//! ```
//!
//! The residual stream, angles and logits are f32, everything else between ops is bf16. Ops do not wait; `read` does.
//! What changes from step to step of decode (tokens, positions, block tables, additions) is read from device memory at
//! fixed addresses, so that a recorded pass can be launched again.

mod attend;
mod attend_latent;
mod attend_wgmma;
mod batch;
mod compress;
mod dense;
mod library;
mod load;
mod measure;
mod memory;
pub mod packed;
mod product;
mod rank;
mod record;
mod recur;
mod route;
mod select;
mod streams;

use std::cell::RefCell;
use std::sync::Arc;

use crate::Result;
use crate::cuda::cublas_lt::CublasLt;
use crate::cuda::{Cuda, DeviceBuffer, Rank};

pub use attend::Kv;
pub use attend_latent::LatentScratch;
pub use batch::CudaBatch;
pub use compress::Entries;
pub use dense::Shortlister;
pub use library::ProductRates;
pub use load::{Groups, LatentUp, Linear, RouterWeights, Rule};
pub use memory::Tensor;
pub use record::Additions;
pub use recur::{DeltaScratch, KdaScratch, State};
pub use route::CudaRouting;

/// Sequences up to which a decode step is recorded.
const RECORDED_TOKENS: usize = 64;

/// What the backend allocates for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Positions of a sequence.
    pub context: usize,
    /// Entries of all block tables of a batch.
    pub table: usize,
}

/// Ops on one GPU.
pub struct CudaBackend {
    cuda: Arc<Cuda>,
    limits: Limits,
    workspace: product::Workspace,
    library: Option<CublasLt>, // what multiplies many tokens, if not our own kernels
    attention: attend::Workspace,
    graphs: record::Graphs,
    gather_rows: DeviceBuffer<u32>,
    staged_rows: RefCell<Vec<u32>>, // what goes there
    rank: Option<Rank>,             // `None`: it is alone
    under_way: RefCell<Vec<rank::SumUnderWay>>,
}

impl CudaBackend {
    /// Ops on `cuda`.
    pub fn new(cuda: Arc<Cuda>, limits: Limits) -> Result<Self> {
        let mut backend = Self {
            workspace: product::Workspace::new(&cuda)?,
            library: None,
            attention: attend::Workspace::new(&cuda)?,
            graphs: RefCell::default(),
            gather_rows: DeviceBuffer::new(&cuda, 1 << 16)?,
            staged_rows: RefCell::default(),
            rank: None,
            under_way: RefCell::default(),
            cuda,
            limits,
        };
        backend.choose_library()?;
        Ok(backend)
    }

    /// The same as one of several.
    pub fn with_rank(self, rank: Rank) -> Self {
        Self { rank: Some(rank), ..self }
    }

    /// The device.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }
}
