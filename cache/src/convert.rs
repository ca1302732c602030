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
pub use expert::{ExpertMoments, Tiles, packed, rounding};

use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoint;
use crate::codec::Source;
use crate::format::ExpertCache;
use crate::pack::{ExpertKind, ExpertPrecision, Precisions};
use crate::quantize::is_chosen;
use crate::{Error, Result, threads};

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
    /// What each of them has.
    pub kind: ExpertKind,
    /// How to store the weights.
    pub precision: Precisions,
    /// Between the products is SiLU and no bias: what else there can be is in the checkpoint alone.
    pub weights_suffice: bool,
    /// The layers with experts, in the model's order.
    pub layers: Vec<LayerSource>,
    /// What codes are chosen for; `None`: for the weights themselves.
    pub calibration: Option<Calibration<'a>>,
}

/// Inputs that a model's experts are to be right on.
#[derive(Clone, Copy, Debug)]
pub struct Calibration<'a> {
    /// What they are, for people and in a cache's name: no two have the same.
    pub name: &'a str,
    /// Who computes them; `None`: the cache must be there.
    pub inputs: Option<&'a dyn Inputs>,
}

/// Computes what experts read.
pub trait Inputs: std::fmt::Debug + Sync {
    /// Calls `take(layer index, what each of its experts reads)` for every layer, in order. Errors: those of `take`,
    /// and its own as `Error::Invalid`.
    fn each_layer(&self, take: &mut dyn FnMut(usize, OfExpert<'_>) -> Result<()>) -> Result<()>;
}

/// What an expert of a layer reads, computed when it is asked for.
pub type OfExpert<'a> = &'a (dyn Fn(usize) -> ExpertMoments + Sync);

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
    /// `[intermediate, hidden]`; of an ungated one `up`.
    pub gate: String,
    /// `[intermediate, hidden]`.
    pub up: String,
    /// `[hidden, intermediate]`.
    pub down: String,
}

impl ExpertSource {
    /// Gate, up, down.
    pub fn names(&self) -> [&str; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// How far the work is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: ConvertPhase,
    /// Bytes of the checkpoint that are dealt with.
    pub bytes_done: u64,
    /// Bytes of the checkpoint in all; 0 where that makes no sense.
    pub bytes_total: u64,
}

/// The phases of [`ensure`]; each reads well after a model's name in a progress line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConvertPhase {
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

impl std::fmt::Display for ConvertPhase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ConvertPhase::Comparing => write!(f, "comparing the checkpoint with its cache"),
            ConvertPhase::Replacing(why) => write!(f, "replacing the cache: {why}"),
            ConvertPhase::Waiting => write!(f, "waiting for another process that builds this cache"),
            ConvertPhase::Resuming => write!(f, "checking an unfinished build"),
            ConvertPhase::Converting => write!(f, "converting experts"),
            ConvertPhase::Finishing => write!(f, "writing to disk"),
            ConvertPhase::Removed(path) => write!(f, "removed {}, which is out of date", path.display()),
        }
    }
}

/// Receives progress, from several threads.
pub type OnProgress<'a> = &'a (dyn Fn(Progress) + Sync);

impl ConvertPhase {
    fn at(self, bytes_done: u64, bytes_total: u64) -> Progress {
        Progress { phase: self, bytes_done, bytes_total }
    }
}

/// Opens the cache of this job from `cache_dir`, and builds it before if it is not there or not of this content.
///
/// A build that was killed is resumed; two processes build once. After an error nothing unfinished is left behind,
/// unless a later call can resume it. Errors: `Error::Checkpoint` when a tensor is missing, misshapen or holds NaN,
/// `Error::CacheDir` when the folder cannot be written or is too small, `Error::Invalid` when the dimensions do not fit
/// the precision.
pub fn ensure(job: &Job<'_>, cache_dir: &Path, progress: OnProgress<'_>) -> Result<ExpertCache> {
    threads::start()?;
    let job = &FoundJob::new(job)?;
    let identity = Identity::of(job)?;
    let seen = disk::inodes(cache_dir)?;
    if let Some(cache) = find(job, &identity, cache_dir, progress)? {
        Lock::sweep(cache_dir, &identity.suffix());
        return Ok(cache);
    }
    let _lock = Lock::take(cache_dir, &identity.suffix(), &|| progress(ConvertPhase::Waiting.at(0, 0)))?;
    // Another process may have built it meanwhile. Where nothing changed, looking again would compare the same content
    // twice.
    if disk::inodes(cache_dir)? != seen
        && let Some(cache) = find(job, &identity, cache_dir, progress)?
    {
        return Ok(cache);
    }
    if let Some(Calibration { name, inputs: None }) = job.calibration {
        return Err(Error::Invalid(format!(
            "{} has no {} cache that is calibrated with {name} in {}: build it with `moebius cache build` and the same \
             flags",
            job.model,
            job.precision,
            cache_dir.display()
        )));
    }
    build::build(job, &identity, cache_dir, progress)
}

