//! Where resident weights come from: named tensors of a checkpoint, checked for shape and finite values; or shapes
//! alone, where memory is only counted.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use half::bf16;
use moebius_cache::Precision;
use moebius_cache::checkpoint::{Checkpoint, Dtype, Table};
use moebius_cache::codec::Source;
use moebius_cache::pack::TILE_ROWS;
use rayon::prelude::*;

use super::tensor::HostTensor;
use crate::kernel::random::Random;
use crate::{Error, Result};

/// Rows that are looked up while a model runs.
pub trait Rows: Send + Sync {
    /// How many there are.
    fn count(&self) -> usize;
    /// Row `i`. Errors: it holds NaN.
    fn read(&self, i: usize, out: &mut [f32]) -> Result<()>;
}

impl Rows for Table {
    fn count(&self) -> usize {
        self.rows()
    }

    fn read(&self, i: usize, out: &mut [f32]) -> Result<()> {
        Ok(self.row(i, out)?)
    }
}

/// Small numbers that depend on the row's.
struct AnyRow;

impl Rows for AnyRow {
    fn count(&self) -> usize {
        usize::MAX
    }

    fn read(&self, i: usize, out: &mut [f32]) -> Result<()> {
        let mut random = Random(i as u64);
        out.iter_mut().for_each(|x| *x = random.uniform() as f32 - 0.5);
        Ok(())
    }
}

/// A matrix to multiply with, on its way to a backend.
pub enum LinearWeight<'a> {
    /// Plain numbers.
    Plain(HostTensor<'a>),
    /// Codes and scales that a precision holds as they are, of matrices one below the other: rows of all but the last
    /// fill tiles.
    Stored(Precision, Vec<Source<'a>>),
    /// As many of those: memory is only counted.
    StoredShape(Precision, [usize; 2]),
}

impl<'a> From<HostTensor<'a>> for LinearWeight<'a> {
    fn from(plain: HostTensor<'a>) -> Self {
        Self::Plain(plain)
    }
}

impl<'a> LinearWeight<'a> {
    /// `[rows, cols]`
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Plain(plain) => [plain.rows(), plain.cols()],
            Self::Stored(_, sources) => [sources.iter().map(|source| source.shape()[0]).sum(), sources[0].shape()[1]],
            Self::StoredShape(_, shape) => *shape,
        }
    }

    /// These of its rows, in this order.
    pub(crate) fn rows_by(self, order: &[usize]) -> LinearWeight<'a> {
        match self {
            Self::Plain(plain) => plain.rows_by(order).into(),
            Self::Stored(precision, sources) => {
                let mut sources = sources.into_iter();
                let (Some(source), None) = (sources.next(), sources.next()) else { panic!("rows of one matrix") };
                Self::Stored(precision, vec![source.rows_by(order)])
            }
            Self::StoredShape(precision, [_, k]) => Self::StoredShape(precision, [order.len(), k]),
        }
    }

    /// The rows `[from, to)` of each of `heads` equal parts.
    pub(crate) fn head_rows(self, heads: usize, from: usize, to: usize) -> LinearWeight<'a> {
        let part = self.shape()[0] / heads;
        match self {
            Self::Plain(plain) => plain.head_rows(heads, from, to).into(),
            stored => {
                stored.rows_by(&(0..heads).flat_map(|head| head * part + from..head * part + to).collect::<Vec<_>>())
            }
        }
    }

    /// What holds it as it is stored.
    pub(crate) fn held(&self) -> Option<Precision> {
        match self {
            Self::Plain(_) => None,
            Self::Stored(precision, _) | Self::StoredShape(precision, _) => Some(*precision),
        }
    }

    /// The rows of several, one after the other, as they are stored where one precision holds all and parts fill whole
    /// tiles. Errors: as [`LinearWeight::plain`].
    pub(crate) fn stacked<const N: usize>(parts: [LinearWeight<'a>; N]) -> Result<LinearWeight<'a>> {
        let held = parts[0].held().filter(|held| parts.iter().all(|part| part.held() == Some(*held)));
        let whole = parts[..N - 1].iter().all(|part| part.shape()[0].is_multiple_of(TILE_ROWS));
        let Some(precision) = held.filter(|_| whole) else {
            let plain = parts.into_iter().map(Self::plain).collect::<Result<Vec<_>>>()?;
            return Ok(HostTensor::stacked(&plain).into());
        };
        let shape = [parts.iter().map(|part| part.shape()[0]).sum(), parts[0].shape()[1]];
        let mut sources = Vec::new();
        for part in parts {
            match part {
                Self::Stored(_, of) => sources.extend(of),
                _ => return Ok(Self::StoredShape(precision, shape)),
            }
        }
        Ok(Self::Stored(precision, sources))
    }

    /// What it stands for. Errors: as [`TensorSource::matrix`].
    pub fn plain(self) -> Result<HostTensor<'a>> {
        match self {
            Self::Plain(plain) => Ok(plain),
            Self::Stored(_, sources) => match &sources[..] {
                [source] => decoded(source),
                several => Ok(HostTensor::stacked(&several.iter().map(decoded).collect::<Result<Vec<_>>>()?)),
            },
            Self::StoredShape(_, [rows, cols]) => Ok(HostTensor::Shape { rows, cols }),
        }
    }
}

