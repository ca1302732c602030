//! The header of a cache file: written, and read from bytes that may be hostile.

use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::pack::{ExpertKind, ExpertLayout, Precisions};
use crate::{Error, Result};

/// First bytes of a complete cache file.
pub const MAGIC: [u8; 8] = *b"MOEBIUS\0";
/// First bytes of a cache file that is not complete.
const MAGIC_PARTIAL: [u8; 8] = *b"MOEBPART";
/// Version of the header and of the packed layout.
pub const VERSION: u32 = 4;
/// The oldest one that is read; it lacks MXFP4 and scales in F16.
pub const OLDEST_VERSION: u32 = 2;
/// Layers begin at multiples of this.
pub const PAGE_BYTES: u64 = 4096;

const PREFIX_BYTES: usize = 64;
const RECORD_BYTES: usize = 32;
const MAX_JSON_BYTES: usize = 1 << 20;
const MAX_DIMENSION: usize = 1 << 20;
const MAX_EXPERTS: usize = 1 << 16;
const MAX_LAYERS: usize = 1 << 12;
const MAX_BYTES: u128 = 1 << 60;

/// What a cache file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Name of the model, for people.
    pub model: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of one expert.
    pub intermediate: usize,
    /// Experts of each layer.
    pub num_experts: usize,
    /// What each of them has.
    pub kind: ExpertKind,
    /// How the weights are stored.
    pub precision: Precisions,
    /// The layers with experts, in the model's order.
    pub layers: Vec<LayerEntry>,
    /// What it was made from; `None` for random weights.
    pub source: Option<Source>,
}

/// What a cache is to hold.
#[derive(Clone, Debug)]
pub struct Contents<'a> {
    /// Name of the model, for people.
    pub model: &'a str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of one expert.
    pub intermediate: usize,
    /// Experts of each layer.
    pub num_experts: usize,
    /// What each of them has.
    pub kind: ExpertKind,
    /// How the weights are stored.
    pub precision: Precisions,
    /// Numbers, in the model, of the layers with experts, in order.
    pub layers: &'a [usize],
}

/// One layer of experts in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerEntry {
    /// Number of the layer in the model.
    pub layer: usize,
    /// Where it begins in the file, a multiple of 4096.
    pub offset: u64,
    /// Its size in bytes: experts times the stride of one.
    pub bytes: u64,
    /// XXH3 of its expert records (see [`ExpertRecord`]).
    pub checksum: u64,
}

/// Where the weights of a cache came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Short name of the content: 16 hexadecimal digits, also in the file's name.
    pub key: String,
    /// The folder of the checkpoint.
    pub dir: String,
    /// State of its files as they were read.
    pub files: Vec<FileState>,
    /// As [`Job::weights_suffice`](crate::convert::Job::weights_suffice); where a file does not say, they do.
    #[serde(default = "yes")]
    pub weights_suffice: bool,
    /// The [`Calibration`](crate::convert::Calibration)'s name; `None`: codes are nearest to the weights themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<String>,
}

fn yes() -> bool {
    true
}

fn is_gated(kind: &ExpertKind) -> bool {
    *kind == ExpertKind::Gated
}

/// What the file system says of a file; equal states are taken for equal content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // the words of stat(2)
pub struct FileState {
    pub name: String,
    pub bytes: u64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    pub inode: u64,
}

/// XXH3-64 of one packed expert and of the source tensors it was made from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertRecord {
    /// Of the packed bytes, padding included.
    pub packed: u64,
    /// Of the whole tensors `gate`, `up` and `down` as they lie in the checkpoint.
    pub source: [u64; 3],
}

/// The part of the header that is JSON.
#[derive(Serialize, Deserialize)]
struct HeaderJson {
    model: String,
    hidden: usize,
    intermediate: usize,
    num_experts: usize,
    num_layers: usize,
    #[serde(default, skip_serializing_if = "is_gated")]
    experts: ExpertKind,
    precision: Precisions,
    source: Option<Source>,
}

