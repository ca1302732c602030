//! Blocks with offsets, and blocks of 256 weights whose groups count how many of the block's numbers their scales are.
//!
//! Codes are integers once the middle of their range is taken off, or words of places in a grid; counts stay as they
//! are stored.

use super::half_at;
use crate::checkpoint::GgmlType::{self, *};
use crate::pack::{Blocks, IQ4, Precision};

/// What such a type is packed as; `None`: it is of another kind.
pub(super) fn precision(kind: GgmlType) -> Option<Precision> {
    Some(match kind {
        Q4_1 => Precision::Q4_1,
        Q5_1 => Precision::Q5_1,
        Q2_K => Precision::Q2K,
        Q3_K => Precision::Q3K,
        Q4_K => Precision::Q4K,
        Q5_K => Precision::Q5K,
        Q6_K => Precision::Q6K,
        IQ4_XS => Precision::Iq4Xs,
        IQ2_XXS => Precision::Iq2Xxs,
        IQ2_XS => Precision::Iq2Xs,
        IQ2_S => Precision::Iq2S,
        IQ3_XXS => Precision::Iq3Xxs,
        IQ3_S => Precision::Iq3S,
        IQ1_S => Precision::Iq1S,
        IQ1_M => Precision::Iq1M,
        TQ1_0 => Precision::Tq1_0,
        TQ2_0 => Precision::Tq2_0,
        Q4_0 | Q5_0 | Q8_0 | IQ4_NL | MXFP4 => return None,
    })
}

/// Reads whole blocks into `out`, which has room for their rows. Errors: the type is of another kind.
pub(super) fn read(kind: GgmlType, bytes: &[u8], out: &mut Blocks) -> Result<(), String> {
    match kind {
        Q4_1 => each::<20, 32, 2, 0, 0>(bytes, out, q4_1),
        Q5_1 => each::<24, 32, 2, 0, 0>(bytes, out, q5_1),
        Q2_K => each::<84, 256, 2, 16, 16>(bytes, out, q2_k),
        Q3_K => each::<110, 256, 1, 16, 0>(bytes, out, q3_k),
        Q4_K => each::<144, 256, 2, 8, 8>(bytes, out, q4_k),
        Q5_K => each::<176, 256, 2, 8, 8>(bytes, out, q5_k),
        Q6_K => each::<210, 256, 1, 16, 0>(bytes, out, q6_k),
        IQ4_XS => each::<136, 256, 1, 8, 0>(bytes, out, iq4_xs),
        IQ2_XXS => each_in_grid::<66>(bytes, out, |bytes, words, _| {
            words.copy_from_slice(&u32s::<16>(&bytes[2..]));
        }),
        IQ2_XS => each_in_grid::<74>(bytes, out, iq2_xs),
        IQ2_S => each_in_grid::<82>(bytes, out, iq2_s),
        IQ3_XXS => each_in_grid::<98>(bytes, out, iq3_xxs),
        IQ3_S => each_in_grid::<110>(bytes, out, iq3_s),
        IQ1_S => each_in_grid::<50>(bytes, out, iq1_s),
        IQ1_M => {
            each_in_grid::<56>(bytes, out, iq1_m);
            out.heads.iter_mut().zip(bytes.as_chunks::<56>().0).for_each(|(head, block)| *head = iq1_m_head(block));
        }
        TQ1_0 => {
            each_in_grid::<54>(bytes, out, |bytes, words, _| words.copy_from_slice(&u32s::<13>(bytes)));
            out.heads.iter_mut().zip(bytes.as_chunks::<54>().0).for_each(|(head, block)| *head = half_at(block, 52));
        }
        TQ2_0 => each::<66, 256, 1, 0, 0>(bytes, out, tq2_0),
        other => return Err(format!("of type {other} is codes with a scale each")),
    }
    Ok(())
}

/// What one block is read into.
struct Block<'a, const N: usize, const HEADS: usize, const COUNTS: usize, const OFFSETS: usize> {
    codes: &'a mut [i8; N],
    heads: &'a mut [u16; HEADS],
    counts: &'a mut [u8; COUNTS],
    offsets: &'a mut [u8; OFFSETS],
}

