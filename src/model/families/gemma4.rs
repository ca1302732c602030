//! Gemma 4 with experts (text): windowed layers, and full ones with wider heads whose values are their keys; norms
//! before and after each part; an MLP beside the routed experts.
//!
//! Source: HF modeling_gemma4.

use half::bf16;
use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::{Fields, gqa};
use super::gguf::{Gguf, layer_types};
use crate::model::{
    Activation, Attention, Ffn, Gqa, LayerConfig, Mlp, ModelConfig, Moe, Names, QkNorm, Residual, Router, Scoring,
    SharedExpert, Window,
};
use crate::{Error, Result};

/// `gemma4_text`.
pub(super) fn text(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect("hidden_activation", "gelu_pytorch_tanh".into())?;
    f.expect("attention_bias", false.into())?;
    f.expect("num_kv_shared_layers", 0.into())?;
    f.expect("hidden_size_per_layer_input", 0.into())?;
    if !f.bool_or("enable_moe_block", false)? {
        return Err(Error::Model("enable_moe_block false is not supported for this architecture; true is".into()));
    }
    let heads = f.heads("num_attention_heads")?;
    let kinds = f.layer_kinds("layer_types", ["sliding_attention", "full_attention"])?;
    let slides = |layer: usize| kinds.as_ref().map_or((layer + 1) % 6 != 0, |kinds| kinds[layer]);
    let of_kind = |kind: &str, kv_heads: usize, head_dim: usize| {
        let plain = gqa([heads, kv_heads, head_dim], Some(f.rope_of(kind, head_dim, 10_000.0)?))?;
        Ok::<_, Error>(Gqa { qk_norm: QkNorm::PerHead, value_norm: true, scale: 1.0, ..plain })
    };
    let (kv_heads, head_dim) = (f.heads("num_key_value_heads")?, f.heads("head_dim")?);
    let window = Some(Window::Sliding(f.dim_or("sliding_window", 512)?));
    let sliding = Gqa { window, ..of_kind("sliding_attention", kv_heads, head_dim)? };
    let values_are_keys = f.bool_or("attention_k_eq_v", false)?;
    let global_kv = if values_are_keys { f.dim_or("num_global_key_value_heads", kv_heads)? } else { kv_heads };
    let global_dim = f.heads_or("global_head_dim", 512)?;
    let full = Gqa { values_are_keys, ..of_kind("full_attention", global_kv, global_dim)? };
    let attention = |layer: usize| Attention::Gqa(if slides(layer) { sliding.clone() } else { full.clone() });
    let activation = Activation::GeluTanh;
    let router = Router {
        normalize: true,
        expert_scale: true,
        ..Router::new(f.up_to_top_k("top_k_experts")?, Scoring::Softmax)
    };
    let moe = Moe {
        activation,
        shared: Some(SharedExpert::plain(Mlp { intermediate_size: f.dim("intermediate_size")?, activation })),
        ..Moe::new(f.num_experts(&["num_experts"])?, f.dim("moe_intermediate_size")?, router)
    };
    let names = Names {
        ffn_norm: "pre_feedforward_layernorm",
        router: "router.proj",
        shared_expert: "mlp",
        experts: "experts",
        ..Names::COMMON
    };
    let layers = super::layers(f, attention, |_| Ok(Ffn::Moe(moe.clone())))?;
    let layers = layers.into_iter().map(|layer| LayerConfig { residual: Residual::Sandwich, ..layer }).collect();
    let model = super::model(f, layers)?;
    let cap = f.f64_or("final_logit_softcapping", 0.0)? as f32;
    Ok(ModelConfig {
        // Rounded as the checkpoint's numbers are.
        embedding_scale: bf16::from_f32((model.hidden_size as f32).sqrt()).to_f32(),
        logit_softcap: (cap > 0.0).then_some(cap),
        tied_embeddings: f.bool_or("tie_word_embeddings", true)?,
        names,
        ..model
    })
}

/// `gemma4`: the language model is nested, and so are its tensor names.
pub(super) fn nested(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", text)
}

/// `gemma4_text` in GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "gemma4",
        tensors: &[
            ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
            ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
            ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
            ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
            ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
            ("layer_output_scale.weight", "layer_scalar"),
            ("ffn_gate_inp.weight", "router.proj.weight"),
            ("ffn_gate_inp.scale", "router.scale"),
            ("ffn_down_exps.scale", "router.per_expert_scale"),
            ("ffn_gate_up_exps.weight", "experts.gate_up_proj.weight"),
            ("ffn_gate_exps.weight", "experts.gate_proj.weight"),
            ("ffn_up_exps.weight", "experts.up_proj.weight"),
            ("ffn_down_exps.weight", "experts.down_proj.weight"),
        ],
        permuted: &[],
    },
    model_types: &["gemma4_text"],
    config: |header| {
        let windowed = header.windowed(|layer| (layer + 1) % 6 != 0);
        let kv_heads = |windows| header.number_of("attention.head_count_kv", &windowed, windows);
        let [sliding, full] = ["attention.key_length_swa", "attention.key_length"].map(|key| header.number(key));
        // Frequencies that do not turn are divided by more than there is.
        let factors = header.rope_factors()?.unwrap_or_default();
        let turning = factors.iter().filter(|&&factor| factor == 1.0).count();
        let has_values = |(layer, &windows): (u64, &bool)| {
            windows || header.has(&format!("model.layers.{layer}.self_attn.v_proj.weight"))
        };
        Ok(json!({
            "model_type": "gemma4_text",
            "layer_types": layer_types(&windowed),
            "head_dim": sliding,
            "global_head_dim": full,
            "num_key_value_heads": kv_heads(true),
            "num_global_key_value_heads": kv_heads(false),
            "attention_k_eq_v": !(0..).zip(&windowed).all(has_values),
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": header.metadata.own("rope.freq_base"),
                    "partial_rotary_factor": turning as f64 / factors.len().max(1) as f64,
                },
                "sliding_attention": {
                    "rope_theta": header.metadata.own("rope.freq_base_swa"),
                    "partial_rotary_factor": header.partial_rotary_factor("rope.dimension_count_swa", sliding),
                },
            },
            "enable_moe_block": header.has("model.layers.0.router.proj.weight"),
            "num_experts": header.experts(),
            "top_k_experts": header.number("expert_used_count"),
            "num_kv_shared_layers": header.number("attention.shared_kv_layers"),
            "hidden_size_per_layer_input": header.number("embedding_length_per_layer_input"),
            "final_logit_softcapping": header.metadata.own("final_logit_softcapping"),
        }))
    },
};
