//! Blocks of 256 weights that are -1, 0 or 1: TQ1_0 and TQ2_0; and IQ1_S and IQ1_M, an eighth beside that.
//!
//! Source: ggml's `dequantize_row_iq1_*` and `dequantize_row_tq*`.

use half::f16;

use super::half_at;
use crate::checkpoint::GgmlType;
use crate::pack::iq1;

/// Codes and scales of TQ1_0 or TQ2_0.
pub(super) fn ternary(kind: GgmlType, bytes: &[u8], codes: &mut [i8], scales: &mut [f32]) {
    let (_, size) = kind.block();
    for ((block, codes), scale) in bytes.chunks_exact(size).zip(codes.as_chunks_mut::<256>().0).zip(scales) {
        *scale = f16::from_bits(half_at(block, size - 2)).to_f32();
        if kind == GgmlType::TQ2_0 {
            for (i, code) in codes.iter_mut().enumerate() {
                *code = (block[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) as i8 - 1;
            }
            continue;
        }
        // Digits to the base of three: a byte times a power of three has the next one in its highest bits.
        let digit = |byte: u8, i: usize| {
            let shifted = byte.wrapping_mul(3u8.pow(i as u32));
            ((u16::from(shifted) * 3) >> 8) as i8 - 1
        };
        for (i, code) in codes.iter_mut().enumerate() {
            *code = match i {
                0..160 => digit(block[i % 32], i / 32),
                160..240 => digit(block[32 + (i - 160) % 16], (i - 160) / 16),
                _ => digit(block[48 + (i - 240) % 4], (i - 240) / 4),
            };
        }
    }
}

/// Weights of IQ1_S or IQ1_M.
pub(super) fn decode(kind: GgmlType, bytes: &[u8], out: &mut [f32]) {
    let (_, size) = kind.block();
    for (block, out) in bytes.chunks_exact(size).zip(out.as_chunks_mut::<256>().0) {
        let word = |at: usize| u32::from(half_at(block, at));
        // Of each eight weights the index, the scale and what is beside the numbers.
        let eight = |i: usize| -> (usize, f32, f32) {
            let beside = |negative: bool| if negative { -0.125 } else { 0.125 };
            match kind {
                GgmlType::IQ1_S => {
                    let upper = word(34 + i / 4 * 2);
                    let index = u32::from(block[2 + i]) | (upper >> (3 * (i % 4)) & 7) << 8;
                    let scale = f16::from_bits(half_at(block, 0)).to_f32() * (2 * (upper >> 12 & 7) + 1) as f32;
                    (index as usize, scale, beside(upper & 0x8000 != 0))
                }
                _ => {
                    let upper = u32::from(block[32 + i / 2]) >> (i % 2 * 4);
                    let index = u32::from(block[i]) | (upper & 7) << 8;
                    let d = (0..4).fold(0, |d, part| d | (word(48 + 2 * part) >> 12) << (4 * part));
                    let count = word(48 + i / 8 * 2) >> (i % 8 / 2 * 3) & 7;
                    let scale = f16::from_bits(d as u16).to_f32() * (2 * count + 1) as f32;
                    (index as usize, scale, beside(upper & 8 != 0))
                }
            }
        };
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let (index, scale, beside) = eight(i);
            for (out, number) in out.iter_mut().zip(iq1(index)) {
                *out = scale * (f32::from(number) + beside);
            }
        }
    }
}
