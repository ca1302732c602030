//! How a `config.json` says that weights are quantized: whose format it is, and the words that formats share.

use std::path::Path;

use serde_json::Value;

use super::formats::{READERS, Reader};
use crate::pack::{MatrixLayout, Precision, largest_group_size};
use crate::{Error, Result};

/// What the tensors' own names, types and shapes do not tell.
#[derive(Clone, Debug, Default)]
pub struct Quantization {
    reader: Option<&'static Reader>,
    config: Value,
}

/// Rows and inputs that share a scale of FP8, where a config does not say.
pub(super) const BLOCK: [usize; 2] = [128, 128];

impl Quantization {
    /// None at all, or in a container that says so itself.
    pub const NONE: Self = Self { reader: None, config: Value::Null };

    /// What the config says of it; null: nothing.
    pub(super) fn config(&self) -> &Value {
        &self.config
    }

    /// Whether the config says that this reads the weights.
    pub(super) fn is_read_by(&self, reader: &Reader) -> bool {
        self.reader.is_some_and(|own| std::ptr::eq(own, reader))
    }

    /// That of the `config.json` in a folder; [`None`](Self::NONE) where there is none.
    ///
    /// Errors: `Error::Checkpoint` as [`parse`](Self::parse).
    pub fn of_folder(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let checkpoint = |what: String| Error::Checkpoint { path: path.clone(), what };
        match crate::file::read(&path) {
            Ok(bytes) => {
                let json = |bytes: &[u8]| {
                    serde_json::from_slice(bytes)
                        .map_err(|e| checkpoint(format!("not valid JSON ({e}): download it again")))
                };
                let mut config = json(&bytes)?;
                if let Ok(own) = crate::file::read(&dir.join(Self::OWN_FILE)) {
                    Self::join(&mut config, &json(&own)?);
                }
                Self::parse(&config).map_err(checkpoint)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::NONE),
            Err(e) => Err(Error::io(&path)(e)),
        }
    }

    /// Where ModelOpt says what `config.json` does not: of NVIDIA's Nemotron 3 and DeepSeek-V3.1 it does not.
    pub const OWN_FILE: &str = "hf_quant_config.json";

    /// Adds to a `config` that says nothing of it what that file says.
    pub fn join(config: &mut Value, own: &Value) {
        let own = own.get("quantization").unwrap_or(own);
        if given(config).is_none() && own["quant_algo"].is_string() && config.is_object() {
            config["quantization_config"] = own.clone();
            config["quantization_config"]["quant_method"] = "modelopt".into();
        }
    }

    /// What [`Source::kept_by`](super::Source::kept_by) will say of weights that are not here yet; `inputs`: the
    /// lengths of their rows.
    pub fn kept_by(&self, inputs: &[usize]) -> Option<Precision> {
        self.reader.and_then(|reader| (reader.kept_by)(&self.config, inputs))
    }

    /// What [`Source::held_by`](super::Source::held_by) will say of the dense matrix `name`, of shape `[n, k]`, that is
    /// not here yet, as far as the config tells.
    pub fn holds(&self, name: &str, [n, k]: [usize; 2]) -> Option<Precision> {
        let (reader, q, name) = (self.reader?, &self.config, name.strip_suffix(".weight")?);
        // An output head is plain where nothing is said of it.
        let is_head = matches!(name.rsplit('.').next(), Some("lm_head" | "head"));
        let is_named = q["quantized_layers"].get(name).is_some() || flag(q, "lm_head", false);
        if left_out(q).any(|of| is_about(of, name)) || is_head && !is_named {
            return None;
        }
        (reader.holds)(q, name, k).filter(|&precision| MatrixLayout::new(n, k, precision).is_ok())
    }

    /// Reads `quantization_config` of a whole config, or of its `text_config`.
    ///
    /// Errors: one clause that names the method, or the variant of one, that is not supported.
    pub fn parse(config: &Value) -> std::result::Result<Self, String> {
        let Some(mut q) = given(config).cloned() else { return Ok(Self::NONE) };
        // ModelOpt does not always say that it is the method.
        let by = if q["producer"]["name"] == "modelopt" { "modelopt" } else { "unknown" };
        let method = q["quant_method"].as_str().unwrap_or(by);
        let Some(reader) = READERS.iter().find(|reader| reader.methods.contains(&method)) else {
            return refused(format!("`{method}`"));
        };
        (reader.check)(&q)?;
        // DeepSeek-V4 says beside it that its experts are of another kind.
        if let (Some(own), Some(experts)) = (q.as_object_mut(), config.get("expert_dtype")) {
            own.insert("expert_dtype".into(), experts.clone());
        }
        Ok(Self { reader: Some(reader), config: q })
    }
}

