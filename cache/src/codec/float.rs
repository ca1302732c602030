//! F32, F16 and BF16. Each returns whether all values are finite and stay so in BF16, and is written so that the compiler vectorizes it.

/// Bits of the smallest magnitude that rounds to infinity in BF16.
const LIMIT: i32 = 0x7f7f_8000;

use crate::simd::multiversion;

multiversion!(pub(super) fn f32(bytes: &[u8], out: &mut [f32]) -> bool = [f32_body, f32_body, f32_body]);
multiversion!(pub(super) fn bf16(bytes: &[u8], out: &mut [f32]) -> bool = [bf16_body, bf16_body, bf16_body]);
multiversion!(pub(super) fn f16(bytes: &[u8], out: &mut [f32]) -> bool = [f16_body, f16_body, f16_body]);

#[inline(always)]
fn f32_body(bytes: &[u8], out: &mut [f32]) -> bool {
    decode::<4>(bytes, out, u32::from_le_bytes)
}

#[inline(always)]
fn bf16_body(bytes: &[u8], out: &mut [f32]) -> bool {
    decode::<2>(bytes, out, |b| (u16::from_le_bytes(b) as u32) << 16)
}

/// Half to single: shift the exponent and mantissa into place, then let a multiplication by 2^112 mend the bias; it also normalizes
/// subnormals. Infinity and NaN (exponent all ones) come out as 2^16 and more, and get their exponent back.
#[inline(always)]
fn f16_body(bytes: &[u8], out: &mut [f32]) -> bool {
    decode::<2>(bytes, out, |b| {
        let h = u16::from_le_bytes(b) as u32;
        let magnitude = f32::from_bits((h & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
        let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        (magnitude.to_bits() | special) | ((h & 0x8000) << 16)
    })
}

/// Elements between two looks at the flags: keeps them in registers.
const BLOCK: usize = 64;

#[inline(always)]
fn decode<const N: usize>(bytes: &[u8], out: &mut [f32], bits: impl Fn([u8; N]) -> u32) -> bool {
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
