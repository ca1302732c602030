//! FP8 E4M3 with a scale for the tensor, for each row, or for each block of it, as DeepSeek-V3 has them (128 x 128,
//! edges partial) and MXFP8 (1 x 32, E8M0).
//!
//! Source: DeepSeek-V3's `weight_dequant`; a weight is its value times the scale, whichever name (`weight_scale_inv`,
//! `weight_scale`, `scale`) it has.

use serde_json::Value;

use super::{Format, Reader, compressed_tensors};
use crate::Result;
use crate::checkpoint::{Dtype, TensorView};
use crate::codec::quantization::{BLOCK, block, refused};
use crate::codec::scales::Scales;
use crate::codec::{Codec, Codes, Found, Integers, Read, Stored, Values};
use crate::pack::{Precision, ScaleType, largest_group_size};
use crate::simd::multiversion;

pub(super) const READER: Reader = Reader {
    methods: &["fp8", "fbgemm_fp8", "mxfp8"],
    check: |q| match q["fmt"].as_str().unwrap_or("e4m3") {
        "e4m3" | "float8_e4m3fn" => block(&q["weight_block_size"]).map(|_| ()),
        other => refused(format!("fp8 of the kind `{other}`")),
    },
    kept_by: |q, inputs| {
        // The experts of MiniMax-M3.1 and of DeepSeek-V4 by NVIDIA.
        if q["moe_quant_algo"].as_str() == Some("NVFP4") {
            return Some(Precision::Nvfp4);
        }
        // The experts of DeepSeek-V4, MiMo-V2.6 and Ling 3, each in the words of its config.
        let experts = ["expert_dtype", "store_dtype", "routed_experts_quant_method"].map(|name| q[name].as_str());
        if experts.iter().any(|experts| matches!(experts, Some("fp4" | "mxfp4"))) {
            return Some(Precision::Mxfp4);
        }
        let (block, powers) = blocks(q)?;
        kept(block, powers, inputs)
    },
    holds: |q, name, k| {
        let (block, powers) = blocks(q)?;
        // In all of DeepSeek's they are plain.
        held(block, powers, &[k]).filter(|_| !name.ends_with("indexer.weights_proj"))
    },
    dtype: |dtype| dtype == Dtype::F8E4M3,
    read,
    ..Reader::NONE
};

/// Blocks of a config, and whether it says that their scales are powers of two.
fn blocks(q: &Value) -> Option<([usize; 2], bool)> {
    Some((block(&q["weight_block_size"]).ok()?, q["scale_fmt"].as_str() == Some("ue8m0")))
}

/// What keeps blocks of this size; whether scales are powers of two the types of tensors say, and maybe the config.
pub(super) fn kept(block: [usize; 2], powers: bool, inputs: &[usize]) -> Option<Precision> {
    held(block, powers, inputs).or_else(|| largest_group_size(inputs).map(Precision::int8))
}

/// What holds them exactly.
pub(super) fn held(block: [usize; 2], powers: bool, inputs: &[usize]) -> Option<Precision> {
    let scales = if powers { ScaleType::Bf16 } else { ScaleType::F32 };
    let group = largest_group_size(&[&[block[1]], inputs].concat())?;
    Some(Precision::fp8(group).with_scales(scales))
}

/// A matrix `[n, k]`; `block` rows and inputs share a scale. Blocks begin anew every `part` rows.
struct Fp8<'a> {
    view: TensorView<'a>,
    k: usize,
    scales: Scales<'a>,
    block: [usize; 2],
    group: usize, // inputs that share a scale for certain, as many as precisions have
    part: usize,
}

/// Rows of each of the equal parts that were given scales one by one, and rows of scales of each: MiMo-V2.5 joins
/// queries, keys and values of devices whose last block is partial.
fn parts(n: usize, block: usize, scale_rows: usize) -> (usize, usize) {
    const MOST: usize = 64;
    let of = |count: usize| (n / count, (n / count).div_ceil(block));
    let fits = |count: &usize| n.is_multiple_of(*count) && count * of(*count).1 == scale_rows;
    of((1..=MOST).find(fits).unwrap_or(1))
}

