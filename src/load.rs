//! From a checkpoint directory to a model ready to run: what fits, what precision, where the experts are.
//!
//! ```text
//! machine       workers, their kernels, and the memory there is
//! cache         where packed experts are kept, and the conversion that makes them
//! spec          a model as it is to run, and what its experts become
//! folder        a model's folder, opened once
//! synthetic     random weights of a known shape
//! place         where the experts' bytes lie
//! crews         how many workers take part
//! experts       routed experts alone, for other engines
//! memory        what a model takes of the CPU's memory
//! components    what each part of a checkpoint is stored as and becomes
//! remedy        what would make a model fit that does not
//! speed         how fast it will be
//! gpu           what goes where on a GPU
//! budget        what fits
//! assemble      weights and experts put together
//! calibrate     what experts read of a text, for their conversion
//! plan          all of this before anything is loaded
//! ```
//!
//! Imports machine, kernel, cuda, config, model, backend, experts and forward. Read [`load`] first, then `assemble`.

mod assemble;
mod budget;
mod cache;
pub mod calibrate;
pub mod components;
pub(crate) mod crews;
pub mod experts;
pub(crate) mod folder;
#[cfg(feature = "cuda")]
pub mod gpu;
mod machine;
mod memory;
pub(crate) mod place;
pub mod plan;
mod remedy;
mod spec;
pub mod speed;
pub mod synthetic;

use std::sync::Arc;

use moebius_cache::convert::{self, Progress};
use moebius_cache::format::ExpertCache;
use moebius_cache::pack::Precisions;

use crate::Result;
use crate::backend::source::TensorSource;
use crate::config::EngineConfig;
use crate::forward::Forward;
use crate::kernel::Kernel;
use crate::machine::topology::Topology;
use crate::machine::workers::Team;
pub use assemble::assemble;
pub use budget::{Budget, CpuPlan};
pub use cache::{cache_dir, cache_job, calibrated, calibration_name};
pub use folder::{Description, ModelFolder};
pub(crate) use machine::{AMX_REFUSED, LEAST_BYTES};
pub use machine::{Machine, machine};
pub use spec::{Kept, Spec};

/// Progress of loading.
#[derive(Clone, Copy, Debug)]
pub enum LoadProgress<'a> {
    /// Experts are being converted or the converter waits, with its own words.
    Convert(&'a Progress),
    /// Resident weights: layers done, of how many.
    Weights(usize, usize),
    /// Experts copied: layers done, of how many.
    Copy(usize, usize),
    /// What was decided, in one line: where the experts are that take a while to read or were copied, and what runs
    /// where how fast.
    Experts(&'a str),
}

/// A model in memory, and what it may use.
pub struct Loaded {
    /// Ready to run.
    pub model: Box<dyn Forward>,
    /// Blocks of its KV cache.
    pub kv_blocks: usize,
    /// Blocks of its KV cache more, on the host.
    pub host_blocks: usize,
    /// Snapshots of recurrent state that there is room for.
    pub snapshots: usize,
    /// Tokens a sequence may hold.
    pub max_context: usize,
    /// Tokens of one forward pass.
    pub max_batch_tokens: usize,
    /// What it runs on, what takes how much VRAM and how fast it should be, in one line; `None`: the CPU alone.
    pub device: Option<String>,
    /// Of the routed experts; `None` for a dense model.
    pub precision: Option<Precisions>,
    /// What dense weights became, in words.
    pub dense: String,
    /// Runs the ops.
    pub team: Arc<Team>,
    /// Its instruction set.
    pub kernel: &'static dyn Kernel,
    /// RAM that can be taken, asked for at each new request.
    pub available_bytes: fn() -> u64,
}

/// What a model is loaded from.
pub struct Stored<'a> {
    /// Everything but the routed experts.
    pub resident: &'a dyn TensorSource,
    /// The routed experts, packed; `None`: a dense model.
    pub experts: Option<ExpertCache>,
}

/// Loads the model in `folder`, converting its experts first if no cache of them is there.
///
/// Errors: everything that can be wrong with a checkpoint, and `Error::Resources` before loading when it cannot fit.
pub fn load(folder: &ModelFolder, config: &EngineConfig, report: &(dyn Fn(LoadProgress<'_>) + Sync)) -> Result<Loaded> {
    let ModelFolder { name, model, checkpoint, .. } = folder;
    let machine = machine(config, &Topology::read())?;
    let spec = folder.spec(config)?;
    let budget = Budget::new(&spec, &machine)?;
    let experts = match spec.precision.clone() {
        None => None,
        Some(precision) => {
            let calibration = config.calibrate.as_deref().map(calibration_name).transpose()?;
            let job = calibrated(cache_job(name, checkpoint, model, precision), calibration.as_deref(), None);
            Some(convert::ensure(&job, &cache_dir(config)?, &|p| report(LoadProgress::Convert(&p)))?)
        }
    };
    assemble(&spec, Stored { resident: checkpoint, experts }, budget, machine, report)
}
