//! How a `config.json` says that weights are quantized: read here and nowhere else.

use std::path::Path;

use serde_json::Value;

use crate::pack::{Precision, ScaleType, largest_group_size};
use crate::{Error, Result};

/// What the tensors' own names, types and shapes do not tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Quantization {
    /// Not at all, or in a container that says so itself.
    #[default]
    None,
    /// FP8 E4M3; `block` rows and inputs share a scale where scales are for blocks.
    Fp8 {
        /// Rows and inputs.
        block: [usize; 2],
    },
    /// Integers or FP8, as the library of this name writes them.
    CompressedTensors {
        /// Bits of a weight.
        bits: u32,
        /// Whether they have no zero points.
        symmetric: bool,
        /// Inputs that share a scale; `None`: whole rows, or blocks.
        group: Option<usize>,
        /// Rows and inputs that share a scale, of FP8 in blocks.
        block: [usize; 2],
    },
    /// Integers, inputs packed into words.
    Gptq {
        /// Bits of a weight.
        bits: u32,
        /// Inputs that share a scale; `None`: whole rows.
        group: Option<usize>,
        /// Whether all zero points are in the middle.
        symmetric: bool,
        /// Whether zero points are stored less one, as in the format's first version.
        zeros_less_one: bool,
        /// Whether inputs may be grouped out of order.
        act_order: bool,
    },
    /// Integers, outputs packed into words.
    Awq {
        /// Inputs that share a scale; `None`: whole rows.
        group: Option<usize>,
    },
    /// 4-bit floats in blocks of 32.
    Mxfp4,
}

const BLOCK: [usize; 2] = [128, 128];

impl Quantization {
    /// That of the `config.json` in a folder; [`None`](Self::None) where there is none.
    ///
    /// Errors: `Error::Checkpoint` as [`parse`](Self::parse).
    pub fn of_folder(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let checkpoint = |what: String| Error::Checkpoint { path: path.clone(), what };
        match crate::file::read(&path) {
            Ok(bytes) => {
                let config = serde_json::from_slice(&bytes)
                    .map_err(|e| checkpoint(format!("not valid JSON ({e}): download it again")))?;
                Self::parse(&config).map_err(checkpoint)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::None),
            Err(e) => Err(Error::io(&path)(e)),
        }
    }

    /// What [`Source::kept_by`](super::Source::kept_by) will say of weights that are not here yet; `inputs`: the
    /// lengths of their rows.
    pub fn kept_by(&self, inputs: &[usize]) -> Option<Precision> {
        let group_size = |group: Option<usize>| match group {
            Some(group) => largest_group_size(&[group]),
            None => largest_group_size(inputs),
        };
        let int4 = |group| group_size(group).map(Precision::int4);
        let int8 = |group| group_size(group).map(Precision::int8);
        // What these two write, unless told otherwise.
        let f16 = |precision: Option<Precision>| precision.map(|precision| precision.with_scales(ScaleType::F16));
        match *self {
            Self::None => None,
            Self::Fp8 { .. } => int8(None),
            // No codes of 8 bits are left of these: they are rounded.
            Self::CompressedTensors { bits: 8, symmetric: false, .. }
            | Self::Gptq { bits: 8, symmetric: false, .. }
            | Self::Gptq { act_order: true, .. } => int8(Some(32)),
            Self::CompressedTensors { bits: 4, symmetric: true, group, .. } => int4(group),
            Self::CompressedTensors { group, .. } => int8(group),
            Self::Gptq { bits: 4, symmetric: true, group, .. } => f16(int4(group)),
            Self::Gptq { group, .. } | Self::Awq { group } => f16(int8(group)),
            Self::Mxfp4 => Some(Precision::Mxfp4),
        }
    }

    /// Reads `quantization_config` of a whole config, or of its `text_config`.
    ///
    /// Errors: one clause that names the method, or the variant of one, that is not supported.
    pub fn parse(config: &Value) -> std::result::Result<Self, String> {
        let given = |config: &Value| Some(config.get("quantization_config")?.clone()).filter(|q| !q.is_null());
        let Some(q) = given(config).or_else(|| given(config.get("text_config")?)) else { return Ok(Self::None) };
        let text = |name: &str| q.get(name).and_then(Value::as_str);
        let flag = |name: &str, default| q.get(name).and_then(Value::as_bool).unwrap_or(default);
        let bits = || q.get("bits").or(q.get("w_bit")).and_then(Value::as_u64).unwrap_or(4) as u32;
        let refuse = |what: String| {
            Err(format!(
                "the checkpoint is quantized with {what}, which is not supported: use another one of this model"
            ))
        };
        match text("quant_method").unwrap_or("unknown") {
            "fp8" | "fbgemm_fp8" => match text("fmt").unwrap_or("e4m3") {
                "e4m3" | "float8_e4m3fn" => Ok(Self::Fp8 { block: block(&q["weight_block_size"])? }),
                other => refuse(format!("fp8 of the kind `{other}`")),
            },
            "compressed-tensors" => compressed_tensors(&q),
            "gptq" => match (bits(), text("checkpoint_format").unwrap_or("gptq")) {
                (bits @ (4 | 8), format @ ("gptq" | "gptq_v2")) => Ok(Self::Gptq {
                    bits,
                    group: group_size(&q),
                    symmetric: flag("sym", false),
                    zeros_less_one: format == "gptq",
                    act_order: flag("desc_act", false),
                }),
                (bits @ (4 | 8), other) => refuse(format!("gptq of {bits} bits in the format `{other}`")),
                (bits, _) => refuse(format!("gptq of {bits} bits")),
            },
            "awq" => match (bits(), text("version").unwrap_or("gemm").to_ascii_lowercase().as_str()) {
                (4, "gemm") if flag("zero_point", true) => Ok(Self::Awq { group: group_size(&q) }),
                (4, "gemm") => refuse("awq without zero points".into()),
                (bits, version) => refuse(format!("awq of {bits} bits in the order `{version}`")),
            },
            "mxfp4" => Ok(Self::Mxfp4),
            other => refuse(format!("`{other}`")),
        }
    }
}

