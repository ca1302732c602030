//! From the bytes of a checkpoint to weights, one file in `formats/` per source format.
//!
//! ```text
//! name, [n, k] ── find ──▶ Source: the tensors it is made of, its Format, and a codec
//!                            decode  rows as f32, of any format
//!                            codes   rows as integers with a scale for each group, where that is what the format is
//!                            blocks  rows as integers whose groups have more than a scale
//! ```
//!
//! Weights that are integers with group scales are packed as they are: nothing is rounded twice. Every codec decodes
//! whole rows, so that a conversion holds a few of them and never a whole tensor.

mod find;
mod formats;
mod latent;
mod list;
mod quantization;
mod scales;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use self::find::Stored;
pub use self::formats::{Format, Library};
use self::formats::{float, fp8};
pub use self::quantization::Quantization;
pub(crate) use self::scales::e8m0;
use crate::checkpoint::{Checkpoint, GgmlType, TensorView};
use crate::pack::{Blocks, CodeType, GROUP_SIZES, MatrixLayout, Precision, ScaleType, Scales};
use crate::{Error, Result};

/// Codes with a scale for each run of inputs: a weight is its code times its scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Integers {
    /// The smallest code there can be.
    pub low: i32,
    /// The largest.
    pub high: i32,
    /// Inputs of a row that share a scale; they divide the row.
    pub group: usize,
    /// Whether the codes of a group are 4 bits, less a zero point.
    pub zeros: bool,
    /// The packed type that is nearest to the source's scales; of the same type they pass exactly.
    pub scales: ScaleType,
    /// The codes whose table has all of their values, or that are floats; `None`: they may be any integers.
    pub table: Option<CodeType>,
}

impl Integers {
    /// Floats of 8 bits, whose codes no integers hold.
    pub const fn fp8(group: usize, scales: ScaleType) -> Self {
        Self { low: i32::MIN, high: i32::MAX, group, zeros: false, scales, table: Some(CodeType::E4m3) }
    }

    /// The weights of a group.
    fn weights(&self, codes: &[i8], scale: f32, out: &mut [f32]) {
        match self.table {
            Some(CodeType::E4m3) => {
                fp8::scaled(bytemuck::cast_slice(codes), scale, out);
            }
            _ => out.iter_mut().zip(codes).for_each(|(out, &code)| *out = f32::from(code) * scale),
        }
    }
}

impl Integers {
    /// Whether packed weights of this precision hold these codes as they are.
    pub fn fit(&self, precision: Precision) -> bool {
        let (Some(row), Some(group_size)) = (precision.row(), precision.group_size()) else { return false };
        let [low, high] = row.codes.range().map(i32::from);
        let values = match row.codes {
            CodeType::Int { .. } if row.scales == Scales::Zeros => self.zeros,
            CodeType::Int { .. } => self.low >= low && self.high <= high,
            of_values => self.table == Some(of_values),
        };
        // Where the type of the scales is a precision's own, others would be rounded.
        let scales = precision.with_scales(self.scales).scales() == self.scales;
        row.scales.are_single() && scales && self.group.is_multiple_of(group_size) && values
    }
}

/// One clause: what is wrong with a tensor.
type Read = std::result::Result<(), String>;

/// Decodes rows of a matrix to f32.
trait Values: Send + Sync {
    /// Rows from `first` on, as many as fill `out`.
    fn rows(&self, first: usize, out: &mut [f32]) -> Read;

    /// Whether the bytes are the rows, one after the other.
    fn as_they_lie(&self) -> bool {
        false
    }
}

/// Gives rows of a matrix as they are stored.
trait Codes: Send + Sync {
    fn integers(&self) -> Integers;

    /// Rows from `first` on, as many as fill `codes` and, one for each group, `scales`.
    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read;
}

/// Gives rows of a matrix as they are stored, whose groups have offsets, or scales of two levels.
trait Blocked: Send + Sync {
    /// Rows from `first` on, as many as `out` has room for.
    fn rows(&self, first: usize, out: &mut Blocks) -> Read;
}

