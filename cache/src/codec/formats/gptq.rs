//! GPTQ with 4 or 8 bits: `qweight` `[k * bits / 32, n]`, `qzeros` `[groups, n * bits / 32]`, `scales` `[groups, n]`,
//! `g_idx` `[k]`.
//!
//! `g_idx` is the group of each input. In act-order (`desc_act`) inputs of a group lie apart, unless the groups were
//! fixed before the order was (`static_groups`).
//!
//! A word of `qweight` holds inputs one after the other, the lowest bits first; a word of `qzeros` outputs. A weight is
//! (code - zero) * scale, where the first version of the format stores zero - 1. Source: AutoGPTQ and GPTQModel.

use serde_json::Value;

use super::{Format, Library, Reader};
use crate::Result;
use crate::checkpoint::TensorView;
use crate::codec::quantization::{bits, flag, group_size, largest, refused};
use crate::codec::scales::{Scales, Words, group_index};
use crate::codec::{Codec, Codes, Found, Integers, Read, Stored, Values};
use crate::pack::{Precision, ScaleType};

pub(super) const READER: Reader = Reader {
    methods: &["gptq"],
    check: |q| match (bits(q), version(q)) {
        (4 | 8, "gptq" | "gptq_v2") => Ok(()),
        (bits @ (4 | 8), other) => refused(format!("gptq of {bits} bits in the format `{other}`")),
        (bits, _) => refused(format!("gptq of {bits} bits")),
    },
    kept_by,
    holds: |q, _, k| match (bits(q), flag(q, "sym", false)) {
        _ if out_of_order(q) => None,
        (8, false) => None,
        _ => kept_by(q, &[k]),
    },
    tensor: "qweight",
    shape: |checkpoint, codes| match codes.shape {
        &[words, n] => Some([n, words.saturating_mul(32) / bits(checkpoint.quantization().config())]),
        _ => None,
    },
    read,
    ..Reader::NONE
};

fn version(q: &Value) -> &str {
    q["checkpoint_format"].as_str().unwrap_or("gptq")
}

fn kept_by(q: &Value, inputs: &[usize]) -> Option<Precision> {
    // GPTQ writes scales in F16, unless told otherwise.
    let f16 = |precision: Precision| precision.with_scales(ScaleType::F16);
    let group = || largest(group_size(q), inputs);
    match (bits(q), flag(q, "sym", false)) {
        _ if out_of_order(q) => Some(Precision::int8(32)),
        (8, false) => Some(Precision::int8(32)),
        (4, true) => group().map(Precision::int4).map(f16),
        (4, false) => group().map(Precision::uint4).map(f16),
        _ => group().map(Precision::int8).map(f16),
    }
}

/// Whether the config says that inputs of a group lie apart.
fn out_of_order(q: &Value) -> bool {
    flag(q, "desc_act", false) && !flag(q, "static_groups", false)
}

struct Gptq<'a> {
    codes: Words<'a>,
    zeros: Words<'a>,
    scales: Scales<'a>,
    k: usize,
    group: usize,
    bits: usize,
    /// What is to be added to a stored zero: 1 in the first version.
    zero_offset: i32,
    /// Whether all zeros are the middle of the codes, as the config says.
    symmetric: bool,
    /// Whether inputs are grouped out of order, and how.
    group_index: Option<Vec<usize>>,
}

/// The matrix whose codes are `NAME.qweight`; the config says how they are meant.
fn read(stored: Stored<'_>) -> Result<Found<'_>> {
    let (codes, [n, k], q) = (stored.view, stored.shape, stored.checkpoint.quantization().config());
    let (symmetric, act_order) = (flag(q, "sym", false), out_of_order(q));
    let (zeros, scales) = (stored.tensor_beside("qzeros")?, stored.tensor_beside("scales")?);
    let (groups, bits) = (groups_of(&scales, k)?, bits(q));
    if !k.is_multiple_of(32 / bits) || !n.is_multiple_of(32 / bits) {
        return Err(codes.error(format!(
            "has {n} x {k} weights, which words of 32 bits do not hold: config.json and weights do not belong together"
        )));
    }
    let mut parts = vec![codes, zeros, scales];
    let mut index = None;
    let group = k / groups;
    if flag(q, "desc_act", false) {
        let view = stored.tensor_beside("g_idx")?;
        let groups = group_index(view, k, groups)?;
        if !act_order && groups.iter().enumerate().any(|(input, of_group)| *of_group != input / group) {
            return Err(view.error(
                "groups inputs out of order, although config.json says `static_groups`: set `static_groups` to false \
                 there",
            ));
        }
        index = act_order.then_some(groups);
        parts.push(view);
    }
    let all = Gptq {
        codes: Words::new(codes, k * bits / 32, n)?,
        zeros: Words::new(zeros, groups, n * bits / 32)?,
        scales: Scales::new(scales, groups, n)?,
        k,
        group,
        bits,
        zero_offset: i32::from(version(q) == "gptq"),
        symmetric,
        group_index: index,
    };
    let by = Library::Gptq;
    let format = if act_order { Format::OutOfOrder(by) } else { Format::Integers { by, bits, zeros: !symmetric } };
    let fits = !act_order && (bits == 4 || symmetric);
    let codec = if fits { Codec::Codes(Box::new(all)) } else { Codec::Values(Box::new(all)) };
    Ok(Found::new(format, &format!(", groups of {group}"), parts, codec))
}

/// Groups in a row of `k` inputs with these scales, `[groups, n]`. Errors: the row is not that many groups.
pub(super) fn groups_of(scales: &TensorView<'_>, k: usize) -> Result<usize> {
    match scales.shape.first().copied().unwrap_or(0) {
        groups if groups != 0 && k.is_multiple_of(groups) => Ok(groups),
        groups => Err(scales.error(format!(
            "has {groups} groups for rows of {k} weights: config.json and weights do not belong together"
        ))),
    }
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
        let zeros = !self.symmetric && self.bits == 4;
        let (low, high) = if self.symmetric { (-half, half - 1) } else { (-2 * half, 2 * half - 1) };
        Integers { low, high, group: self.group, zeros, scales, table: None }
    }

    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let (groups, rows) = (self.k / self.group, codes.len() / self.k);
        let all: Vec<_> = (0..groups).map(|group| self.of_group(group, first, rows)).collect();
        for (group, zeros) in all.iter().enumerate() {
            for (i, &(zero, scale)) in zeros.iter().enumerate() {
                if self.symmetric && zero != 1 << (self.bits - 1) {
                    return Err(format!(
                        "has a zero point of {zero}, although config.json says `sym`: set `sym` to false there"
                    ));
                }
                scales[i * groups + group] = scale;
            }
        }
        self.each(first, rows, |i, input, code| {
            codes[i * self.k + input] = (code - all[input / self.group][i].0) as i8
        });
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
