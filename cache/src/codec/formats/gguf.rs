//! The block types of GGUF files. A row is blocks one after the other, each with its scales before or after its codes.
//!
//! Those with a scale for each 32 weights and no offset are codes; the others are decoded. Halves of bytes lie 16
//! weights apart, not side by side. Source: ggml's `dequantize_row_*`.

mod super_blocks;

use half::f16;

use super::mxfp4;
use super::{Format, Reader};
use crate::Result;
use crate::checkpoint::{Dtype, GgmlType};
use crate::codec::scales::e8m0;
use crate::codec::{Codec, Codes, Found, Integers, Read, Stored, Values};
use crate::pack::{DOUBLED_E2M1, ScaleType};

/// The 16 values of IQ4_NL and IQ4_XS.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

pub(super) const READER: Reader = Reader { dtype: |dtype| matches!(dtype, Dtype::Ggml(_)), read, ..Reader::NONE };

/// Rows of weights; whoever opened the file has checked that blocks fill them.
fn read(Stored { view, shape: [_, k], .. }: Stored<'_>) -> Result<Found<'_>> {
    use GgmlType::*;
    let Dtype::Ggml(kind) = view.dtype else { return Err(view.error(super::float::unsupported(view.dtype))) };
    let blocks = Blocks { kind, data: view.data, k };
    let codec = match kind {
        Q4_0 | Q5_0 | Q8_0 | IQ4_NL | IQ4_XS | MXFP4 => Codec::Codes(Box::new(blocks)),
        Q4_1 | Q5_1 | Q2_K | Q3_K | Q4_K | Q5_K | Q6_K => Codec::Values(Box::new(blocks)),
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
        let of = |low, high| Integers { low, high, group: 32, scales: ScaleType::F16, table: None };
        match self.kind {
            GgmlType::Q4_0 => of(-8, 7),
            GgmlType::Q5_0 => of(-16, 15),
            GgmlType::MXFP4 => mxfp4::INTEGERS,
            _ => of(-128, 127),
        }
    }

    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let bytes = self.bytes(first, codes.len());
        let (codes, _) = codes.as_chunks_mut::<32>();
        match self.kind {
            GgmlType::Q4_0 => each::<18, 1>(bytes, codes, scales, |block, [codes], [scale]| {
                *scale = half_at(block, 0);
                halves(&block[2..], codes, |nibble| nibble as i8 - 8);
            }),
            GgmlType::Q5_0 => each::<22, 1>(bytes, codes, scales, |block, [codes], [scale]| {
                *scale = half_at(block, 0);
                let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
                halves(&block[6..], codes, |nibble| nibble as i8 - 16);
                for (i, code) in codes.iter_mut().enumerate() {
                    *code += (fifth >> i & 1) as i8 * 16;
                }
            }),
            GgmlType::Q8_0 => each::<34, 1>(bytes, codes, scales, |block, [codes], [scale]| {
                *scale = half_at(block, 0);
                codes.iter_mut().zip(&block[2..]).for_each(|(code, &byte)| *code = byte as i8);
            }),
            GgmlType::IQ4_NL => each::<18, 1>(bytes, codes, scales, |block, [codes], [scale]| {
                *scale = half_at(block, 0);
                halves(&block[2..], codes, |nibble| IQ4[nibble as usize]);
            }),
            GgmlType::MXFP4 => each::<17, 1>(bytes, codes, scales, |block, [codes], [scale]| {
                *scale = e8m0(block[0], 1);
                halves(&block[1..], codes, |nibble| DOUBLED_E2M1[nibble as usize]);
            }),
            GgmlType::IQ4_XS => each::<136, 8>(bytes, codes, scales, |block, codes, scales| {
                let (d, high) = (half_at(block, 0), u16::from_le_bytes([block[2], block[3]]));
                for (i, (codes, scale)) in codes.iter_mut().zip(scales).enumerate() {
                    let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
                    *scale = d * ((low as i32 | (high as i32 >> (2 * i) & 3) << 4) - 32) as f32;
                    halves(&block[8 + 16 * i..], codes, |nibble| IQ4[nibble as usize]);
                }
            }),
            other => return Err(format!("of type {other} has no codes")),
        }
        Ok(())
    }
}

/// Calls `read` for each block of `BYTES`, with the codes and scales of its `N` groups of 32.
#[inline(always)]
fn each<const BYTES: usize, const N: usize>(
    bytes: &[u8],
    codes: &mut [[i8; 32]],
    scales: &mut [f32],
    read: impl Fn(&[u8; BYTES], &mut [[i8; 32]; N], &mut [f32; N]),
) {
    let (codes, scales) = (codes.as_chunks_mut::<N>().0, scales.as_chunks_mut::<N>().0);
    for ((block, codes), scales) in bytes.as_chunks::<BYTES>().0.iter().zip(codes).zip(scales) {
        read(block, codes, scales);
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

#[inline(always)]
fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

impl Values for Blocks<'_> {
    fn rows(&self, first: usize, out: &mut [f32]) -> Read {
        let bytes = self.bytes(first, out.len());
        match self.kind {
            GgmlType::Q4_1 => super_blocks::q4_1(bytes, out),
            GgmlType::Q5_1 => super_blocks::q5_1(bytes, out),
            GgmlType::Q2_K => super_blocks::q2_k(bytes, out),
            GgmlType::Q3_K => super_blocks::q3_k(bytes, out),
            GgmlType::Q4_K => super_blocks::q4_k(bytes, out),
            GgmlType::Q5_K => super_blocks::q5_k(bytes, out),
            GgmlType::Q6_K => super_blocks::q6_k(bytes, out),
            other => return Err(format!("of type {other} is codes")),
        }
        Ok(())
    }
}
