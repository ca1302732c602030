//! MiniMax-M2: QK norm over all heads together, a part of each head rotated, sigmoid routing with a correction bias.
//!
//! Source: HF modeling_minimax_m2.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::Gguf;
use super::mixtral;
use crate::model::{Attention, Ffn, Gqa, ModelConfig, QkNorm, Router, Scoring};
use crate::{Error, Result};

/// `minimax_m2`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("scoring_func", "sigmoid".into())?;
    f.expect("use_qk_norm", true.into())?;
    f.expect("qk_norm_type", "per_layer".into())?;
    f.expect("use_routing_bias", true.into())?;
    f.expect("shared_intermediate_size", 0.into())?;
    if f.layers("attn_type_list")?.iter().any(|&kind| kind != 1) {
        return Err(Error::Model(
            "attn_type_list names linear attention, which is not supported for minimax_m2; 1 in every layer is".into(),
        ));
    }
    let rope = f.rope(f.rotary_dim(1.0)?, 5_000_000.0)?;
    let attention = Gqa { qk_norm: QkNorm::FullWidth, ..f.gqa(rope)? };
    let moe = mixtral::moe(
        f,
        Router { correction_bias: true, normalize: true, ..Router::new(f.top_k()?, Scoring::Sigmoid) },
    )?;
    let layers = super::layers(f, |_| Attention::Gqa(attention.clone()), |_| Ok(Ffn::Moe(moe.clone())))?;
    Ok(ModelConfig { names: mixtral::NAMES, ..super::model(f, layers)? })
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "minimax-m2",
        tensors: &[
            ("ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
            ("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"),
            ("ffn_gate_exps.weight", "block_sparse_moe.experts.w1.weight"),
            ("ffn_down_exps.weight", "block_sparse_moe.experts.w2.weight"),
            ("ffn_up_exps.weight", "block_sparse_moe.experts.w3.weight"),
        ],
        permuted: &[],
    },
    model_types: &["minimax_m2"],
    config: |header| {
        Ok(json!({
            "model_type": "minimax_m2",
            "head_dim": header.head_dim(),
            "num_local_experts": header.experts(),
            "intermediate_size": header.number("expert_feed_forward_length"),
            "rotary_dim": header.number("rope.dimension_count"),
            "use_qk_norm": true,
        }))
    },
};
