//! The cache file, open: mapped as it lies, every number in its header checked.
//!
//! Opening reads the header only, so it takes no time whatever the size; each expert has a checksum, to be compared
//! when it is used first. The same type holds experts that never were in a file, for benches on random weights.
#![allow(unsafe_code)] // giving pages of the map back

mod header;

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, MmapMut, MmapOptions, UncheckedAdvice};
use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

pub use self::header::{
    Contents, ExpertRecord, FileState, Header, LayerEntry, MAGIC, OLDEST_VERSION, PAGE_BYTES, Source, VERSION, parse,
    reseal,
};
pub(crate) use self::header::{decode_layer, encode_layer, layer_record_bytes, peek};
use crate::error::readable_bytes;
use crate::file::MappedFile;
use crate::pack::ExpertLayout;
use crate::{Error, Result, threads};

/// The packed experts of one model, in memory.
#[derive(Debug)]
pub struct ExpertCache {
    header: Header,
    layouts: Vec<ExpertLayout>, // [layers]
    experts: Vec<ExpertRecord>, // [layers * num_experts]; empty for random weights
    memory: Arc<Mapping>,
    path: PathBuf,
    run: Option<Range<usize>>, // which of the layers there are it has; `None`: all
}

#[derive(Debug)]
enum Mapping {
    File(MappedFile),
    Anonymous(MmapMut),
}

impl std::ops::Deref for Mapping {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Mapping::File(map) => map,
            Mapping::Anonymous(map) => map,
        }
    }
}

impl ExpertCache {
    /// Maps a cache file, shared and read-only, so that it can also be pinned for a GPU as it lies.
    ///
    /// Errors: `Error::Io` when it cannot be read, `Error::Cache` when it is damaged, unfinished or of another version.
    pub fn open(path: &Path) -> Result<Self> {
        let cache = |what| Error::Cache { path: path.to_path_buf(), what };
        let (_, map) = MappedFile::open(path, "start again, which makes a new one")?;
        if map.is_empty() {
            return Err(cache("is empty".into()));
        }
        let (header, experts) = parse(&map).map_err(cache)?;
        // Advice: file systems without huge pages refuse it, and then the map has small ones.
        let _ = map.advise(Advice::HugePage);
        let memory = Arc::new(Mapping::File(map));
        Ok(Self { layouts: layouts(&header), header, experts, memory, path: path.to_path_buf(), run: None })
    }

    /// Experts that lie in no file: `fill(layer index, expert, bytes)` writes each of them, in parallel, into zeroed
    /// memory.
    ///
    /// There are no checksums: [`check_expert`](Self::check_expert) finds nothing wrong.
    /// Errors: `Error::Invalid` when the dimensions make no expert, or there is not enough memory.
    pub fn anonymous(contents: &Contents<'_>, fill: impl Fn(usize, usize, &mut [u8]) + Sync) -> Result<Self> {
        threads::start()?;
        let header = Header::new(contents, None)?;
        let layouts = layouts(&header);
        let bytes = header.file_bytes();
        let too_large = |why: String| {
            Error::Invalid(format!("{} of experts {why}; use fewer layers or --experts int4", readable_bytes(bytes)))
        };
        let available = crate::limits::available_bytes();
        if bytes > available {
            return Err(too_large(format!("do not fit into {} of free memory", readable_bytes(available))));
        }
        let mut map =
            MmapOptions::new().len(bytes as usize).map_anon().map_err(|e| too_large(format!("were refused ({e})")))?;
        let _ = map.advise(Advice::HugePage); // without huge pages it is only slower
        for (i, entry) in header.layers.iter().enumerate() {
            let layer = &mut map[entry.offset as usize..][..entry.bytes as usize];
            let each = layer.par_chunks_exact_mut(layouts[i].bytes()).enumerate();
            each.for_each(|(expert, bytes)| fill(i, expert, bytes));
        }
        let memory = Arc::new(Mapping::Anonymous(map));
        Ok(Self { header, layouts, experts: Vec::new(), memory, path: PathBuf::new(), run: None })
    }

    /// Cuts it into one for each run of layer indices, from the first to the last, which count their layers from 0.
    ///
    /// Panics: the runs leave a layer out, or have one twice (a bug).
    pub fn split(self, runs: &[Range<usize>]) -> Vec<Self> {
        let all = self.num_layers();
        let ends = runs.iter().try_fold(0, |at, run| (run.start == at && run.end >= at).then_some(run.end));
        assert_eq!(ends, Some(all), "every layer is in one of {runs:?}");
        let of_run = |run: &Range<usize>| {
            let records = run.start * self.num_experts()..run.end * self.num_experts();
            Self {
                header: Header {
                    layers: self.header.layers[run.clone()].to_vec(),
                    precision: self.header.precision.of_layers(run.clone()),
                    ..self.header.clone()
                },
                layouts: self.layouts[run.clone()].to_vec(),
                experts: self.experts.get(records).unwrap_or_default().to_vec(),
                memory: self.memory.clone(),
                path: self.path.clone(),
                run: (run.len() < all).then(|| run.clone()),
            }
        };
        runs.iter().map(of_run).collect()
    }

    /// Which of the file's layers, by index, it has; `None`: all.
    pub fn run(&self) -> Option<&Range<usize>> {
        self.run.as_ref()
    }