impl Header {
    /// Lays out a file: offsets and sizes are computed, checksums are zero. Errors: `Error::Invalid` when the
    /// dimensions make no cache.
    pub(crate) fn new(contents: &Contents<'_>, source: Option<Source>) -> Result<Self> {
        let &Contents { model, hidden, intermediate, num_experts, kind, ref precision, layers } = contents;
        let layers = layers.iter().map(|&layer| LayerEntry { layer, offset: 0, bytes: 0, checksum: 0 }).collect();
        let mut header = Header {
            model: model.to_string(),
            hidden,
            intermediate,
            num_experts,
            kind,
            precision: precision.clone(),
            layers,
            source,
        };
        header.check().map_err(|what| Error::Invalid(format!("{model}: {what}")))?;
        let mut offset = header.region_bytes() as u64;
        for i in 0..header.layers.len() {
            let bytes = (num_experts * header.layout(i).bytes()) as u64;
            (header.layers[i].offset, header.layers[i].bytes) = (offset, bytes);
            offset = (offset + bytes).next_multiple_of(PAGE_BYTES);
        }
        Ok(header)
    }

    /// Size of the file: the end of the last layer, rounded up to whole pages.
    pub fn file_bytes(&self) -> u64 {
        self.layers.last().map_or(0, |last| last.offset + last.bytes).next_multiple_of(PAGE_BYTES)
    }

    /// The layout of each expert of layer index `i`; the header was checked to have one.
    pub fn layout(&self, i: usize) -> ExpertLayout {
        self.kind.layout(self.hidden, self.intermediate, self.precision.layer(i)).expect("a checked header")
    }

    fn json(&self) -> Vec<u8> {
        let description = HeaderJson {
            model: self.model.clone(),
            hidden: self.hidden,
            intermediate: self.intermediate,
            num_experts: self.num_experts,
            num_layers: self.layers.len(),
            experts: self.kind,
            precision: self.precision.clone(),
            source: self.source.clone(),
        };
        serde_json::to_vec(&description).expect("plain data")
    }

    /// Where the record of layer `i` begins: its entry, then those of its experts.
    pub(crate) fn record_offset(&self, i: usize) -> usize {
        table_offset(self.json().len()) + i * layer_record_bytes(self.num_experts)
    }

    fn region_bytes(&self) -> usize {
        self.record_offset(self.layers.len()).next_multiple_of(PAGE_BYTES as usize)
    }

    /// Whether it is within the bounds that [`parse`] insists on. Errors: one clause.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        let bounded = |what, value: usize, max: usize| match value {
            0 => Err(format!("{what} is zero")),
            v if v > max => Err(format!("{what} is {v}, more than {max}")),
            _ => Ok(()),
        };
        bounded("hidden size", self.hidden, MAX_DIMENSION)?;
        bounded("expert size", self.intermediate, MAX_DIMENSION)?;
        bounded("number of experts", self.num_experts, MAX_EXPERTS)?;
        bounded("number of layers", self.layers.len(), MAX_LAYERS)?;
        bounded("description", self.json().len(), MAX_JSON_BYTES)?;
        if !self.precision.are_of(self.layers.len()) {
            return Err("has precisions of another number of layers".into());
        }
        for precision in self.precision.distinct() {
            let layout = self.kind.layout(self.hidden, self.intermediate, precision).map_err(|e| e.to_string())?;
            // Offsets are sums of at most these, so none of them overflows.
            if layout.bytes() as u128 * self.num_experts as u128 * self.layers.len() as u128 > MAX_BYTES {
                return Err("experts take more than 2^60 bytes".into());
            }
        }
        match self.layers.windows(2).all(|pair| pair[0].layer < pair[1].layer) {
            true => Ok(()),
            false => Err("layers are not in order".into()),
        }
    }

    /// The whole header region, up to the first layer. `experts` holds the records of all layers in order.
    pub(crate) fn encode(&self, experts: &[ExpertRecord]) -> Vec<u8> {
        assert_eq!(experts.len(), self.layers.len() * self.num_experts, "experts");
        let mut out = self.encode_partial();
        out[..8].copy_from_slice(&MAGIC);
        for (i, experts) in experts.chunks(self.num_experts).enumerate() {
            let part = encode_layer(&self.layers[i], experts);
            out[self.record_offset(i)..][..part.len()].copy_from_slice(&part);
        }
        let checksum = checksum(&out);
        out[24..32].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// The header region of a file whose layers are yet to come: no records, and first bytes that no reader takes for a
    /// cache.
    pub(crate) fn encode_partial(&self) -> Vec<u8> {
        let json = self.json();
        let mut out = Vec::with_capacity(self.region_bytes());
        out.extend(MAGIC_PARTIAL);
        out.extend(VERSION.to_le_bytes());
        out.extend((json.len() as u32).to_le_bytes());
        out.extend(self.file_bytes().to_le_bytes());
        out.resize(PREFIX_BYTES, 0);
        out.extend(json);
        out.resize(self.region_bytes(), 0);
        out
    }
}