/// The matrix with the scales that its name leads to.
fn read(stored: Stored<'_>) -> Result<Found<'_>> {
    let Stored { checkpoint, view, part, shape: [n, k] } = stored;
    let names = ["_scale_inv", "_scale"].map(|suffix| format!("{}{suffix}", view.name));
    let Some(scales) = names.iter().find_map(|name| checkpoint.get(name)).or_else(|| stored.beside("scale")) else {
        return Err(view.error(format!("is FP8 and {} is missing: the download is incomplete", names[0])));
    };
    // Of a stack a list has one for each expert, as Mistral Small 4 has it.
    let scales = match (part, scales.shape) {
        (Some(i), [experts] | [experts, _, _, ..]) if i < *experts => scales.part(i),
        (Some(i), [_] | [_, _, _, ..]) => {
            return Err(scales.error(format!("has no scales of expert {i}: the download is incomplete")));
        }
        _ => scales,
    };
    let q = checkpoint.quantization().config();
    let block = compressed_tensors::fp8_block(q).or(block(&q["weight_block_size"]).ok()).unwrap_or(BLOCK);
    let (block, words) = match (scales.shape, scales.shape.iter().product::<usize>()) {
        (_, 1) => ([n, k], ", one scale".to_string()),
        ([rows] | [rows, 1], _) if *rows == n => ([1, k], ", a scale for each row".to_string()),
        // MXFP8 beside other formats, of which the config says no block.
        (&[rows, runs], _) if rows == n && k.is_multiple_of(runs) => {
            ([1, k / runs], format!(", blocks of 1 x {}", k / runs))
        }
        _ => (block, format!(", blocks of {} x {}", block[0], block[1])),
    };
    let tensors = vec![view, scales];
    let (part, blocks) = parts(n, block[0], scales.shape.first().copied().unwrap_or(1));
    let scales = Scales::new(scales, n / part.max(1) * blocks, k.div_ceil(block[1]))?;
    let codec = match largest_group_size(&[block[1], k]) {
        Some(group) => Codec::Codes(Box::new(Fp8 { view, k, scales, block, part, group })),
        None => Codec::Values(Box::new(Fp8 { view, k, scales, block, part, group: k })),
    };
    Ok(Found::new(Format::Fp8, &words, tensors, codec))
}

impl Fp8<'_> {
    /// The row of scales of a row.
    fn scale_row(&self, row: usize) -> usize {
        row / self.part * self.part.div_ceil(self.block[0]) + row % self.part / self.block[0]
    }
}

impl Codes for Fp8<'_> {
    fn integers(&self) -> Integers {
        Integers::fp8(self.group, self.scales.exact_type())
    }

    fn rows(&self, first: usize, codes: &mut [i8], scales: &mut [f32]) -> Read {
        let stored = &self.view.data[first * self.k..][..codes.len()];
        if stored.iter().any(|byte| byte & 0x7f == 0x7f) {
            return Err(super::float::UNUSABLE.into());
        }
        codes.copy_from_slice(bytemuck::cast_slice(stored));
        for (i, scales) in scales.chunks_exact_mut(self.k / self.group).enumerate() {
            let row = self.scale_row(first + i);
            for (group, scale) in scales.iter_mut().enumerate() {
                *scale = self.scales.get(row, group * self.group / self.block[1]);
            }
        }
        Ok(())
    }
}

/// Of blocks that are no multiple of 32 inputs.
impl Values for Fp8<'_> {
    fn rows(&self, first: usize, out: &mut [f32]) -> Read {
        for (i, out) in out.chunks_exact_mut(self.k).enumerate() {
            let row = first + i;
            let scale_row = self.scale_row(row);
            let stored = &self.view.data[row * self.k..][..self.k];
            let mut numbers = true;
            for (j, (out, stored)) in out.chunks_mut(self.block[1]).zip(stored.chunks(self.block[1])).enumerate() {
                numbers &= scaled(stored, self.scales.get(scale_row, j), out);
            }
            if !numbers {
                return Err(super::float::UNUSABLE.into());
            }
        }
        Ok(())
    }
}

multiversion!(
    /// Values times a scale; whether none is NaN.
    pub(in crate::codec) fn scaled(stored: &[u8], scale: f32,
        out: &mut [f32]) -> bool = [scaled_body, scaled_body, scaled_body]
);

/// Exponent and mantissa shifted to where f32 has them; multiplying by 2^120 mends the bias and normalizes subnormals,
/// exactly.
#[inline(always)]
fn scaled_body(stored: &[u8], scale: f32, out: &mut [f32]) -> bool {
    let mut nan = 0u32;
    for (out, &byte) in out.iter_mut().zip(stored) {
        let bits = byte as u32;
        nan |= (bits & 0x7f == 0x7f) as u32;
        let magnitude = f32::from_bits((bits & 0x7f) << 20) * f32::from_bits((127 + 120) << 23);
        *out = f32::from_bits(magnitude.to_bits() | (bits & 0x80) << 24) * scale;
    }
    nan == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_with_scales_of_their_own_are_found() {
        assert_eq!(parts(13_568, 128, 108), (3392, 27)); // 4 parts of 26.5 blocks
        assert_eq!(parts(13_568, 128, 106), (13_568, 106));
        assert_eq!(parts(14_848, 128, 116), (14_848, 116));
        assert_eq!(parts(200, 128, 2), (200, 2));
        assert_eq!(parts(200, 128, 7), (200, 2), "which the scales' shape then refuses");
    }

    /// All 256 of them by the definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; the last of each sign is
    /// NaN.
    #[test]
    fn every_value_is_as_defined() {
        for byte in 0..=255u8 {
            let (sign, e, m) = (if byte & 0x80 == 0 { 1.0 } else { -1.0 }, (byte >> 3 & 15) as i32, (byte & 7) as f32);
            let want = sign * if e == 0 { m / 8.0 * 2f32.powi(-6) } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) };
            let mut got = [0.0];
            let number = scaled(&[byte], 0.5, &mut got);
            assert_eq!(number, byte & 0x7f != 0x7f, "{byte:#x}");
            assert!(
                !number || got[0].to_bits() == (want * 0.5).to_bits(),
                "{byte:#x}: {} instead of {}",
                got[0],
                want * 0.5
            );
        }
    }
}
