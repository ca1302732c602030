//! Builds a cache file in a `*.partial` beside its final place.
//!
//! The partial file is the final one, except that its first bytes are not those of a cache. Its table of records says
//! which layers are complete: a layer's record is written after its bytes are on disk, so a killed build is continued
//! from the last record.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, mpsc};

use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::disk::{self, Lock, unwritable};
use super::expert::ExpertBuffers;
use super::identity::{self, Identity};
use super::{ConvertPhase, FoundJob, OfExpert, OnProgress};
use crate::codec::Source;
use crate::cut::Listed;
use crate::format::{self, Contents, ExpertCache, ExpertRecord, Header};
use crate::{Error, Result, threads};

/// Builds, publishes and opens. The caller holds the lock of this identity.
pub(super) fn build(
    job: &FoundJob<'_>,
    identity: &Identity,
    cache_dir: &Path,
    progress: OnProgress<'_>,
) -> Result<ExpertCache> {
    let layers: Vec<usize> = job.layers.iter().map(|layer| layer.layer).collect();
    let &super::Job { hidden, intermediate, num_experts, kind, ref precision, .. } = job.job;
    let precision = precision.clone();
    let contents = Contents { model: &job.model, hidden, intermediate, num_experts, kind, precision, layers: &layers };
    let header = Header::new(&contents, Some(identity.source.clone()))?;
    let path = cache_dir.join(identity.file_name(&job.model));
    let partial_path = cache_dir.join(format!("{}.partial", identity.suffix()));

    if path.is_dir() {
        return Err(unwritable(&path)(std::io::Error::other("a folder is where the cache belongs: remove it")));
    }
    let partial = UnfinishedCache {
        job,
        header: &header,
        file: disk::reserve(&partial_path, header.file_bytes())?,
        path: &partial_path,
    };
    let _listed = Listed::unfinished(&partial_path);
    let written = partial.fill(progress).and_then(|()| match identity.still_holds(job)? {
        true => Ok(()),
        false => {
            let what = "its files changed while they were read; run again once they are complete".into();
            Err(Error::Checkpoint { path: job.checkpoint.dir().to_path_buf(), what })
        }
    });
    if let Err(error) = written {
        let _ = std::fs::remove_file(&partial_path); // the error that counts is the one returned
        return Err(error);
    }
    // What was remembered of an older file of this name is not true of this one.
    let _ = std::fs::remove_file(identity::memory_path(&path));
    disk::publish(&partial.file, &partial_path, &path)?;
    remove_stale(identity, cache_dir, &path, progress)?;
    ExpertCache::open(&path)
}

struct UnfinishedCache<'a> {
    job: &'a FoundJob<'a>,
    header: &'a Header,
    file: File,
    path: &'a Path,
}

