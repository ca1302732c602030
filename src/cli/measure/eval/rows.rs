//! The reference's rows, in a file that has no name and goes with the process.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use moebius_cache::convert::free_bytes;

use crate::{Error, Result};

/// Rows of logarithms of probabilities, `[scored, vocab]` f32, written once and then read once.
pub struct Rows {
    file: File,
    dir: PathBuf,
    part: Vec<f32>,
}

impl Rows {
    /// Room for `rows` of them in `dir`. Errors: the disk has less room, or the folder cannot be written.
    pub fn new(dir: &Path, rows: usize, vocab: usize) -> Result<Self> {
        let needed = (rows * vocab * size_of::<f32>()) as u64;
        std::fs::create_dir_all(dir).map_err(Error::unwritable(dir))?;
        if let Some(free) = free_bytes(dir).filter(|&free| free < needed) {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            return Err(Error::Resources(format!(
                "{} has {} MiB free, and the reference's probabilities of {rows} tokens take {} MiB: lower --tokens, \
                 or give another --cache-dir",
                dir.display(),
                mib(free),
                mib(needed)
            )));
        }
        Ok(Self {
            file: tempfile::tempfile_in(dir).map_err(Error::unwritable(dir))?,
            dir: dir.into(),
            part: Vec::new(),
        })
    }

    /// Adds rows.
    pub fn write(&mut self, rows: &[f32]) -> Result<()> {
        self.file.write_all(bytemuck::cast_slice(rows)).map_err(Error::unwritable(&self.dir))
    }

    /// Goes back to the first row.
    pub fn rewind(&mut self) -> Result<()> {
        self.file.rewind().map_err(Error::io(&self.dir))
    }

    /// The next `numbers` of the rows.
    pub fn next(&mut self, numbers: usize) -> Result<&[f32]> {
        self.part.resize(numbers, 0.0);
        self.file.read_exact(bytemuck::cast_slice_mut(&mut self.part)).map_err(Error::io(&self.dir))?;
        Ok(&self.part)
    }
}
