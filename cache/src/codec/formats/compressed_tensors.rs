//! compressed-tensors: integers of 4 or 8 bits packed into words (`weight_packed`), or of 8 bits as they are
//! (`weight`), `[n, k]`. Its 4-bit floats are in nvfp4.rs and mxfp4.rs, those of 8 bits in fp8.rs.
//!
//! A word holds the inputs of a row one after the other, the lowest bits first, each with half of its range added.
//! `weight_scale` is `[n, groups]`; `weight_zero_point`, where there is one, `[n, groups]` with rows packed into words
//! in the same way. Source: the compressed-tensors library.

use serde_json::Value;

use super::{Format, Library, Reader, float, fp8, mxfp4, nvfp4};
use crate::Result;
use crate::checkpoint::{Dtype, TensorView};
use crate::codec::quantization::{block, group_size, is_about, largest, strings};
use crate::codec::scales::{Scales, Words, group_index};
use crate::codec::{Codec, Codes, Found, Integers, Read, Stored, Values};
use crate::pack::Precision;

pub(super) const READER: Reader = Reader {
    methods: &["compressed-tensors"],
    check: |q| Group::all(q).map(|_| ()),
    kept_by: |q, inputs| Group::smallest(q)?.kept_by(inputs),
    holds: |q, name, k| {
        let group = Group::all(q).ok()?.into_iter().find(|group| group.is_about(name))?;
        // Of 8 bits with zero points no codes are left: they are rounded.
        let rounded = group.bits == 8 && !group.symmetric;
        let fp8 = group.float && group.bits == 8;
        if fp8 { fp8::held(group.block, false, &[k]) } else { group.kept_by(&[k]).filter(|_| !rounded) }
    },
    tensor: "weight_packed",
    shape: |checkpoint, packed| match *packed.shape {
        [n, pairs] if packed.dtype == Dtype::U8 => Some([n, pairs.saturating_mul(2)]),
        [n, words] => Some([n, words * 32 / Group::smallest(checkpoint.quantization().config()).map_or(4, |g| g.bits)]),
        _ => None,
    },
    read: packed,
    ..Reader::NONE
};

/// What a config says of a group of layers.
struct Group {
    bits: usize,
    float: bool,
    symmetric: bool,
    size: Option<usize>, // inputs that share a scale
    block: [usize; 2],   // of FP8
    targets: Vec<String>,
}

impl Group {
    /// Each of them, of which the tensors say what is in which.
    fn all(q: &Value) -> std::result::Result<Vec<Self>, String> {
        let refuse = |what: String| {
            Err(format!(
                "the checkpoint is quantized with compressed-tensors, {what}, which is not supported: use another one \
                 of this model"
            ))
        };
        let mut all = Vec::new();
        for group in q["config_groups"].as_object().into_iter().flat_map(|groups| groups.values()) {
            let weights = &group["weights"];
            let format = group["format"].as_str().or(q["format"].as_str()).unwrap_or("pack-quantized");
            let (bits, kind) = (weights["num_bits"].as_u64().unwrap_or(0), weights["type"].as_str().unwrap_or("int"));
            match (format, kind, bits) {
                ("pack-quantized", "int", 4 | 8) | ("int-quantized", "int", 8) | ("float-quantized", "float", 8) => {}
                ("naive-quantized", "int" | "float", 8) => {}
                ("nvfp4-pack-quantized" | "mxfp4-pack-quantized", "float", 4) => {}
                _ => return refuse(format!("`{format}` of type {kind} and {bits} bits")),
            }
            all.push(Self {
                bits: bits as usize,
                float: kind == "float",
                symmetric: weights["symmetric"].as_bool().unwrap_or(true) || kind == "float",
                size: group_size(weights),
                block: block(&weights["block_structure"])?,
                targets: strings(&group["targets"]).map(String::from).collect(),
            });
        }
        // Those of weights are done; others would be ours to do.
        let transforms = q["transform_config"]["config_groups"].as_object().into_iter().flat_map(|all| all.values());
        let mut places = transforms.flat_map(|transform| transform["apply"].as_array().into_iter().flatten());
        let place = |apply: &Value| apply["location"].as_str().is_some_and(|place| !place.starts_with("weight"));
        match q["sparsity_config"]["format"].as_str() {
            None | Some("dense") if all.is_empty() => refuse("without a group of layers".into()),
            None | Some("dense") if places.any(place) => refuse("with transforms of activations".into()),
            None | Some("dense") => Ok(all),
            Some(format) => refuse(format!("sparse as `{format}`")),
        }
    }

    /// The one of the fewest bits, which most weights have.
    fn smallest(q: &Value) -> Option<Self> {
        Self::all(q).ok()?.into_iter().min_by_key(|group| group.bits)
    }

    /// Whether a layer of this name is one of them: by its name, or because all linear ones are.
    fn is_about(&self, name: &str) -> bool {
        self.targets.iter().any(|target| target == "Linear" || is_about(target, name))
    }

    /// What keeps them, whose rows have these lengths.
    fn kept_by(&self, inputs: &[usize]) -> Option<Precision> {
        match (self.bits, self.symmetric) {
            (4, _) if self.float => Some(if self.size == Some(16) { Precision::Nvfp4 } else { Precision::Mxfp4 }),
            _ if self.float => fp8::kept(self.block, false, inputs),
            (8, false) => Some(Precision::int8(32)), // no codes of 8 bits are left of these: they are rounded
            (4, true) => largest(self.size, inputs).map(Precision::int4),
            (4, false) => largest(self.size, inputs).map(Precision::uint4),
            _ => largest(self.size, inputs).map(Precision::int8),
        }
    }
}

