//! AWQ in the order of its GEMM kernels: `qweight` `[k, n / 8]`, `qzeros` `[groups, n / 8]`, `scales` `[groups, n]`.
//!
//! A word holds eight outputs of one input, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble on. A weight is
//! (code - zero) * scale. Source: AutoAWQ's packing.

use serde_json::Value;

use super::gptq::groups_of;
use super::{Format, Library, Reader};
use crate::Result;
use crate::codec::quantization::{bits, flag, group_size, largest, refused};
use crate::codec::scales::{Scales, Words};
use crate::codec::{Codec, Codes, Found, Integers, Read, Stored};
use crate::pack::{Precision, ScaleType};

pub(super) const READER: Reader = Reader {
    methods: &["awq"],
    check: |q| match (bits(q), q["version"].as_str().unwrap_or("gemm").to_ascii_lowercase().as_str()) {
        (4, "gemm") if flag(q, "zero_point", true) => Ok(()),
        (4, "gemm") => refused("awq without zero points".into()),
        (bits, version) => refused(format!("awq of {bits} bits in the order `{version}`")),
    },
    kept_by,
    holds: |q, _, k| kept_by(q, &[k]),
    tensor: "qweight",
    shape: |_, codes| match codes.shape {
        &[k, words] => Some([words.saturating_mul(8), k]),
        _ => None,
    },
    read,
    ..Reader::NONE
};

fn kept_by(q: &Value, inputs: &[usize]) -> Option<Precision> {
    // AWQ writes scales in F16, unless told otherwise.
    Some(Precision::uint4(largest(group_size(q), inputs)?).with_scales(ScaleType::F16))
}

/// The nibble of each of the eight outputs.
const NIBBLE: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

struct Awq<'a> {
    codes: Words<'a>,
    zeros: Words<'a>,
    scales: Scales<'a>,
    k: usize,
    group: usize,
}

/// The matrix whose codes are `NAME.qweight`.
fn read(stored: Stored<'_>) -> Result<Found<'_>> {
    let (codes, [n, k]) = (stored.view, stored.shape);
    let (zeros, scales) = (stored.tensor_beside("qzeros")?, stored.tensor_beside("scales")?);
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
        Integers { low: -15, high: 15, group: self.group, zeros: true, scales: self.scales.packed_type(), table: None }
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
