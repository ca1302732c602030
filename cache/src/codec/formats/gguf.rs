//! The block types of GGUF files. A row is blocks one after the other, each with its scales before or after its codes.
//!
//! Those with a scale for each 32 weights and no offset are codes; the others have scales of more parts. Halves of
//! bytes lie 16 weights apart, not side by side. Source: ggml's `dequantize_row_*`.

mod super_blocks;

use half::f16;

use super::mxfp4;
use super::{Format, Reader};
use crate::Result;
use crate::checkpoint::{Dtype, GgmlType};
use crate::codec::scales::e8m0;
use crate::codec::{Blocked, Codec, Codes, Found, Integers, Read, Stored};
use crate::pack::{self, CodeType, DOUBLED_E2M1, IQ4, ScaleType};

pub(super) const READER: Reader = Reader { dtype: |dtype| matches!(dtype, Dtype::Ggml(_)), read, ..Reader::NONE };

/// Rows of weights; whoever opened the file has checked that blocks fill them.
fn read(Stored { view, shape: [_, k], .. }: Stored<'_>) -> Result<Found<'_>> {
    let Dtype::Ggml(kind) = view.dtype else { return Err(view.error(super::float::unsupported(view.dtype))) };
    let blocks = Blocks { kind, data: view.data, k };
    let codec = match (super_blocks::precision(kind), kind) {
        (Some(precision), _) => Codec::Blocks(precision, Box::new(blocks)),
        (None, _) => Codec::Codes(Box::new(blocks)),
    };
    Ok(Found::new(Format::Gguf(kind), "", vec![view], codec))
}

struct Blocks<'a> {
    kind: GgmlType,
    data: &'a [u8],
    k: usize,
}

impl Blocks<'_> {
    /// The bytes of as many weights from row `first` on.
    fn bytes(&self, first: usize, weights: usize) -> &[u8] {
        let (elements, bytes) = self.kind.block();
        &self.data[first * self.k / elements * bytes..][..weights / elements * bytes]
    }
}

impl Codes for Blocks<'_> {
    fn integers(&self) -> Integers {
        let of = |low, high| Integers { low, high, group: 32, zeros: false, scales: ScaleType::F16, table: None };
        match self.kind {
            GgmlType::Q4_0 => of(-8, 7),
            GgmlType::Q5_0 => of(-16, 15),
            GgmlType::MXFP4 => mxfp4::INTEGERS,
            GgmlType::IQ4_NL => Integers { table: Some(CodeType::Iq4), ..of(-127, 113) },
            _ => of(-128, 127),
        }
    }

    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let bytes = self.bytes(first, codes.len());
        let (codes, _) = codes.as_chunks_mut::<32>();
        match self.kind {
            GgmlType::Q4_0 => each::<18>(bytes, codes, scales, |block, codes, scale| {
                *scale = f16::from_bits(half_at(block, 0)).to_f32();
                halves(&block[2..], codes, |nibble| nibble as i8 - 8);
            }),
            GgmlType::Q5_0 => each::<22>(bytes, codes, scales, |block, codes, scale| {
                *scale = f16::from_bits(half_at(block, 0)).to_f32();
                let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
                halves(&block[6..], codes, |nibble| nibble as i8 - 16);
                for (i, code) in codes.iter_mut().enumerate() {
                    *code += (fifth >> i & 1) as i8 * 16;
                }
            }),
            GgmlType::Q8_0 => each::<34>(bytes, codes, scales, |block, codes, scale| {
                *scale = f16::from_bits(half_at(block, 0)).to_f32();
                codes.iter_mut().zip(&block[2..]).for_each(|(code, &byte)| *code = byte as i8);
            }),
            GgmlType::IQ4_NL => each::<18>(bytes, codes, scales, |block, codes, scale| {
                *scale = f16::from_bits(half_at(block, 0)).to_f32();
                halves(&block[2..], codes, |nibble| IQ4[nibble as usize]);
            }),
            GgmlType::MXFP4 => each::<17>(bytes, codes, scales, |block, codes, scale| {
                *scale = e8m0(block[0], 1);
                halves(&block[1..], codes, |nibble| DOUBLED_E2M1[nibble as usize]);
            }),
            other => return Err(format!("of type {other} has no codes")),
        }
        Ok(())
    }
}

/// Calls `read` for each block of `BYTES`, with its codes and its scale.
#[inline(always)]
fn each<const BYTES: usize>(
    bytes: &[u8],
    codes: &mut [[i8; 32]],
    scales: &mut [f32],
    read: impl Fn(&[u8; BYTES], &mut [i8; 32], &mut f32),
) {
    for ((block, codes), scale) in bytes.as_chunks::<BYTES>().0.iter().zip(codes).zip(scales) {
        read(block, codes, scale);
    }
}

/// Sixteen bytes: low halves are codes 0 to 15, high ones 16 to 31.
#[inline(always)]
fn halves(bytes: &[u8], codes: &mut [i8; 32], code: impl Fn(u8) -> i8) {
    for j in 0..16 {
        codes[j] = code(bytes[j] & 15);
        codes[j + 16] = code(bytes[j] >> 4);
    }
}

/// The bits of an f16 number.
#[inline(always)]
fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

impl Blocked for Blocks<'_> {
    fn rows(&self, first: usize, out: &mut pack::Blocks) -> Read {
        super_blocks::read(self.kind, self.bytes(first, out.weights()), out)
    }
}