/// Precision and source of a cache file, complete or not, without any check; `None` where there is nothing of the kind.
pub(crate) fn peek(path: &Path) -> Option<(Precisions, Source)> {
    let file = crate::file::open(path).ok()?;
    let mut prefix = [0; PREFIX_BYTES];
    file.read_exact_at(&mut prefix, 0).ok()?;
    if ![MAGIC, MAGIC_PARTIAL].contains(prefix[..8].as_array()?) {
        return None;
    }
    let json_bytes = u32::from_le_bytes(*prefix[12..16].as_array()?) as usize;
    let mut json = vec![0; json_bytes.min(MAX_JSON_BYTES)];
    file.read_exact_at(&mut json, PREFIX_BYTES as u64).ok()?;
    let description: HeaderJson = serde_json::from_slice(&json).ok()?;
    Some((description.precision, description.source?))
}

/// One layer's part of the table. The entry's checksum is taken from `experts`.
pub(crate) fn encode_layer(entry: &LayerEntry, experts: &[ExpertRecord]) -> Vec<u8> {
    let mut records = Vec::with_capacity(experts.len() * RECORD_BYTES);
    for expert in experts {
        records.extend(expert.packed.to_le_bytes());
        records.extend(expert.source.iter().flat_map(|hash| hash.to_le_bytes()));
    }
    let mut out = Vec::with_capacity(RECORD_BYTES + records.len());
    for field in [entry.layer as u64, entry.offset, entry.bytes, xxhash_rust::xxh3::xxh3_64(&records)] {
        out.extend(field.to_le_bytes());
    }
    out.extend(records);
    out
}

/// Reads one layer's part of the table; `None` when its checksum does not fit its records. Panics: `bytes` is no whole
/// part (a bug).
pub(crate) fn decode_layer(bytes: &[u8]) -> Option<(LayerEntry, Vec<ExpertRecord>)> {
    let words: Vec<u64> = bytes.as_chunks().0.iter().map(|&word| u64::from_le_bytes(word)).collect();
    let entry = LayerEntry { layer: words[0].try_into().ok()?, offset: words[1], bytes: words[2], checksum: words[3] };
    if entry.checksum != xxhash_rust::xxh3::xxh3_64(&bytes[RECORD_BYTES..]) {
        return None;
    }
    let experts = words[4..]
        .as_chunks()
        .0
        .iter()
        .map(|&[packed, gate, up, down]| ExpertRecord { packed, source: [gate, up, down] });
    Some((entry, experts.collect()))
}

/// Bytes of one layer's part of the table.
pub(crate) fn layer_record_bytes(num_experts: usize) -> usize {
    (1 + num_experts) * RECORD_BYTES
}

fn table_offset(json_bytes: usize) -> usize {
    (PREFIX_BYTES + json_bytes).next_multiple_of(RECORD_BYTES)
}

/// XXH3 of a header region, all but the checksum's own eight bytes.
fn checksum(region: &[u8]) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(&region[..24]);
    hasher.update(&region[32..]);
    hasher.digest()
}

