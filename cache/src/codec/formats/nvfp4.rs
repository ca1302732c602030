//! NVFP4: E2M1 values two to a byte, the low half first, a scale in E4M3 for each 16 of them, and one F32 number for
//! the matrix, by which scales are multiplied (ModelOpt: `weight`, `weight_scale`, `weight_scale_2`) or divided
//! (compressed-tensors: `weight_packed`, `weight_scale`, `weight_global_scale`).
//!
//! Values pass as codes up to 12 with half the number. That of a matrix that divides is turned around, in F32. Source:
//! ModelOpt's `NVFP4QTensor`, compressed-tensors' `NVFP4PackedCompressor`.

use serde_json::Value;

use super::{Format, Reader, float};
use crate::Result;
use crate::checkpoint::Dtype;
use crate::codec::quantization::{is_about, refused};
use crate::codec::{Blocked, Codec, Found, Read, Stored};
use crate::pack::{Blocks, DOUBLED_E2M1, Precision, largest_group_size};

/// What ModelOpt writes; its tensors are found by their types.
pub(super) const READER: Reader = Reader {
    methods: &["modelopt"],
    check: |q| kinds(q).try_for_each(|(_, kind)| check(kind)),
    kept_by: |q, inputs| {
        let mut all = kinds(q);
        let of_experts = all.clone().find(|(layer, _)| layer.contains(".experts"));
        kept(of_experts.or_else(|| all.next())?.1, inputs)
    },
    holds: |q, name, k| {
        let (_, kind) = kinds(q).find(|(layer, _)| layer.is_empty() || is_about(layer, name))?;
        kept(kind, &[k])
    },
    ..Reader::NONE
};

/// Layers and how they are quantized: one kind for all, or one for each that is. Sources: vLLM's modelopt, the configs
/// of NVIDIA's Qwen3.6-35B-A3B-NVFP4 and MiniMax-M3-NVFP4.
fn kinds(q: &Value) -> impl Iterator<Item = (&str, &str)> + Clone {
    let one = q["quant_algo"].as_str().unwrap_or("unknown");
    let each = q["quantized_layers"].as_object().filter(|_| one == "MIXED_PRECISION");
    let kinds = each.into_iter().flatten();
    let kinds = kinds.map(|(layer, says)| (layer.as_str(), says["quant_algo"].as_str().unwrap_or("unknown")));
    kinds.chain(each.is_none().then_some(("", one)))
}

/// What keeps weights of a kind, whose rows have these lengths.
fn kept(kind: &str, inputs: &[usize]) -> Option<Precision> {
    match kind {
        "NVFP4" | "W4A16_NVFP4" => Some(Precision::Nvfp4),
        "MXFP8" => Some(Precision::fp8(32)),
        _ => largest_group_size(inputs).map(|group| Precision::fp8(group).with_scales(crate::ScaleType::F32)),
    }
}

/// What is done to activations is no matter of ours.
fn check(kind: &str) -> std::result::Result<(), String> {
    match kind {
        "NVFP4" | "W4A16_NVFP4" | "FP8" | "FP8_PER_CHANNEL_PER_TOKEN" | "FP8_PB_WO" | "MXFP8" => Ok(()),
        other => refused(format!("modelopt of the kind `{other}`")),
    }
}

/// Inputs that share a scale.
const GROUP: usize = 16;

/// The name of the number of a matrix, and what becomes of it.
pub(super) type Number = (&'static str, fn(f32) -> f32);
pub(super) const MODELOPT: Number = ("weight_scale_2", |number| number);
pub(super) const COMPRESSED_TENSORS: Number = ("weight_global_scale", |number| 1.0 / number);

struct Nvfp4<'a> {
    pairs: &'a [u8],  // [n, k / 2]
    scales: &'a [u8], // [n, k / 16]
    number: f32,
    k: usize,
}

/// The matrix of these bytes, with the scales that its name leads to.
pub(super) fn pairs(stored: Stored<'_>, (name, turned): Number) -> Result<Found<'_>> {
    let (pairs, [n, k]) = (stored.view, stored.shape);
    if !k.is_multiple_of(32) || pairs.dtype != Dtype::U8 {
        return Err(pairs.error(format!(
            "is NVFP4 in rows of {k} weights, no multiple of 32, which is not supported: use another checkpoint of \
             this model"
        )));
    }
    pairs.expect_shape(&[n, k / 2])?;
    let (scales, number) = (stored.tensor_beside("weight_scale")?, stored.tensor_beside(name)?);
    let scales = stored.in_stack(scales)?;
    scales.expect_shape(&[n, k / GROUP])?;
    // Of a stack as many, one after the other, as Step-3.7-Flash-NVFP4 has them.
    let number = match (stored.part, number.shape.first()) {
        (Some(expert), Some(&experts)) if expert < experts => number.part(expert),
        _ => number,
    };
    if scales.dtype != Dtype::F8E4M3 || number.shape.iter().product::<usize>() != 1 {
        return Err(number.error(format!(
            "does not belong to scales of {:?}: config.json and weights do not belong together",
            scales.dtype
        )));
    }
    let mut value = [0.0];
    crate::codec::decode_f32(&number, &mut value)?;
    let half = turned(value[0]) / 2.0;
    if half.is_nan() || half.abs() >= 2f32.powi(100) {
        return Err(number.error(float::UNUSABLE));
    }
    let all = Nvfp4 { pairs: pairs.data, scales: scales.data, number: half, k };
    let words = if stored.part.is_some() { ", stacked" } else { "" };
    Ok(Found::new(Format::Nvfp4, words, vec![pairs, scales, number], Codec::Blocks(Precision::Nvfp4, Box::new(all))))
}

impl Blocked for Nvfp4<'_> {
    fn rows(&self, first: usize, out: &mut Blocks) -> Read {
        let (codes, _) = out.codes.as_chunks_mut::<2>();
        for (pair, byte) in codes.iter_mut().zip(&self.pairs[first * self.k / 2..]) {
            *pair = [DOUBLED_E2M1[usize::from(byte & 15)], DOUBLED_E2M1[usize::from(byte >> 4)]];
        }
        let counts = out.counts.len();
        out.counts.copy_from_slice(&self.scales[first * self.k / GROUP..][..counts]);
        let bits = self.number.to_bits();
        out.heads.as_chunks_mut::<2>().0.fill([bits as u16, (bits >> 16) as u16]);
        Ok(())
    }
}