/// Inputs that share a scale; `None`: all of a row, which is -1.
fn group_size(q: &Value) -> Option<usize> {
    q.get("group_size").or(q.get("q_group_size")).and_then(Value::as_u64).map(|n| n as usize)
}

/// `[rows, inputs]` that share a scale.
fn block(value: &Value) -> std::result::Result<[usize; 2], String> {
    if value.is_null() {
        return Ok(BLOCK);
    }
    let sizes: Vec<usize> =
        value.as_array().into_iter().flatten().filter_map(Value::as_u64).map(|n| n as usize).collect();
    match sizes[..] {
        [rows @ 1..=65536, inputs @ 1..=65536] => Ok([rows, inputs]),
        _ => Err(format!("the block of the quantization is {value}, not two sizes: download config.json again")),
    }
}

fn compressed_tensors(q: &Value) -> std::result::Result<Quantization, String> {
    let refuse = |what: String| {
        Err(format!(
            "the checkpoint is quantized with compressed-tensors, {what}, which is not supported: use another one of \
             this model"
        ))
    };
    let groups = q.get("config_groups").and_then(Value::as_object);
    let mut found = None;
    for group in groups.into_iter().flat_map(|groups| groups.values()) {
        let weights = &group["weights"];
        let format = group["format"].as_str().or(q["format"].as_str()).unwrap_or("pack-quantized");
        let (bits, kind) =
            (weights["num_bits"].as_u64().unwrap_or(0) as u32, weights["type"].as_str().unwrap_or("int"));
        match (format, kind, bits) {
            ("pack-quantized", "int", 4 | 8) | ("int-quantized", "int", 8) | ("float-quantized", "float", 8) => {}
            ("naive-quantized", "int" | "float", 8) => {}
            _ => return refuse(format!("`{format}` of type {kind} and {bits} bits")),
        }
        let this = Quantization::CompressedTensors {
            bits,
            symmetric: weights["symmetric"].as_bool().unwrap_or(true) || kind == "float",
            group: group_size(weights),
            block: block(&weights["block_structure"])?,
        };
        if found.as_ref().is_some_and(|found| *found != this) {
            return refuse("different for groups of layers".into());
        }
        found = Some(this);
    }
    match q.get("sparsity_config").and_then(|s| s["format"].as_str()) {
        None | Some("dense") => found.map_or_else(|| refuse("without a group of layers".into()), Ok),
        Some(format) => refuse(format!("sparse as `{format}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(q: Value) -> std::result::Result<Quantization, String> {
        Quantization::parse(&json!({ "quantization_config": q }))
    }

    #[test]
    fn methods_are_told_apart_and_others_refused_by_name() {
        assert_eq!(Quantization::parse(&json!({})), Ok(Quantization::None));
        assert_eq!(parse(Value::Null), Ok(Quantization::None));
        assert_eq!(
            parse(json!({"quant_method": "fp8", "weight_block_size": [64, 32]})),
            Ok(Quantization::Fp8 { block: [64, 32] })
        );
        let nested = json!({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}});
        assert_eq!(Quantization::parse(&nested), Ok(Quantization::Mxfp4));
        let gptq = |zeros_less_one| Quantization::Gptq {
            bits: 4,
            group: None,
            symmetric: true,
            zeros_less_one,
            act_order: false,
        };
        assert_eq!(parse(json!({"quant_method": "gptq", "bits": 4, "sym": true})), Ok(gptq(true)));
        assert_eq!(
            parse(json!({"quant_method": "gptq", "bits": 4, "sym": true, "checkpoint_format": "gptq_v2"})),
            Ok(gptq(false))
        );
        for (q, name) in [
            (json!({"quant_method": "bitsandbytes"}), "`bitsandbytes`"),
            (json!({}), "`unknown`"),
            (json!({"quant_method": "gptq", "bits": 3}), "gptq of 3 bits"),
            (json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "`marlin`"),
            (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "`gemv`"),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "`e5m2`"),
            (
                json!({"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "nvfp4-pack-quantized",
                    "weights": {"num_bits": 4, "type": "float"}}}}),
                "nvfp4",
            ),
            (json!({"quant_method": "compressed-tensors"}), "without a group"),
        ] {
            let error = parse(q).unwrap_err();
            assert!(error.contains(name) && error.contains("use another one"), "{error}");
        }
        assert!(
            parse(json!({"quant_method": "fp8", "weight_block_size": [0, -1]})).unwrap_err().contains("not two sizes")
        );
    }
}
