//! LFM2 with experts: gated short convolutions in most layers, grouped queries with QK norm in the others; sigmoid
//! routing with a correction bias.
//!
//! Source: HF modeling_lfm2_moe.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::{Fields, missing};
use super::gguf::Gguf;
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

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "lfm2moe",
        tensors: &[
            ("attn_norm.weight", "operator_norm.weight"),
            ("ffn_norm.weight", "ffn_norm.weight"),
            ("attn_output.weight", "self_attn.out_proj.weight"),
            ("attn_q_norm.weight", "self_attn.q_layernorm.weight"),
            ("attn_k_norm.weight", "self_attn.k_layernorm.weight"),
            ("shortconv.conv.weight", "conv.conv.weight"),
            ("shortconv.in_proj.weight", "conv.in_proj.weight"),
            ("shortconv.out_proj.weight", "conv.out_proj.weight"),
            ("ffn_gate.weight", "feed_forward.w1.weight"),
            ("ffn_down.weight", "feed_forward.w2.weight"),
            ("ffn_up.weight", "feed_forward.w3.weight"),
            ("ffn_gate_inp.weight", "feed_forward.gate.weight"),
            ("exp_probs_b.bias", "feed_forward.expert_bias"),
            ("ffn_gate_exps.weight", "feed_forward.experts.w1.weight"),
            ("ffn_down_exps.weight", "feed_forward.experts.w2.weight"),
            ("ffn_up_exps.weight", "feed_forward.experts.w3.weight"),
        ],
        permuted: &[],
    },
    model_types: &["lfm2_moe"],
    config: |header| {
        let is_conv = header.each_layer(|layer| header.has(&format!("model.layers.{layer}.conv.conv.weight")));
        let kinds: Vec<_> = is_conv.iter().map(|conv| if *conv { "conv" } else { "full_attention" }).collect();
        Ok(json!({
            "model_type": "lfm2_moe",
            "layer_types": kinds,
            "num_key_value_heads": header.number_of("attention.head_count_kv", &is_conv, false), // 0: a convolution
            "conv_L_cache": header.number("shortconv.l_cache"),
            "num_experts": header.experts(),
            "num_dense_layers": header.number("leading_dense_block_count"),
        }))
    },
};
