//! The header of a GGUF file: metadata, and where each tensor lies; read from bytes that may be hostile.
//!
//! Source: the GGUF specification of ggml, versions 2 and 3.

mod names;
mod types;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;

pub use self::names::GgufNames;
pub use self::types::GgmlType;
use super::{Dtype, Entry};
use crate::file::MappedFile;
use crate::{Error, Result};

/// Elements of all arrays of a header together: a vocabulary and its merges take a tenth of that.
const MAX_ARRAY_ITEMS: usize = 1 << 23;
/// Files of one model.
const MAX_SPLITS: u64 = 1 << 12;
const AGAIN: &str = "download it again";

/// What the header of a GGUF file says.
#[derive(Clone, Debug, Default)]
pub struct GgufHeader {
    /// Keys and values, as JSON has them; a number that JSON lacks is null.
    pub metadata: BTreeMap<String, Value>,
    /// Tensors by the names they have in the file, dimensions with the contiguous one last.
    pub tensors: HashMap<String, Entry>,
}

/// Bytes read one after the other.
struct ByteReader<'a> {
    bytes: &'a [u8],
    at: usize,
    items: usize, // of arrays, so far
}

type Parsed<T> = std::result::Result<T, String>;

impl<'a> ByteReader<'a> {
    fn take(&mut self, count: u64) -> Parsed<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(count).ok().and_then(|count| rest.get(..count)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => Err(format!("ends inside of its header: it is cut off, or claims impossible lengths; {AGAIN}")),
        }
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        Ok(*self.take(N as u64)?.as_array().expect("as many bytes as were asked for"))
    }

    fn u32(&mut self) -> Parsed<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Parsed<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn string(&mut self) -> Parsed<String> {
        let bytes = self.u64()?;
        // Vocabularies hold a few pieces that are no text; none of them is a name.
        Ok(String::from_utf8_lossy(self.take(bytes)?).into_owned())
    }

    fn value(&mut self, kind: u32, may_nest: bool) -> Parsed<Value> {
        Ok(match kind {
            0 => self.array::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.array()?).into(),
            2 => u16::from_le_bytes(self.array()?).into(),
            3 => i16::from_le_bytes(self.array()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.array()?).into(),
            6 => f32::from_le_bytes(self.array()?).into(),
            7 => (self.array::<1>()?[0] != 0).into(),
            8 => self.string()?.into(),
            9 if may_nest => {
                let (kind, count) = (self.u32()?, self.u64()?);
                // Every element takes a byte or more, so what is left of the file bounds their number too.
                let fits = usize::try_from(count)
                    .ok()
                    .filter(|&n| n <= self.bytes.len() - self.at && n <= MAX_ARRAY_ITEMS - self.items);
                let Some(count) = fits else { return Err(format!("has an array of {count} elements; {AGAIN}")) };
                self.items += count;
                let mut items = Vec::new();
                for _ in 0..count {
                    items.push(self.value(kind, false)?);
                }
                Value::Array(items)
            }
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.array()?).into(),
            12 => f64::from_le_bytes(self.array()?).into(),
            other => return Err(format!("has a value of the unknown type {other}; {AGAIN}")),
        })
    }
}

/// Bytes of a tensor's name at most. llama.cpp writes up to 63.
const MAX_NAME_BYTES: usize = 256;

