//! From a checkpoint directory to a model ready to run: what fits, what precision, where the experts are.
//!
//! ```text
//! machine       workers, their kernels, and the memory there is
//! cache         where packed experts are kept, and the conversion that makes them
//! precision     what the experts become
//! synthetic     random weights of a known shape
//! place         where the experts' bytes lie
//! experts       routed experts alone, for other engines
//! components    what each part of a checkpoint is stored as and becomes
//! gpu           what goes where on a GPU
//! budget        what fits
//! speed         how fast it will be
//! assemble      weights and experts put together
//! plan          all of this before anything is loaded
//! ```
//!
//! Imports machine, kernel, cuda, config, model, backend, experts and forward. Read [`load`] first, then `assemble`.

mod assemble;
mod budget;
mod cache;
pub mod components;
pub mod experts;
#[cfg(feature = "cuda")]
pub mod gpu;
mod machine;
pub(crate) mod place;
pub mod plan;
mod precision;
pub mod speed;
pub mod synthetic;

use std::path::Path;

use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::convert::{self, Progress};

use crate::Result;
use crate::config::EngineConfig;
use crate::machine::topology::Topology;
use crate::model::families;
pub use assemble::{Loaded, assemble};
pub use budget::Budget;
pub use cache::{cache_dir, cache_job};
pub(crate) use machine::{AMX_REFUSED, LEAST_BYTES};
pub use machine::{Machine, machine};
pub use precision::{for_checkpoint, for_folder, precision};

/// What loading tells whoever waits.
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

/// Loads the model in `dir`, converting its experts first if no cache of them is there.
///
/// Errors: everything that can be wrong with a checkpoint, and `Error::Resources` before loading when it cannot fit.
pub fn load(
    name: &str,
    dir: &Path,
    config: &EngineConfig,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<Loaded> {
    let model = families::read(dir)?;
    let machine = machine(config, &Topology::read())?;
    let checkpoint = Checkpoint::open(dir)?;
    let config = &for_checkpoint(config, &model, &checkpoint);
    let precision = precision(&model, config)?;
    let budget = Budget::new(&model, config, precision, &machine)?;
    let experts = match precision {
        None => None,
        Some(precision) => {
            let job = cache_job(name, &checkpoint, &model, precision);
            Some(convert::ensure(&job, &cache_dir(config)?, &|p| report(LoadProgress::Convert(&p)))?)
        }
    };
    assemble(model, &checkpoint, experts, config, budget, machine, report)
}
