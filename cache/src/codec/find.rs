//! Where a matrix lies in a checkpoint, and in which format: for itself, or stacked with those of the other experts.

use super::awq::Awq;
use super::compressed_tensors::{CompressedTensors, Stored, Zeros};
use super::float::{self, Plain, Transposed};
use super::fp8::Fp8;
use super::gptq::Gptq;
use super::latent::LatentUp;
use super::mxfp4::Mxfp4;
use super::scales::{Scales, Words, group_index};
use super::{Codec, Quantization, Rows, Source, gguf};
use crate::checkpoint::{Checkpoint, Dtype, TensorView};
use crate::{Error, Result};

const ALL: Rows = Rows::From { first: 0, step: 1 };

/// What was found, before it has a name.
struct Found<'a> {
    format: String,
    parts: Vec<TensorView<'a>>,
    codec: Codec<'a>,
    rows: Rows,
    transposed: bool,
}

pub(super) fn find<'a>(checkpoint: &'a Checkpoint, name: &str, [n, k]: [usize; 2]) -> Result<Source<'a>> {
    if n == 0 || k == 0 {
        return Err(Error::Invalid(format!("tensor {name} of {n} x {k} has no weights: config.json is not that of a model")));
    }
    let stem = name.strip_suffix(".weight").unwrap_or(name);
    let found = if let Some(view) = checkpoint.get(name) {
        let rows = match checkpoint.permuted_head(name) {
            Some(head) => Rows::Pairs { head },
            None => ALL,
        };
        Found { rows, ..matrix(checkpoint, view, None, [n, k])? }
    } else if let Some(packed) = checkpoint.get(&format!("{stem}.weight_packed")) {
        compressed(checkpoint, packed, stem, [n, k])?
    } else if let Some(codes) = checkpoint.get(&format!("{stem}.qweight")) {
        words(checkpoint, codes, stem, [n, k])?
    } else if let Some(found) = stacked(checkpoint, stem, [n, k])? {
        found
    } else if let Some(found) = latent(checkpoint, stem, [n, k])? {
        found
    } else {
        return Err(checkpoint.tensor(name).err().unwrap_or_else(|| unreachable!("it was looked up before")));
    };
    let lossless = found.parts.iter().all(|part| float::element_bytes(part.dtype).is_some());
    Ok(Source {
        name: name.to_string(),
        shape: [n, k],
        format: found.format,
        parts: found.parts,
        codec: found.codec,
        rows: found.rows,
        transposed: found.transposed,
        lossless,
    })
}

/// A whole matrix `[n, k]`, or number `part` of stacked ones, by the type of its elements.
fn matrix<'a>(checkpoint: &'a Checkpoint, view: TensorView<'a>, part: Option<usize>, [n, k]: [usize; 2]) -> Result<Found<'a>> {
    let whole = part.map_or(view, |i| view.part(i));
    // A matrix of one row may lie as a vector.
    if !(n == 1 && whole.shape == [k]) && whole.shape != [n, k] {
        whole.expect_shape(&[n, k])?;
    }
    let found = |format: String, parts: Vec<TensorView<'a>>, codec| Ok(Found { format, parts, codec, rows: ALL, transposed: false });
    match whole.dtype {
        dtype if float::element_bytes(dtype).is_some() => {
            found(format!("{dtype:?}"), vec![whole], Codec::Values(Box::new(Plain { view: whole, k })))
        }
        Dtype::F8E4M3 => {
            let names = ["_scale_inv", "_scale"].map(|suffix| format!("{}{suffix}", view.name));
            let Some(scales) = names.iter().find_map(|name| checkpoint.get(name)) else {
                return Err(view.error(format!("is FP8 and {} is missing: the download is incomplete", names[0])));
            };
            let scales = match part.filter(|_| scales.shape.len() > 2) {
                Some(i) if i < scales.shape[0] => scales.part(i),
                Some(i) => return Err(scales.error(format!("has no scales of expert {i}: the download is incomplete"))),
                None => scales,
            };
            let block = match checkpoint.quantization() {
                Quantization::Fp8 { block } | Quantization::CompressedTensors { block, .. } => *block,
                _ => [128, 128],
            };
            let (block, format) = match (scales.shape, scales.shape.iter().product::<usize>()) {
                (_, 1) => ([n, k], "FP8 E4M3, one scale".to_string()),
                ([rows] | [rows, 1], _) if *rows == n => ([1, k], "FP8 E4M3, a scale for each row".to_string()),
                _ => (block, format!("FP8 E4M3, blocks of {} x {}", block[0], block[1])),
            };
            let parts = vec![whole, scales];
            let scales = Scales::new(scales, n.div_ceil(block[0]), k.div_ceil(block[1]))?;
            found(format, parts, Codec::Values(Box::new(Fp8 { view: whole, k, scales, block })))
        }
        Dtype::I8 => {
            let Some(scales) = checkpoint.get(&format!("{}_scale", view.name)) else {
                return Err(view.error(float::unsupported(Dtype::I8)));
            };
            let stem = view.name.strip_suffix(".weight").unwrap_or(view.name);
            integers(checkpoint, Stored::Bytes(whole.data), vec![whole, scales], stem, [n, k], 8)
        }
        Dtype::Ggml(kind) => found(format!("{kind}, GGUF"), vec![whole], gguf::codec(kind, whole.data, k)),
        other => Err(whole.error(float::unsupported(other))),
    }
}

