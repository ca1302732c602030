//! Step-3.5-Flash and 3.7: windowed and full layers with heads and ropes of their own, a gate for each head, experts
//! whose activations some layers clamp; norms around one.
//!
//! Source: HF modeling_step3p5.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::{Fields, checked, gqa, missing, part};
use super::gguf::{Gguf, layer_types};
use crate::model::{
    Activation, Attention, Ffn, GateActivation, Gqa, Mlp, ModelConfig, Moe, Names, OutputGate, QkNorm, Rope,
    RopeScaling, Router, Scoring, SharedExpert, Window,
};
use crate::{Error, Result};

/// `step3p5`, and the text part of `step3p7`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("attention_bias", false.into())?;
    f.expect("moe_router_activation", "sigmoid".into())?;
    f.expect("use_qk_norm", true.into())?;
    let num_layers = f.num_layers()?;
    let kinds = f.layer_kinds("layer_types", ["sliding_attention", "full_attention"])?;
    let kinds = kinds.ok_or_else(|| missing("layer_types"))?;
    let window = Window::Sliding(f.dim_or("sliding_window", 512)?);
    let full = [f.heads("num_attention_heads")?, f.heads("num_attention_groups")?, f.heads("head_dim")?];
    let sliding = match f.object("attention_other_setting")? {
        Some(other) => [other.heads("num_attention_heads")?, other.heads("num_attention_groups")?, full[2]],
        None => full,
    };
    let thetas = f.each_layer_or("rope_theta", 10_000.0)?;
    let factors = f.each_layer_or("partial_rotary_factors", 1.0)?;
    // Which kinds of layers are stretched.
    let stretched = f.texts("yarn_only_types")?;
    let output_gate = f.bool_or("use_head_wise_attn_gate", false)?;
    let output_gate = output_gate.then_some(OutputGate::Heads(GateActivation::Sigmoid));
    let attention = |layer: usize| {
        let (heads, kind) = if kinds[layer] { (sliding, "sliding_attention") } else { (full, "full_attention") };
        let dim = part(heads[2], factors[layer])?;
        let scaling = match stretched.as_ref().is_none_or(|kinds| kinds.contains(&kind)) {
            true => f.rope_scaling(f.object("rope_scaling")?.or(f.object("rope_parameters")?), dim)?.0,
            false => RopeScaling::None,
        };
        let rope = checked(Rope { dim, theta: thetas[layer], interleaved: false, scaling })?;
        let window = kinds[layer].then_some(window);
        Ok::<_, Error>(Gqa { qk_norm: QkNorm::PerHead, window, output_gate, ..gqa(heads, Some(rope))? })
    };
    let attentions: Vec<Gqa> = (0..num_layers).map(attention).collect::<Result<_>>()?;

    let router = Router {
        correction_bias: f.bool_or("use_moe_router_bias", true)?,
        normalize: f.bool_or("norm_expert_weight", true)?,
        scaling: f.f64_or("moe_router_scaling_factor", 1.0)? as f32,
        ..Router::new(f.up_to_top_k("moe_top_k")?, Scoring::Sigmoid)
    };
    let (experts, width) = (f.num_experts(&["moe_num_experts"])?, f.dim("moe_intermediate_size")?);
    let shared = f.optional_dim("share_expert_dim")?;
    let [limits, shared_limits] =
        [f.each_layer_or("swiglu_limits", 0.0)?, f.each_layer_or("swiglu_limits_shared", 0.0)?];
    let moe_layers = f.layers("moe_layers_enum")?;
    let ffn = |layer: usize| {
        let is_moe = if moe_layers.is_empty() { layer > 0 } else { moe_layers.contains(&layer) };
        if !is_moe {
            let activation = Activation::silu_within(shared_limits[layer]);
            return Ok(Ffn::Dense(Mlp { intermediate_size: f.dim("intermediate_size")?, activation }));
        }
        let shared = shared.map(|intermediate_size| {
            SharedExpert::plain(Mlp { intermediate_size, activation: Activation::silu_within(shared_limits[layer]) })
        });
        let activation = Activation::silu_within(limits[layer]);
        Ok(Ffn::Moe(Moe { shared, activation, ..Moe::new(experts, width, router.clone()) }))
    };
    let names = Names {
        router: "moe.gate",
        correction_bias: "moe.router_bias",
        shared_expert: "share_expert",
        experts: "moe.experts",
        ..Names::COMMON
    };
    let layers = super::layers(f, |layer| Attention::Gqa(attentions[layer].clone()), ffn)?;
    // In GGUF files the one is part of the weights.
    let norm_offset = f.f64_or("norm_offset", 1.0)? as f32;
    // Step-3.7's config leaves it out.
    let norm_eps = f.norm_eps_or(1e-5)?;
    Ok(ModelConfig { norm_eps, norm_offset, names, ..super::model(f, layers)? })
}