/// The `quantization_config` of a whole config, or of its `text_config`.
fn given(config: &Value) -> Option<&Value> {
    let both = [Some(config), config.get("text_config")];
    both.into_iter().flatten().find_map(|config| config.get("quantization_config").filter(|q| !q.is_null()))
}

/// The layers that are not quantized, in the words of every library: names, patterns, of GPTQModel behind `-:`.
fn left_out(q: &Value) -> impl Iterator<Item = &str> {
    const LISTS: [&str; 4] = ["modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"];
    let dynamic = q["dynamic"].as_object().into_iter().flat_map(|all| all.keys());
    let patterns = dynamic.filter(|pattern| pattern.starts_with("-:")).map(String::as_str);
    LISTS.iter().flat_map(|list| strings(&q[*list])).chain(patterns)
}

/// Strings of a list.
pub(super) fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Whether `pattern` is about the layer `name`: a regular expression behind `re:` that matches from its beginning on,
/// or parts of the name, where `*` stands for anything.
pub(super) fn is_about(pattern: &str, name: &str) -> bool {
    /// Steps that a pattern may take: those of libraries take a few for each letter.
    const STEPS: usize = 10_000;
    if let Some(expression) = pattern.strip_prefix("re:").or(pattern.strip_prefix("-:")) {
        let from_the_first = format!("^(?:{expression})");
        let expression = fancy_regex::RegexBuilder::new(&from_the_first).backtrack_limit(STEPS).build();
        return expression.is_ok_and(|expression| expression.is_match(name).unwrap_or(false));
    }
    let (name, pattern) = (format!(".{name}."), format!(".{pattern}."));
    let found = pattern.split('*').try_fold(&name[..], |rest, part| Some(&rest[rest.find(part)? + part.len()..]));
    found.is_some()
}

/// What is not supported.
pub(super) fn refused<T>(what: String) -> std::result::Result<T, String> {
    Err(format!("the checkpoint is quantized with {what}, which is not supported: use another one of this model"))
}

/// Bits of a weight.
pub(super) fn bits(q: &Value) -> usize {
    q.get("bits").or(q.get("w_bit")).and_then(Value::as_u64).unwrap_or(4) as usize
}

/// A switch.
pub(super) fn flag(q: &Value, name: &str, default: bool) -> bool {
    q.get(name).and_then(Value::as_bool).unwrap_or(default)
}

/// The largest groups of a precision that divide those of a config; of whole rows those that divide the rows.
pub(super) fn largest(group: Option<usize>, inputs: &[usize]) -> Option<usize> {
    group.map_or_else(|| largest_group_size(inputs), |group| largest_group_size(&[group]))
}

/// Inputs that share a scale; `None`: all of a row, which is -1.
pub(super) fn group_size(q: &Value) -> Option<usize> {
    q.get("group_size").or(q.get("q_group_size")).and_then(Value::as_u64).map(|n| n as usize)
}