fn compressed<'a>(checkpoint: &'a Checkpoint, packed: TensorView<'a>, stem: &str, [n, k]: [usize; 2]) -> Result<Found<'a>> {
    let bits =
        match packed.shape {
            [_, cols] if *cols == k.div_ceil(8) => 4,
            [_, cols] if *cols == k.div_ceil(4) => 8,
            other => return Err(packed.error(format!(
                "has shape {other:?}, which does not hold {n} x {k} weights of 4 or 8 bits: config.json and weights do not belong together"
            ))),
        };
    let words = Words::new(packed, n, k.div_ceil(32 / bits))?;
    let scales = checkpoint.tensor(&format!("{stem}.weight_scale"))?;
    integers(checkpoint, Stored::Words(words), vec![packed, scales], stem, [n, k], bits)
}

/// Integers of compressed-tensors; `parts` are codes and scales.
fn integers<'a>(
    checkpoint: &'a Checkpoint,
    codes: Stored<'a>,
    mut parts: Vec<TensorView<'a>>,
    stem: &str,
    [n, k]: [usize; 2],
    bits: usize,
) -> Result<Found<'a>> {
    let scales = parts[1];
    let groups = scales.shape.get(1).copied().unwrap_or(1);
    let (group, scales) = match scales.shape.iter().product::<usize>() {
        1 if n > 1 => {
            return Err(
                scales.error("is one scale for a whole matrix of integers, which is not supported: use another checkpoint of this model")
            );
        }
        _ if groups == 0 || !k.is_multiple_of(groups) => {
            return Err(
                scales.error(format!("has {groups} groups for rows of {k} weights: config.json and weights do not belong together"))
            );
        }
        _ => (k / groups, Scales::new(scales, n, groups)?),
    };
    let mut zeros = None;
    if let Some(view) = checkpoint.get(&format!("{stem}.weight_zero_point")) {
        zeros = Some(match view.dtype {
            Dtype::I32 => Zeros::Packed(Words::new(view, n.div_ceil(32 / bits), groups)?),
            Dtype::I8 | Dtype::U8 if view.data.len() == n * groups => Zeros::Bytes(view),
            other => return Err(view.error(format!("holds zero points as {other:?} of shape {:?}, which is not supported", view.shape))),
        });
        parts.push(view);
    } else if matches!(checkpoint.quantization(), Quantization::CompressedTensors { symmetric: false, .. }) {
        return Err(
            parts[0].error("has no weight_zero_point, although config.json says that it is not symmetric: the download is incomplete")
        );
    }
    let mut index = None;
    // Inputs in order are all in group -1.
    let ordered = |view: &TensorView<'_>| view.data.iter().all(|&byte| byte == 0xff);
    if let Some(view) = checkpoint.get(&format!("{stem}.weight_g_idx")).filter(|view| !ordered(view)) {
        index = Some(group_index(view, k, groups)?);
        parts.push(view);
    }
    let with_zeros = if zeros.is_some() { " with zero points" } else { "" };
    let format = format!("INT{bits}, groups of {group}{with_zeros}, compressed-tensors");
    let beyond = zeros.is_some() && bits == 8;
    let all = CompressedTensors { codes, zeros, scales, k, group, bits, group_index: index };
    let codec = if beyond || all.group_index.is_some() { Codec::Values(Box::new(all)) } else { Codec::Codes(Box::new(all)) };
    Ok(Found { format, parts, codec, rows: ALL, transposed: false })
}

