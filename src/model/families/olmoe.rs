//! OLMoE: QK norm over all heads together, softmax routing.
//!
//! Source: HF modeling_olmoe.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::Gguf;
use super::mixtral;
use crate::Result;
use crate::model::{Attention, Bias, Ffn, Gqa, ModelConfig, QkNorm, Router, Scoring};

/// `olmoe`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.refuse("clip_qkv")?;
    let bias = if f.bool_or("attention_bias", false)? { Bias::All } else { Bias::None };
    let rope = f.rope(f.head_dim()?, 10_000.0)?;
    let attention = Gqa { qk_norm: QkNorm::FullWidth, bias, ..f.gqa(rope)? };
    let moe = mixtral::moe(
        f,
        Router { normalize: f.bool_or("norm_topk_prob", false)?, ..Router::new(f.top_k()?, Scoring::Softmax) },
    )?;
    super::model(f, super::layers(f, |_| Attention::Gqa(attention.clone()), |_| Ok(Ffn::Moe(moe.clone())))?)
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames { architecture: "olmoe", tensors: &[], permuted: &[] },
    model_types: &["olmoe"],
    config: |header| {
        Ok(json!({
            "model_type": "olmoe",
            "num_experts": header.experts(),
            "norm_topk_prob": header.normalized(false),
        }))
    },
};
