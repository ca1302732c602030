//! What a family knows of GGUF files: their name for it, their names for its tensors, and what its metadata amount to.

use std::collections::BTreeMap;

use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::checkpoint::gguf::GgufNames;
use moebius_cache::codec::decode_f32;
use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// An architecture of GGUF files.
#[derive(Clone, Copy)]
pub struct Gguf {
    /// What it is called, and what its tensors are called.
    pub names: GgufNames,
    /// The `model_type`s of the models it holds.
    pub model_types: &'static [&'static str],
    /// Fields of `config.json` that not every architecture has, as an object; null fields count as absent.
    pub config: fn(&Header<'_>) -> Result<Value>,
}

/// The keys and values of a GGUF file's header.
pub struct Metadata {
    values: BTreeMap<String, Value>,
    /// `general.architecture`
    pub architecture: String,
}

impl Metadata {
    /// Errors: they do not say which architecture they are of.
    pub fn new(values: BTreeMap<String, Value>) -> Result<Self> {
        let architecture = values.get("general.architecture").and_then(Value::as_str).map(String::from);
        match architecture {
            Some(architecture) => Ok(Self { values, architecture }),
            None => Err(Error::Model("its metadata lack general.architecture: convert the model again".into())),
        }
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// The value of a key that begins with the architecture's name.
    pub fn own(&self, key: &str) -> Option<&Value> {
        self.get(&format!("{}.{key}", self.architecture))
    }

    /// A list of strings. Errors: there is none.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        let list = self.get(key).and_then(|value| value.as_array()?.iter().map(Value::as_str).collect());
        list.ok_or_else(|| Error::Model(format!("its metadata lack the strings {key}: convert the model again")))
    }
}

/// A GGUF file as families read it.
pub struct Header<'a> {
    /// Its keys and values.
    pub metadata: &'a Metadata,
    /// Its tensors, under Hugging Face's names.
    pub checkpoint: &'a Checkpoint,
}

/// Layers of a model, at most.
const MAX_LAYERS: u64 = 1 << 12;
/// Frequencies of a head, at most.
const MAX_FREQUENCIES: usize = 1 << 16;

impl Header<'_> {
    /// A number, by its key after the architecture's name.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.metadata.own(key).and_then(Value::as_u64)
    }

    /// As [`number`](Header::number). Errors: there is none.
    pub(super) fn need(&self, key: &str) -> Result<u64> {
        let architecture = &self.metadata.architecture;
        let missing = || Error::Model(format!("its metadata lack {architecture}.{key}: convert the model again"));
        self.number(key).ok_or_else(missing)
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.get(name).is_some()
    }

    /// Layers. Those that only draft further tokens come last, and are not run.
    pub fn num_layers(&self) -> u64 {
        self.number("block_count").unwrap_or(0).saturating_sub(self.number("nextn_predict_layers").unwrap_or(0))
    }

    /// What `kind` says of each layer.
    pub(super) fn each_layer<T>(&self, kind: impl FnMut(u64) -> T) -> Vec<T> {
        (0..self.num_layers().min(MAX_LAYERS)).map(kind).collect()
    }

    /// Layers without a router.
    pub(super) fn dense_layers(&self) -> Vec<u64> {
        let layers = self.each_layer(|layer| layer).into_iter();
        layers.filter(|layer| !self.has(&format!("model.layers.{layer}.mlp.gate.weight"))).collect()
    }

    /// Of each layer, whether it attends to a window; `default` where the metadata do not say.
    pub(super) fn windowed(&self, default: impl FnMut(u64) -> bool) -> Vec<bool> {
        match self.metadata.own("attention.sliding_window_pattern").and_then(Value::as_array) {
            // Some converters write numbers. Further ones are of layers that draft.
            Some(list) => {
                list.iter().take(self.num_layers() as usize).map(|kind| *kind == true || *kind == 1).collect()
            }
            None => self.each_layer(default),
        }
    }

    /// The number under a key that the layers have whose `kinds` are `kind`: one for all, or of a list the first such
    /// layer's.
    pub(super) fn number_of(&self, key: &str, kinds: &[bool], kind: bool) -> Option<u64> {
        match self.metadata.own(key)? {
            Value::Array(list) => list.iter().zip(kinds).find(|(_, k)| **k == kind)?.0.as_u64(),
            one => one.as_u64(),
        }
    }

    /// Which part of a head of `head_dim` numbers is rotated, by the key of their count.
    pub(super) fn partial_rotary_factor(&self, key: &str, head_dim: Option<u64>) -> Option<f64> {
        // What readers multiply with it is rounded down.
        let part = (self.number(key)? as f64 + 0.5) / head_dim.filter(|&dim| dim > 0)? as f64;
        Some(part.min(1.0))
    }

    /// What each frequency of a rope is divided by, where a tensor says. Errors: it cannot be read.
    pub(super) fn rope_factors(&self) -> Result<Option<Vec<f32>>> {
        let Some(view) = self.checkpoint.get("rope_freqs.weight") else { return Ok(None) };
        let count = view.shape.iter().product();
        if count > MAX_FREQUENCIES {
            return Err(Error::Model(format!(
                "its rope_freqs.weight has {count} numbers, more than a head: convert the model again"
            )));
        }
        let mut factors = vec![0.0; count];
        decode_f32(&view, &mut factors)?;
        Ok(Some(factors))
    }

    /// How the rope is stretched, as `rope_scaling` of a `config.json`. Errors: two ways at once.
    pub fn rope_scaling(&self) -> Result<Option<Value>> {
        let own = |key: &str| self.metadata.own(&format!("rope.scaling.{key}")).cloned().unwrap_or_default();
        let kind = own("type");
        let kind = kind.as_str().unwrap_or("none");
        // Llama 3's: a tensor, where metadata have no word for it.
        if let Some(factors) = self.rope_factors()? {
            if kind != "none" {
                return Err(Error::Model(format!(
                    "it has rope_freqs.weight and `{kind}` as rope.scaling.type, of which one can be: convert the \
                     model again"
                )));
            }
            return Ok(Some(json!({"type": "factors", "factors": factors})));
        }
        Ok(match kind {
            "none" => None,
            "yarn" => {
                let mut scaling = Map::new();
                scaling.insert("type".into(), "yarn".into());
                scaling.insert("factor".into(), own("factor"));
                for (name, key) in [
                    ("original_max_position_embeddings", "original_context_length"),
                    ("beta_fast", "yarn_beta_fast"),
                    ("beta_slow", "yarn_beta_slow"),
                    ("attention_factor", "attn_factor"),
                ] {
                    if !own(key).is_null() {
                        scaling.insert(name.into(), own(key));
                    }
                }
                // What the converter keeps of DeepSeek's two factors, which are equal in every published model.
                if let Some(tenth) = own("yarn_log_multiplier").as_f64() {
                    // Back from f32 times a tenth to the few digits that it was.
                    let factor = (tenth * 10.0 * 1e6).round() / 1e6;
                    scaling.insert("mscale".into(), factor.into());
                    scaling.insert("mscale_all_dim".into(), factor.into());
                }
                Some(Value::Object(scaling))
            }
            other => Some(json!({"type": other, "factor": own("factor")})),
        })
    }

    /// Routed experts of a layer.
    pub(super) fn experts(&self) -> u64 {
        self.number("expert_count").unwrap_or(0)
    }

    /// Width of a head.
    pub(super) fn head_dim(&self) -> Option<u64> {
        self.number("attention.key_length")
    }

    /// Whether the chosen experts' weights are divided by their sum; `default` where the metadata do not say.
    pub(super) fn normalized(&self, default: bool) -> bool {
        self.metadata.own("expert_weights_norm").and_then(Value::as_bool).unwrap_or(default)
    }
}