/// Reads the header of `bytes`, a whole GGUF file; every range it returns lies inside of them, and none overlaps
/// another.
///
/// Errors: one clause that names the fault and its remedy.
pub fn parse(bytes: &[u8]) -> Parsed<GgufHeader> {
    let mut reader = ByteReader { bytes, at: 0, items: 0 };
    if bytes.get(..4) != Some(b"GGUF") {
        return Err(format!("does not begin with GGUF, so it is no such file; {AGAIN}"));
    }
    reader.at = 4;
    match reader.u32()? {
        2 | 3 => {}
        1 => return Err("is GGUF version 1, which nothing writes any more: convert the model again".into()),
        v if (2..=3).contains(&v.swap_bytes()) => {
            return Err("is a big-endian GGUF file: convert the model for little-endian machines".into());
        }
        v => {
            return Err(format!(
                "is GGUF version {v}, and this program reads 2 and 3: update it, or convert the model again"
            ));
        }
    }
    let (tensors, pairs) = (reader.u64()?, reader.u64()?);
    // A tensor's description takes 32 bytes or more, a pair 13.
    let left = (bytes.len() - reader.at) as u64;
    if tensors > left / 32 || pairs > left / 13 {
        return Err(format!(
            "claims {tensors} tensors and {pairs} pairs of metadata in {} bytes: it is cut off; {AGAIN}",
            bytes.len()
        ));
    }
    let mut gguf = GgufHeader::default();
    for _ in 0..pairs {
        let (key, kind) = (reader.string()?, reader.u32()?);
        let value = reader.value(kind, true)?;
        if gguf.metadata.insert(key.clone(), value).is_some() {
            return Err(format!("has the key {key} twice; {AGAIN}"));
        }
    }
    let alignment = match gguf.metadata.get("general.alignment").map(Value::as_u64) {
        None => 32,
        Some(Some(a)) if a.is_power_of_two() && (8..=1 << 20).contains(&a) => a,
        Some(_) => return Err(format!("has an alignment that is no power of two from 8 to 1048576; {AGAIN}")),
    };
    let mut found = Vec::new();
    for _ in 0..tensors {
        let name = reader.string()?;
        if name.len() > MAX_NAME_BYTES {
            return Err(format!("a tensor's name has {} bytes, more than {MAX_NAME_BYTES}; {AGAIN}", name.len()));
        }
        let dims = reader.u32()?;
        if dims == 0 || dims > 4 {
            return Err(format!("tensor {name} has {dims} dimensions; {AGAIN}"));
        }
        let mut shape = (0..dims).map(|_| reader.u64()).collect::<Parsed<Vec<u64>>>()?;
        shape.reverse(); // the file has the contiguous one first
        let (kind, offset) = (reader.u32()?, reader.u64()?);
        found.push((name, shape, kind, offset));
    }
    let start = (reader.at as u64).next_multiple_of(alignment);
    let mut taken = Vec::new();
    for (name, shape, kind, offset) in found {
        let dtype = types::dtype(kind).map_err(|what| format!("tensor {name} is of the type {what}"))?;
        let (block_elements, block_bytes) = dtype.block();
        let elements = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
        let row = shape.last().copied().unwrap_or(0);
        if row % block_elements as u64 != 0 {
            return Err(format!(
                "tensor {name} has rows of {row} weights, which blocks of {block_elements} do not fill; {AGAIN}"
            ));
        }
        let bytes_of = elements.and_then(|n| (n / block_elements as u64).checked_mul(block_bytes as u64));
        let end = bytes_of
            .and_then(|size| size.checked_add(offset)?.checked_add(start))
            .filter(|&end| end <= bytes.len() as u64);
        let (Some(size), Some(end)) = (bytes_of, end) else {
            return Err(format!("tensor {name} lies beyond the end of the file: it is cut off; {AGAIN}"));
        };
        if size == 0 || offset % alignment != 0 {
            return Err(format!("tensor {name} is empty, or does not begin at a multiple of {alignment}; {AGAIN}"));
        }
        taken.push((end - size, end, name.clone()));
        let entry = Entry {
            dtype,
            shape: shape.iter().map(|&n| n as usize).collect(),
            bytes: (end - size) as usize..end as usize,
        };
        if gguf.tensors.insert(name.clone(), entry).is_some() {
            return Err(format!("has the tensor {name} twice; {AGAIN}"));
        }
    }
    taken.sort_unstable();
    match taken.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        Some(pair) => Err(format!("tensors {} and {} overlap; {AGAIN}", pair[0].2, pair[1].2)),
        None => Ok(gguf),
    }
}

/// The metadata of a GGUF file, of the first where a model is split.
///
/// Errors: `Error::Io`; `Error::Checkpoint` when it is none.
pub fn metadata(path: &Path) -> Result<BTreeMap<String, Value>> {
    let (_, map) = MappedFile::open(path, AGAIN)?;
    let checkpoint = |what| Error::Checkpoint { path: path.to_path_buf(), what };
    if map.is_empty() {
        return Err(checkpoint(format!("is empty; {AGAIN}")));
    }
    Ok(parse(&map).map_err(checkpoint)?.metadata)
}

/// The part of a split file's name before its number, and its number and count: `name-00001-of-00003.gguf`.
fn split_name(path: &Path) -> Option<(String, u64, u64)> {
    let stem = path.file_stem()?.to_str()?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| (s.len() == 5).then(|| s.parse().ok()).flatten();
    Some((base.to_string(), digits(number)?, digits(count)?))
}