fn decoded(source: &Source<'_>) -> Result<HostTensor<'static>> {
    // Whole heads: a latent's keys are turned a head at a time.
    const ROWS: usize = 256;
    let [rows, cols] = source.shape();
    let mut data = vec![0.0; rows * cols];
    data.par_chunks_mut(ROWS * cols).enumerate().try_for_each(|(i, rows)| source.decode(i * ROWS, rows))?;
    Ok(HostTensor::F32 { data: data.into(), cols })
}

/// Where resident weights come from, by their Hugging Face names.
pub trait TensorSource: Sync {
    /// The tensor `name` as `[rows, cols]`, quantized where it is stored so. Errors: as [`TensorSource::matrix`], but
    /// for numbers that nobody read yet.
    fn stored(&self, name: &str, rows: usize, cols: usize) -> Result<LinearWeight<'_>> {
        self.matrix(name, rows, cols).map(LinearWeight::Plain)
    }

    /// The tensor `name` as `[rows, cols]`. Errors: missing, misshapen, NaN or infinite; each by name.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>>;

    /// A vector, decoded: one column.
    fn vector(&self, name: &str, len: usize) -> Result<HostTensor<'_>>;

    /// All numbers of a tensor of any shape, decoded: its last dimension is that of the columns.
    fn numbers(&self, name: &str, shape: &[usize]) -> Result<HostTensor<'_>> {
        let cols = shape.last().copied().unwrap_or(1);
        Ok(self.vector(name, shape.iter().fold(1, |n: usize, dim| n.saturating_mul(*dim)))?.reshaped(cols))
    }

    /// A vector of integers. Synthetic weights have the same everywhere.
    fn integers(&self, _name: &str, len: usize) -> Result<Vec<i64>> {
        const PRIME: i64 = 1_000_003;
        Ok(vec![PRIME; len])
    }

    /// Each token's experts, `[tokens, top_k]`, of so many. Synthetic weights spread them.
    fn experts_by_token(&self, _name: &str, [tokens, top_k]: [usize; 2], experts: usize) -> Result<HostTensor<'_>> {
        let of = |token: usize| (0..top_k).map(move |i| ((token * 7 + i) % experts) as f32);
        Ok(HostTensor::from((0..tokens).flat_map(of).collect::<Vec<_>>()).reshaped(top_k))
    }

    /// Rows of `cols` numbers that stay where they are, in tensors `prefix0.weight` and so on, or in `name`. Synthetic
    /// weights have as many as one likes.
    fn table(&self, _name: &str, _prefix: &str, _cols: usize) -> Result<Box<dyn Rows>> {
        Ok(Box::new(AnyRow))
    }

    /// Whether there is a tensor of this name, however it is stored. Synthetic weights have none that there is a choice
    /// about.
    fn has(&self, _name: &str) -> bool {
        false
    }
}

impl TensorSource for Checkpoint {
    fn stored(&self, name: &str, rows: usize, cols: usize) -> Result<LinearWeight<'_>> {
        let source = self.source(name, [rows, cols])?;
        match source.held_by() {
            Some(precision) => Ok(LinearWeight::Stored(precision, vec![source])),
            None => self.matrix(name, rows, cols).map(LinearWeight::Plain),
        }
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>> {
        let source = self.source(name, [rows, cols])?;
        if let Some(view) = source.plain().filter(|view| view.dtype == Dtype::BF16)
            && let Ok(data) = bytemuck::try_cast_slice::<u8, bf16>(view.data)
        {
            if !data.par_chunks(1 << 18).all(|c| c.iter().all(|w| w.to_bits() & 0x7f80 != 0x7f80)) {
                return Err(Error::Model(format!(
                    "tensor `{name}` holds NaN or infinite weights: download its shard again"
                )));
            }
            return Ok(HostTensor::Bf16 { data: data.into(), cols });
        }
        decoded(&source)
    }

