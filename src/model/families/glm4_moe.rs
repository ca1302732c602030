//! GLM-4 MoE (4.5 to 4.7, and the text part of 4.5V and 4.6V): grouped queries with biases, half of each head rotated;
//! DeepSeek-V3's experts.
//!
//! Sources: HF modeling_glm4_moe and modeling_glm4v_moe.

use super::deepseek;
use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::Gguf;
use crate::Result;
use crate::model::{Attention, Bias, Gqa, ModelConfig, QkNorm};

/// `glm4v_moe`: the language model is nested, and so are its tensor names.
pub(super) fn vision(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", config)
}

/// `glm4_moe` and `glm4v_moe_text`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    let bias = if f.bool_or("attention_bias", false)? { Bias::Qkv } else { Bias::None };
    let qk_norm = if f.bool_or("use_qk_norm", false)? { QkNorm::PerHead } else { QkNorm::None };
    let rope = f.rope(f.rotary_dim(0.5)?, 10_000.0)?;
    let attention = Gqa { bias, qk_norm, ..f.gqa(rope)? };
    let moe = deepseek::moe(f, deepseek::v3_router(f)?, 1)?;
    super::model(f, super::layers(f, |_| Attention::Gqa(attention.clone()), deepseek::ffn(f, moe, 1)?)?)
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames { architecture: "glm4moe", tensors: &[], permuted: &[] },
    model_types: &["glm4_moe", "glm4v_moe_text"],
    config: |header| {
        let of_layer = |part: &str| header.has(&format!("model.layers.0.{part}"));
        Ok(json!({
            "model_type": "glm4_moe",
            "head_dim": header.head_dim(),
            "n_routed_experts": header.experts(),
            "n_shared_experts": header.number("expert_shared_count"),
            "first_k_dense_replace": header.number("leading_dense_block_count"),
            "norm_topk_prob": header.normalized(true),
            "use_qk_norm": of_layer("self_attn.q_norm.weight"),
            "attention_bias": of_layer("self_attn.q_proj.bias"),
            "rotary_dim": header.number("rope.dimension_count"),
        }))
    },
};