/// `step3p7`: the language model is nested, its tensor names are not.
pub(super) fn nested(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.", config)
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "step35",
        tensors: &[
            ("attn_gate.weight", "self_attn.g_proj.weight"),
            ("ffn_gate_inp.weight", "moe.gate.weight"),
            ("exp_probs_b.bias", "moe.router_bias"),
            ("ffn_gate_exps.weight", "moe.gate_proj.weight"),
            ("ffn_up_exps.weight", "moe.up_proj.weight"),
            ("ffn_down_exps.weight", "moe.down_proj.weight"),
            ("ffn_gate_shexp.weight", "share_expert.gate_proj.weight"),
            ("ffn_up_shexp.weight", "share_expert.up_proj.weight"),
            ("ffn_down_shexp.weight", "share_expert.down_proj.weight"),
        ],
        permuted: &[],
    },
    model_types: &["step3p5"],
    config: |header| {
        let windowed = header.windowed(|layer| layer % 4 != 0);
        let of = |key, windows| header.number_of(key, &windowed, windows);
        let theta = |key: &str| header.metadata.own(key).cloned().unwrap_or_default();
        let (full, sliding) = (theta("rope.freq_base"), theta("rope.freq_base_swa"));
        let thetas: Vec<_> = windowed.iter().map(|&windows| if windows { &sliding } else { &full }).collect();
        // llama.cpp has these factors in its code.
        let factors: Vec<f64> = windowed.iter().map(|&windows| if windows { 1.0 } else { 0.5 }).collect();
        let is_moe = |layer: &u64| header.has(&format!("model.layers.{layer}.moe.gate.weight"));
        let moe_layers: Vec<u64> = header.each_layer(|layer| layer).into_iter().filter(is_moe).collect();
        Ok(json!({
            "model_type": "step3p5",
            "norm_offset": 0, // the converter adds one to norms
            "layer_types": layer_types(&windowed),
            "head_dim": header.head_dim(),
            "num_attention_heads": of("attention.head_count", false),
            "num_attention_groups": of("attention.head_count_kv", false),
            "num_key_value_heads": of("attention.head_count_kv", false),
            "attention_other_setting": {
                "num_attention_heads": of("attention.head_count", true),
                "num_attention_groups": of("attention.head_count_kv", true),
            },
            "rope_theta": thetas,
            "partial_rotary_factors": factors,
            "yarn_only_types": ["full_attention"],
            "use_head_wise_attn_gate": header.has("model.layers.0.self_attn.g_proj.weight"),
            "moe_layers_enum": moe_layers,
            "moe_num_experts": header.experts(),
            "moe_top_k": header.number("expert_used_count"),
            "moe_router_scaling_factor": header.metadata.own("expert_weights_scale"),
            "norm_expert_weight": header.normalized(true),
            "share_expert_dim": header.number("expert_shared_feed_forward_length"),
            "swiglu_limits": header.metadata.own("swiglu_clamp_exp"),
            "swiglu_limits_shared": header.metadata.own("swiglu_clamp_shexp"),
        }))
    },
};