enum Codec<'a> {
    Values(Box<dyn Values + 'a>),
    Codes(Box<dyn Codes + 'a>),
    /// What holds them as they are.
    Blocks(Precision, Box<dyn Blocked + 'a>),
}

/// Which rows of what is stored are those of the matrix.
enum Rows {
    /// From one on, each so many after the one before.
    From { first: usize, step: usize },
    /// Pairs within heads of this width, where the matrix has halves.
    Pairs { head: usize },
    /// These.
    Listed(Vec<usize>),
}

impl Rows {
    const ALL: Self = Self::From { first: 0, step: 1 };

    /// Where row `i` of the matrix is.
    fn stored(&self, i: usize) -> usize {
        match self {
            Self::From { first, step } => first + i * step,
            Self::Pairs { head } => {
                let (within, half) = (i % head, head / 2);
                i - within + within % half * 2 + within / half
            }
            Self::Listed(rows) => rows[i],
        }
    }
}

/// What a format's file makes of tensors, before it has a name.
struct Found<'a> {
    kind: Format,
    words: String,
    parts: Vec<TensorView<'a>>,
    codec: Codec<'a>,
    rows: Rows,
}

impl<'a> Found<'a> {
    /// All rows; `details` follow the format's name.
    fn new(kind: Format, details: &str, parts: Vec<TensorView<'a>>, codec: Codec<'a>) -> Self {
        Self { kind, words: format!("{kind}{details}"), parts, codec, rows: Rows::ALL }
    }

    fn named(self, name: &str, shape: [usize; 2]) -> Source<'a> {
        let Self { kind, words, parts, codec, rows } = self;
        Source { name: name.to_string(), shape, kind, words, parts, codec, rows }
    }
}

/// One matrix of a checkpoint, `[n, k]`, wherever and however it lies.
pub struct Source<'a> {
    name: String,
    shape: [usize; 2],
    kind: Format,
    words: String,
    parts: Vec<TensorView<'a>>,
    codec: Codec<'a>,
    rows: Rows,
}

impl Checkpoint {
    /// The matrix `name`, of shape `[n, k]`, in whichever format it is stored: for itself, stacked with others,
    /// quantized.
    ///
    /// Errors: `Error::Checkpoint` naming the tensor that is missing, misshapen or of a type that is not supported.
    pub fn source(&self, name: &str, shape: [usize; 2]) -> Result<Source<'_>> {
        find::find(self, name, shape)
    }
}

impl<'a> Source<'a> {
    /// These of its rows, in this order. Panics: one is beyond the last (a bug).
    pub fn rows_by(self, order: &[usize]) -> Self {
        let [n, k] = self.shape;
        assert!(order.iter().all(|&row| row < n), "rows");
        let rows = Rows::Listed(order.iter().map(|&row| self.rows.stored(row)).collect());
        Self { shape: [order.len(), k], rows, ..self }
    }

    /// Its name, the one it was asked for by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `[n, k]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Its format.
    pub fn kind(&self) -> Format {
        self.kind
    }

    /// Its format, groups and place, in words.
    pub fn format(&self) -> &str {
        &self.words
    }

    /// The tensors, or parts of them, that it is made of.
    pub fn parts(&self) -> &[TensorView<'a>] {
        &self.parts
    }