/// Calls `read` for each block of `BYTES` bytes and `N` weights.
#[inline(always)]
fn each<const BYTES: usize, const N: usize, const HEADS: usize, const COUNTS: usize, const OFFSETS: usize>(
    bytes: &[u8],
    out: &mut Blocks,
    read: impl Fn(&[u8; BYTES], Block<'_, N, HEADS, COUNTS, OFFSETS>),
) {
    let part = |i: usize, len: usize| i * len..(i + 1) * len;
    for (i, block) in bytes.as_chunks::<BYTES>().0.iter().enumerate() {
        let (mut counts, mut offsets) = ([0; COUNTS], [0; OFFSETS]);
        let codes = &mut out.codes.as_chunks_mut::<N>().0[i];
        let heads = &mut out.heads.as_chunks_mut::<HEADS>().0[i];
        read(block, Block { codes, heads, counts: &mut counts, offsets: &mut offsets });
        out.counts[part(i, COUNTS)].copy_from_slice(&counts);
        out.offsets[part(i, OFFSETS)].copy_from_slice(&offsets);
    }
}

/// Scale and offset, f16, then 16 bytes of halves.
fn q4_1(bytes: &[u8; 20], block: Block<'_, 32, 2, 0, 0>) {
    *block.heads = [half_at(bytes, 0), half_at(bytes, 2)];
    super::halves(&bytes[4..], block.codes, |nibble| nibble as i8);
}

/// As Q4_1, with the fifth bits in a word between.
fn q5_1(bytes: &[u8; 24], block: Block<'_, 32, 2, 0, 0>) {
    *block.heads = [half_at(bytes, 0), half_at(bytes, 2)];
    let fifths = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    super::halves(&bytes[8..], block.codes, |nibble| nibble as i8);
    for (i, code) in block.codes.iter_mut().enumerate() {
        *code |= (fifths >> i & 1) as i8 * 16;
    }
}

/// 16 bytes of counts and offsets of 4 bits, for 16 weights each, 64 of codes, d, dmin.
fn q2_k(bytes: &[u8; 84], block: Block<'_, 256, 2, 16, 16>) {
    let (scales, codes) = (&bytes[..16], &bytes[16..80]);
    *block.heads = [half_at(bytes, 80), half_at(bytes, 82)];
    for (group, out) in block.codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (part, shift, second) = (group / 8, group % 8 / 2 * 2, group % 2);
        (block.counts[group], block.offsets[group]) = (scales[group] & 15, scales[group] >> 4);
        for (out, code) in out.iter_mut().zip(&codes[32 * part + 16 * second..]) {
            *out = (code >> shift & 3) as i8;
        }
    }
}

/// 32 bytes of third bits, 64 of codes, 16 counts of 6 bits in 12 bytes, d.
fn q3_k(bytes: &[u8; 110], block: Block<'_, 256, 1, 16, 0>) {
    let (thirds, codes, packed) = (&bytes[..32], &bytes[32..96], &bytes[96..108]);
    *block.heads = [half_at(bytes, 108)];
    for (group, out) in block.codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = if group < 8 { packed[group] & 15 } else { packed[group - 8] >> 4 };
        let high = packed[8 + group % 4] >> (2 * (group / 4)) & 3;
        block.counts[group] = low | high << 4;
        let (part, shift, second) = (group / 8, group % 8 / 2 * 2, group % 2);
        let bit = 4 * part + group % 8 / 2;
        for (j, out) in out.iter_mut().enumerate() {
            let at = 16 * second + j;
            *out = (codes[32 * part + at] >> shift & 3) as i8 + (thirds[at] >> bit & 1) as i8 * 4 - 4;
        }
    }
}

/// Count and offset number `i` of eight, 6 bits each, of the 12 bytes in which Q4_K and Q5_K keep them.
fn count_and_offset(packed: &[u8], i: usize) -> (u8, u8) {
    match i < 4 {
        true => (packed[i] & 63, packed[i + 4] & 63),
        false => (packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4),
    }
}

