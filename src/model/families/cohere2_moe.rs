//! Command with experts: attention and experts read one layer norm and are added together; windowed layers rotate, full
//! ones do not.
//!
//! Source: HF modeling_cohere2_moe.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::{Gguf, layer_types};
use crate::model::{
    Attention, Ffn, Gqa, LayerConfig, Mlp, ModelConfig, Moe, Norm, Residual, Router, Scoring, SharedExpert, Window,
};
use crate::{Error, Result};

/// `cohere2_moe`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("attention_bias", false.into())?;
    f.expect("use_qk_norm", false.into())?;
    f.expect("use_parallel_block", true.into())?;
    let (rope, _) = f.rope_and_mscale(f.head_dim()?, true, 10_000.0)?;
    let window = Window::Sliding(f.dim_or("sliding_window", 4096)?);
    let sliding = Gqa { window: Some(window), ..f.gqa(rope)? };
    let full = Gqa { rope: None, window: None, ..sliding.clone() };
    let rotated_full = Gqa { window: None, ..sliding.clone() };
    let kinds = f.layer_kinds("layer_types", ["sliding_attention", "full_attention"])?;
    let first_dense = f.count_or("first_k_dense_replace", 0)?;
    let dense = f.layer_kinds("mlp_layer_types", ["dense", "sparse"])?;
    let is_dense = |layer: usize| dense.as_ref().map_or(layer < first_dense, |dense| dense[layer]);
    let dense_period = f.dim_or("prefix_dense_sliding_window_pattern", 1)?;
    let period = f.dim_or("sliding_window_pattern", 4)?;
    let slides = |layer: usize| match &kinds {
        Some(kinds) => kinds[layer],
        None if layer < first_dense => (layer + 1) % dense_period != 0,
        None => (layer - first_dense + 1) % period != 0,
    };
    // Dense layers rotate even where they attend to everything, if each of them does.
    let attention = |layer: usize| match slides(layer) {
        true => Attention::Gqa(sliding.clone()),
        false if is_dense(layer) && dense_period == 1 => Attention::Gqa(rotated_full.clone()),
        false => Attention::Gqa(full.clone()),
    };
    // Scores of the chosen alone: as of all, divided by their sum.
    let (scoring, normalize) = match f.str_or("expert_selection_fn", "softmax")? {
        "softmax" => (Scoring::Softmax, true),
        "sigmoid" => (Scoring::Sigmoid, f.bool_or("norm_topk_prob", true)?),
        other => {
            return Err(Error::Model(format!(
                "expert_selection_fn `{other}` is not supported; softmax and sigmoid are"
            )));
        }
    };
    let scale = match f.str_or("shared_expert_combination_strategy", "average")? {
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
    let ffn = |layer| match is_dense(layer) {
        true => Ok(Ffn::Dense(Mlp::silu(f.dim("prefix_dense_intermediate_size")?))),
        false => Ok(Ffn::Moe(moe.clone())),
    };
    let layers = super::layers(f, attention, ffn)?;
    let layers = layers.into_iter().map(|layer| LayerConfig { residual: Residual::Parallel, ..layer }).collect();
    let model = super::model(f, layers)?;
    Ok(ModelConfig {
        norm: if f.has("rms_norm_eps") { Norm::Rms } else { Norm::Layer },
        logit_scale: f.f64_or("logit_scale", 0.0625)? as f32,
        tied_embeddings: f.bool_or("tie_word_embeddings", true)?,
        ..model
    })
}

/// `cohere2_vision`, which may hold another model: the language model is nested, and so are its tensor names.
pub(super) fn vision(f: &Fields<'_>) -> Result<ModelConfig> {
    let text = f.object("text_config")?.map_or(Ok("cohere2"), |text| text.str_or("model_type", "cohere2"))?;
    if text != "cohere2_moe" {
        return Err(Error::Model(format!(
            "text_config is `{text}`, which is not supported in cohere2_vision; cohere2_moe is"
        )));
    }
    super::nested(f, "model.language_model.", config)
}

/// In GGUF files. The shared experts' part is half: the converter takes no other.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames { architecture: "cohere2moe", tensors: &[], permuted: &[] },
    model_types: &["cohere2_moe"],
    config: |header| {
        // llama.cpp's numbers: 1 is softmax, 2 and none are sigmoids.
        let scores = if header.number("expert_gating_func") == Some(1) { "softmax" } else { "sigmoid" };
        Ok(json!({
            "model_type": "cohere2_moe",
            "head_dim": header.head_dim(),
            "layer_norm_eps": header.metadata.own("attention.layer_norm_epsilon"),
            "layer_types": layer_types(&header.windowed(|layer| layer % 4 != 0)),
            "logit_scale": header.metadata.own("logit_scale"),
            "num_experts": header.experts(),
            "expert_selection_fn": scores,
            "norm_topk_prob": header.normalized(false),
            "first_k_dense_replace": header.number("leading_dense_block_count"),
            "prefix_dense_intermediate_size": header.number("feed_forward_length"),
            "intermediate_size": header.number("expert_feed_forward_length"),
            "num_shared_experts": header.number("expert_shared_count").unwrap_or(0),
            "shared_expert_combination_strategy": "average",
        }))
    },
};
