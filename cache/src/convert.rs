//! From a checkpoint to a cache file: found if it is there, built once if not.
//!
//! ```text
//! ensure:  key = hash(names, types, shapes, sampled bytes)
//!          a file of that key whose source states or source hashes fit -> open it
//!          else take the lock, look again, build: layer by layer, experts in parallel
//! build:   *.partial, its whole size reserved -> layers, each recorded once it is on disk -> header -> rename
//! ```

mod build;
mod disk;
mod expert;
mod identity;

pub use disk::free_bytes;

use std::path::{Path, PathBuf};

use crate::checkpoint::{Checkpoint, TensorView};
use crate::format::ExpertCache;
use crate::pack::{ExpertLayout, Precision};
use crate::{Error, Result, codec};

use self::disk::Lock;
use self::identity::Identity;

/// A cache to be made: which tensors of a checkpoint are experts, and how to store them.
#[derive(Debug)]
pub struct Job<'a> {
    /// Where the tensors are.
    pub checkpoint: &'a Checkpoint,
    /// Name of the model, for people and file names.
    pub model: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of one expert.
    pub intermediate: usize,
    /// Experts of each layer.
    pub num_experts: usize,
    /// How to store the weights.
    pub precision: Precision,
    /// The layers with experts, in the model's order.
    pub layers: Vec<LayerSource>,
}

/// The experts of one layer.
#[derive(Clone, Debug)]
pub struct LayerSource {
    /// Number of the layer in the model.
    pub layer: usize,
    /// One for each expert, in order.
    pub experts: Vec<ExpertSource>,
}

/// Names of the tensors of one expert.
#[derive(Clone, Debug)]
pub struct ExpertSource {
    /// `[intermediate, hidden]`.
    pub gate: String,
    /// `[intermediate, hidden]`.
    pub up: String,
    /// `[hidden, intermediate]`.
    pub down: String,
}

impl ExpertSource {
    /// Gate, up, down.
    fn names(&self) -> [&str; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// How far the work is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes of the checkpoint that are dealt with.
    pub bytes_done: u64,
    /// Bytes of the checkpoint in all; 0 where that makes no sense.
    pub bytes_total: u64,
}

/// The phases of [`ensure`]; each reads well after a model's name in a progress line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The checkpoint's files are not those a cache was made from: their content is compared.
    Comparing,
    /// An existing cache cannot be used, for this reason, and is replaced.
    Replacing(String),
    /// Another process builds this cache.
    Waiting,
    /// Layers of an unfinished build are checked.
    Resuming,
    /// Experts are converted.
    Converting,
    /// The last bytes go to disk.
    Finishing,
    /// A file that the new cache makes useless was removed.
    Removed(PathBuf),
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Phase::Comparing => write!(f, "comparing the checkpoint with its cache"),
            Phase::Replacing(why) => write!(f, "replacing the cache: {why}"),
            Phase::Waiting => write!(f, "waiting for another process that builds this cache"),
            Phase::Resuming => write!(f, "checking an unfinished build"),
            Phase::Converting => write!(f, "converting experts"),
            Phase::Finishing => write!(f, "writing to disk"),
            Phase::Removed(path) => write!(f, "removed {}, which is out of date", path.display()),
        }
    }
}

/// Receives progress, from several threads.
pub type OnProgress<'a> = &'a (dyn Fn(Progress) + Sync);

impl Phase {
    fn at(self, bytes_done: u64, bytes_total: u64) -> Progress {
        Progress { phase: self, bytes_done, bytes_total }
    }
}

/// Opens the cache of this job from `cache_dir`, and builds it before if it is not there or not of this content.
///
/// A build that was killed is resumed; two processes build once. After an error nothing unfinished is left behind, unless a later call
/// can resume it. Errors: `Error::Checkpoint` when a tensor is missing, misshapen or holds NaN, `Error::CacheDir` when the folder
/// cannot be written or is too small, `Error::Invalid` when the dimensions do not fit the precision.
pub fn ensure(job: &Job<'_>, cache_dir: &Path, progress: OnProgress<'_>) -> Result<ExpertCache> {
    job.check()?;
    let identity = Identity::of(job)?;
    let seen = disk::inodes(cache_dir)?;
    if let Some(cache) = find(job, &identity, cache_dir, progress)? {
        return Ok(cache);
    }
    let _lock = Lock::take(cache_dir, &identity.suffix(), &|| progress(Phase::Waiting.at(0, 0)))?;
    // Another process may have built it meanwhile. Where nothing changed, looking again would compare the same content twice.
    if disk::inodes(cache_dir)? != seen
        && let Some(cache) = find(job, &identity, cache_dir, progress)?
    {
        return Ok(cache);
    }
    build::build(job, &identity, cache_dir, progress)
}

