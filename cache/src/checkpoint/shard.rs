//! One mapped file of a checkpoint, whatever its container.
#![allow(unsafe_code)] // giving pages of the map back

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use memmap2::{Advice, UncheckedAdvice};

use super::{DOWNLOAD, Dtype, TensorView};
use crate::file::MappedFile;
use crate::{Error, Result};

/// Where one tensor lies in the bytes it was parsed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, the last one contiguous.
    pub shape: Vec<usize>,
    /// Its bytes, header included in the count.
    pub bytes: Range<usize>,
}

/// A mapped file and where its tensors lie.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    map: MappedFile,
    entries: HashMap<String, Entry>,
}

impl Shard {
    /// Maps a file and hands its bytes to `parse`, which says what is in them, or what is wrong with them in one
    /// clause.
    ///
    /// Errors: `Error::Checkpoint` with that clause.
    pub(super) fn open(
        path: &Path,
        parse: impl FnOnce(&[u8]) -> std::result::Result<HashMap<String, Entry>, String>,
    ) -> Result<Self> {
        let (file, map) = MappedFile::open(path, DOWNLOAD)?;
        let checkpoint = |what| Error::Checkpoint { path: path.to_path_buf(), what };
        if map.is_empty() {
            return Err(checkpoint("is empty; download it again".into()));
        }
        let entries = parse(&map).map_err(checkpoint)?;
        Ok(Self { path: path.to_path_buf(), file, map, entries })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    pub(super) fn metadata(&self) -> Result<std::fs::Metadata> {
        self.file.metadata().map_err(Error::io(&self.path))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub(super) fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, entry) = self.entries.get_key_value(name)?;
        let data = &self.map[entry.bytes.clone()];
        Some(TensorView { name, file: &self.path, dtype: entry.dtype, shape: &entry.shape, data })
    }

    /// Where a part of the map lies in it; `None` for bytes from elsewhere.
    fn offset(&self, data: &[u8]) -> Option<usize> {
        let offset = (data.as_ptr() as usize).checked_sub(self.map.as_ptr() as usize)?;
        (offset + data.len() <= self.map.len()).then_some(offset)
    }

    pub(super) fn prefetch(&self, data: &[u8]) {
        if let Some(offset) = self.offset(data) {
            // Advice: a system that ignores it reads the pages when they are touched.
            let _ = self.map.advise_range(Advice::WillNeed, offset, data.len());
        }
    }

    /// Tells the system that parts of `data` will be read in no order.
    pub(super) fn read_at_random(&self, data: &[u8]) {
        if let Some(offset) = self.offset(data) {
            // Advice: a system that ignores it reads more than is needed.
            let _ = self.map.advise_range(Advice::Random, offset, data.len());
        }
    }

    pub(super) fn release(&self, data: &[u8], page_cache_too: bool) {
        let Some(offset) = self.offset(data) else { return };
        // SAFETY: pages of a shared file map that are dropped are read again from the file, with the same bytes.
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, data.len()) };
        if page_cache_too {
            // SAFETY: the descriptor is open as long as `self.file`; this call changes no memory of ours.
            unsafe {
                libc::posix_fadvise(self.file.as_raw_fd(), offset as i64, data.len() as i64, libc::POSIX_FADV_DONTNEED)
            };
        }
    }
}