    /// Bytes it takes in the checkpoint.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.data.len() as u64).sum()
    }

    /// What it is as integers, if that is what it is.
    pub fn integers(&self) -> Option<Integers> {
        match &self.codec {
            Codec::Values(_) | Codec::Blocks(..) => None,
            Codec::Codes(codes) => Some(codes.integers()),
        }
    }

    /// Whether a precision holds its codes and scales as they are.
    pub fn fits(&self, precision: Precision) -> bool {
        match &self.codec {
            Codec::Values(_) => false,
            Codec::Codes(codes) => codes.integers().fit(precision),
            Codec::Blocks(own, _) => *own == precision,
        }
    }

    /// The tensor that is this matrix as it lies, row after row of plain numbers.
    pub fn plain(&self) -> Option<&TensorView<'a>> {
        let whole = matches!(self.rows, Rows::From { first: 0, step: 1 });
        match (&self.parts[..], &self.codec) {
            ([view], Codec::Values(values)) if whole && values.as_they_lie() => {
                Some(view).filter(|view| view.shape.iter().product::<usize>() == self.shape[0] * self.shape[1])
            }
            _ => None,
        }
    }

    /// The coarsest precision that keeps what is stored; `None` of plain numbers, of which that is for the user to say.
    ///
    /// Integers are kept exactly. What has no packed form of its own becomes INT8: its error is a fraction of the one
    /// that was made before.
    pub fn kept_by(&self) -> Option<Precision> {
        let largest = |length: usize| GROUP_SIZES.into_iter().rev().find(|group| length % group == 0);
        if let Codec::Blocks(precision, _) = self.codec {
            return Some(precision);
        }
        match self.integers() {
            Some(integers) => {
                let Some(group_size) = largest(integers.group) else { return Some(Precision::int8(GROUP_SIZES[0])) };
                let of_any_groups = [Precision::int4, Precision::uint4, Precision::int8].map(|of| of(group_size));
                let [int4, uint4, int8] = of_any_groups.map(|precision| precision.with_scales(integers.scales));
                // The smaller ones first.
                let kept = match self.kind {
                    Format::Gguf(GgmlType::Q5_0) => [Precision::Q5_0; 4],
                    Format::Fp8 => [Precision::fp8(group_size).with_scales(integers.scales); 4],
                    _ => [Precision::Mxfp4, int4, uint4, Precision::Iq4Nl],
                };
                Some(kept.into_iter().find(|&precision| integers.fit(precision)).unwrap_or(int8))
            }
            None if self.kind.is_plain() => None,
            None if self.kind.is_in_groups() => Some(Precision::int8(GROUP_SIZES[0])),
            None => largest(self.shape[1]).map(Precision::int8),
        }
    }

    /// The precision that holds codes and scales as they are; `None` of plain numbers, and of what none does.
    pub fn held_by(&self) -> Option<Precision> {
        let [n, k] = self.shape;
        self.kept_by().filter(|&kept| self.fits(kept) && MatrixLayout::new(n, k, kept).is_ok())
    }

    /// Rows from `first` on, as many as fill `out`, decoded.
    ///
    /// Errors: `Error::Checkpoint` when a value is NaN or too large for BF16. Panics: `out` is not whole rows of the
    /// matrix (a bug).
    pub fn decode(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let k = self.shape[1];
        assert!(out.len() % k == 0 && first + out.len() / k <= self.shape[0], "rows");
        let read = match &self.codec {
            Codec::Values(values) => {
                self.runs(first, out.len() / k, |at, to, count| values.rows(at, &mut out[to * k..][..count * k]))
            }
            Codec::Codes(codec) => {
                let group = codec.integers().group;
                let (mut codes, mut scales) = (vec![0; out.len()], vec![0.0; out.len() / group]);
                let integers = codec.integers();
                self.code_rows(codec.as_ref(), first, &mut codes, &mut scales).map(|()| {
                    for ((out, codes), scale) in out.chunks_exact_mut(group).zip(codes.chunks_exact(group)).zip(scales)
                    {
                        integers.weights(codes, scale, out);
                    }
                })
            }
            Codec::Blocks(precision, _) => {
                let mut blocks = Blocks::default();
                self.block_rows(first, out.len() / k, &mut blocks).map(|()| blocks.dequantize(*precision, k, out))
            }
        };
        let read = read.and_then(|()| if float::all_usable(out) { Ok(()) } else { Err(float::UNUSABLE.into()) });
        read.map_err(|what| self.error(what))
    }

    /// Rows from `first` on as they are stored: `codes` `[rows, k]`, `scales` `[rows, k / group]`.
    ///
    /// Errors: `Error::Checkpoint` when a scale is not finite, or a code is not what the config promised.
    /// Panics: it has no codes, or the lengths do not fit (bugs).
    pub fn codes(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Result<()> {
        let Codec::Codes(codec) = &self.codec else { panic!("{} has no codes", self.name) };
        assert_eq!(codes.len(), scales.len() * codec.integers().group, "codes, scales");
        assert!(codes.len() % self.shape[1] == 0 && first + codes.len() / self.shape[1] <= self.shape[0], "rows");
        self.code_rows(codec.as_ref(), first, codes, scales).map_err(|what| self.error(what))
    }

    /// Rows from `first` on as they are stored, `count` of them.
    ///
    /// Errors: `Error::Checkpoint` when a number is not finite. Panics: it has no blocks (a bug).
    pub fn blocks(&self, first: usize, count: usize, out: &mut Blocks) -> Result<()> {
        assert!(first + count <= self.shape[0], "rows");
        let usable = |out: &Blocks| match &self.codec {
            // Halves of f32 numbers, and E4M3.
            Codec::Blocks(Precision::Nvfp4, _) => {
                out.heads.as_chunks::<2>().0.iter().all(|[_, high]| high & 0x7f80 != 0x7f80)
                    && out.counts.iter().all(|count| count & 0x7f != 0x7f)
            }
            _ => out.heads.iter().all(|bits| bits & 0x7c00 != 0x7c00),
        };
        let read = self.block_rows(first, count, out);
        let read = read.and_then(|()| if usable(out) { Ok(()) } else { Err(float::UNUSABLE.into()) });
        read.map_err(|what| self.error(what))
    }

    fn block_rows(&self, first: usize, count: usize, out: &mut Blocks) -> Read {
        let Codec::Blocks(precision, codec) = &self.codec else { panic!("{} has no blocks", self.name) };
        let layout = |n: usize| MatrixLayout { n, k: self.shape[1], precision: *precision };
        out.resize(&layout(count), count);
        if let Rows::From { first: start, step: 1 } = self.rows {
            return codec.rows(start + first, out);
        }
        let mut row = Blocks::default();
        row.resize(&layout(1), 1);
        self.runs(first, count, |at, to, count| {
            (0..count).try_for_each(|i| {
                codec.rows(at + i, &mut row)?;
                out.set(to + i, &row);
                Ok(())
            })
        })
    }

    fn code_rows(&self, codec: &dyn Codes, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let (k, groups) = (self.shape[1], self.shape[1] / codec.integers().group);
        self.runs(first, codes.len() / k, |at, to, count| {
            codec.rows(at, &mut codes[to * k..][..count * k], &mut scales[to * groups..][..count * groups])
        })?;
        if float::all_usable(scales) { Ok(()) } else { Err(float::UNUSABLE.into()) }
    }

    /// Calls `read(stored row, row from 0, count)` for runs of rows that lie one after the other.
    fn runs(&self, first: usize, count: usize, mut read: impl FnMut(usize, usize, usize) -> Read) -> Read {
        let mut done = 0;
        while done < count {
            let stored = |i: usize| self.rows.stored(first + done + i);
            let start = stored(0);
            let len = (1..count - done).take_while(|&i| stored(i) == start + i).count() + 1;
            read(start, done, len)?;
            done += len;
        }
        Ok(())
    }

    /// XXH3 of its bytes: of a single part's as they lie, of several that of their hashes.
    pub(crate) fn hash(&self) -> u64 {
        joined(self.parts.iter().map(|part| xxh3_64(part.data)))
    }

    /// Hashes that are fed in so many steps, each just before or after the rows it is about are read.
    pub(crate) fn hasher(&self, steps: usize) -> SourceHasher<'_, 'a> {
        SourceHasher { source: self, hashers: self.parts.iter().map(|_| Xxh3::new()).collect(), steps }
    }

    fn error(&self, what: String) -> Error {
        let file = self.parts.first().map_or_else(Default::default, |part| part.file.to_path_buf());
        Error::Checkpoint { path: file, what: format!("tensor {} {what}", self.name) }
    }
}

