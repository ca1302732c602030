//! Which content a cache was made from, told quickly when nothing changed and surely when something did.
//!
//! The key, part of the file's name, samples the content so that two fine-tunes of a model get two files. Whether a
//! file found by its key is right is decided by the state of the checkpoint's files (size, times, inode) or, where that
//! differs, by the hashes of all tensors. States found equal in that way are remembered in a small file beside the
//! cache.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{ConvertPhase, FoundJob, OnProgress, disk};
use crate::codec::Source as Matrix;
use crate::format::{ExpertCache, FileState, Source};
use crate::pack::Precisions;
use crate::{Error, Result};

/// Tensors of which a page goes into the key.
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 4096;
/// Sources remembered beside a cache.
const REMEMBERED: usize = 8;

/// The content of a checkpoint, as far as one job uses it.
pub(super) struct Identity {
    pub(super) source: Source,
    precision: Precisions,
}

impl Identity {
    /// Errors: `Error::Checkpoint` when a tensor is missing, `Error::Io` when the system hides a file's state.
    pub(super) fn of(job: &FoundJob<'_>) -> Result<Self> {
        let dir = job.checkpoint.dir();
        let dir = dir.canonicalize().map_err(Error::io(dir))?.to_string_lossy().into_owned();
        Ok(Self {
            source: Source {
                key: key(job)?,
                dir,
                files: file_states(job)?,
                weights_suffice: job.weights_suffice,
                calibration: job.calibration.map(|calibration| calibration.name.to_string()),
            },
            precision: job.precision.clone(),
        })
    }

    /// End of the names of all files that belong to this content and precision, without their extension.
    pub(super) fn suffix(&self) -> String {
        let calibration = self.source.calibration.iter();
        let calibration: String = calibration.map(|name| format!("-{:016x}", xxh3_64(name.as_bytes()))).collect();
        format!("{}-{}{calibration}", self.source.key, self.precision)
    }

    /// Name of the cache file.
    pub(super) fn file_name(&self, model: &str) -> String {
        let slug: String = model
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '-' })
            .take(100)
            .collect();
        format!("{}-{}.moebius", slug.trim_start_matches(['.', '-']), self.suffix())
    }

    /// Whether `path` is a cache file of this content, by its name.
    pub(super) fn names(&self, path: &Path) -> bool {
        path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with(&format!("-{}", self.suffix())))
    }

    /// Whether a cache of that precision, made from `source`, is an older one of this checkpoint.
    pub(super) fn replaces(&self, precision: &Precisions, source: &Source) -> bool {
        (precision, &source.dir, &source.calibration) == (&self.precision, &self.source.dir, &self.source.calibration)
    }

    /// Whether the source files are in the state in which they were when this was made.
    pub(super) fn still_holds(&self, job: &FoundJob<'_>) -> Result<bool> {
        Ok(file_states(job)? == self.source.files)
    }

    /// Whether `cache` was made from the content that the checkpoint has now.
    pub(super) fn is_source_of(
        &self,
        cache: &ExpertCache,
        job: &FoundJob<'_>,
        progress: OnProgress<'_>,
    ) -> Result<bool> {
        let mut known = remembered(cache.path());
        let made_from = cache.header().source.iter();
        if made_from.chain(&known).any(|source| source.files == self.source.files) {
            return Ok(true);
        }
        if !equal_content(cache, job, progress)? {
            return Ok(false);
        }
        known.insert(0, self.source.clone());
        known.truncate(REMEMBERED);
        // Only saves time: where it cannot be written, the content is compared again next time.
        let _ = disk::replace(&memory_path(cache.path()), &serde_json::to_vec(&known).expect("plain data"));
        Ok(true)
    }
}

/// The file beside a cache with the sources that were found equal to its own.
pub(super) fn memory_path(cache: &Path) -> PathBuf {
    cache.with_extension("sources.json")
}

fn remembered(cache: &Path) -> Vec<Source> {
    crate::file::read(&memory_path(cache)).ok().and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default()
}

/// Compares the hashes of all tensors with those of the cache's records.
fn equal_content(cache: &ExpertCache, job: &FoundJob<'_>, progress: OnProgress<'_>) -> Result<bool> {
    let total = job.source_bytes();
    let done = AtomicU64::new(0);
    // A difference found stops the others.
    let equal = job.experts.par_iter().enumerate().all(|(i, sources)| {
        let Some(record) = cache.record(i / job.num_experts, i % job.num_experts) else { return false };
        sources.iter().zip(record.source).all(|(source, hash)| {
            let equal = source.hash() == hash;
            source.parts().iter().for_each(|part| job.checkpoint.release(part));
            progress(
                ConvertPhase::Comparing.at(done.fetch_add(source.bytes(), Ordering::Relaxed) + source.bytes(), total),
            );
            equal
        })
    });
    Ok(equal)
}

fn key(job: &FoundJob<'_>) -> Result<String> {
    let mut hasher = Xxh3::new();
    // The version that changed what a precision's bytes are, last: files since then are used.
    hasher.update(&3u32.to_le_bytes());
    if !job.weights_suffice {
        hasher.update(b"more"); // caches from before files said so are not used again
    }
    for layer in &job.layers {
        hasher.update(&(layer.layer as u64).to_le_bytes());
    }
    let views: Vec<_> = job.experts.iter().flatten().flat_map(Matrix::parts).collect();
    for view in &views {
        hasher.update(format!("{} {:?} {:?}\n", view.name, view.dtype, view.shape).as_bytes());
    }
    for i in 0..SAMPLES.min(views.len()) {
        let data = views[i * views.len() / SAMPLES.min(views.len())].data;
        let middle = data.len() / 2;
        hasher.update(&data[middle..data.len().min(middle + SAMPLE_BYTES)]);
    }
    Ok(format!("{:016x}", hasher.digest()))
}

/// The states of the files that hold the job's tensors, by name.
fn file_states(job: &FoundJob<'_>) -> Result<Vec<FileState>> {
    let views = job.experts.iter().flatten().flat_map(Matrix::parts);
    let mut used: Vec<usize> = views.filter_map(|view| job.checkpoint.file_of(view.name)).collect();
    used.sort_unstable();
    used.dedup();
    let files: Vec<&Path> = job.checkpoint.files().collect();
    let state = |i: usize| {
        let stat = job.checkpoint.metadata(i)?;
        Ok(FileState {
            name: files[i].file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: stat.len(),
            mtime_ns: stat.mtime() * 1_000_000_000 + stat.mtime_nsec(),
            ctime_ns: stat.ctime() * 1_000_000_000 + stat.ctime_nsec(),
            inode: stat.ino(),
        })
    };
    used.into_iter().map(state).collect()
}
