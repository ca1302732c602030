//! The scales of quantized formats: small tensors of plain numbers, read one at a time.

use half::{bf16, f16};

use crate::checkpoint::{Dtype, TensorView};
use crate::pack::ScaleType;
use crate::{Error, Result};

/// Scales of a matrix, `[rows, cols]`, in any type that a format keeps them in; bytes are E8M0.
pub(super) struct Scales<'a> {
    view: TensorView<'a>,
    cols: usize,
}

impl<'a> Scales<'a> {
    /// Errors: `Error::Checkpoint` when they are of another number or type.
    pub(super) fn new(view: TensorView<'a>, rows: usize, cols: usize) -> Result<Self> {
        if view.shape.iter().product::<usize>() != rows * cols {
            return Err(view.error(format!(
                "has shape {:?} where {rows} x {cols} scales are expected: is it of this model?",
                view.shape
            )));
        }
        match view.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8E8M0 | Dtype::U8 => Ok(Self { view, cols }),
            other => Err(view.error(format!(
                "holds scales of type {other:?}, which is not supported: download the model again, or its BF16 \
                 checkpoint"
            ))),
        }
    }

    pub(super) fn get(&self, row: usize, col: usize) -> f32 {
        let (i, data) = (row * self.cols + col, self.view.data);
        match self.view.dtype {
            Dtype::F32 => f32::from_le_bytes([data[4 * i], data[4 * i + 1], data[4 * i + 2], data[4 * i + 3]]),
            Dtype::F16 => f16::from_le_bytes([data[2 * i], data[2 * i + 1]]).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes([data[2 * i], data[2 * i + 1]]).to_f32(),
            _ => e8m0(data[i], 0),
        }
    }

    /// The type they are packed in beside integers: F16 as it is, of anything else what has its range.
    pub(super) fn packed_type(&self) -> ScaleType {
        if self.view.dtype == Dtype::F16 { ScaleType::F16 } else { ScaleType::Bf16 }
    }

    /// The type they are packed in beside floats, all of them exactly.
    pub(super) fn exact_type(&self) -> ScaleType {
        if matches!(self.view.dtype, Dtype::F32 | Dtype::F16) { ScaleType::F32 } else { ScaleType::Bf16 }
    }
}

/// `2^(exponent - 127 - halvings)`, exact where f32 has it; NaN for 255.
pub(crate) fn e8m0(exponent: u8, halvings: u32) -> f32 {
    match (exponent as u32).checked_sub(halvings) {
        _ if exponent == 255 => f32::NAN,
        Some(biased @ 1..) => f32::from_bits(biased << 23),
        _ => (exponent as f64 - 127.0 - halvings as f64).exp2() as f32, // subnormal
    }
}

/// Integers of 32 bits of a tensor, `[rows, cols]`.
pub(super) struct Words<'a> {
    pub(super) view: TensorView<'a>,
    pub(super) cols: usize,
}

impl<'a> Words<'a> {
    /// Errors: `Error::Checkpoint` when it is of another shape or type.
    pub(super) fn new(view: TensorView<'a>, rows: usize, cols: usize) -> Result<Self> {
        match (view.dtype, view.shape) {
            (Dtype::I32 | Dtype::U32, shape) if *shape == [rows, cols] => Ok(Self { view, cols }),
            (dtype, shape) => Err(view
                .error(format!("is {dtype:?} of shape {shape:?} where {rows} x {cols} words of 32 bits are expected"))),
        }
    }

    /// A row's words from `col` on.
    pub(super) fn row(&self, row: usize, col: usize) -> impl Iterator<Item = u32> + '_ {
        self.view.data[(row * self.cols + col) * 4..(row + 1) * self.cols * 4]
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&word| u32::from_le_bytes(word))
    }

    pub(super) fn get(&self, row: usize, col: usize) -> u32 {
        let at = (row * self.cols + col) * 4;
        self.view.data[at..at + 4].as_array().map_or(0, |&word| u32::from_le_bytes(word))
    }
}

/// The group of each input, where a format keeps them out of order. Errors: `Error::Checkpoint` when one is beyond
/// `groups`.
pub(super) fn group_index(view: TensorView<'_>, k: usize, groups: usize) -> Result<Vec<usize>> {
    let wrong = |view: &TensorView<'_>| -> Error {
        view.error(format!("does not name a group below {groups} for each of {k} inputs: download it again"))
    };
    if !matches!(view.dtype, Dtype::I32 | Dtype::U32) || view.shape != [k] {
        return Err(wrong(&view));
    }
    let index: Vec<usize> =
        view.data.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word) as usize).collect();
    if index.iter().all(|&group| group < groups) { Ok(index) } else { Err(wrong(&view)) }
}
