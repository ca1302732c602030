//! Blocks with offsets, and blocks of 256 weights with scales for 16 or 32 of them that are quantized themselves.

use super::half_at;
use crate::simd::multiversion;

multiversion!(pub(super) fn q4_1(bytes: &[u8], out: &mut [f32]) = [q4_1_body, q4_1_body, q4_1_body]);
multiversion!(pub(super) fn q5_1(bytes: &[u8], out: &mut [f32]) = [q5_1_body, q5_1_body, q5_1_body]);
multiversion!(pub(super) fn q2_k(bytes: &[u8], out: &mut [f32]) = [q2_k_body, q2_k_body, q2_k_body]);
multiversion!(pub(super) fn q3_k(bytes: &[u8], out: &mut [f32]) = [q3_k_body, q3_k_body, q3_k_body]);
multiversion!(pub(super) fn q4_k(bytes: &[u8], out: &mut [f32]) = [q4_k_body, q4_k_body, q4_k_body]);
multiversion!(pub(super) fn q5_k(bytes: &[u8], out: &mut [f32]) = [q5_k_body, q5_k_body, q5_k_body]);
multiversion!(pub(super) fn q6_k(bytes: &[u8], out: &mut [f32]) = [q6_k_body, q6_k_body, q6_k_body]);

/// Calls `decode` for each block of `BYTES` bytes and `N` weights.
#[inline(always)]
fn each<const BYTES: usize, const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; N]),
) {
    for (block, out) in bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<N>().0) {
        decode(block, out);
    }
}

/// Scale and offset, f16, then 16 bytes of halves: `q * d + m`.
#[inline(always)]
fn q4_1_body(bytes: &[u8], out: &mut [f32]) {
    each::<20, 32>(bytes, out, |block, out| {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        for j in 0..16 {
            out[j] = (block[4 + j] & 15) as f32 * d + m;
            out[j + 16] = (block[4 + j] >> 4) as f32 * d + m;
        }
    });
}

/// As Q4_1, with the fifth bits in a word between.
#[inline(always)]
fn q5_1_body(bytes: &[u8], out: &mut [f32]) {
    each::<24, 32>(bytes, out, |block, out| {
        let (d, m) = (half_at(block, 0), half_at(block, 2));
        let fifth = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        for j in 0..16 {
            let (low, high) = (block[8 + j] as u32 & 15, block[8 + j] as u32 >> 4);
            out[j] = (low | (fifth >> j & 1) << 4) as f32 * d + m;
            out[j + 16] = (high | (fifth >> (j + 16) & 1) << 4) as f32 * d + m;
        }
    });
}

/// 16 bytes of scale and offset (4 bits each, for 16 weights), 64 of codes, d, dmin: `d * scale * q - dmin * offset`.
#[inline(always)]
fn q2_k_body(bytes: &[u8], out: &mut [f32]) {
    each::<84, 256>(bytes, out, |block, out| {
        let (scales, codes) = (&block[..16], &block[16..80]);
        let (d, dmin) = (half_at(block, 80), half_at(block, 82));
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let (part, shift, second) = (group / 8, group % 8 / 2 * 2, group % 2);
            let (scale, offset) = (d * (scales[group] & 15) as f32, dmin * (scales[group] >> 4) as f32);
            let codes = &codes[32 * part + 16 * second..][..16];
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * (code >> shift & 3) as f32 - offset;
            }
        }
    });
}

/// 32 bytes of third bits, 64 of codes, 16 scales of 6 bits in 12 bytes, d: `d * (scale - 32) * (q - 4)`.
#[inline(always)]
fn q3_k_body(bytes: &[u8], out: &mut [f32]) {
    each::<110, 256>(bytes, out, |block, out| {
        let (thirds, codes, packed) = (&block[..32], &block[32..96], &block[96..108]);
        let d = half_at(block, 108);
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let low = if group < 8 { packed[group] & 15 } else { packed[group - 8] >> 4 };
            let high = packed[8 + group % 4] >> (2 * (group / 4)) & 3;
            let scale = d * ((low | high << 4) as i32 - 32) as f32;
            let (part, shift, second) = (group / 8, group % 8 / 2 * 2, group % 2);
            let bit = 4 * part + group % 8 / 2;
            for j in 0..16 {
                let at = 16 * second + j;
                let code = (codes[32 * part + at] >> shift & 3) as i32 + (thirds[at] >> bit & 1) as i32 * 4 - 4;
                out[j] = scale * code as f32;
            }
        }
    });
}

/// Scale and offset number `i` of eight, 6 bits each, of the 12 bytes in which Q4_K and Q5_K keep them.
#[inline(always)]
fn scale_and_offset(packed: &[u8], i: usize) -> (f32, f32) {
    let (scale, offset) = match i < 4 {
        true => (packed[i] & 63, packed[i + 4] & 63),
        false => (packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4),
    };
    (scale as f32, offset as f32)
}

/// d, dmin, 12 bytes of scales and offsets for 32 weights, 128 of codes: `d * scale * q - dmin * offset`.
#[inline(always)]
fn q4_k_body(bytes: &[u8], out: &mut [f32]) {
    each::<144, 256>(bytes, out, |block, out| {
        let (d, dmin) = (half_at(block, 0), half_at(block, 2));
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, offset) = scale_and_offset(&block[4..16], group);
            let (scale, offset) = (d * scale, dmin * offset);
            let codes = &block[16 + group / 2 * 32..][..32];
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * (code >> (group % 2 * 4) & 15) as f32 - offset;
            }
        }
    });
}

/// As Q4_K, with 32 bytes of fifth bits before the codes.
#[inline(always)]
fn q5_k_body(bytes: &[u8], out: &mut [f32]) {
    each::<176, 256>(bytes, out, |block, out| {
        let (d, dmin) = (half_at(block, 0), half_at(block, 2));
        let fifths = &block[16..48];
        for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, offset) = scale_and_offset(&block[4..16], group);
            let (scale, offset) = (d * scale, dmin * offset);
            let codes = &block[48 + group / 2 * 32..][..32];
            for ((out, code), fifth) in out.iter_mut().zip(codes).zip(fifths) {
                *out = scale * (code >> (group % 2 * 4) & 15 | (fifth >> group & 1) << 4) as f32 - offset;
            }
        }
    });
}

/// 128 bytes of low halves, 64 of upper pairs of bits, 16 scales of 8 bits, d: `d * scale * (q - 32)`.
#[inline(always)]
fn q6_k_body(bytes: &[u8], out: &mut [f32]) {
    each::<210, 256>(bytes, out, |block, out| {
        let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
        let d = half_at(block, 208);
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            // Of each half of the block: four runs of 32, the first two in low halves.
            let (part, run, second) = (group / 8, group % 8 / 2, group % 2);
            let scale = d * (scales[group] as i8) as f32;
            let low = &low[64 * part + 32 * (run % 2) + 16 * second..][..16];
            let high = &high[32 * part + 16 * second..][..16];
            for j in 0..16 {
                let code = low[j] >> (run / 2 * 4) & 15 | (high[j] >> (2 * run) & 3) << 4;
                out[j] = scale * (code as i32 - 32) as f32;
            }
        }
    });
}
