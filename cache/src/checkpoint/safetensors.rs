//! One safetensors file: its header parsed and checked, its bytes mapped.
//!
//! The `safetensors` crate checks the header: lengths, JSON, types, sizes without overflow, and that the tensors cover the file exactly,
//! without holes or overlaps. Here its findings become sentences, and the file a map.
#![allow(unsafe_code)] // the map

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, UncheckedAdvice};
use safetensors::SafeTensors;
use safetensors::tensor::SafeTensorError;

use super::{Dtype, TensorView};
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

/// Reads the header of `bytes`, a whole safetensors file; every range it returns lies inside of them.
///
/// Errors: one clause that names the fault and its remedy.
pub fn parse(bytes: &[u8]) -> std::result::Result<HashMap<String, Entry>, String> {
    let (header_bytes, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| explain(&e, bytes.len()))?;
    let start = 8 + header_bytes;
    let mut entries = HashMap::new();
    for (name, info) in metadata.tensors() {
        let Some(dtype) = dtype(info.dtype) else {
            return Err(format!("tensor {name} is of the unsupported type {}; convert it to BF16", info.dtype));
        };
        let (from, to) = info.data_offsets;
        entries.insert(name, Entry { dtype, shape: info.shape.clone(), bytes: start + from..start + to });
    }
    Ok(entries)
}

fn explain(error: &SafeTensorError, file_bytes: usize) -> String {
    use SafeTensorError::*;
    let cause = match error {
        HeaderTooSmall => format!("has {file_bytes} bytes, too few for a safetensors file"),
        HeaderTooLarge => "claims a header of more than 100 MB, so it is no safetensors file".into(),
        InvalidHeaderLength => format!("claims a header longer than its {file_bytes} bytes: it is cut off, or no safetensors file"),
        MetadataIncompleteBuffer => format!("has {file_bytes} bytes, not what its header promises: it is cut off, or was written to"),
        InvalidOffset(name) => format!("tensor {name} does not begin where the one before it ends"),
        TensorInvalidInfo => "has a tensor whose bytes do not fit its type and shape".into(),
        ValidationOverflow => "has a tensor of impossible size".into(),
        other => format!("has no valid safetensors header ({other})"),
    };
    format!("{cause}; download it again")
}

fn dtype(dtype: safetensors::Dtype) -> Option<Dtype> {
    use safetensors::Dtype as S;
    Some(match dtype {
        S::F64 => Dtype::F64,
        S::F32 => Dtype::F32,
        S::F16 => Dtype::F16,
        S::BF16 => Dtype::BF16,
        S::F8_E4M3 => Dtype::F8E4M3,
        S::F8_E5M2 => Dtype::F8E5M2,
        S::F8_E8M0 => Dtype::F8E8M0,
        S::F4 => Dtype::F4,
        S::I64 => Dtype::I64,
        S::I32 => Dtype::I32,
        S::I16 => Dtype::I16,
        S::I8 => Dtype::I8,
        S::U64 => Dtype::U64,
        S::U32 => Dtype::U32,
        S::U16 => Dtype::U16,
        S::U8 => Dtype::U8,
        S::BOOL => Dtype::Bool,
        _ => return None,
    })
}

/// One mapped file.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    map: Mmap,
    entries: HashMap<String, Entry>,
}

impl Shard {
    /// Errors: `Error::Checkpoint` when the header does not describe the file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io(path))?;
        let checkpoint = |what| Error::Checkpoint { path: path.to_path_buf(), what };
        if file.metadata().map_err(Error::io(path))?.len() == 0 {
            return Err(checkpoint("is empty; download it again".into()));
        }
        // SAFETY: the map is shared and read-only. A file that another process changes meanwhile can change what is read, and one that
        // it cuts off can end this process; both are outside of what a reader of files can prevent. Conversion compares the files'
        // state before and after.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
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

    pub(super) fn prefetch(&self, name: &str) {
        if let Some(Entry { bytes, .. }) = self.entries.get(name) {
            // Advice: a system that ignores it reads the pages when they are touched.
            let _ = self.map.advise_range(Advice::WillNeed, bytes.start, bytes.len());
        }
    }

    pub(super) fn release(&self, name: &str, page_cache_too: bool) {
        let Some(Entry { bytes, .. }) = self.entries.get(name) else { return };
        // SAFETY: pages of a shared file map that are dropped are read again from the file, with the same bytes.
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
        if page_cache_too {
            // SAFETY: the descriptor is open as long as `self.file`; this call changes no memory of ours.
            unsafe { libc::posix_fadvise(self.file.as_raw_fd(), bytes.start as i64, bytes.len() as i64, libc::POSIX_FADV_DONTNEED) };
        }
    }
}
