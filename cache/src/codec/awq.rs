//! AWQ in the order of its GEMM kernels: `qweight` `[k, n / 8]`, `qzeros` `[groups, n / 8]`, `scales` `[groups, n]`.
//!
//! A word holds eight outputs of one input, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble on. A weight is
//! (code - zero) * scale. Source: AutoAWQ's packing.

use super::gptq::groups_of;
use super::scales::{Scales, Words};
use super::{Codec, Codes, Format, Found, Integers, Library, Read};
use crate::Result;
use crate::checkpoint::{Checkpoint, TensorView};

/// The nibble of each of the eight outputs.
const NIBBLE: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

struct Awq<'a> {
    codes: Words<'a>,
    zeros: Words<'a>,
    scales: Scales<'a>,
    k: usize,
    group: usize,
}

/// The matrix `[n, k]` whose codes, `NAME.qweight`, are these.
pub(super) fn found<'a>(
    checkpoint: &'a Checkpoint,
    codes: TensorView<'a>,
    stem: &str,
    [n, k]: [usize; 2],
) -> Result<Found<'a>> {
    let (zeros, scales) =
        (checkpoint.tensor(&format!("{stem}.qzeros"))?, checkpoint.tensor(&format!("{stem}.scales"))?);
    let groups = groups_of(&scales, k)?;
    if !n.is_multiple_of(8) {
        return Err(codes.error(format!(
            "has {n} outputs, which words of eight do not hold: config.json and weights do not belong together"
        )));
    }
    let (parts, group) = (vec![codes, zeros, scales], k / groups);
    let (codes, zeros) = (Words::new(codes, k, n / 8)?, Words::new(zeros, groups, n / 8)?);
    let all = Awq { codes, zeros, scales: Scales::new(scales, groups, n)?, k, group };
    let format = Format::Integers { by: Library::Awq, bits: 4, zeros: true };
    Ok(Found::new(format, &format!(", groups of {group}"), parts, Codec::Codes(Box::new(all))))
}

impl Codes for Awq<'_> {
    fn integers(&self) -> Integers {
        Integers { low: -15, high: 15, group: self.group, scales: self.scales.packed_type(), table: None }
    }

    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let (groups, rows) = (self.k / self.group, codes.len() / self.k);
        let nibble = |word: u32, row: usize| (word >> (4 * NIBBLE[row % 8]) & 15) as i8;
        for group in 0..groups {
            let zeros: Vec<i8> = (first..first + rows).map(|row| nibble(self.zeros.get(group, row / 8), row)).collect();
            for (i, row) in (first..first + rows).enumerate() {
                scales[i * groups + group] = self.scales.get(group, row);
            }
            for input in group * self.group..(group + 1) * self.group {
                let words = &mut self.codes.row(input, first / 8);
                let mut word = words.next().unwrap_or(0);
                for (i, row) in (first..first + rows).enumerate() {
                    if i > 0 && row % 8 == 0 {
                        word = words.next().unwrap_or(0);
                    }
                    codes[i * self.k + input] = nibble(word, row) - zeros[i];
                }
            }
        }
        Ok(())
    }
}
