//! Hy3: grouped queries with QK norm, DeepSeek-V3's experts under names of its own.
//!
//! Source: HF modeling_hy_v3.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::deepseek;
use super::fields::Fields;
use super::gguf::Gguf;
use crate::Result;
use crate::model::{Attention, Bias, Gqa, Mlp, ModelConfig, Moe, Names, QkNorm, Router, Scoring, SharedExpert};

/// `hy_v3`
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    for field in ["qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"] {
        f.expect(field, true.into())?;
    }
    f.expect("mlp_bias", false.into())?;
    let bias = if f.bool_or("attention_bias", false)? { Bias::All } else { Bias::None };
    let rope = f.rope(f.head_dim()?, 11_158_840.0)?;
    let attention = Gqa { bias, qk_norm: QkNorm::PerHead, ..f.gqa(rope)? };
    let intermediate_size = f.dim("moe_intermediate_size")?;
    let shared = f.count_or("num_shared_experts", 1)?;
    let router = Router {
        correction_bias: true,
        normalize: true,
        scaling: f.f64_or("router_scaling_factor", 2.826)? as f32,
        ..Router::new(f.top_k()?, Scoring::Sigmoid)
    };
    let shared = (shared > 0).then(|| SharedExpert::plain(Mlp::silu(shared * intermediate_size)));
    let num_experts = f.num_experts(&["num_experts", "num_local_experts"])?;
    let moe = Moe { shared, ..Moe::new(num_experts, intermediate_size, router) };
    let layers = super::layers(f, |_| Attention::Gqa(attention.clone()), deepseek::ffn(f, moe, 1)?)?;
    let names = Names {
        router: "mlp.router.gate",
        correction_bias: "mlp.expert_bias",
        shared_expert: "mlp.shared_mlp",
        ..Names::COMMON
    };
    Ok(ModelConfig { names, ..super::model(f, layers)? })
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "hy_v3",
        tensors: &[
            ("ffn_gate_inp.weight", "mlp.router.gate.weight"),
            ("exp_probs_b.bias", "mlp.expert_bias"),
            ("exp_probs_b", "mlp.expert_bias"),
            ("ffn_gate_shexp.weight", "mlp.shared_mlp.gate_proj.weight"),
            ("ffn_up_shexp.weight", "mlp.shared_mlp.up_proj.weight"),
            ("ffn_down_shexp.weight", "mlp.shared_mlp.down_proj.weight"),
        ],
        permuted: &[],
    },
    model_types: &["hy_v3"],
    config: |header| {
        let shared = header.number("expert_shared_feed_forward_length").unwrap_or(0);
        let kind = |layer: u64| match header.has(&format!("model.layers.{layer}.mlp.router.gate.weight")) {
            true => "sparse",
            false => "dense",
        };
        Ok(json!({
            "model_type": "hy_v3",
            "head_dim": header.head_dim(),
            "num_experts": header.experts(),
            "num_shared_experts": shared.checked_div(header.number("expert_feed_forward_length").unwrap_or(0)),
            "router_scaling_factor": header.metadata.own("expert_weights_scale"),
            "route_norm": header.normalized(true),
            "mlp_layer_types": header.each_layer(kind),
        }))
    },
};
