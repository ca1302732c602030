//! Mixtral: grouped queries, every layer MoE, weights normalized over the chosen.
//!
//! Source: HF modeling_mixtral.

use super::fields::Fields;
use crate::Result;
use crate::model::{Activation, Attention, Ffn, Gqa, ModelConfig, Moe, Names, Router, Scoring};

/// Experts in a block of Mixtral's name, by its names.
pub(super) const NAMES: Names = Names {
    body: "model.",
    head: "lm_head",
    moe: "block_sparse_moe",
    router: "gate",
    correction_bias: "e_score_correction_bias",
    shared_expert: "shared_experts",
    experts: ["w1", "w3", "w2"],
};

/// `mixtral`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    let rope = f.rope(f.head_dim()?, 10_000.0)?;
    let attention = Gqa { window: f.optional_dim("sliding_window")?, ..f.gqa(rope)? };
    let router = Router {
        top_k: f.top_k()?,
        bias: false,
        scoring: Scoring::Softmax,
        correction_bias: false,
        groups: None,
        normalize: true,
        scaling: 1.0,
    };
    let moe = moe(f, router)?;
    let layers = super::layers(f, |_| Attention::Gqa(attention.clone()), |_| Ok(Ffn::Moe(moe.clone())))?;
    Ok(ModelConfig { names: NAMES, ..super::model(f, layers)? })
}

/// Experts as wide as `intermediate_size`, which is there for no dense layer.
pub(super) fn moe(f: &Fields<'_>, router: Router) -> Result<Moe> {
    Ok(Moe {
        num_experts: f.num_experts(&["num_local_experts", "num_experts"])?,
        intermediate_size: f.dim("intermediate_size")?,
        shared_intermediate_size: None,
        shared_gate: false,
        activation: Activation::Silu,
        expert_bias: false,
        router,
    })
}
