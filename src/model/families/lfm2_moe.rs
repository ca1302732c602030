//! LFM2 with experts: gated short convolutions in most layers, grouped queries with QK norm in the others; sigmoid
//! routing with a correction bias.
//!
//! Source: HF modeling_lfm2_moe.

use super::fields::{Fields, missing};
use crate::model::{Attention, Ffn, Gqa, ModelConfig, Moe, Names, QkNorm, Router, Scoring, ShortConv};
use crate::{Error, Result};

/// Inputs of a convolution, at most: what a sequence keeps grows with it.
const MAX_CONV_WIDTH: usize = 64;

/// `lfm2_moe`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect("conv_bias", false.into())?;
    let rope = f.rope(f.head_dim()?, 1_000_000.0)?;
    let full = Gqa { qk_norm: QkNorm::PerHead, ..f.gqa(rope)? };
    let conv = ShortConv { channels: f.dim("hidden_size")?, conv_width: f.dim_or("conv_L_cache", 3)? };
    if !(2..=MAX_CONV_WIDTH).contains(&conv.conv_width) {
        return Err(Error::Model(format!("field `conv_L_cache` is not an integer from 2 to {MAX_CONV_WIDTH}")));
    }
    let kinds = f.layer_kinds("layer_types", ["full_attention", "conv"])?.ok_or_else(|| missing("layer_types"))?;
    let attention =
        |layer: usize| if kinds[layer] { Attention::Gqa(full.clone()) } else { Attention::ShortConv(conv.clone()) };
    let router = Router {
        correction_bias: f.bool_or("use_expert_bias", true)?,
        normalize: f.bool_or("norm_topk_prob", true)?,
        scaling: f.f64_or("routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::Sigmoid)
    };
    let moe = Moe::new(f.num_experts(&["num_experts"])?, f.dim("moe_intermediate_size")?, router);
    let first_dense = f.count_or("num_dense_layers", 0)?;
    let ffn = |layer| if layer >= first_dense { Ok(Ffn::Moe(moe.clone())) } else { f.dense() };
    let names = Names {
        final_norm: "embedding_norm",
        attention_norm: "operator_norm",
        ffn_norm: "ffn_norm",
        o: "out_proj",
        qk_norm: ["q_layernorm", "k_layernorm"],
        mlp: "feed_forward",
        mlp_projections: ["w1", "w3", "w2"],
        router: "feed_forward.gate",
        correction_bias: "feed_forward.expert_bias",
        experts: "feed_forward.experts",
        expert_projections: ["w1", "w3", "w2"],
        ..Names::COMMON
    };
    let model = super::model(f, super::layers(f, attention, ffn)?)?;
    let tied_embeddings = f.bool_or("tie_embedding", f.bool_or("tie_word_embeddings", true)?)?;
    Ok(ModelConfig { names, tied_embeddings, ..model })
}
