//! The machine side of a configuration: workers, their kernels, and the memory there is.

use std::sync::Arc;

use crate::config::{ActivationBits, EngineConfig, Numa};
use crate::kernel::{self, Kernel, Simd};
use crate::machine::heap::Heap;
use crate::machine::topology::{self, Topology};
use crate::machine::workers::Team;
use crate::{Error, Result};

/// Memory that is left to the rest of the machine, in bytes.
pub(crate) const RESERVE_BYTES: u64 = 512 << 20;

/// Available memory below which nothing more is taken, in bytes: loading stops, new requests are refused.
pub(crate) const LEAST_BYTES: u64 = RESERVE_BYTES / 2;

/// The machine side of a configuration.
pub struct Machine {
    /// Workers.
    pub team: Arc<Team>,
    /// Their kernels.
    pub kernel: &'static dyn Kernel,
    /// Where a model takes its memory, and where that is counted.
    pub heap: Heap,
    /// RAM that can be taken, before anything is loaded.
    pub available_bytes: u64,
}

/// What `doctor` and `--simd amx` say where [`topology::cpu_has_amx`] and there are no kernels for it all the same.
pub(crate) const AMX_REFUSED: &str = "the CPU has AMX, but the system does not let programs use it: that takes Linux \
                                      5.16 or later, and a hypervisor and a container that allow it";

/// Workers and kernels. Errors: the instruction set asked for cannot run here; a CPU cannot be used; the system gives
/// no more threads.
pub fn machine(config: &EngineConfig, topology: &Topology) -> Result<Machine> {
    moebius_cache::threads::start()?;
    let kernel = match config.simd {
        None => kernel::best(),
        Some(simd) => kernel::get(simd).ok_or_else(|| {
            let have: Vec<_> = kernel::available().iter().map(|s| s.to_string()).collect();
            let why = match simd {
                Simd::Amx if topology::cpu_has_amx() => AMX_REFUSED,
                _ => "this CPU lacks it",
            };
            Error::Invalid(format!("--simd {simd} cannot run: {why}; use one of {}", have.join(", ")))
        })?,
    };
    let kernel = match config.activations {
        ActivationBits::Eight => kernel,
        ActivationBits::Sixteen => kernel::halves(kernel),
    };
    let threads = config.threads.unwrap_or_else(|| topology.default_threads());
    let mut seats = topology.seats(threads);
    if config.numa != Numa::Auto {
        seats.iter_mut().for_each(|seat| seat.node = 0);
    }
    let team = Arc::new(Team::on_nodes(&seats)?);
    let limit = moebius_cache::limits::address_space_bytes().unwrap_or(u64::MAX);
    Ok(Machine { team, kernel, heap: Heap::default(), available_bytes: topology.available_bytes.min(limit) })
}

/// Stops loading before the machine runs out of memory. Errors: `Error::Resources`.
pub(super) fn watch_memory() -> Result<()> {
    let available = topology::available_bytes();
    if available > LEAST_BYTES {
        return Ok(());
    }
    Err(Error::Resources(format!(
        "memory ran short while loading ({} MiB are left): close other programs, or use --dense int8 and --experts \
         int4",
        available >> 20
    )))
}

/// Bytes as people read them.
pub(crate) fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
