//! F32, F16 and BF16, row after row or column after column; also where quantized formats keep their scales.

use super::{Format, Reader};
use crate::Result;
use crate::checkpoint::{Dtype, TensorView};
use crate::codec::{Codec, Found, Read, Values};
use crate::simd::multiversion;

pub(super) const READER: Reader = Reader {
    dtype: |dtype| element_bytes(dtype).is_some(),
    read: |stored| found(stored.view, stored.shape[1]),
    ..Reader::NONE
};

pub(in crate::codec) const UNUSABLE: &str =
    "holds a NaN, an infinity or a value beyond BF16: the checkpoint is damaged; download it again";

/// Bytes of an element; `None` of types that are no plain numbers.
pub(in crate::codec) fn element_bytes(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 => Some(4),
        Dtype::F16 | Dtype::BF16 => Some(2),
        _ => None,
    }
}

/// Decodes as many elements as `out` holds. Errors: one clause. Panics: `bytes` is of another length (a bug).
pub(in crate::codec) fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) -> Read {
    let finite = match dtype {
        Dtype::F32 => f32(bytes, out),
        Dtype::F16 => f16(bytes, out),
        Dtype::BF16 => bf16(bytes, out),
        other => return Err(unsupported(other)),
    };
    if finite { Ok(()) } else { Err(UNUSABLE.into()) }
}

pub(in crate::codec) fn unsupported(dtype: Dtype) -> String {
    format!(
        "is of type {dtype:?}, which is not supported here; use a checkpoint in BF16, F16, F32 or a quantized format \
         that docs/formats.md lists"
    )
}

/// Rows of `k` weights as they lie. Errors: they are no plain numbers.
pub(in crate::codec) fn found(view: TensorView<'_>, k: usize) -> Result<Found<'_>> {
    match element_bytes(view.dtype) {
        Some(_) => {
            Ok(Found::new(Format::Float(view.dtype), "", vec![view], Codec::Values(Box::new(Plain { view, k }))))
        }
        None => Err(view.error(unsupported(view.dtype))),
    }
}

/// A matrix of plain numbers, row after row.
struct Plain<'a> {
    view: TensorView<'a>,
    k: usize,
}

impl Values for Plain<'_> {
    fn rows(&self, first: usize, out: &mut [f32]) -> Read {
        let bytes = element_bytes(self.view.dtype).ok_or_else(|| unsupported(self.view.dtype))?;
        decode(self.view.dtype, &self.view.data[first * self.k * bytes..][..out.len() * bytes], out)
    }

    fn as_they_lie(&self) -> bool {
        true
    }
}

/// A matrix whose columns are stored as rows: `[k, n]`.
pub(in crate::codec) struct Transposed<'a> {
    pub(in crate::codec) view: TensorView<'a>,
    pub(in crate::codec) n: usize,
    pub(in crate::codec) k: usize,
}

impl Values for Transposed<'_> {
    fn rows(&self, first: usize, out: &mut [f32]) -> Read {
        let bytes = element_bytes(self.view.dtype).ok_or_else(|| unsupported(self.view.dtype))?;
        let mut column = vec![0.0; out.len() / self.k];
        for (input, stored) in self.view.data.chunks_exact(self.n * bytes).enumerate() {
            decode(self.view.dtype, &stored[first * bytes..][..column.len() * bytes], &mut column)?;
            for (row, value) in column.iter().enumerate() {
                out[row * self.k + input] = *value;
            }
        }
        Ok(())
    }
}

multiversion!(
    /// Whether all values are finite and stay so in BF16.
    pub(in crate::codec) fn all_usable(values: &[f32]) -> bool = [all_usable_body, all_usable_body, all_usable_body]
);

#[inline(always)]
fn all_usable_body(values: &[f32]) -> bool {
    values.iter().fold(0u32, |beyond, x| beyond | ((x.to_bits() & 0x7fff_ffff) as i32 >= LIMIT) as u32) == 0
}

/// Bits of the smallest magnitude that rounds to infinity in BF16.
const LIMIT: i32 = 0x7f7f_8000;

multiversion!(pub(in crate::codec) fn f32(bytes: &[u8], out: &mut [f32]) -> bool = [f32_body, f32_body, f32_body]);
multiversion!(pub(in crate::codec) fn bf16(bytes: &[u8], out: &mut [f32]) -> bool = [bf16_body, bf16_body, bf16_body]);
multiversion!(pub(in crate::codec) fn f16(bytes: &[u8], out: &mut [f32]) -> bool = [f16_body, f16_body, f16_body]);

#[inline(always)]
fn f32_body(bytes: &[u8], out: &mut [f32]) -> bool {
    elements::<4>(bytes, out, u32::from_le_bytes)
}

#[inline(always)]
fn bf16_body(bytes: &[u8], out: &mut [f32]) -> bool {
    elements::<2>(bytes, out, |b| (u16::from_le_bytes(b) as u32) << 16)
}

/// Half to single: shift the exponent and mantissa into place, then let a multiplication by 2^112 mend the bias; it
/// also normalizes subnormals. Infinity and NaN (exponent all ones) come out as 2^16 and more, and get their exponent
/// back.
#[inline(always)]
fn f16_body(bytes: &[u8], out: &mut [f32]) -> bool {
    elements::<2>(bytes, out, |b| {
        let h = u16::from_le_bytes(b) as u32;
        let magnitude = f32::from_bits((h & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
        let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        (magnitude.to_bits() | special) | ((h & 0x8000) << 16)
    })
}

/// Elements between two looks at the flags: keeps them in registers.
const BLOCK: usize = 64;

#[inline(always)]
fn elements<const N: usize>(bytes: &[u8], out: &mut [f32], bits: impl Fn([u8; N]) -> u32) -> bool {
    let (elements, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty() && elements.len() == out.len(), "bytes and elements disagree");
    let mut beyond = [0u32; BLOCK];
    let mut element = |i: usize, x: [u8; N]| {
        let b = bits(x);
        beyond[i] |= ((b & 0x7fff_ffff) as i32 >= LIMIT) as u32; // signed: SSE2 has no other comparison
        f32::from_bits(b)
    };
    let (blocks, tail) = elements.as_chunks::<BLOCK>();
    let (out_blocks, out_tail) = out.as_chunks_mut::<BLOCK>();
    for (x, y) in blocks.iter().zip(out_blocks) {
        for i in 0..BLOCK {
            y[i] = element(i, x[i]);
        }
    }
    for (i, (x, y)) in tail.iter().zip(out_tail).enumerate() {
        *y = element(i, *x);
    }
    beyond == [0; BLOCK]
}