impl std::fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}, {}", self.name, self.shape, self.words)
    }
}

/// The hash of one part is that part's; several are hashed together.
fn joined(mut hashes: impl ExactSizeIterator<Item = u64>) -> u64 {
    match hashes.len() {
        1 => hashes.next().unwrap_or_default(),
        _ => xxh3_64(&hashes.flat_map(u64::to_le_bytes).collect::<Vec<u8>>()),
    }
}

/// [`Source::hash`], while the bytes are in the cache of the core anyway.
pub(crate) struct SourceHasher<'s, 'a> {
    source: &'s Source<'a>,
    hashers: Vec<Xxh3>,
    steps: usize,
}

impl SourceHasher<'_, '_> {
    /// Step `i` of all: the same share of every part.
    pub(crate) fn step(&mut self, i: usize) {
        for (hasher, part) in self.hashers.iter_mut().zip(&self.source.parts) {
            let at = |i: usize| (part.data.len() as u128 * i as u128 / self.steps as u128) as usize;
            hasher.update(&part.data[at(i)..at(i + 1)]);
        }
    }

    pub(crate) fn finish(self) -> u64 {
        joined(self.hashers.iter().map(Xxh3::digest))
    }
}

/// The coarsest precision that keeps several matrices; `None` when all are plain numbers.
///
/// Scales are F16 where those of all integers are; of a mixture they are BF16, which has the range of both, or F32
/// where one is.
pub fn kept_by_all(sources: &[Source<'_>]) -> Option<Precision> {
    let coarsest = sources.iter().filter_map(Source::kept_by).reduce(Precision::coarsest_of)?;
    let scales = sources.iter().filter_map(Source::integers).map(|integers| integers.scales);
    Some(coarsest.with_scales(scales.reduce(ScaleType::of_both).unwrap_or_default()))
}

/// Decodes FP8 values that share a scale. Errors: one clause, where a value is NaN.
pub(crate) fn decode_fp8(stored: &[u8], scale: f32, out: &mut [f32]) -> std::result::Result<(), String> {
    if fp8::scaled(stored, scale, out) { Ok(()) } else { Err(float::UNUSABLE.into()) }
}

/// Decodes a whole tensor of plain numbers.
///
/// Errors: `Error::Checkpoint` naming the tensor when it is of another type, or holds NaN or infinity.
/// Panics: `out` has another number of elements (a bug).
pub fn decode_f32(view: &TensorView<'_>, out: &mut [f32]) -> Result<()> {
    float::decode(view.dtype, view.data, out).map_err(|what| view.error(what))
}