impl UnfinishedCache<'_> {
    /// Writes all layers that are not there yet, then the header.
    fn fill(&self, progress: OnProgress<'_>) -> Result<()> {
        let mut records = self.resume(progress)?;
        let total = self.job.source_bytes();
        let layer_bytes = total / self.job.layers.len() as u64;
        let done = AtomicU64::new(layer_bytes * records.iter().flatten().count() as u64);
        let workers = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            // While one layer goes to disk the next is converted; a third waits, so that memory for written pages stays
            // bounded.
            let (converted, to_record) = mpsc::sync_channel::<(usize, Vec<ExpertRecord>)>(0);
            let record_all = move || to_record.iter().try_for_each(|(i, records)| self.record(i, &records));
            let recorder = std::thread::Builder::new().spawn_scoped(scope, record_all).map_err(threads::refused)?;
            let mut convert = |i: usize, moments: Option<OfExpert<'_>>| {
                if records[i].is_some() {
                    return Ok(());
                }
                let of_layer = self.convert_layer(i, moments, &workers, &|bytes| {
                    progress(ConvertPhase::Converting.at(done.fetch_add(bytes, Ordering::Relaxed) + bytes, total));
                })?;
                records[i] = Some(of_layer.clone());
                // Where the recorder has failed, it says why below.
                converted.send((i, of_layer)).map_err(|_| Error::Invalid("nothing more can be written".into()))
            };
            let all = match self.job.calibration.and_then(|calibration| calibration.inputs) {
                Some(inputs) => inputs.each_layer(&mut |i, moments| convert(i, Some(moments))),
                None => (0..self.job.layers.len()).try_for_each(|i| convert(i, None)),
            };
            drop(converted);
            if all.is_ok() {
                progress(ConvertPhase::Finishing.at(total, total));
            }
            let recorded = recorder.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            recorded.and(all)
        })?;
        let records: Vec<ExpertRecord> = records.into_iter().flatten().flatten().collect();
        self.write(&self.header.encode(&records), 0)
    }

    /// The records of the layers that an earlier build of the same content completed, `None` for the others.
    fn resume(&self, progress: OnProgress<'_>) -> Result<Vec<Option<Vec<ExpertRecord>>>> {
        let layers = self.job.layers.len();
        let blank = self.header.encode_partial();
        let mut found = vec![0; blank.len()];
        self.file.read_exact_at(&mut found, 0).map_err(unwritable(self.path))?;
        let table = self.header.record_offset(0);
        if found[..table] != blank[..table] {
            self.write(&blank, 0)?;
            return Ok(vec![None; layers]);
        }
        let record_bytes = format::layer_record_bytes(self.job.num_experts);
        let complete = |i: usize| -> Result<Option<Vec<ExpertRecord>>> {
            let Some((entry, records)) = format::decode_layer(&found[self.header.record_offset(i)..][..record_bytes])
            else {
                return Ok(None);
            };
            let expected = &self.header.layers[i];
            let placed = (entry.layer, entry.offset, entry.bytes) == (expected.layer, expected.offset, expected.bytes);
            progress(ConvertPhase::Resuming.at(i as u64 * expected.bytes, layers as u64 * expected.bytes));
            Ok((placed && self.layer_is_intact(i, &records)?).then_some(records))
        };
        (0..layers).map(complete).collect()
    }

    fn layer_is_intact(&self, i: usize, records: &[ExpertRecord]) -> Result<bool> {
        let bytes = self.header.layout(i).bytes();
        let intact = records.par_iter().enumerate().map_init(
            || vec![0; bytes],
            |buffer, (expert, record)| {
                self.file.read_exact_at(buffer, self.header.layers[i].offset + (expert * bytes) as u64)?;
                Ok(xxh3_64(buffer) == record.packed)
            },
        );
        intact.try_reduce(|| true, |a, b| Ok(a && b)).map_err(unwritable(self.path))
    }

    /// Converts and writes the experts of layer index `i`, and returns their records. `done(bytes)` is called after
    /// each.
    fn convert_layer(
        &self,
        i: usize,
        moments: Option<OfExpert<'_>>,
        workers: &Mutex<Vec<ExpertBuffers>>,
        done: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<ExpertRecord>> {
        let layout = self.header.layout(i);
        let lock = || workers.lock().expect("nothing panics while holding it");
        let convert = |(number, sources): (usize, &[Source<'_>; 3])| {
            let parts = || sources.iter().flat_map(Source::parts);
            parts().for_each(|part| self.job.checkpoint.prefetch(part));
            let mut worker = lock().pop().unwrap_or_default();
            let moments = moments.map(|moments| moments(number));
            let (packed, record) = worker.convert(&layout, sources, moments.as_ref())?;
            self.write(packed, self.header.layers[i].offset + (number * layout.bytes()) as u64)?;
            lock().push(worker);
            parts().for_each(|part| self.job.checkpoint.release(part));
            done(sources.iter().map(Source::bytes).sum());
            Ok(record)
        };
        self.job.layer(i).par_iter().enumerate().map(convert).collect()
    }

    /// Notes that a layer is complete, once it is on disk.
    fn record(&self, i: usize, records: &[ExpertRecord]) -> Result<()> {
        self.file.sync_data().map_err(unwritable(self.path))?;
        self.write(&format::encode_layer(&self.header.layers[i], records), self.header.record_offset(i) as u64)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(unwritable(self.path))
    }
}

/// Removes what the cache at `fresh` replaces: other files of the same content, and those of an earlier content of the
/// same folder.
fn remove_stale(identity: &Identity, cache_dir: &Path, fresh: &Path, progress: OnProgress<'_>) -> Result<()> {
    let stale = |path: &PathBuf| {
        path != fresh
            && !path.is_dir()
            && (identity.names(path)
                || format::peek(path).is_some_and(|(precision, source)| identity.replaces(&precision, &source)))
    };
    let mut files = disk::caches(cache_dir)?;
    let unfinished = disk::files(cache_dir, "partial")?;
    // A partial file of another key may be the work of a running process, on a checkpoint that changed since.
    files.extend(
        unfinished
            .into_iter()
            .filter(|path| !Lock::is_taken(cache_dir, &path.file_stem().unwrap_or_default().to_string_lossy())),
    );
    for path in files.into_iter().filter(stale) {
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(unwritable(&path)(e)),
            _ => {} // removed, by this process or by another
        }
        let _ = std::fs::remove_file(identity::memory_path(&path)); // most have none
        progress(ConvertPhase::Removed(path).at(0, 0));
    }
    Ok(())
}