/// d, dmin, 12 bytes of counts and offsets for 32 weights, 128 of codes.
fn q4_k(bytes: &[u8; 144], block: Block<'_, 256, 2, 8, 8>) {
    *block.heads = [half_at(bytes, 0), half_at(bytes, 2)];
    for (group, out) in block.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        (block.counts[group], block.offsets[group]) = count_and_offset(&bytes[4..16], group);
        for (out, code) in out.iter_mut().zip(&bytes[16 + group / 2 * 32..]) {
            *out = (code >> (group % 2 * 4) & 15) as i8;
        }
    }
}

/// As Q4_K, with 32 bytes of fifth bits before the codes.
fn q5_k(bytes: &[u8; 176], block: Block<'_, 256, 2, 8, 8>) {
    *block.heads = [half_at(bytes, 0), half_at(bytes, 2)];
    let fifths = &bytes[16..48];
    for (group, out) in block.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        (block.counts[group], block.offsets[group]) = count_and_offset(&bytes[4..16], group);
        for ((out, code), fifth) in out.iter_mut().zip(&bytes[48 + group / 2 * 32..]).zip(fifths) {
            *out = (code >> (group % 2 * 4) & 15 | (fifth >> group & 1) << 4) as i8;
        }
    }
}

/// 128 bytes of low halves, 64 of upper pairs of bits, 16 counts of 8 bits with a sign, d.
fn q6_k(bytes: &[u8; 210], block: Block<'_, 256, 1, 16, 0>) {
    let (low, high, scales) = (&bytes[..128], &bytes[128..192], &bytes[192..208]);
    *block.heads = [half_at(bytes, 208)];
    for (group, out) in block.codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // Of each half of the block: four runs of 32, the first two in low halves.
        let (part, run, second) = (group / 8, group % 8 / 2, group % 2);
        block.counts[group] = scales[group] ^ 0x80;
        let (low, high) = (&low[64 * part + 32 * (run % 2) + 16 * second..], &high[32 * part + 16 * second..]);
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            *out = (low >> (run / 2 * 4) & 15 | (high >> (2 * run) & 3) << 4) as i8 - 32;
        }
    }
}

/// d, 8 counts of 6 bits in 6 bytes, 128 bytes of halves: codes of a table.
fn iq4_xs(bytes: &[u8; 136], block: Block<'_, 256, 1, 8, 0>) {
    *block.heads = [half_at(bytes, 0)];
    let high = u16::from_le_bytes([bytes[2], bytes[3]]);
    for (i, codes) in block.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = bytes[4 + i / 2] >> (4 * (i % 2)) & 15;
        block.counts[i] = low | ((high >> (2 * i) & 3) as u8) << 4;
        super::halves(&bytes[8 + 16 * i..], codes, |nibble| IQ4[nibble as usize]);
    }
}

/// 64 bytes of codes, of which each has four that lie 32 weights apart, d.
fn tq2_0(bytes: &[u8; 66], block: Block<'_, 256, 1, 0, 0>) {
    *block.heads = [half_at(bytes, 64)];
    for (i, code) in block.codes.iter_mut().enumerate() {
        *code = (bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) as i8 - 1;
    }
}

/// Calls `read(block, words, counts)` for each block of `BYTES` bytes, which begins with d.
fn each_in_grid<const BYTES: usize>(
    bytes: &[u8],
    out: &mut Blocks,
    read: impl Fn(&[u8; BYTES], &mut [u32], &mut [u8]),
) {
    let blocks = bytes.as_chunks::<BYTES>().0;
    let (words, counts) = (out.words.len() / blocks.len().max(1), out.counts.len() / blocks.len().max(1));
    for (i, block) in blocks.iter().enumerate() {
        out.heads[i] = half_at(block, 0);
        read(block, &mut out.words[i * words..][..words], &mut out.counts[i * counts..][..counts]);
    }
}

/// The first `N` words of some bytes.
fn u32s<const N: usize>(bytes: &[u8]) -> [u32; N] {
    std::array::from_fn(|i| u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]))
}