/// All files of the model that `path` is, or belongs to, in order.
///
/// Errors: `Error::Checkpoint` naming the first file that is missing.
pub fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    let Some((base, _, count)) = split_name(path) else { return Ok(vec![path.to_path_buf()]) };
    let checkpoint = |path: &Path, what: String| Err(Error::Checkpoint { path: path.to_path_buf(), what });
    if !(1..=MAX_SPLITS).contains(&count) {
        return checkpoint(path, format!("is named as one of {count} files: give it its own name back"));
    }
    let files: Vec<PathBuf> =
        (1..=count).map(|i| path.with_file_name(format!("{base}-{i:05}-of-{count:05}.gguf"))).collect();
    match files.iter().find(|file| !file.is_file()) {
        Some(missing) => checkpoint(missing, format!("this one of {count} files is missing; finish the download")),
        None => Ok(files),
    }
}

/// The model in a folder: its one GGUF file, or the first of its split files. `None` without any.
///
/// Errors: `Error::Checkpoint` when there are several models.
pub fn in_folder(dir: &Path) -> Result<Option<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
        let path = entry.map_err(Error::io(dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // A vision tower lies beside the language model in a file of its own.
        if name.ends_with(".gguf")
            && !name.starts_with("mmproj")
            && path.is_file()
            && split_name(&path).is_none_or(|(_, n, _)| n == 1)
        {
            files.push(path);
        }
    }
    files.sort();
    match files.len() {
        0 | 1 => Ok(files.pop()),
        n => {
            let name = files[0].file_name().unwrap_or_default().to_string_lossy().into_owned();
            let what = format!("holds {n} models in GGUF files: give the file to run, such as {name}");
            Err(Error::Checkpoint { path: dir.to_path_buf(), what })
        }
    }
}

/// Whether file `i` of `count` says so of itself. Errors: one clause.
pub(super) fn check_split(metadata: &BTreeMap<String, Value>, i: usize, count: usize) -> Parsed<()> {
    let number = |key: &str| metadata.get(key).and_then(Value::as_u64);
    let (no, of) = (number("split.no"), number("split.count").filter(|&of| of > 1));
    match (of, count) {
        (None, 1) => Ok(()),
        (Some(of), _) if of == count as u64 && no == Some(i as u64) => Ok(()),
        (Some(of), 1) => Err(format!("is one of {of} files: give them their names NAME-00001-of-{of:05}.gguf back")),
        _ => Err(format!("is named as file {} of {count}, but says otherwise of itself; {AGAIN}", i + 1)),
    }
}

/// Tensors by name, and the widths of the heads of those whose rows the converter has reordered.
pub(super) type Translated = (HashMap<String, Entry>, Vec<(String, usize)>);

/// Tensors under the names that Hugging Face gives them.
///
/// Errors: one clause.
pub(super) fn translate(gguf: GgufHeader, names: &GgufNames, heads: &BTreeMap<String, Value>) -> Parsed<Translated> {
    let (mut entries, mut permuted) = (HashMap::new(), Vec::new());
    for (name, entry) in gguf.tensors {
        let hf = names.hf_name(&name);
        if let Some(key) = names.permuted_heads(&name) {
            let count = heads.get(&key).and_then(Value::as_u64).unwrap_or(0) as usize;
            let rows = entry.shape.first().copied().unwrap_or(0);
            if count == 0 || rows % count != 0 || rows / count % 2 != 0 {
                return Err(format!("tensor {name} of {rows} rows does not belong to {count} heads; {AGAIN}"));
            }
            permuted.push((hf.clone(), rows / count));
        }
        if entries.insert(hf.clone(), entry).is_some() {
            return Err(format!("has two tensors that are both {hf}; {AGAIN}"));
        }
    }
    Ok((entries, permuted))
}

impl Dtype {
    /// Elements and bytes of the smallest run that stands for itself.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            Dtype::F64 | Dtype::I64 | Dtype::U64 => (1, 8),
            Dtype::F32 | Dtype::I32 | Dtype::U32 => (1, 4),
            Dtype::F16 | Dtype::BF16 | Dtype::I16 | Dtype::U16 => (1, 2),
            Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::F8E8M0 | Dtype::I8 | Dtype::U8 | Dtype::Bool => (1, 1),
            Dtype::F4 => (2, 1),
            Dtype::Ggml(t) => t.block(),
        }
    }
}
