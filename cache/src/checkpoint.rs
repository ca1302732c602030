//! A checkpoint: files that hold named tensors, memory-mapped and checked when opened.
//!
//! Each container, safetensors and GGUF, has a reader that fills the same table, under Hugging Face's names.

pub mod gguf;
mod safetensors;
mod shard;
mod table;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use serde_json::Value;

pub use self::gguf::GgmlType;
pub use self::safetensors::parse as parse_safetensors;
pub use self::shard::Entry;
use self::shard::Shard;
pub use self::table::Table;
use crate::codec::Quantization;
use crate::{Error, Result};

/// Element types of checkpoint tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // each is its own description
pub enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    F4,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    /// A block type of GGUF files.
    Ggml(GgmlType),
}

/// One tensor of a checkpoint, as it lies in its file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Its name in the checkpoint.
    pub name: &'a str,
    /// The file it is in.
    pub file: &'a Path,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, the last one contiguous.
    pub shape: &'a [usize],
    /// Little-endian elements; of no particular alignment.
    pub data: &'a [u8],
}

impl TensorView<'_> {
    /// Errors: `Error::Checkpoint` naming both shapes when this tensor has another one.
    pub fn expect_shape(&self, shape: &[usize]) -> Result<()> {
        if self.shape == shape {
            return Ok(());
        }
        Err(self.error(format!(
            "has shape {:?} where {shape:?} is expected: config.json and weights do not belong together",
            self.shape
        )))
    }

    /// Number `i` of the first dimension. Panics: there is no such part (a bug).
    pub(crate) fn part(&self, i: usize) -> Self {
        let (&count, shape) = self.shape.split_first().expect("a tensor with dimensions");
        let bytes = self.data.len() / count;
        Self { shape, data: &self.data[i * bytes..][..bytes], ..*self }
    }

    /// A checkpoint error about this tensor.
    pub fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::Checkpoint { path: self.file.to_path_buf(), what: format!("tensor {} {what}", self.name) }
    }
}

/// The tensors of one model, wherever in its folder they lie.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    shards: Arc<Vec<Shard>>,           // tables keep them mapped
    tensors: BTreeMap<String, usize>,  // name -> shard
    permuted: BTreeMap<String, usize>, // name -> width of the heads whose rows GGUF has reordered
    quantization: Quantization,
    larger_than_memory: bool,
}

/// `model.safetensors.index.json`; its other fields say nothing that the shards do not.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

const INDEX: &str = "model.safetensors.index.json";
const DOWNLOAD: &str = "download the checkpoint again";

