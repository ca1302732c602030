//! Command with experts: attention and experts read one layer norm and are added together; windowed layers rotate, full
//! ones do not.
//!
//! Source: HF modeling_cohere2_moe.

use super::fields::{Fields, missing};
use crate::model::{
    Attention, Ffn, Gqa, LayerConfig, Mlp, ModelConfig, Moe, Norm, Residual, Router, Scoring, SharedExpert, Window,
};
use crate::{Error, Result};

/// `cohere2_moe`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("attention_bias", false.into())?;
    let (rope, _) = f.rope_and_mscale(f.head_dim()?, true, 10_000.0)?;
    let window = Window::Sliding(f.dim_or("sliding_window", 4096)?);
    let sliding = Gqa { window: Some(window), ..f.gqa(rope)? };
    let full = Gqa { rope: None, window: None, ..sliding.clone() };
    let rotated_full = Gqa { window: None, ..sliding.clone() };
    let kinds = f.layer_kinds("layer_types", ["sliding_attention", "full_attention"])?;
    let kinds = kinds.ok_or_else(|| missing("layer_types"))?;
    // Dense layers at the beginning rotate even where they attend to everything, if each of them does.
    let first_dense = f.count_or("first_k_dense_replace", 0)?;
    let dense_rotates = f.count_or("prefix_dense_sliding_window_pattern", 0)? == 1;
    let attention = |layer: usize| match kinds[layer] {
        true => Attention::Gqa(sliding.clone()),
        false if layer < first_dense && dense_rotates => Attention::Gqa(rotated_full.clone()),
        false => Attention::Gqa(full.clone()),
    };
    // Scores of the chosen alone: as of all, divided by their sum.
    let (scoring, normalize) = match f.str_or("expert_selection_fn", "softmax")? {
        "softmax" => (Scoring::Softmax, true),
        "sigmoid" => (Scoring::Sigmoid, f.bool_or("norm_topk_prob", false)?),
        other => {
            return Err(Error::Model(format!(
                "expert_selection_fn `{other}` is not supported; softmax and sigmoid are"
            )));
        }
    };
    let scale = match f.str_or("shared_expert_combination_strategy", "sum")? {
        "sum" => 1.0,
        "average" => 0.5,
        other => {
            return Err(Error::Model(format!(
                "shared_expert_combination_strategy `{other}` is not supported; sum and average are"
            )));
        }
    };
    let (width, shared) = (f.dim("intermediate_size")?, f.count_or("num_shared_experts", 0)?);
    let shared = (shared > 0).then(|| SharedExpert { scale, ..SharedExpert::plain(Mlp::silu(shared * width)) });
    let scaling = if shared.is_some() { scale } else { 1.0 };
    let router = Router { normalize, scaling, ..Router::new(f.top_k()?, scoring) };
    let moe = Moe { shared, ..Moe::new(f.num_experts(&["num_experts"])?, width, router) };
    let ffn = |layer| match layer < first_dense {
        true => Ok(Ffn::Dense(Mlp::silu(f.dim("prefix_dense_intermediate_size")?))),
        false => Ok(Ffn::Moe(moe.clone())),
    };
    let layers = super::layers(f, attention, ffn)?;
    let layers = layers.into_iter().map(|layer| LayerConfig { residual: Residual::Parallel, ..layer }).collect();
    let model = super::model(f, layers)?;
    Ok(ModelConfig {
        norm: Norm::Layer,
        logit_scale: f.f64_or("logit_scale", 1.0)? as f32,
        tied_embeddings: f.bool_or("tie_word_embeddings", true)?,
        ..model
    })
}
