//! MXFP4: blocks of 32 weights, E2M1 values two to a byte, the low half first, and one exponent for each block. gpt-oss
//! has stacks of them; DeepSeek-V4, MiMo-V2.6 and Ling 3 the matrices of experts (`weight` in bytes, `scale`);
//! compressed-tensors all (`weight_packed`, `weight_scale`).
//!
//! The values 0, 0.5, 1, 1.5, 2, 3, 4, 6 are halves of integers, so that they pass as codes up to 12 with half the
//! scale, exactly. Source: the OCP microscaling specification 1.0, and gpt-oss's own reader.

use super::{Format, Reader};
use crate::Result;
use crate::checkpoint::Dtype;
use crate::codec::scales::e8m0;
use crate::codec::{Codec, Codes, Found, Integers, Read, Stored};
use crate::pack::{CodeType, DOUBLED_E2M1, Precision, ScaleType};

pub(super) const READER: Reader = Reader {
    methods: &["mxfp4"],
    kept_by: |_, _| Some(Precision::Mxfp4),
    stack: BLOCKS,
    shape: |_, blocks| match blocks.shape {
        &[_, n, blocks, 16] => Some([n, blocks.saturating_mul(32)]),
        _ => None,
    },
    read,
    ..Reader::NONE
};

/// What ends the names of the tensors with blocks; those with exponents end with `_scales`.
const BLOCKS: &str = "_blocks";

pub(super) const INTEGERS: Integers =
    Integers { low: -12, high: 12, group: 32, zeros: false, scales: ScaleType::Bf16, table: Some(CodeType::E2m1) };

/// A matrix of `[n, k / 32]` blocks: `blocks` 16 bytes each, `scales` one.
struct Mxfp4<'a> {
    blocks: &'a [u8],
    scales: &'a [u8],
    k: usize,
}

/// The matrix of these blocks, with the exponents that its name leads to.
fn read(stored: Stored<'_>) -> Result<Found<'_>> {
    let (blocks, [n, k]) = (stored.view, stored.shape);
    let (head, tail) = blocks.name.rsplit_once(BLOCKS).unwrap_or((blocks.name, ""));
    let scales = stored.in_stack(stored.checkpoint.tensor(&format!("{head}_scales{tail}"))?)?;
    if !k.is_multiple_of(32) || (blocks.dtype, scales.dtype) != (Dtype::U8, Dtype::U8) {
        return Err(blocks.error(format!(
            "holds no blocks of 32 for rows of {k} weights: config.json and weights do not belong together"
        )));
    }
    if blocks.data.len() != n * k / 2 {
        blocks.expect_shape(&[n, k / 32, 16])?;
    }
    scales.expect_shape(&[n, k / 32])?;
    let codec = Codec::Codes(Box::new(Mxfp4 { blocks: blocks.data, scales: scales.data, k }));
    Ok(Found::new(Format::Mxfp4, ", stacked", vec![blocks, scales], codec))
}

/// The matrix whose pairs of values are `NAME.weight`, `[n, k / 2]`, with exponents `NAME.scale`,
/// `NAME.weight_scale_inv` or `NAME.weight_scale`, `[n, k / 32]`.
pub(super) fn pairs(stored: Stored<'_>) -> Result<Found<'_>> {
    let (pairs, [n, k]) = (stored.view, stored.shape);
    if stored.part.is_some() || !k.is_multiple_of(32) {
        return Err(pairs.error(format!(
            "is FP4 stacked, or in rows of {k} weights, no multiple of 32, which is not supported: use another \
             checkpoint of this model"
        )));
    }
    pairs.expect_shape(&[n, k / 2])?;
    let named = ["scale", "weight_scale_inv"].into_iter().find_map(|name| stored.beside(name));
    let scales = named.map_or_else(|| stored.tensor_beside("weight_scale"), Ok)?;
    scales.expect_shape(&[n, k / 32])?;
    if !matches!(scales.dtype, Dtype::U8 | Dtype::F8E8M0) {
        return Err(scales.error(format!("holds {:?}, not exponents: download it again", scales.dtype)));
    }
    let codec = Codec::Codes(Box::new(Mxfp4 { blocks: pairs.data, scales: scales.data, k }));
    Ok(Found::new(Format::Mxfp4, "", vec![pairs, scales], codec))
}

impl Codes for Mxfp4<'_> {
    fn integers(&self) -> Integers {
        INTEGERS
    }

    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let at = first * self.k / 32;
        let blocks = self.blocks[at * 16..].as_chunks::<16>().0;
        for (i, (codes, scale)) in codes.as_chunks_mut::<32>().0.iter_mut().zip(scales).enumerate() {
            for (pair, byte) in codes.as_chunks_mut::<2>().0.iter_mut().zip(blocks[i]) {
                *pair = [DOUBLED_E2M1[byte as usize & 15], DOUBLED_E2M1[byte as usize >> 4]];
            }
            *scale = e8m0(self.scales[at + i], 1);
        }
        Ok(())
    }
}
