//! ERNIE 4.5 MoE: grouped queries whose pairs are neighbours, softmax routing with a bias for choosing.
//!
//! Source: HF modeling_ernie4_5_moe.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::Gguf;
use crate::Result;
use crate::model::{Attention, Ffn, Mlp, ModelConfig, Moe, Names, Router, Scoring, SharedExpert};

/// `ernie4_5_moe`
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("use_bias", false.into())?;
    let (rope, _) = f.rope_and_mscale(f.head_dim()?, true, 500_000.0)?;
    let attention = f.gqa(rope)?;
    let intermediate_size = f.dim("moe_intermediate_size")?;
    let shared = f.count_or("moe_num_shared_experts", 2)?;
    let router = Router { correction_bias: true, normalize: true, ..Router::new(f.top_k()?, Scoring::Softmax) };
    let shared = (shared > 0).then(|| SharedExpert::plain(Mlp::silu(shared * intermediate_size)));
    let num_experts = f.num_experts(&["moe_num_experts", "num_experts"])?;
    let moe = Moe { shared, ..Moe::new(num_experts, intermediate_size, router) };
    let (first, interval) = (f.count_or("moe_layer_start_index", 1)?, f.dim_or("moe_layer_interval", 1)?);
    // -1 is the last.
    let last = f.f64_or("moe_layer_end_index", -1.0)?;
    let is_moe =
        |layer: usize| (layer + 1).is_multiple_of(interval) && layer >= first && (last < 0.0 || layer as f64 <= last);
    let ffn = |layer| if is_moe(layer) { Ok(Ffn::Moe(moe.clone())) } else { f.dense() };
    let layers = super::layers(f, |_| Attention::Gqa(attention.clone()), ffn)?;
    let names = Names { correction_bias: "mlp.moe_statics.e_score_correction_bias", ..Names::COMMON };
    Ok(ModelConfig { names, ..super::model(f, layers)? })
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "ernie4_5-moe",
        tensors: &[("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias")],
        permuted: &[],
    },
    model_types: &["ernie4_5_moe"],
    config: |header| {
        Ok(json!({
            "model_type": "ernie4_5_moe",
            "head_dim": header.head_dim(),
            "moe_num_experts": header.experts(),
            "moe_num_shared_experts": header.number("expert_shared_count"),
            "moe_layer_start_index": header.number("leading_dense_block_count"),
            "moe_layer_interval": header.number("interleave_moe_layer_step"),
        }))
    },
};
