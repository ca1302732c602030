//! Step-3.5-Flash and 3.7: windowed and full layers with heads and ropes of their own, a gate for each head, experts
//! whose activations some layers clamp; norms around one.
//!
//! Source: HF modeling_step3p5.

use super::fields::{Fields, checked, gqa, missing, part};
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
            true => f.rope_scaling(f.object("rope_scaling")?, dim)?.0,
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
    let clamped = |limit: f64| match limit {
        limit if limit > 0.0 => Activation::ClampedSilu { limit: limit as f32 },
        _ => Activation::Silu,
    };
    let moe_layers = f.str_or("moe_layers_enum", "")?;
    let moe_layers: Vec<usize> = moe_layers.split(',').filter_map(|layer| layer.trim().parse().ok()).collect();
    let ffn = |layer: usize| {
        if !(moe_layers.is_empty() && layer > 0) && !moe_layers.contains(&layer) {
            let activation = clamped(shared_limits[layer]);
            return Ok(Ffn::Dense(Mlp { intermediate_size: f.dim("intermediate_size")?, activation }));
        }
        let shared = shared.map(|intermediate_size| {
            SharedExpert::plain(Mlp { intermediate_size, activation: clamped(shared_limits[layer]) })
        });
        let activation = clamped(limits[layer]);
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
    Ok(ModelConfig { norm_offset: 1.0, names, ..super::model(f, layers)? })
}

/// `step3p7`: the language model is nested.
pub(super) fn nested(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", config)
}