/// Names of tensors that a family has.
pub(super) type Tensors<const N: usize> = [(&'static str, &'static str); N];

/// Those of two lists.
pub(super) const fn joined<const A: usize, const B: usize, const N: usize>(a: Tensors<A>, b: Tensors<B>) -> Tensors<N> {
    assert!(A + B == N, "as many as both have");
    let (mut all, mut i) = ([("", ""); N], 0);
    while i < N {
        all[i] = if i < A { a[i] } else { b[i - A] };
        i += 1;
    }
    all
}

/// `layer_types` of layers that attend to a window or not.
pub(super) fn layer_types(windowed: &[bool]) -> Vec<&'static str> {
    windowed.iter().map(|&windowed| if windowed { "sliding_attention" } else { "full_attention" }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::GGUF;

    #[test]
    fn tensors_have_the_names_of_their_architecture() {
        for (architecture, theirs, ours) in [
            ("qwen3moe", "blk.11.attn_q_norm.weight", "model.layers.11.self_attn.q_norm.weight"),
            ("qwen2moe", "blk.0.ffn_gate_shexp.weight", "model.layers.0.mlp.shared_expert.gate_proj.weight"),
            ("deepseek2", "blk.0.ffn_gate_shexp.weight", "model.layers.0.mlp.shared_experts.gate_proj.weight"),
            ("deepseek2", "blk.3.exp_probs_b.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
            ("minimax-m2", "blk.3.exp_probs_b.bias", "model.layers.3.block_sparse_moe.e_score_correction_bias"),
            ("llama", "blk.3.ffn_down_exps.weight", "model.layers.3.block_sparse_moe.experts.w2.weight"),
            ("gpt-oss", "blk.3.attn_sinks.weight", "model.layers.3.self_attn.sinks"),
            ("gpt-oss", "blk.3.ffn_gate_inp.bias", "model.layers.3.mlp.router.bias"),
            ("qwen3next", "blk.0.ffn_gate_inp_shexp.weight", "model.layers.0.mlp.shared_expert_gate.weight"),
            ("qwen35moe", "blk.0.ssm_a", "model.layers.0.linear_attn.A"),
            ("mimo2", "blk.1.attn_sinks.weight", "model.layers.1.self_attn.attention_sink_bias"),
            ("step35", "blk.1.attn_gate.weight", "model.layers.1.self_attn.g_proj.weight"),
            ("gemma4", "blk.1.ffn_norm.weight", "model.layers.1.pre_feedforward_layernorm.weight"),
            ("gemma4", "blk.1.ffn_down_exps.scale", "model.layers.1.router.per_expert_scale"),
        ] {
            let gguf = GGUF.iter().find(|gguf| gguf.names.architecture == architecture).unwrap();
            assert_eq!(gguf.names.hf_name(theirs), ours);
        }
    }
}
