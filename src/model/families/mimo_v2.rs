//! MiMo-V2: a few layers attend to everything, the others to a window, with heads, widths and ropes of their own;
//! values narrower than keys; DeepSeek-V3's experts.
//!
//! Source: HF modeling_mimo_v2_flash; of the fused projection vLLM's mimo_v2.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::deepseek;
use super::fields::{Fields, checked, gqa, part};
use super::gguf::Gguf;
use crate::model::{Attention, Ffn, Gqa, ModelConfig, Names, Rope, RopeScaling, Window};
use crate::{Error, Result};

/// `mimo_v2_flash`, and `mimo_v2` of V2.5 and later.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("attention_bias", false.into())?;
    // As many parts as a full layer has KV heads: each was a device's.
    let fused_parts = match f.str_or("attention_projection_layout", "split")? {
        "split" => None,
        "fused_qkv" => Some(f.heads("num_key_value_heads")?),
        other => {
            return Err(Error::Model(format!(
                "field `attention_projection_layout` is {other}, and split and fused_qkv are known"
            )));
        }
    };
    let factor = f.f64_or("partial_rotary_factor", 1.0)?;
    // A layer sees as many tokens before it as the window says, and itself.
    let window = Window::Sliding(f.dim_or("sliding_window_size", f.dim_or("sliding_window", 128)?)?.saturating_add(1));
    let kind = |prefix: &str, sinks: &str, default_sinks, window| {
        let or_full = |name: &str| match f.optional_dim(&format!("{prefix}{name}"))? {
            Some(n) => Ok(n),
            None => f.dim(name),
        };
        let head_dim = or_full("head_dim")?;
        let theta = f.f64_or(&format!("{prefix}rope_theta"), f.f64_or("rope_theta", 10_000.0)?)?;
        let rope = Rope { dim: part(head_dim, factor)?, theta, interleaved: false, scaling: RopeScaling::None };
        let heads = [or_full("num_attention_heads")?, or_full("num_key_value_heads")?, head_dim];
        let [queries, kv_heads, _] = heads;
        if let Some(parts) = fused_parts.filter(|parts| queries % parts != 0 || kv_heads % parts != 0) {
            return Err(Error::Model(format!("{queries} and {kv_heads} heads cannot be in {parts} equal parts")));
        }
        Ok::<_, Error>(Gqa {
            fused_parts,
            value_dim: or_full("v_head_dim")?,
            value_scale: f.f64_or("attention_value_scale", 1.0)? as f32,
            sinks: f.bool_or(sinks, default_sinks)?,
            window,
            ..gqa(heads, Some(checked(rope)?))?
        })
    };
    let full = kind("", "add_full_attention_sink_bias", false, None)?;
    let sliding = kind("swa_", "add_swa_attention_sink_bias", true, Some(window))?;
    let pattern = f.each_layer("hybrid_layer_pattern")?;
    if pattern.is_none() {
        // transformers saves what it read in words that leave the windowed layers' heads out.
        f.refuse("layer_types")?;
    }
    let slides = |layer: usize| match &pattern {
        Some(pattern) => pattern[layer] != 0.0,
        None => layer > 0 && (layer + 1) % 6 != 0,
    };
    let attention = |layer| Attention::Gqa(if slides(layer) { sliding.clone() } else { full.clone() });
    let moe = deepseek::moe(f, deepseek::v3_router(f)?, 0)?;
    let frequency = f.each_layer("moe_layer_freq")?;
    let is_moe = |layer: usize| frequency.as_ref().map_or(layer > 0, |frequency| frequency[layer] != 0.0);
    let ffn = |layer| if is_moe(layer) { Ok(Ffn::Moe(moe.clone())) } else { f.dense() };
    let names = Names { sinks: "attention_sink_bias", ..Names::COMMON };
    Ok(ModelConfig { names, ..super::model(f, super::layers(f, attention, ffn)?)? })
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "mimo2",
        tensors: &[("attn_sinks.weight", "self_attn.attention_sink_bias")],
        permuted: &[],
    },
    model_types: &["mimo_v2_flash", "mimo_v2"],
    config: |header| {
        let windowed = header.windowed(|layer| layer > 0 && (layer + 1) % 6 != 0);
        let kv_heads = |windows| header.number_of("attention.head_count_kv", &windowed, windows);
        let sinks = |windows: bool| {
            let has = |layer: usize| header.has(&format!("model.layers.{layer}.self_attn.attention_sink_bias"));
            (0..windowed.len()).any(|layer| windowed[layer] == windows && has(layer))
        };
        Ok(json!({
            "model_type": "mimo_v2_flash",
            "hybrid_layer_pattern": windowed,
            "head_dim": header.head_dim(),
            "v_head_dim": header.number("attention.value_length"),
            "num_key_value_heads": kv_heads(false),
            "swa_num_key_value_heads": kv_heads(true),
            "swa_rope_theta": header.metadata.own("rope.freq_base_swa"),
            "partial_rotary_factor": header.partial_rotary_factor("rope.dimension_count", header.head_dim()),
            "attention_value_scale": header.metadata.own("attention.value_scale"),
            "add_full_attention_sink_bias": sinks(false),
            "add_swa_attention_sink_bias": sinks(true),
            "n_routed_experts": header.experts(),
            "moe_layer_freq": header.each_layer(|layer| header.has(&format!("model.layers.{layer}.mlp.gate.weight"))),
        }))
    },
};