/// Builds the cache of this job whether or not there is one. Errors: as [`ensure`].
pub fn build(job: &Job<'_>, cache_dir: &Path, progress: OnProgress<'_>) -> Result<ExpertCache> {
    threads::start()?;
    let job = &FoundJob::new(job)?;
    let identity = Identity::of(job)?;
    let _lock = Lock::take(cache_dir, &identity.suffix(), &|| progress(ConvertPhase::Waiting.at(0, 0)))?;
    build::build(job, &identity, cache_dir, progress)
}

/// The file that [`ensure`] would look at first, if there is one; neither its content nor its source is checked.
///
/// Errors: as [`ensure`] for the checkpoint.
pub fn locate(job: &Job<'_>, cache_dir: &Path) -> Result<Option<PathBuf>> {
    let identity = Identity::of(&FoundJob::new(job)?)?;
    Ok(disk::caches(cache_dir)?.into_iter().find(|path| identity.names(path)))
}

/// Every cache file in `cache_dir` that opens, with what it holds. Errors: `Error::Io` when the folder cannot be read.
pub fn list(cache_dir: &Path) -> Result<Vec<ExpertCache>> {
    Ok(disk::caches(cache_dir)?.iter().filter_map(|path| ExpertCache::open(path).ok()).collect())
}

/// A cache of this identity whose content is that of the checkpoint.
fn find(
    job: &FoundJob<'_>,
    identity: &Identity,
    cache_dir: &Path,
    progress: OnProgress<'_>,
) -> Result<Option<ExpertCache>> {
    for path in disk::caches(cache_dir)?.into_iter().filter(|path| identity.names(path)) {
        let replacing = |why: &str| progress(ConvertPhase::Replacing(why.into()).at(0, 0));
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
    /// Every precision fits the dimensions. Errors: `Error::Invalid`.
    fn check(&self) -> Result<()> {
        let layout = |precision| self.kind.layout(self.hidden, self.intermediate, precision).map(drop);
        self.precision.distinct().into_iter().try_for_each(layout)?;
        let chosen = |layer: &ExpertPrecision| is_chosen(layer.gate) && is_chosen(layer.down);
        match self.calibration.is_none() || self.precision.distinct().iter().all(chosen) {
            true => Ok(()),
            false => Err(Error::Invalid(format!(
                "codes of {} are not chosen, so there is nothing to calibrate: give --experts int4 or int8",
                self.precision
            ))),
        }
    }

    /// Gate, up and down of an expert. Errors: `Error::Checkpoint` naming what is missing, misshapen or of an unknown
    /// type.
    pub fn sources(&self, expert: &ExpertSource) -> Result<[Source<'_>; 3]> {
        let [gate, up, down] = expert.names();
        let (wide, tall) = ([self.intermediate, self.hidden], [self.hidden, self.intermediate]);
        Ok([
            self.checkpoint.source(gate, wide)?,
            self.checkpoint.source(up, wide)?,
            self.checkpoint.source(down, tall)?,
        ])
    }

    /// Whether a cache has the dimensions and layers of this job.
    fn describes(&self, cache: &ExpertCache) -> bool {
        let header = cache.header();
        (header.hidden, header.intermediate, header.num_experts, header.kind, &header.precision)
            == (self.hidden, self.intermediate, self.num_experts, self.kind, &self.precision)
            && header.layers.iter().map(|entry| entry.layer).eq(self.layers.iter().map(|layer| layer.layer))
    }
}

/// A job whose tensors have been found.
struct FoundJob<'a> {
    job: &'a Job<'a>,
    experts: Vec<[Source<'a>; 3]>, // [layers * num_experts]
}

impl<'a> FoundJob<'a> {
    /// Every tensor is there, with the right shape and in a known format.
    fn new(job: &'a Job<'a>) -> Result<Self> {
        job.check()?;
        let mut experts = Vec::with_capacity(job.layers.len() * job.num_experts);
        for layer in &job.layers {
            if layer.experts.len() != job.num_experts {
                let (has, layer) = (layer.experts.len(), layer.layer);
                return Err(Error::Invalid(format!(
                    "layer {layer} has {has} experts where the model has {}",
                    job.num_experts
                )));
            }
            for expert in &layer.experts {
                experts.push(job.sources(expert)?);
            }
        }
        let kept = || experts.iter().flatten().all(|source: &Source<'_>| source.kept_by().is_some());
        if job.calibration.is_some() && kept() {
            return Err(Error::Invalid(format!(
                "{} is quantized already, and its codes are kept: calibrate a BF16, F16 or F32 checkpoint",
                job.model
            )));
        }
        Ok(Self { job, experts })
    }

    /// The experts of layer index `i`.
    fn layer(&self, i: usize) -> &[[Source<'a>; 3]] {
        &self.experts[i * self.job.num_experts..][..self.job.num_experts]
    }

    /// Bytes of all tensors that it reads.
    fn source_bytes(&self) -> u64 {
        self.experts.iter().flatten().map(Source::bytes).sum()
    }
}

impl<'a> std::ops::Deref for FoundJob<'a> {
    type Target = Job<'a>;
    fn deref(&self) -> &Job<'a> {
        self.job
    }
}