/// GPTQ or AWQ, as the config says.
fn words<'a>(checkpoint: &'a Checkpoint, codes: TensorView<'a>, stem: &str, [n, k]: [usize; 2]) -> Result<Found<'a>> {
    let [zeros, scales] = ["qzeros", "scales"].map(|part| checkpoint.tensor(&format!("{stem}.{part}")));
    let (zeros, scales) = (zeros?, scales?);
    let groups = scales.shape.first().copied().unwrap_or(0);
    if groups == 0 || !k.is_multiple_of(groups) {
        return Err(scales.error(format!("has {groups} groups for rows of {k} weights: config.json and weights do not belong together")));
    }
    let group = k / groups;
    let mut parts = vec![codes, zeros, scales];
    let (format, codec) = match checkpoint.quantization() {
        &Quantization::Gptq { bits, symmetric, zeros_less_one, act_order, .. } => {
            let bits = bits as usize;
            if !k.is_multiple_of(32 / bits) || !n.is_multiple_of(32 / bits) {
                return Err(codes.error(format!(
                    "has {n} x {k} weights, which words of 32 bits do not hold: config.json and weights do not belong together"
                )));
            }
            let mut index = None;
            if let Some(view) = checkpoint.get(&format!("{stem}.g_idx")).filter(|_| act_order) {
                index = Some(group_index(view, k, groups)?);
                parts.push(view);
            }
            let all = Gptq {
                codes: Words::new(codes, k * bits / 32, n)?,
                zeros: Words::new(zeros, groups, n * bits / 32)?,
                scales: Scales::new(scales, groups, n)?,
                k,
                group,
                bits,
                zero_offset: zeros_less_one as i32,
                symmetric,
                group_index: index,
            };
            let (order, with_zeros) = (if act_order { " in act-order" } else { "" }, if symmetric { "" } else { " with zero points" });
            let values = act_order || bits == 8 && !symmetric;
            let codec = if values { Codec::Values(Box::new(all)) } else { Codec::Codes(Box::new(all)) };
            (format!("INT{bits}, groups of {group}{order}{with_zeros}, GPTQ"), codec)
        }
        Quantization::Awq { .. } => {
            if !n.is_multiple_of(8) {
                return Err(codes
                    .error(format!("has {n} outputs, which words of eight do not hold: config.json and weights do not belong together")));
            }
            let (codes, zeros) = (Words::new(codes, k, n / 8)?, Words::new(zeros, groups, n / 8)?);
            let all = Awq { codes, zeros, scales: Scales::new(scales, groups, n)?, k, group };
            (format!("INT4, groups of {group} with zero points, AWQ"), Codec::Codes(Box::new(all)))
        }
        _ => {
            return Err(
                codes.error("is packed as by GPTQ or AWQ, and config.json has no quantization_config that says which: download it again")
            );
        }
    };
    Ok(Found { format, parts, codec, rows: ALL, transposed: false })
}

