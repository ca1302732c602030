//! GPTQ with 4 or 8 bits: `qweight` `[k * bits / 32, n]`, `qzeros` `[groups, n * bits / 32]`, `scales` `[groups, n]`, `g_idx` `[k]`.
//!
//! A word of `qweight` holds inputs one after the other, the lowest bits first; a word of `qzeros` outputs. A weight is (code - zero) * scale,
//! where the first version of the format stores zero - 1. Source: AutoGPTQ and GPTQModel.

use super::scales::{Scales, Words};
use super::{Codes, Integers, Read, Values};

pub(super) struct Gptq<'a> {
    pub(super) codes: Words<'a>,
    pub(super) zeros: Words<'a>,
    pub(super) scales: Scales<'a>,
    pub(super) k: usize,
    pub(super) group: usize,
    pub(super) bits: usize,
    /// What is to be added to a stored zero: 1 in the first version.
    pub(super) zero_offset: i32,
    /// Whether all zeros are the middle of the codes, as the config says.
    pub(super) symmetric: bool,
    /// Whether inputs are grouped out of order, and how.
    pub(super) group_index: Option<Vec<usize>>,
}

impl Gptq<'_> {
    fn zero(&self, group: usize, row: usize) -> i32 {
        let per_word = 32 / self.bits;
        let word = self.zeros.get(group, row / per_word) >> (row % per_word * self.bits);
        (word & ((1 << self.bits) - 1)) as i32 + self.zero_offset
    }

    /// Zeros and scales of a group, for the rows from `first` on.
    fn of_group(&self, group: usize, first: usize, rows: usize) -> Vec<(i32, f32)> {
        (first..first + rows).map(|row| (self.zero(group, row), self.scales.get(group, row))).collect()
    }

    /// Calls `put(row from 0, input, code)` for all inputs of rows `first..first + rows`; codes are as stored.
    fn each(&self, first: usize, rows: usize, mut put: impl FnMut(usize, usize, i32)) {
        let (per_word, mask) = (32 / self.bits, (1u32 << self.bits) - 1);
        for line in 0..self.k / per_word {
            for (i, word) in self.codes.row(line, first).take(rows).enumerate() {
                for j in 0..per_word {
                    put(i, line * per_word + j, (word >> (j * self.bits) & mask) as i32);
                }
            }
        }
    }
}

impl Codes for Gptq<'_> {
    fn integers(&self) -> Integers {
        let (half, scales) = (1 << (self.bits - 1), self.scales.packed_type());
        match self.symmetric {
            true => Integers { low: -half, high: half - 1, group: self.group, scales, e2m1: false },
            false => Integers { low: -2 * half, high: 2 * half - 1, group: self.group, scales, e2m1: false },
        }
    }

    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let (groups, rows) = (self.k / self.group, codes.len() / self.k);
        let all: Vec<_> = (0..groups).map(|group| self.of_group(group, first, rows)).collect();
        for (group, zeros) in all.iter().enumerate() {
            for (i, &(zero, scale)) in zeros.iter().enumerate() {
                if self.symmetric && zero != 1 << (self.bits - 1) {
                    return Err(format!("has a zero point of {zero}, although config.json says `sym`: set `sym` to false there"));
                }
                scales[i * groups + group] = scale;
            }
        }
        self.each(first, rows, |i, input, code| codes[i * self.k + input] = (code - all[input / self.group][i].0) as i8);
        Ok(())
    }
}

/// Of groups out of order, and of 8-bit codes whose distance from zero does not fit 8 bits.
impl Values for Gptq<'_> {
    fn rows(&self, first: usize, out: &mut [f32]) -> Read {
        let rows = out.len() / self.k;
        let all: Vec<_> = (0..self.k / self.group).map(|group| self.of_group(group, first, rows)).collect();
        self.each(first, rows, |i, input, code| {
            let group = self.group_index.as_ref().map_or(input / self.group, |index| index[input]);
            let (zero, scale) = all[group][i];
            out[i * self.k + input] = (code - zero) as f32 * scale;
        });
        Ok(())
    }
}