/// Rows and inputs that share a scale in FP8.
pub(super) fn fp8_block(q: &Value) -> Option<[usize; 2]> {
    Group::all(q).ok()?.into_iter().find(|group| group.float && group.bits == 8).map(|group| group.block)
}

/// Codes packed into words, `NAME.weight_packed`.
fn packed(stored: Stored<'_>) -> Result<Found<'_>> {
    let (packed, [n, k]) = (stored.view, stored.shape);
    if packed.dtype == Dtype::U8 {
        return match stored.beside(nvfp4::COMPRESSED_TENSORS.0) {
            Some(_) => nvfp4::pairs(stored, nvfp4::COMPRESSED_TENSORS),
            None => mxfp4::pairs(stored),
        };
    }
    let bits = match packed.shape {
        [_, cols] if *cols == k.div_ceil(8) => 4,
        [_, cols] if *cols == k.div_ceil(4) => 8,
        other => {
            return Err(packed.error(format!(
                "has shape {other:?}, which does not hold {n} x {k} weights of 4 or 8 bits: config.json and weights \
                 do not belong together"
            )));
        }
    };
    let words = Words::new(packed, n, k.div_ceil(32 / bits))?;
    let scales = stored.tensor_beside("weight_scale")?;
    integers(&stored, CodesOf::Words(words), scales, bits)
}

/// Codes one to a byte, `NAME.weight`.
pub(super) fn bytes(stored: Stored<'_>) -> Result<Found<'_>> {
    let codes = stored.view;
    let Some(scales) = stored.checkpoint.get(&format!("{}_scale", codes.name)) else {
        return Err(codes.error(float::unsupported(codes.dtype)));
    };
    integers(&stored, CodesOf::Bytes(codes.data), scales, 8)
}

/// Either.
fn integers<'a>(stored: &Stored<'a>, codes: CodesOf<'a>, scales: TensorView<'a>, bits: usize) -> Result<Found<'a>> {
    let ([n, k], mut parts) = (stored.shape, vec![stored.view, scales]);
    let groups = scales.shape.get(1).copied().unwrap_or(1);
    let (group, scales) = match scales.shape.iter().product::<usize>() {
        1 if n > 1 => {
            return Err(scales.error(
                "is one scale for a whole matrix of integers, which is not supported: use another checkpoint of this \
                 model",
            ));
        }
        _ if groups == 0 || !k.is_multiple_of(groups) => {
            return Err(scales.error(format!(
                "has {groups} groups for rows of {k} weights: config.json and weights do not belong together"
            )));
        }
        _ => (k / groups, Scales::new(scales, n, groups)?),
    };
    let mut zeros = None;
    if let Some(view) = stored.beside("weight_zero_point") {
        zeros = Some(match view.dtype {
            Dtype::I32 => Zeros::Packed(Words::new(view, n.div_ceil(32 / bits), groups)?),
            Dtype::I8 | Dtype::U8 if view.data.len() == n * groups => Zeros::Bytes(view),
            other => {
                return Err(view.error(format!(
                    "holds zero points as {other:?} of shape {:?}, which is not supported",
                    view.shape
                )));
            }
        });
        parts.push(view);
    } else if Group::all(stored.checkpoint.quantization().config())
        .is_ok_and(|all| all.iter().all(|group| !group.symmetric))
    {
        return Err(parts[0].error(
            "has no weight_zero_point, although config.json says that it is not symmetric: the download is incomplete",
        ));
    }
    let mut index = None;
    // Inputs in order are all in group -1.
    let ordered = |view: &TensorView<'_>| view.data.iter().all(|&byte| byte == 0xff);
    if let Some(view) = stored.beside("weight_g_idx").filter(|view| !ordered(view)) {
        index = Some(group_index(view, k, groups)?);
        parts.push(view);
    }
    let (by, zero_points, ordered) = (Library::CompressedTensors, zeros.is_some(), index.is_none());
    let format = if ordered { Format::Integers { by, bits, zeros: zero_points } } else { Format::OutOfOrder(by) };
    let all = CompressedTensors { codes, zeros, scales, k, group, bits, group_index: index };
    let fits = ordered && !(zero_points && bits == 8);
    let codec = if fits { Codec::Codes(Box::new(all)) } else { Codec::Values(Box::new(all)) };
    Ok(Found::new(format, &format!(", groups of {group}"), parts, codec))
}

struct CompressedTensors<'a> {
    codes: CodesOf<'a>,
    zeros: Option<Zeros<'a>>,
    scales: Scales<'a>,
    k: usize,
    group: usize,
    bits: usize,
    /// Where inputs are grouped out of order.
    group_index: Option<Vec<usize>>,
}

/// Codes packed into words, or one to a byte.
enum CodesOf<'a> {
    Words(Words<'a>),
    Bytes(&'a [u8]),
}

/// Zero points `[n, groups]`.
enum Zeros<'a> {
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
            CodesOf::Bytes(bytes) => {
                out.iter_mut().zip(&bytes[row * self.k..]).for_each(|(code, &byte)| *code = byte as i8)
            }
            CodesOf::Words(words) if self.bits == 4 => {
                for (codes, word) in out.chunks_mut(8).zip(words.row(row, 0)) {
                    for (j, code) in codes.iter_mut().enumerate() {
                        *code = (word >> (4 * j) & 15) as i8 - 8;
                    }
                }
            }
            CodesOf::Words(words) => {
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
        let zeros = self.zeros.is_some() && self.bits == 4;
        let (low, high) = if self.zeros.is_some() { (-2 * half + 1, 2 * half - 1) } else { (-half, half - 1) };
        Integers { low, high, group: self.group, zeros, scales, table: None }
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