    /// What it holds.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The file it is mapped from; empty for random weights.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The layout of each expert of layer index `i`. Panics: there is no such layer (a bug).
    pub fn layout(&self, i: usize) -> ExpertLayout {
        self.layouts[i]
    }

    /// That of each layer.
    pub fn layouts(&self) -> &[ExpertLayout] {
        &self.layouts
    }

    /// Layers with experts.
    pub fn num_layers(&self) -> usize {
        self.header.layers.len()
    }

    /// Experts of each layer.
    pub fn num_experts(&self) -> usize {
        self.header.num_experts
    }

    /// The index, among the layers with experts, of a layer of the model.
    pub fn layer_index(&self, model_layer: usize) -> Option<usize> {
        self.header.layers.binary_search_by_key(&model_layer, |entry| entry.layer).ok()
    }

    /// All experts of layer index `i`, one after the other. Panics: there is no such layer (a bug).
    pub fn layer(&self, i: usize) -> &[u8] {
        let LayerEntry { offset, bytes, .. } = self.header.layers[i];
        &self.memory[offset as usize..][..bytes as usize]
    }

    /// One expert of layer index `i`. Panics: there is no such layer or expert (a bug).
    pub fn expert(&self, i: usize, expert: usize) -> &[u8] {
        let bytes = self.layouts[i].bytes();
        &self.layer(i)[expert * bytes..][..bytes]
    }

    /// The checksums of one expert; `None` for random weights.
    pub fn record(&self, i: usize, expert: usize) -> Option<&ExpertRecord> {
        self.experts.get(i * self.num_experts() + expert)
    }

    /// Compares an expert with its checksum; call it before its first use.
    ///
    /// Errors: `Error::Cache` when its bytes are not those that were written. Panics as [`expert`](Self::expert).
    pub fn check_expert(&self, i: usize, expert: usize) -> Result<()> {
        match self.record(i, expert) {
            Some(record) if record.packed != xxh3_64(self.expert(i, expert)) => {
                let what = format!(
                    "expert {expert} of layer {} is damaged: its bytes do not fit their checksum",
                    self.header.layers[i].layer
                );
                Err(Error::Cache { path: self.path.clone(), what })
            }
            _ => Ok(()),
        }
    }

    /// Checks every expert, in parallel. `progress(bytes done, bytes in all)` is called after each.
    ///
    /// Errors: `Error::Cache` naming the first damaged expert found.
    pub fn verify(&self, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<()> {
        threads::start()?;
        let (layers, experts) = (self.num_layers(), self.num_experts());
        let total = self.header.layers.iter().map(|entry| entry.bytes).sum();
        let done = AtomicU64::new(0);
        (0..layers * experts).into_par_iter().try_for_each(|i| {
            self.check_expert(i / experts, i % experts)?;
            let bytes = self.layouts[i / experts].bytes() as u64;
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, total);
            Ok(())
        })
    }

    /// Whether it is mapped from a file.
    pub fn is_file(&self) -> bool {
        matches!(*self.memory, Mapping::File(_))
    }

    /// Asks for the bytes of one expert, which is read soon: the system brings them from the file meanwhile. What lies
    /// in no file is there.
    pub fn will_need(&self, i: usize, expert: usize) {
        if let Mapping::File(map) = &*self.memory {
            let offset = self.header.layers[i].offset as usize + expert * self.layouts[i].bytes();
            // Advice: a system that ignores it reads the pages when they are touched.
            let _ = map.advise_range(Advice::WillNeed, offset, self.layouts[i].bytes());
        }
    }

    /// Gives back the memory of layer index `i`, where it is needed for a copy of it: a file is read again when it is
    /// used again, random weights become zeros.
    pub fn forget_layer(&mut self, i: usize) {
        let LayerEntry { offset, bytes, .. } = self.header.layers[i];
        let (offset, bytes) = (offset as usize, bytes as usize);
        // A refusal only keeps the memory.
        let _ = match &*self.memory {
            // SAFETY: `self` is borrowed alone, and no other has these layers, so no reader sees their bytes;
            // afterwards they are the file's, or zeros, both readable.
            Mapping::File(map) => unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, bytes) },
            // SAFETY: as above.
            Mapping::Anonymous(map) => unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, bytes) },
        };
        if let (true, Ok(file)) = (self.is_file(), File::open(&self.path)) {
            // SAFETY: the descriptor is open; this only advises.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), offset as i64, bytes as i64, libc::POSIX_FADV_DONTNEED) };
        }
    }

    /// Keeps all of it in memory: never paged out, and read in now.
    ///
    /// Errors: `Error::Invalid` when the limit of locked memory is too low.
    pub fn lock(&self) -> Result<()> {
        let locked = match &*self.memory {
            Mapping::File(map) => map.lock(),
            Mapping::Anonymous(map) => map.lock(),
        };
        locked.map_err(|e| {
            let kib = self.memory.len().div_ceil(1024);
            Error::Invalid(format!(
                "cannot lock the experts in memory ({e}): raise the limit with `ulimit -l {kib}`, or run without \
                 --lock"
            ))
        })
    }
}

fn layouts(header: &Header) -> Vec<ExpertLayout> {
    (0..header.layers.len()).map(|i| header.layout(i)).collect()
}