/// Counts of 4 bits, two to a byte, the low half first.
fn nibbles(bytes: &[u8], counts: &mut [u8]) {
    counts.as_chunks_mut::<2>().0.iter_mut().zip(bytes).for_each(|(pair, byte)| *pair = [byte & 15, byte >> 4]);
}

/// d, 32 halves of indices of 9 bits and signs of 7, 16 counts of 4 bits.
fn iq2_xs(bytes: &[u8; 74], words: &mut [u32], counts: &mut [u8]) {
    for (i, index) in (0..32).map(|i| (i, u32::from(half_at(bytes, 2 + 2 * i)))) {
        let (run, words) = (i % 4, &mut words[i / 4 * 2..][..2]);
        if run == 0 {
            words.fill(0);
        }
        words[0] |= (index & 0xff) << (8 * run);
        words[1] |= (index >> 9) << (7 * run) | (index >> 8 & 1) << (28 + run);
    }
    nibbles(&bytes[66..], counts);
}

/// d, 32 bytes of indices, 32 of signs, 8 of upper bits of indices, 16 counts of 4 bits.
fn iq2_s(bytes: &[u8; 82], words: &mut [u32], counts: &mut [u8]) {
    let (indices, signs) = (u32s::<8>(&bytes[2..]), u32s::<8>(&bytes[34..]));
    for (block, pair) in words[..16].as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *pair = [indices[block], signs[block]];
    }
    words[16..].copy_from_slice(&u32s::<2>(&bytes[66..]));
    nibbles(&bytes[74..], counts);
}

/// d, 64 bytes of indices, 8 words of signs and counts.
fn iq3_xxs(bytes: &[u8; 98], words: &mut [u32], _: &mut [u8]) {
    let (indices, signs) = (u32s::<16>(&bytes[2..]), u32s::<8>(&bytes[66..]));
    for (block, three) in words.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        *three = [indices[2 * block], indices[2 * block + 1], signs[block]];
    }
}

/// d, 64 bytes of indices, 8 of upper bits, 32 of signs, 8 counts of 4 bits.
fn iq3_s(bytes: &[u8; 110], words: &mut [u32], counts: &mut [u8]) {
    let (indices, signs) = (u32s::<16>(&bytes[2..]), u32s::<8>(&bytes[74..]));
    for (block, three) in words[..24].as_chunks_mut::<3>().0.iter_mut().enumerate() {
        *three = [indices[2 * block], indices[2 * block + 1], signs[block]];
    }
    words[24..].copy_from_slice(&u32s::<2>(&bytes[66..]));
    nibbles(&bytes[106..], counts);
}

/// d, 32 bytes of indices, 8 halves of upper bits of indices, three each, a count of 3 bits and what is beside.
fn iq1_s(bytes: &[u8; 50], words: &mut [u32], _: &mut [u8]) {
    words[..8].copy_from_slice(&u32s::<8>(&bytes[2..]));
    words[8..].copy_from_slice(&u32s::<4>(&bytes[34..]));
}

/// 32 bytes of indices, 16 whose halves are three upper bits of an index and what is beside it, 4 halves of four counts
/// of 3 bits and a quarter of d.
fn iq1_m(bytes: &[u8; 56], words: &mut [u32], counts: &mut [u8]) {
    words.copy_from_slice(&[u32s::<8>(bytes), [0; 8]].concat()[..12]);
    for run in 0..32 {
        let (four, lowest) = (u32::from(bytes[32 + run / 2]) >> (run % 2 * 4), run / 4 % 2 * 16);
        words[8 + run / 8] |= ((four & 7) << (3 * (run % 4)) | (four >> 3 & 1) << (12 + run % 4)) << lowest;
    }
    for (i, count) in counts.iter_mut().enumerate() {
        *count = (half_at(bytes, 48 + i / 4 * 2) >> (i % 4 * 3) & 7) as u8;
    }
}

fn iq1_m_head(bytes: &[u8; 56]) -> u16 {
    (0..4).fold(0, |d, part| d | (half_at(bytes, 48 + 2 * part) >> 12) << (4 * part))
}