/// Makes size and checksum of a header right, where it has room for them: for tests that look behind these checks.
#[doc(hidden)]
pub fn reseal(bytes: &mut [u8]) {
    let Some(prefix) = bytes.get(..PREFIX_BYTES) else { return };
    let json_bytes = u32::from_le_bytes([prefix[12], prefix[13], prefix[14], prefix[15]]) as usize;
    let file_bytes = bytes.len() as u64;
    bytes[16..24].copy_from_slice(&file_bytes.to_le_bytes());
    let json = bytes.get(PREFIX_BYTES..PREFIX_BYTES.saturating_add(json_bytes)).unwrap_or_default();
    let Ok(description) = serde_json::from_slice::<HeaderJson>(json) else { return };
    let table_bytes =
        description.num_layers.saturating_mul(layer_record_bytes(description.num_experts.min(MAX_EXPERTS)));
    let region_bytes =
        table_offset(json_bytes).saturating_add(table_bytes).checked_next_multiple_of(PAGE_BYTES as usize);
    if let Some(region) = region_bytes.and_then(|region_bytes| bytes.get(..region_bytes)) {
        let checksum = checksum(region);
        bytes[24..32].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// Reads the header at the start of `bytes`, a whole cache file of which only the header is looked at.
///
/// Everything it returns is consistent: layers lie one after the other, on page boundaries, inside of the file.
/// Errors: one clause that names the fault.
pub fn parse(bytes: &[u8]) -> std::result::Result<(Header, Vec<ExpertRecord>), String> {
    let prefix = bytes.get(..PREFIX_BYTES).ok_or_else(|| format!("has {} bytes, too few for a cache", bytes.len()))?;
    let u32_at = |at: usize| u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    if prefix[..8] != MAGIC {
        return Err("is no Moebius cache, or one whose build was not finished".into());
    }
    let (version, json_bytes, file_bytes) = (u32_at(8), u32_at(12) as usize, u64_at(16));
    if !(OLDEST_VERSION..=VERSION).contains(&version) {
        return Err(format!(
            "is of format version {version}, and this program reads versions {OLDEST_VERSION} to {VERSION}"
        ));
    }
    if file_bytes != bytes.len() as u64 {
        return Err(format!("has {} bytes where its header says {file_bytes}: it was cut off or damaged", bytes.len()));
    }
    if json_bytes > MAX_JSON_BYTES {
        return Err(format!("claims a description of {json_bytes} bytes"));
    }
    let damaged = || "has a damaged header".to_string();
    let json = bytes.get(PREFIX_BYTES..PREFIX_BYTES + json_bytes).ok_or_else(damaged)?;
    let description: HeaderJson = serde_json::from_slice(json).map_err(|_| damaged())?;
    if description.num_layers > MAX_LAYERS || description.num_experts > MAX_EXPERTS {
        return Err(damaged());
    }
    let record_bytes = layer_record_bytes(description.num_experts);
    let table = table_offset(json_bytes);
    let table_end = table + description.num_layers * record_bytes;
    let region = bytes.get(..table_end.next_multiple_of(PAGE_BYTES as usize)).ok_or_else(damaged)?;
    if checksum(region) != u64_at(24) {
        return Err(damaged());
    }

    let mut header = Header {
        model: description.model,
        hidden: description.hidden,
        intermediate: description.intermediate,
        num_experts: description.num_experts,
        kind: description.experts,
        precision: description.precision,
        layers: Vec::new(),
        source: description.source,
    };
    let mut experts = Vec::new();
    for part in region[table..table_end].chunks_exact(record_bytes) {
        let (entry, records) = decode_layer(part).ok_or_else(damaged)?;
        header.layers.push(entry);
        experts.extend(records);
    }
    header.check()?;
    let mut offset = region.len() as u64;
    for (i, entry) in header.layers.iter().enumerate() {
        let layer_bytes = header.num_experts as u64 * header.layout(i).bytes() as u64;
        if (entry.offset, entry.bytes) != (offset, layer_bytes) {
            return Err(damaged());
        }
        offset = (offset + layer_bytes).next_multiple_of(PAGE_BYTES);
    }
    match offset == file_bytes {
        true => Ok((header, experts)),
        false => Err(damaged()),
    }
}