/// `[rows, inputs]` that share a scale.
pub(super) fn block(value: &Value) -> std::result::Result<[usize; 2], String> {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pack::ScaleType;

    fn parse(q: Value) -> std::result::Result<Quantization, String> {
        Quantization::parse(&json!({ "quantization_config": q }))
    }

    #[test]
    fn layers_are_left_out_in_the_words_of_every_library() {
        let (name, dense) = ("model.layers.3.self_attn.q_proj", "model.layers.0.mlp.gate_proj");
        for pattern in [
            "model.layers.3",
            "self_attn",
            "self_attn.q_proj",
            "model.layers.*.self_attn",
            "model.layers.3.self_attn*",
            "*.q_proj",
            "re:.*self_attn.*",
            r"re:model\.layers\.\d+\.(self|linear)_attn",
            r"-:^(?!.*mlp).*$",
        ] {
            assert!(is_about(pattern, name) && !is_about(pattern, dense), "{pattern}");
        }
        for pattern in
            ["model.layers.0.mlp.gate", "layers.30", "attn", "re:self_attn", "re:(", "re:((.*)*)*x\\1", "lm_head"]
        {
            assert!(!is_about(pattern, name) && !is_about(pattern, dense), "{pattern}");
        }
        assert!(is_about(r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", dense));

        let held = |q: Value, name: &str| parse(q).unwrap().holds(&format!("{name}.weight"), [256, 256]);
        let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["self_attn"]});
        let uint4 = Precision::uint4(64).with_scales(ScaleType::F16);
        assert_eq!([held(awq.clone(), name), held(awq.clone(), dense)], [None, Some(uint4)]);
        assert_eq!(held(awq, "lm_head"), None);
        let each = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            dense: {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "MXFP8"}}});
        let of_each = [name, dense, "lm_head"].map(|name| held(each.clone(), name));
        assert_eq!(of_each, [None, Some(Precision::Nvfp4), Some(Precision::fp8(32))]);
        let groups = json!({"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {
            "a": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}},
            "b": {"targets": ["re:.*attn.*"], "weights": {"num_bits": 8, "type": "int", "symmetric": false}}}});
        let of_groups = [name, dense, "lm_head"].map(|name| held(groups.clone(), name));
        assert_eq!(of_groups, [None, Some(Precision::int4(32)), None]);
    }

    #[test]
    fn methods_are_told_apart_and_others_refused_by_name() {
        let kept = |config: Value| Quantization::parse(&config).map(|quantization| quantization.kept_by(&[4096]));
        let by = |q: Value| kept(json!({ "quantization_config": q }));
        assert_eq!(kept(json!({})), Ok(None));
        assert_eq!(by(Value::Null), Ok(None));
        let fp8 = |group| Precision::fp8(group).with_scales(ScaleType::F32);
        assert_eq!(by(json!({"quant_method": "fp8", "weight_block_size": [64, 32]})), Ok(Some(fp8(32))));
        let mxfp8 = json!({"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"});
        assert_eq!(by(mxfp8), Ok(Some(Precision::fp8(32))));
        let experts = json!({"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"});
        assert_eq!(kept(experts), Ok(Some(Precision::Mxfp4)));
        assert_eq!(by(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"})), Ok(Some(Precision::Nvfp4)));
        let nested = json!({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}});
        assert_eq!(kept(nested), Ok(Some(Precision::Mxfp4)));
        for version in [json!({}), json!({"checkpoint_format": "gptq_v2"})] {
            let mut q = json!({"quant_method": "gptq", "bits": 4, "sym": true, "group_size": 64});
            version.as_object().unwrap().iter().for_each(|(name, value)| q[name] = value.clone());
            assert_eq!(by(q), Ok(Some(Precision::int4(64).with_scales(ScaleType::F16))));
        }
        // By its older versions ModelOpt is named in a file of its own, or not as the method.
        let mut older = json!({"model_type": "nemotron_h"});
        Quantization::join(&mut older, &Value::Null);
        assert_eq!(kept(older.clone()), Ok(None));
        Quantization::join(
            &mut older,
            &json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}),
        );
        assert_eq!(kept(older.clone()), Ok(Some(Precision::Nvfp4)));
        Quantization::join(&mut older, &json!({"quantization": {"quant_algo": "MXFP8"}}));
        assert_eq!(kept(older), Ok(Some(Precision::Nvfp4)), "which said it already");
        let unnamed = json!({"quant_algo": "MXFP8", "producer": {"name": "modelopt", "version": "0.31.0"}});
        assert_eq!(by(unnamed), Ok(Some(Precision::fp8(32))));
        for (q, name) in [
            (json!({"quant_method": "bitsandbytes"}), "`bitsandbytes`"),
            (json!({}), "`unknown`"),
            (json!({"quant_method": "gptq", "bits": 3}), "gptq of 3 bits"),
            (json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "`marlin`"),
            (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "`gemv`"),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "`e5m2`"),
            (
                json!({"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "marlin-24",
                    "weights": {"num_bits": 4, "type": "int"}}}}),
                "marlin-24",
            ),
            (json!({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}), "`W4A8_AWQ`"),
            (
                json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8_AWQ"}}}),
                "`W4A8_AWQ`",
            ),
            (
                json!({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}},
                    "transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}}),
                "transforms of activations",
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