/// Builds the cache of this job whether or not there is one. Errors: as [`ensure`].
pub fn build(job: &Job<'_>, cache_dir: &Path, progress: OnProgress<'_>) -> Result<ExpertCache> {
    job.check()?;
    let identity = Identity::of(job)?;
    let _lock = Lock::take(cache_dir, &identity.suffix(), &|| progress(Phase::Waiting.at(0, 0)))?;
    build::build(job, &identity, cache_dir, progress)
}

/// The file that [`ensure`] would look at first, if there is one; neither its content nor its source is checked.
///
/// Errors: as [`ensure`] for the checkpoint.
pub fn locate(job: &Job<'_>, cache_dir: &Path) -> Result<Option<PathBuf>> {
    job.check()?;
    let identity = Identity::of(job)?;
    Ok(disk::caches(cache_dir)?.into_iter().find(|path| identity.names(path)))
}

/// Every cache file in `cache_dir` that opens, with what it holds. Errors: `Error::Io` when the folder cannot be read.
pub fn list(cache_dir: &Path) -> Result<Vec<ExpertCache>> {
    Ok(disk::caches(cache_dir)?.iter().filter_map(|path| ExpertCache::open(path).ok()).collect())
}

/// A cache of this identity whose content is that of the checkpoint.
fn find(job: &Job<'_>, identity: &Identity, cache_dir: &Path, progress: OnProgress<'_>) -> Result<Option<ExpertCache>> {
    for path in disk::caches(cache_dir)?.into_iter().filter(|path| identity.names(path)) {
        let replacing = |why: &str| progress(Phase::Replacing(why.into()).at(0, 0));
        match ExpertCache::open(&path) {
            Ok(cache) if !job.describes(&cache) => replacing("it has other dimensions"),
            Ok(cache) => match identity.is_source_of(&cache, job, progress)? {
                true => return Ok(Some(cache)),
                false => replacing("the checkpoint has changed"),
            },
            Err(Error::Cache { what, .. }) => replacing(&format!("it {what}")),
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {} // removed meanwhile
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

impl Job<'_> {
    fn layout(&self) -> Result<ExpertLayout> {
        ExpertLayout::new(self.hidden, self.intermediate, self.precision)
    }

    /// The tensors of an expert: gate, up, down.
    fn tensors<'s>(&'s self, expert: &ExpertSource) -> Result<[TensorView<'s>; 3]> {
        let [gate, up, down] = expert.names();
        Ok([self.checkpoint.tensor(gate)?, self.checkpoint.tensor(up)?, self.checkpoint.tensor(down)?])
    }

    /// All experts, layer after layer.
    fn experts(&self) -> Vec<&ExpertSource> {
        self.layers.iter().flat_map(|layer| &layer.experts).collect()
    }

    /// Whether a cache has the dimensions and layers of this job.
    fn describes(&self, cache: &ExpertCache) -> bool {
        let header = cache.header();
        (header.hidden, header.intermediate, header.num_experts, header.precision)
            == (self.hidden, self.intermediate, self.num_experts, self.precision)
            && header.layers.iter().map(|entry| entry.layer).eq(self.layers.iter().map(|layer| layer.layer))
    }

    /// Every tensor is there, with the right shape and a known type.
    fn check(&self) -> Result<()> {
        self.layout()?;
        for layer in &self.layers {
            if layer.experts.len() != self.num_experts {
                let (has, layer) = (layer.experts.len(), layer.layer);
                return Err(Error::Invalid(format!("layer {layer} has {has} experts where the model has {}", self.num_experts)));
            }
            for expert in &layer.experts {
                let [gate, up, down] = self.tensors(expert)?;
                gate.expect_shape(&[self.intermediate, self.hidden])?;
                up.expect_shape(&[self.intermediate, self.hidden])?;
                down.expect_shape(&[self.hidden, self.intermediate])?;
                for view in [gate, up, down] {
                    codec::element_bytes(&view)?;
                }
            }
        }
        Ok(())
    }
}