    fn vector(&self, name: &str, len: usize) -> Result<HostTensor<'_>> {
        Ok(self.numbers(name, &[len])?.reshaped(1))
    }

    fn numbers(&self, name: &str, shape: &[usize]) -> Result<HostTensor<'_>> {
        let view = self.tensor(name)?;
        // GGUF keeps no dimension of one; ERNIE's vectors have one more.
        if !view.shape.iter().filter(|&&n| n != 1).eq(shape.iter().filter(|&&n| n != 1)) {
            view.expect_shape(shape)?;
        }
        let mut data = vec![0.0; shape.iter().product()];
        moebius_cache::codec::decode_f32(&view, &mut data)?;
        Ok(HostTensor::F32 { data: data.into(), cols: shape.last().copied().unwrap_or(1) })
    }

    fn integers(&self, name: &str, len: usize) -> Result<Vec<i64>> {
        let view = self.tensor(name)?;
        view.expect_shape(&[len])?;
        match view.dtype {
            Dtype::I64 => Ok(view.data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8"))).collect()),
            _ => Err(view.error("does not hold 64-bit integers: download its shard again").into()),
        }
    }

    fn experts_by_token(&self, name: &str, shape: [usize; 2], experts: usize) -> Result<HostTensor<'_>> {
        let view = self.tensor(name)?;
        view.expect_shape(&shape)?;
        let ids: Vec<i64> = match view.dtype {
            Dtype::I64 => view.data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
            Dtype::I32 => view.data.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
            _ => return Err(view.error("does not hold integers: download its shard again").into()),
        };
        let below = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < experts);
        match ids.iter().find(|id| !below(id)) {
            Some(id) => Err(view.error(format!("names expert {id} of {experts}: download its shard again")).into()),
            None => Ok(HostTensor::from(ids.into_iter().map(|id| id as f32).collect::<Vec<_>>()).reshaped(shape[1])),
        }
    }

    fn table(&self, name: &str, prefix: &str, cols: usize) -> Result<Box<dyn Rows>> {
        Ok(Box::new(Checkpoint::table(self, name, prefix, cols)?))
    }

    fn has(&self, name: &str) -> bool {
        Checkpoint::has(self, name)
    }
}

/// What holds matrices of a checkpoint as they are stored, by their names; plain ones are not there.
pub type Held = BTreeMap<String, Precision>;

/// Weights of which nothing is known but their shapes, and how they are stored: what is made of them tells what a
/// model's weights take.
#[derive(Default)]
pub struct Shapes {
    held: Held,
    asked: Mutex<BTreeMap<String, [usize; 2]>>,
}

impl Shapes {
    /// Of a checkpoint that stores matrices so.
    pub fn stored_as(held: Held) -> Self {
        Self { held, ..Self::default() }
    }

    /// Names and shapes of the matrices that were asked for as they are stored.
    pub fn asked(self) -> BTreeMap<String, [usize; 2]> {
        self.asked.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TensorSource for Shapes {
    fn stored(&self, name: &str, rows: usize, cols: usize) -> Result<LinearWeight<'_>> {
        let plain = self.matrix(name, rows, cols)?;
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into(), [rows, cols]);
        Ok(match self.held.get(name) {
            Some(&precision) => LinearWeight::StoredShape(precision, [rows, cols]),
            None => plain.into(),
        })
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>> {
        /// Numbers beyond reason: a thousand times the largest matrix that a model has.
        const MAX: usize = 1 << 40;
        match rows.checked_mul(cols) {
            Some(0..=MAX) => Ok(HostTensor::Shape { rows, cols }),
            _ => Err(Error::Resources(format!(
                "tensor `{name}` of {rows} x {cols} fits into no machine: check the sizes in config.json"
            ))),
        }
    }

    fn experts_by_token(&self, name: &str, [tokens, top_k]: [usize; 2], _: usize) -> Result<HostTensor<'_>> {
        self.matrix(name, tokens, top_k)
    }

    fn vector(&self, name: &str, len: usize) -> Result<HostTensor<'_>> {
        self.matrix(name, len, 1)
    }
}