/// Expert `e` of `HEAD.experts.e.PART` in tensors that hold all experts.
fn stacked<'a>(checkpoint: &'a Checkpoint, stem: &str, [n, k]: [usize; 2]) -> Result<Option<Found<'a>>> {
    let Some((head, rest)) = stem.rsplit_once(".experts.") else { return Ok(None) };
    let Some((e, part)) = rest.split_once('.').and_then(|(e, part)| Some((e.parse::<usize>().ok()?, part))) else { return Ok(None) };
    let get = |name: &str| ["", ".weight"].iter().find_map(|suffix| checkpoint.get(&format!("{head}.experts.{name}{suffix}")));
    let there = |view: &TensorView<'_>| match view.shape.first() {
        Some(&experts) if e < experts && view.shape.len() > 2 => Ok(()),
        _ => {
            Err(view.error(format!("has shape {:?}, which has no expert {e}: config.json and weights do not belong together", view.shape)))
        }
    };
    let (role, other_role) = match part {
        "gate_proj" | "w1" => ("gate", Some(0)),
        "up_proj" | "w3" => ("up", Some(1)),
        "down_proj" | "w2" => ("down", None),
        _ => return Ok(None),
    };
    let gate_up = get("gate_up_proj");
    // Of a square matrix the shape does not say which way it lies; its neighbour's then does.
    let (hidden, width) = if role == "down" { (n, k) } else { (k, n) };
    let turned = |view: &TensorView<'_>, shape: [usize; 2]| {
        if view.shape[1..] != [shape[1], shape[0]] {
            return false;
        }
        match (&gate_up, shape[0] != shape[1]) {
            (_, true) => true,
            (Some(pair), false) if pair.name != view.name => pair.shape.get(1..) == Some(&[hidden, 2 * width]),
            (None, false) => false,
            (Some(_), false) => get("down_proj").is_some_and(|down| down.shape.get(1..) == Some(&[width, hidden])),
        }
    };
    let float = |view: &TensorView<'_>| float::element_bytes(view.dtype).is_some();
    if let Some(view) = get(part).or_else(|| get(&format!("{role}_proj"))) {
        there(&view)?;
        if float(&view) && turned(&view, [n, k]) {
            let whole = view.part(e);
            let codec = Codec::Values(Box::new(Transposed { view: whole, n, k }));
            return Ok(Some(Found {
                format: format!("{:?}, stacked, transposed", view.dtype),
                parts: vec![whole],
                codec,
                rows: ALL,
                transposed: true,
            }));
        }
        let found = matrix(checkpoint, view, Some(e), [n, k])?;
        return Ok(Some(Found { format: format!("{}, stacked", found.format), ..found }));
    }
    // gpt-oss, which alone has these biases, alternates the rows of gate and up; all others put one after the other.
    let alternates = get("gate_up_proj_bias").is_some();
    let half = |second: usize| match alternates {
        true => Rows::From { first: second, step: 2 },
        false => Rows::From { first: second * n, step: 1 },
    };
    if let (Some(view), Some(second)) = (gate_up, other_role) {
        there(&view)?;
        let (shape, rows) = ([2 * n, k], half(second));
        if float(&view) && turned(&view, shape) {
            let whole = view.part(e);
            let codec = Codec::Values(Box::new(Transposed { view: whole, n: 2 * n, k }));
            return Ok(Some(Found {
                format: format!("{:?}, gate and up stacked, transposed", view.dtype),
                parts: vec![whole],
                codec,
                rows,
                transposed: true,
            }));
        }
        let found = matrix(checkpoint, view, Some(e), shape)?;
        return Ok(Some(Found { format: format!("{}, gate and up stacked", found.format), rows, ..found }));
    }
    let name = if role == "down" { "down_proj" } else { "gate_up_proj" };
    let (Some(blocks), Some(scales)) = (get(&format!("{name}_blocks")), get(&format!("{name}_scales"))) else { return Ok(None) };
    there(&blocks)?;
    there(&scales)?;
    let (all_rows, rows) = other_role.map_or((n, ALL), |second| (2 * n, half(second)));
    let (blocks, scales) = (blocks.part(e), scales.part(e));
    if !k.is_multiple_of(32) || (blocks.dtype, scales.dtype) != (Dtype::U8, Dtype::U8) {
        return Err(blocks.error(format!("holds no blocks of 32 for rows of {k} weights: config.json and weights do not belong together")));
    }
    if blocks.data.len() != all_rows * k / 2 {
        blocks.expect_shape(&[all_rows, k / 32, 16])?;
    }
    scales.expect_shape(&[all_rows, k / 32])?;
    let codec = Codec::Codes(Box::new(Mxfp4 { blocks: blocks.data, scales: scales.data, k }));
    Ok(Some(Found { format: "MXFP4, stacked".into(), parts: vec![blocks, scales], codec, rows, transposed: false }))
}

/// `kv_b_proj` from its two parts in a GGUF file.
fn latent<'a>(checkpoint: &'a Checkpoint, stem: &str, [n, lora]: [usize; 2]) -> Result<Option<Found<'a>>> {
    let Some(head) = stem.strip_suffix(".kv_b_proj") else { return Ok(None) };
    let [keys, values] = ["k_b_proj", "v_b_proj"].map(|part| checkpoint.get(&format!("{head}.{part}.weight")));
    let (Some(keys), Some(values)) = (keys, values) else { return Ok(None) };
    let ([heads, key_lora, nope], [value_heads, v, value_lora]) = (keys.shape, values.shape) else {
        return Err(keys.error("and its values are not one matrix for each head: convert the model again"));
    };
    if (heads, key_lora, value_lora) != (value_heads, &lora, &lora) || heads * (nope + v) != n {
        return Err(
            keys.error(format!("of shape {:?} does not belong to values of shape {:?} and a latent of {lora}", keys.shape, values.shape))
        );
    }
    let of = |view: TensorView<'a>, shape: [usize; 2]| -> Result<Source<'a>> {
        let (format, codec) = match view.dtype {
            Dtype::Ggml(kind) => (format!("{kind}, GGUF"), gguf::codec(kind, view.data, shape[1])),
            dtype if float::element_bytes(dtype).is_some() => (format!("{dtype:?}"), Codec::Values(Box::new(Plain { view, k: shape[1] }))),
            other => return Err(view.error(float::unsupported(other))),
        };
        let lossless = float::element_bytes(view.dtype).is_some();
        Ok(Source { name: view.name.to_string(), shape, format, parts: vec![view], codec, rows: ALL, transposed: false, lossless })
    };
    let (keys, values) = (of(keys, [heads * lora, *nope])?, of(values, [heads * v, lora])?);
    let (format, parts) = (format!("{}, keys and values apart", keys.format()), [keys.parts.clone(), values.parts.clone()].concat());
    let codec = Codec::Values(Box::new(LatentUp { keys, values, heads: *heads }));
    Ok(Some(Found { format, parts, codec, rows: ALL, transposed: false }))
}
