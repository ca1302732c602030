//! gpt-oss: biases everywhere, attention sinks, a sliding window in every other layer, clamped SwiGLU.
//!
//! Top-k before the softmax is the same as a softmax over all, normalized over the chosen. Source: HF modeling_gpt_oss.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::Gguf;
use super::mixtral;
use crate::model::{Activation, Attention, Bias, Ffn, Gqa, ModelConfig, Moe, Names, Router, Scoring, Window};
use crate::{Error, Result};

/// `gpt_oss`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    let bias = if f.bool_or("attention_bias", true)? { Bias::All } else { Bias::None };
    let rope = f.rope(f.head_dim()?, 150_000.0)?;
    let attention = Gqa { bias, sinks: true, ..f.gqa(rope)? };
    let window = Window::Sliding(f.dim_or("sliding_window", 128)?);
    let kinds = f.layer_kinds("layer_types", ["sliding_attention", "full_attention"])?;
    let slides = |layer: usize| kinds.as_ref().map_or(layer % 2 == 0, |kinds| kinds[layer]);
    let limit = f.f64_or("swiglu_limit", 7.0)?;
    if limit <= 0.0 {
        return Err(Error::Model(format!("swiglu_limit {limit} is not a positive number")));
    }
    let router = Router { bias: true, normalize: true, ..Router::new(f.top_k()?, Scoring::Softmax) };
    let activation = Activation::ClampedSwiglu { limit: limit as f32, alpha: f.f64_or("swiglu_alpha", 1.702)? as f32 };
    let moe = Moe { activation, expert_bias: true, ..mixtral::moe(f, router)? };
    let layers = super::layers(
        f,
        |layer| Attention::Gqa(Gqa { window: slides(layer).then_some(window), ..attention.clone() }),
        |_| Ok(Ffn::Moe(moe.clone())),
    )?;
    let names = Names { router: "mlp.router", ..Names::COMMON };
    Ok(ModelConfig { names, ..super::model(f, layers)? })
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "gpt-oss",
        tensors: &[
            ("ffn_gate_inp.weight", "mlp.router.weight"),
            ("ffn_gate_inp.bias", "mlp.router.bias"),
            ("ffn_gate_exps.bias", "mlp.experts.gate_proj_bias"),
            ("ffn_up_exps.bias", "mlp.experts.up_proj_bias"),
            ("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
        ],
        permuted: &[],
    },
    model_types: &["gpt_oss"],
    config: |header| {
        let kind = |layer: u64| if layer % 2 == 0 { "sliding_attention" } else { "full_attention" };
        Ok(json!({
            "model_type": "gpt_oss",
            "head_dim": header.head_dim(),
            "num_local_experts": header.experts(),
            "attention_bias": true,
            "intermediate_size": header.number("expert_feed_forward_length"),
            "layer_types": header.each_layer(kind),
            "rope_scaling": { "truncate": false },
        }))
    },
};
