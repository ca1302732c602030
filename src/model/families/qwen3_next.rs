//! Qwen3-Next and the text part of Qwen3.5 and later, MoE and dense: gated DeltaNet in most layers, gated attention in
//! the others; norms around one.
//!
//! Sources: HF modeling_qwen3_next, modeling_qwen3_5_moe and modeling_qwen3_5.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::{Value, json};

use super::fields::Fields;
use super::gguf::{Gguf, Header};
use super::qwen_moe;
use crate::model::{Attention, Bias, DeltaGate, DeltaNet, Ffn, Gqa, ModelConfig, Moe, Names, OutputGate, QkNorm};
use crate::{Error, Result};

/// `qwen3_next`
pub(super) fn qwen3_next(f: &Fields<'_>) -> Result<ModelConfig> {
    let moe = moe(f, f.bool_or("norm_topk_prob", true)?)?;
    config(f, qwen_moe::ffn(f, &moe)?)
}

/// `qwen3_5_moe_text`: the language model alone. Experts are stacked, their weights always normalized.
pub(super) fn qwen3_5_moe_text(f: &Fields<'_>) -> Result<ModelConfig> {
    let moe = moe(f, true)?;
    config(f, qwen_moe::ffn(f, &moe)?)
}

/// `qwen3_5_text`: without experts.
pub(super) fn qwen3_5_text(f: &Fields<'_>) -> Result<ModelConfig> {
    config(f, |_| f.dense())
}

/// `qwen3_5_moe`: the language model is nested, and so are its tensor names.
pub(super) fn qwen3_5_moe(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", qwen3_5_moe_text)
}

/// `qwen3_5`: the same without experts.
pub(super) fn qwen3_5(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", qwen3_5_text)
}

/// Experts, and a shared one with a gate.
pub(super) fn moe(f: &Fields<'_>, normalize: bool) -> Result<Moe> {
    Ok(Moe { shared: Some(qwen_moe::shared(f)?), ..qwen_moe::moe(f, normalize)? })
}

pub(super) fn config(f: &Fields<'_>, ffn: impl Fn(usize) -> Result<Ffn>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("use_sliding_window", false.into())?;
    f.expect("attn_output_gate", true.into())?;
    let bias = if f.bool_or("attention_bias", false)? { Bias::All } else { Bias::None };
    let rope = f.rope(f.rotary_dim(0.25)?, 10_000_000.0)?;
    let full = Gqa { bias, qk_norm: QkNorm::PerHead, output_gate: Some(OutputGate::InQuery), ..f.gqa(rope)? };
    let linear = DeltaNet {
        num_key_heads: f.heads("linear_num_key_heads")?,
        num_value_heads: f.heads("linear_num_value_heads")?,
        key_head_dim: f.heads("linear_key_head_dim")?,
        value_head_dim: f.heads("linear_value_head_dim")?,
        conv_width: f.conv_width("linear_conv_kernel_dim")?,
        // Published configs of Qwen3.6 and 3.8 say swish, which is another name of SiLU.
        gate: match f.str_or("output_gate_type", "silu")? {
            "silu" | "swish" => DeltaGate::Silu,
            "sigmoid" => DeltaGate::Sigmoid,
            other => {
                return Err(Error::Model(format!(
                    "field `output_gate_type` is {other}, and silu and sigmoid are known"
                )));
            }
        },
        tiled: f.bool_or("linear_value_heads_tiled", false)?,
    };
    if linear.num_value_heads % linear.num_key_heads != 0 {
        let (keys, values) = (linear.num_key_heads, linear.num_value_heads);
        return Err(Error::Model(format!("{values} value heads cannot share {keys} key heads evenly")));
    }
    let interval = f.dim_or("full_attention_interval", 4)?;
    let kinds = f.layer_kinds("layer_types", ["full_attention", "linear_attention"])?;
    let is_full = |layer: usize| kinds.as_ref().map_or((layer + 1) % interval == 0, |kinds| kinds[layer]);
    let attention =
        |layer| if is_full(layer) { Attention::Gqa(full.clone()) } else { Attention::DeltaNet(linear.clone()) };
    let layers = super::layers(f, attention, ffn)?;
    let names = Names { shared_expert: "mlp.shared_expert", ..Names::COMMON };
    // In GGUF files the one is part of the weights.
    let norm_offset = f.f64_or("norm_offset", 1.0)? as f32;
    Ok(ModelConfig { norm_offset, names, ..super::model(f, layers)? })
}

/// `qwen3_next` in GGUF files.
pub(super) const GGUF_NEXT: Gguf = Gguf {
    names: GgufNames { architecture: "qwen3next", tensors: qwen_moe::GGUF_SHARED, permuted: &[] },
    model_types: &["qwen3_next"],
    config: |header| Ok(gguf(header, "qwen3_next", false)),
};

/// `qwen3_5_text` in GGUF files, whose value heads are tiled.
pub(super) const GGUF_QWEN3_5: Gguf = Gguf {
    names: GgufNames { architecture: "qwen35", tensors: &[], permuted: &[] },
    model_types: &["qwen3_5_text"],
    config: |header| Ok(gguf(header, "qwen3_5_text", true)),
};

/// `qwen3_5_moe_text` in GGUF files.
pub(super) const GGUF_QWEN3_5_MOE: Gguf = Gguf {
    names: GgufNames { architecture: "qwen35moe", tensors: qwen_moe::GGUF_SHARED, permuted: &[] },
    model_types: &["qwen3_5_moe_text"],
    config: |header| Ok(gguf(header, "qwen3_5_moe_text", true)),
};

pub(super) fn gguf(header: &Header<'_>, model_type: &str, tiled: bool) -> Value {
    let (values, heads) = (header.number("ssm.inner_size").unwrap_or(0), header.number("ssm.time_step_rank"));
    let heads = heads.unwrap_or(0);
    let is_linear = |layer: u64| header.has(&format!("model.layers.{layer}.linear_attn.A"));
    let kind = |layer| if is_linear(layer) { "linear_attention" } else { "full_attention" };
    json!({
        "model_type": model_type,
        "norm_offset": 0, // the converter adds one to norms
        "linear_value_heads_tiled": tiled,
        "head_dim": header.head_dim(),
        "num_experts": header.experts(),
        "norm_topk_prob": header.normalized(true),
        "shared_expert_intermediate_size": header.number("expert_shared_feed_forward_length"),
        "mlp_only_layers": header.dense_layers(),
        "layer_types": header.each_layer(kind),
        "linear_conv_kernel_dim": header.number("ssm.conv_kernel"),
        "linear_key_head_dim": header.number("ssm.state_size"),
        "linear_num_key_heads": header.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": values.checked_div(heads),
        "rotary_dim": header.number("rope.dimension_count"),
    })
}
