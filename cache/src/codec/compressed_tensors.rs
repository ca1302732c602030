//! compressed-tensors: integers of 4 or 8 bits packed into words (`weight_packed`), or of 8 bits as they are (`weight`), `[n, k]`.
//!
//! A word holds the inputs of a row one after the other, the lowest bits first, each with half of its range added. `weight_scale` is
//! `[n, groups]`; `weight_zero_point`, where there is one, `[n, groups]` with rows packed into words in the same way.
//! Source: the compressed-tensors library.

use super::scales::{Scales, Words};
use super::{Codes, Integers, Read, Values};
use crate::checkpoint::{Dtype, TensorView};

pub(super) struct CompressedTensors<'a> {
    pub(super) codes: Stored<'a>,
    pub(super) zeros: Option<Zeros<'a>>,
    pub(super) scales: Scales<'a>,
    pub(super) k: usize,
    pub(super) group: usize,
    pub(super) bits: usize,
    /// Where inputs are grouped out of order.
    pub(super) group_index: Option<Vec<usize>>,
}

/// Codes packed into words, or one to a byte.
pub(super) enum Stored<'a> {
    Words(Words<'a>),
    Bytes(&'a [u8]),
}

/// Zero points `[n, groups]`.
pub(super) enum Zeros<'a> {
    /// `[ceil(n * bits / 32), groups]`
    Packed(Words<'a>),
    /// One byte each.
    Bytes(TensorView<'a>),
}

impl CompressedTensors<'_> {
    fn zero(&self, row: usize, group: usize) -> i32 {
        let per_word = 32 / self.bits;
        match &self.zeros {
            None => 0,
            Some(Zeros::Packed(words)) => {
                let word = words.get(row / per_word, group) >> (row % per_word * self.bits);
                (word & ((1 << self.bits) - 1)) as i32 - (1 << (self.bits - 1))
            }
            Some(Zeros::Bytes(view)) => {
                let byte = view.data[row * (self.k / self.group) + group];
                if view.dtype == Dtype::U8 { byte as i32 } else { byte as i8 as i32 }
            }
        }
    }

    /// Codes of one row, half of the range taken off again.
    fn row(&self, row: usize, out: &mut [i8]) {
        match &self.codes {
            Stored::Bytes(bytes) => out.iter_mut().zip(&bytes[row * self.k..]).for_each(|(code, &byte)| *code = byte as i8),
            Stored::Words(words) if self.bits == 4 => {
                for (codes, word) in out.chunks_mut(8).zip(words.row(row, 0)) {
                    for (j, code) in codes.iter_mut().enumerate() {
                        *code = (word >> (4 * j) & 15) as i8 - 8;
                    }
                }
            }
            Stored::Words(words) => {
                for (codes, word) in out.chunks_mut(4).zip(words.row(row, 0)) {
                    codes.iter_mut().zip(word.to_le_bytes()).for_each(|(code, byte)| *code = (byte ^ 0x80) as i8);
                }
            }
        }
    }
}

impl Codes for CompressedTensors<'_> {
    fn integers(&self) -> Integers {
        let (half, scales) = (1 << (self.bits - 1), self.scales.packed_type());
        match self.zeros {
            None => Integers { low: -half, high: half - 1, group: self.group, scales, e2m1: false },
            Some(_) => Integers { low: -2 * half + 1, high: 2 * half - 1, group: self.group, scales, e2m1: false },
        }
    }

    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let groups = self.k / self.group;
        for (i, (codes, scales)) in codes.chunks_exact_mut(self.k).zip(scales.chunks_exact_mut(groups)).enumerate() {
            self.row(first + i, codes);
            for (group, (codes, scale)) in codes.chunks_exact_mut(self.group).zip(scales).enumerate() {
                *scale = self.scales.get(first + i, group);
                if self.zeros.is_some() {
                    let zero = self.zero(first + i, group) as i8;
                    codes.iter_mut().for_each(|code| *code -= zero);
                }
            }
        }
        Ok(())
    }
}

/// Of groups out of order, and of 8-bit codes whose distance from zero does not fit 8 bits.
impl Values for CompressedTensors<'_> {
    fn rows(&self, first: usize, out: &mut [f32]) -> Read {
        let mut codes = vec![0; self.k];
        for (i, out) in out.chunks_exact_mut(self.k).enumerate() {
            self.row(first + i, &mut codes);
            for (input, (out, &code)) in out.iter_mut().zip(&codes).enumerate() {
                let group = self.group_index.as_ref().map_or(input / self.group, |index| index[input]);
                *out = (code as i32 - self.zero(first + i, group)) as f32 * self.scales.get(first + i, group);
            }
        }
        Ok(())
    }
}
