//! The text part of Llama 4: layers that attend within chunks, with norms after their rotation, and layers that rotate
//! nothing and scale queries by position; one routed expert, whose input is weighted, beside the shared one.
//!
//! Source: HF modeling_llama4.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::Gguf;
use crate::Result;
use crate::model::{
    Attention, Bias, Ffn, Gqa, Mlp, ModelConfig, Moe, Names, PositionScale, QkNorm, Router, Scoring, SharedExpert,
    Window,
};

/// `llama4_text`.
pub(super) fn text(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("num_experts_per_tok", 1.into())?;
    let bias = if f.bool_or("attention_bias", false)? { Bias::All } else { Bias::None };
    let (rope, _) = f.rope_and_mscale(f.head_dim()?, true, 500_000.0)?;
    let chunk = f.dim_or("attention_chunk_size", 8192)?;
    let qk_norm = if f.bool_or("use_qk_norm", true)? { QkNorm::AfterRope } else { QkNorm::None };
    let rotated = Gqa { bias, qk_norm, window: Some(Window::Chunk(chunk)), ..f.gqa(rope)? };
    let position_scale = PositionScale {
        beta: f.f64_or("attn_scale", 0.1)? as f32,
        length: f.dim_or("floor_scale", 8192)? as f32,
        offset: 1.0,
    };
    let plain = Gqa {
        rope: None,
        qk_norm: QkNorm::None,
        window: None,
        position_scale: f.bool_or("attn_temperature_tuning", true)?.then_some(position_scale),
        ..rotated.clone()
    };
    // The list says which layers do rotate.
    let list = f.each_layer("no_rope_layers")?;
    let interval = f.dim_or("no_rope_layer_interval", 4)?;
    let rotates = |layer: usize| list.as_ref().map_or((layer + 1) % interval != 0, |list| list[layer] != 0.0);
    let attention = |layer| Attention::Gqa(if rotates(layer) { rotated.clone() } else { plain.clone() });
    let width = f.dim("intermediate_size")?;
    let router = Router { weighs_input: true, ..Router::new(1, Scoring::Sigmoid) };
    let moe = Moe {
        shared: Some(SharedExpert::plain(Mlp::silu(width))),
        ..Moe::new(f.num_experts(&["num_local_experts"])?, width, router)
    };
    let (moe_layers, step) = (f.layers("moe_layers")?, f.dim_or("interleave_moe_layer_step", 1)?);
    let is_moe = |layer: usize| match moe_layers.is_empty() {
        true => (layer + 1) % step == 0,
        false => moe_layers.contains(&layer),
    };
    let ffn = |layer| match is_moe(layer) {
        true => Ok(Ffn::Moe(moe.clone())),
        false => Ok(Ffn::Dense(Mlp::silu(f.dim("intermediate_size_mlp")?))),
    };
    let names = Names {
        mlp: "feed_forward",
        router: "feed_forward.router",
        shared_expert: "feed_forward.shared_expert",
        experts: "feed_forward.experts",
        ..Names::COMMON
    };
    Ok(ModelConfig { names, ..super::model(f, super::layers(f, attention, ffn)?)? })
}

/// `llama4`: the language model is nested, and so are its tensor names.
pub(super) fn nested(f: &Fields<'_>) -> Result<ModelConfig> {
    let model = super::nested(f, "language_model.model.", text)?;
    let names = Names { head: "language_model.lm_head", ..model.names };
    Ok(ModelConfig { names, ..model })
}

/// `llama4_text` in GGUF files. Chunks, the scale by position and the layers that rotate are not in their metadata, but
/// in llama.cpp's code: they are the defaults here.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "llama4",
        tensors: &[
            ("ffn_gate.weight", "feed_forward.gate_proj.weight"),
            ("ffn_up.weight", "feed_forward.up_proj.weight"),
            ("ffn_down.weight", "feed_forward.down_proj.weight"),
            ("ffn_gate_inp.weight", "feed_forward.router.weight"),
            ("ffn_gate_exps.weight", "feed_forward.experts.gate_proj.weight"),
            ("ffn_up_exps.weight", "feed_forward.experts.up_proj.weight"),
            ("ffn_down_exps.weight", "feed_forward.experts.down_proj.weight"),
            ("ffn_gate_up_exps.weight", "feed_forward.experts.gate_up_proj.weight"),
            ("ffn_gate_shexp.weight", "feed_forward.shared_expert.gate_proj.weight"),
            ("ffn_up_shexp.weight", "feed_forward.shared_expert.up_proj.weight"),
            ("ffn_down_shexp.weight", "feed_forward.shared_expert.down_proj.weight"),
        ],
        permuted: &[],
    },
    model_types: &["llama4_text"],
    config: |header| {
        Ok(json!({
            "model_type": "llama4_text",
            "head_dim": header.head_dim(),
            "num_local_experts": header.experts(),
            "intermediate_size": header.number("expert_feed_forward_length"),
            "intermediate_size_mlp": header.number("feed_forward_length"),
            "interleave_moe_layer_step": header.number("interleave_moe_layer_step"),
            // Maverick has 128 experts and no norms.
            "use_qk_norm": header.experts() != 128,
        }))
    },
};
