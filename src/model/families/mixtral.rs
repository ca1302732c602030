//! Mixtral: grouped queries, every layer MoE, weights normalized over the chosen.
//!
//! Source: HF modeling_mixtral.

use super::fields::Fields;
use crate::Result;
use crate::model::{Attention, Ffn, Gqa, ModelConfig, Moe, Names, Router, Scoring, Window};

/// Experts in a block of Mixtral's name, by its names.
pub(super) const NAMES: Names = Names {
    router: "block_sparse_moe.gate",
    correction_bias: "block_sparse_moe.e_score_correction_bias",
    shared_expert: "block_sparse_moe.shared_experts",
    experts: "block_sparse_moe.experts",
    expert_projections: ["w1", "w3", "w2"],
    ..Names::COMMON
};

/// `mixtral`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    let rope = f.rope(f.head_dim()?, 10_000.0)?;
    let attention = Gqa { window: f.optional_dim("sliding_window")?.map(Window::Sliding), ..f.gqa(rope)? };
    let router = Router { normalize: true, ..Router::new(f.top_k()?, Scoring::Softmax) };
    let moe = moe(f, router)?;
    let layers = super::layers(f, |_| Attention::Gqa(attention.clone()), |_| Ok(Ffn::Moe(moe.clone())))?;
    Ok(ModelConfig { names: NAMES, ..super::model(f, layers)? })
}

/// Experts as wide as `intermediate_size`, which is there for no dense layer.
pub(super) fn moe(f: &Fields<'_>, router: Router) -> Result<Moe> {
    Ok(Moe::new(f.num_experts(&["num_local_experts", "num_experts"])?, f.dim("intermediate_size")?, router))
}