impl Checkpoint {
    /// Opens what is at `path`: a GGUF file (of a split model any of its files), or a folder with
    /// `model.safetensors.index.json` and its shards, or `model.safetensors`, or else every `*.safetensors`, or
    /// else the GGUF model in it.
    ///
    /// How weights are quantized is read from the folder's `config.json`, where there is one. Tensors of GGUF files get
    /// the names that most architectures have: [`open_as`](Self::open_as) takes those of others.
    /// Errors: `Error::Checkpoint` when there is none, a shard is missing or damaged, or shards and index disagree.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, || Quantization::of_folder(path), &[])
    }

    /// As [`open`](Self::open), of a folder whose `config.json` was read before. `names`: what GGUF files of some
    /// architectures call their tensors.
    pub fn open_as(path: &Path, quantization: Quantization, names: &[gguf::GgufNames]) -> Result<Self> {
        Self::open_with(path, || Ok(quantization), names)
    }

    fn open_with(
        path: &Path,
        quantization: impl FnOnce() -> Result<Quantization>,
        names: &[gguf::GgufNames],
    ) -> Result<Self> {
        if path.is_file() && path.extension().is_some_and(|e| e == "gguf") {
            return Self::open_gguf(path.parent().unwrap_or(path), path, names);
        }
        let dir = path;
        if !dir.is_dir() {
            return Err(Error::Checkpoint {
                path: dir.to_path_buf(),
                what: "is no folder; give the folder of a checkpoint".into(),
            });
        }
        let index_path = dir.join(INDEX);
        let single = dir.join("model.safetensors");
        let index = if index_path.is_file() { Some(read_index(&index_path)?) } else { None };
        let files = match &index {
            Some(index) => indexed_files(dir, index)?,
            None if single.is_file() => vec![single],
            None => all_files(dir)?,
        };
        if files.is_empty() {
            return match gguf::in_folder(dir)? {
                Some(file) => Self::open_gguf(dir, &file, names),
                None => {
                    let what = "holds no *.safetensors and no *.gguf; give the folder of a checkpoint in one of these \
                                formats"
                        .into();
                    Err(Error::Checkpoint { path: dir.to_path_buf(), what })
                }
            };
        }
        let shards = files.iter().map(|file| Shard::open(file, parse_safetensors)).collect::<Result<Vec<_>>>()?;
        let checkpoint = Self::new(dir, shards, quantization()?)?;
        for (name, file) in index.iter().flat_map(|index| &index.weight_map) {
            let holder = checkpoint.tensors.get(name).map(|&i| checkpoint.shards[i].path());
            if holder != Some(dir.join(file).as_path()) {
                let what = format!("tensor {name} is missing, although {INDEX} says it is here; {DOWNLOAD}");
                return Err(Error::Checkpoint { path: dir.join(file), what });
            }
        }
        Ok(checkpoint)
    }

    fn open_gguf(dir: &Path, file: &Path, all: &[gguf::GgufNames]) -> Result<Self> {
        let files = gguf::files_of(file)?;
        let (mut names, mut heads, mut permuted) = (gguf::GgufNames::default(), BTreeMap::new(), BTreeMap::new());
        let mut shards = Vec::new();
        for (i, file) in files.iter().enumerate() {
            shards.push(Shard::open(file, |bytes| {
                let mut parsed = gguf::parse(bytes)?;
                gguf::check_split(&parsed.metadata, i, files.len())?;
                if i == 0 {
                    let architecture = parsed.metadata.get("general.architecture").and_then(Value::as_str);
                    let own = all.iter().find(|names| Some(names.architecture) == architecture);
                    names = own.copied().unwrap_or_default();
                    heads = std::mem::take(&mut parsed.metadata);
                    heads.retain(|key, _| key.contains(".attention.head_count"));
                }
                let (entries, reordered) = gguf::translate(parsed, &names, &heads)?;
                permuted.extend(reordered);
                Ok(entries)
            })?);
        }
        Ok(Self { permuted, ..Self::new(dir, shards, Quantization::NONE)? })
    }

    /// Errors: `Error::Checkpoint` when two shards hold a tensor of one name.
    fn new(dir: &Path, shards: Vec<Shard>, quantization: Quantization) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (i, shard) in shards.iter().enumerate() {
            for name in shard.names() {
                if let Some(first) = tensors.insert(name.to_string(), i) {
                    let first: &Shard = &shards[first];
                    let what = format!(
                        "tensor {name} is also in {}; keep the shards of one checkpoint only",
                        first.path().display()
                    );
                    return Err(Error::Checkpoint { path: shard.path().to_path_buf(), what });
                }
            }
        }
        let bytes: u64 = shards.iter().map(|shard| shard.file_bytes()).sum();
        let larger_than_memory = bytes > crate::limits::available_bytes() / 2;
        Ok(Self {
            dir: dir.to_path_buf(),
            shards: Arc::new(shards),
            tensors,
            permuted: BTreeMap::new(),
            quantization,
            larger_than_memory,
        })
    }

    /// The folder it was opened from.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path())
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor called `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        self.shards[*self.tensors.get(name)?].get(name)
    }

    /// Whether there is a tensor of this name, or of a matrix in a format that has names of its own.
    pub fn has(&self, name: &str) -> bool {
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let packed = |suffix: &&str| self.get(&format!("{stem}.{suffix}")).is_some();
        self.get(name).is_some() || ["weight_packed", "qweight"].iter().any(packed)
    }

    /// The tensor called `name`. Errors: `Error::Checkpoint` naming it and the folder.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        self.get(name).ok_or_else(|| Error::Checkpoint {
            path: self.dir.clone(),
            what: format!(
                "tensor {name} is missing: config.json and weights do not belong together, or the download is \
                 incomplete"
            ),
        })
    }

    /// How its config.json says that weights are quantized.
    pub fn quantization(&self) -> &Quantization {
        &self.quantization
    }

    /// The width of the heads of a matrix whose rows GGUF has reordered; `None`: they are as they should be.
    pub(crate) fn permuted_head(&self, name: &str) -> Option<usize> {
        self.permuted.get(name).copied()
    }

    /// Asks the system to read ahead the bytes of a tensor that is needed soon.
    pub fn prefetch(&self, view: &TensorView<'_>) {
        if let Some(&shard) = self.tensors.get(view.name) {
            self.shards[shard].prefetch(view.data);
        }
    }

    /// Gives the memory of a tensor back after use: its pages leave the process, and are read again if it is used
    /// again.
    ///
    /// The page cache keeps them unless the checkpoint is larger than half of the free memory: a page read once is the
    /// first the kernel reclaims, and a small checkpoint is likely read again soon (resident weights, a second
    /// precision). A large one would push out the cache file that is being written, so its pages are dropped from
    /// the page cache too.
    pub fn release(&self, view: &TensorView<'_>) {
        if let Some(&shard) = self.tensors.get(view.name) {
            self.shards[shard].release(view.data, self.larger_than_memory);
        }
    }

    /// Which of [`files`](Self::files), by number, holds the tensor called `name`.
    pub(crate) fn file_of(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).copied()
    }

    /// What the system says of file number `i` of [`files`](Self::files), as it was opened.
    pub(crate) fn metadata(&self, i: usize) -> Result<std::fs::Metadata> {
        self.shards[i].metadata()
    }
}

fn read_index(path: &Path) -> Result<Index> {
    let text = crate::file::read(path).map_err(Error::io(path))?;
    serde_json::from_slice(&text).map_err(|e| Error::Checkpoint {
        path: path.to_path_buf(),
        what: format!("is not an index of shards ({e}); {DOWNLOAD}"),
    })
}

/// The distinct shards an index names, each checked to be a plain name in `dir` and there.
fn indexed_files(dir: &Path, index: &Index) -> Result<Vec<PathBuf>> {
    let mut names: Vec<&str> = index.weight_map.values().map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let mut files = Vec::with_capacity(names.len());
    for name in &names {
        if Path::new(name).file_name() != Some(name.as_ref()) {
            let what = format!("names a shard outside of its folder, {name:?}; {DOWNLOAD}");
            return Err(Error::Checkpoint { path: dir.join(INDEX), what });
        }
        let file = dir.join(name);
        if !file.is_file() {
            let what = format!("this shard of {} is missing; finish the download", names.len());
            return Err(Error::Checkpoint { path: file, what });
        }
        files.push(file);
    }
    if files.is_empty() {
        return Err(Error::Checkpoint { path: dir.join(INDEX), what: format!("names no tensor; {DOWNLOAD}") });
    }
    Ok(files)
}

fn all_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
        let path = entry.map_err(Error::io(dir))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
