//! The routed experts of a model alone, for engines that compute everything else.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use moebius_cache::convert;
use moebius_cache::format::{Contents, ExpertCache, MAGIC};
use moebius_cache::pack::{ExpertKind, ExpertLayout, largest_group_size};
use moebius_cache::quantize::quantize_expert;

use super::LoadProgress;
use super::cache::{cache_dir, cache_job, calibrated, calibration_name};
use super::folder::{Description, ModelFolder};
use super::machine::Machine;
use super::place::place;
use crate::config::{EngineConfig, ExpertBits};
use crate::experts::{Epilogue, ExpertMemory, ExpertService};
use crate::{Error, Result};

/// Opens the experts of the model in `dir`, converting them first if no cache of them is there; or of a cache file
/// itself.
///
/// Errors: everything that can be wrong with a checkpoint; the model has no experts; a cache file of experts that need
/// more than their weights.
pub fn open_experts(
    name: &str,
    dir: &Path,
    config: &EngineConfig,
    machine: &Machine,
    report: &(dyn Fn(LoadProgress<'_>) + Sync),
) -> Result<ExpertService> {
    let (cache, epilogue) = if is_cache_file(dir) {
        let cache = ExpertCache::open(dir)?;
        if let Some(source) = cache.header().source.as_ref().filter(|source| !source.weights_suffice) {
            return Err(Error::Invalid(format!(
                "{} holds weights only, and these experts have biases or an activation of their own besides: give \
                 their checkpoint, {}",
                dir.display(),
                source.dir
            )));
        }
        (cache, Epilogue::default())
    } else {
        let folder = ModelFolder::open(name, Description::read(dir)?)?;
        let ModelFolder { model, checkpoint, .. } = &folder;
        let precision = folder
            .spec(config)?
            .precision
            .ok_or_else(|| Error::Invalid(format!("{name} is a dense model: give a model with routed experts")))?;
        let calibration = config.calibrate.as_deref().map(calibration_name).transpose()?;
        let job = calibrated(cache_job(name, checkpoint, model, precision), calibration.as_deref(), None);
        let cache = convert::ensure(&job, &cache_dir(config)?, &|p| report(LoadProgress::Convert(&p)))?;
        (cache, Epilogue::load(&machine.heap, checkpoint, model)?)
    };
    let memory = place(cache, config, &machine.team, report)?;
    ExpertService::new(Arc::new(memory), epilogue, machine.team.clone(), machine.kernel)
}

/// Whether it is a file that begins as our caches do.
pub fn is_cache_file(path: &Path) -> bool {
    let mut begin = [0; MAGIC.len()];
    moebius_cache::file::open(path).and_then(|mut file| file.read_exact(&mut begin)).is_ok() && begin == MAGIC
}

/// Matrices of one layer of experts, one expert after the other: `gate` and `up` `[experts, intermediate, hidden]`,
/// `down` `[experts, hidden, intermediate]`.
#[derive(Clone, Copy)]
pub struct ExpertArrays<'a> {
    /// Experts, intermediate, hidden.
    pub shape: [usize; 3],
    /// Gates.
    pub gate: &'a [f32],
    /// Ups.
    pub up: &'a [f32],
    /// Downs.
    pub down: &'a [f32],
}

/// One layer of experts from arrays, packed in memory. Errors: the shapes cannot be packed so, or there is not enough
/// memory.
pub fn pack_experts(arrays: ExpertArrays<'_>, config: &EngineConfig, machine: &Machine) -> Result<ExpertService> {
    let [num_experts, intermediate, hidden] = arrays.shape;
    let size = intermediate * hidden;
    if [arrays.gate, arrays.up, arrays.down].iter().any(|all| !all.iter().all(|w| w.is_finite())) {
        return Err(Error::Invalid("the weights hold NaN or infinity: give finite ones".into()));
    }
    assert!([arrays.gate, arrays.up, arrays.down].iter().all(|a| a.len() == num_experts * size));
    let group_size = || {
        config.group_size.or_else(|| largest_group_size(&[hidden, intermediate])).ok_or_else(|| {
            Error::Invalid(format!(
                "rows of {hidden} and {intermediate} weights cannot be cut into groups of 32: use bf16"
            ))
        })
    };
    if let ExpertBits::Within(_) = config.experts {
        let what = format!("--experts {} chooses for the layers of a model: give int4 or int8", config.experts);
        return Err(Error::Invalid(what));
    }
    let chosen = config.experts.precision(None);
    let precision = if chosen.codes().is_some() { chosen.in_groups(group_size()?) } else { chosen };
    let contents = Contents {
        model: "arrays",
        hidden,
        intermediate,
        num_experts,
        kind: ExpertKind::Gated,
        precision: precision.into(),
        layers: &[0],
    };
    let layout = ExpertLayout::new(hidden, intermediate, precision)?;
    let of = |e: usize| e * size..(e + 1) * size;
    let cache = ExpertCache::anonymous(&contents, |_, e, bytes| {
        let packed = quantize_expert(&layout, &arrays.gate[of(e)], &arrays.up[of(e)], &arrays.down[of(e)]);
        bytes[..packed.len()].copy_from_slice(&packed);
    })?;
    let memory = ExpertMemory::mapped(Arc::new(cache));
    ExpertService::new(Arc::new(memory), Epilogue::default(), machine.team.clone(), machine.kernel)
}
