//! Laguna: windowed and full layers with head counts and ropes of their own, a softplus gate of the output, router
//! logits with a soft cap.
//!
//! Source: HF modeling_laguna.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::{Value, json};

use super::fields::{Fields, gqa, missing};
use super::gguf::{Gguf, layer_types};
use crate::model::{
    Attention, Bias, Ffn, GateActivation, Gqa, Mlp, ModelConfig, Moe, Names, OutputGate, QkNorm, Router, Scoring,
    SharedExpert, Window,
};
use crate::{Error, Result};

/// `laguna`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("moe_router_use_sigmoid", true.into())?;
    f.expect("moe_apply_router_weight_on_input", false.into())?;
    let (head_dim, kv_heads) = (f.head_dim()?, f.heads("num_key_value_heads")?);
    let bias = if f.bool_or("attention_bias", false)? { Bias::All } else { Bias::None };
    let window = Window::Sliding(f.dim_or("sliding_window", 512)?);
    let kinds = f.layer_kinds("layer_types", ["sliding_attention", "full_attention"])?;
    let kinds = kinds.ok_or_else(|| missing("layer_types"))?;
    let heads = f.heads_of_layers("num_attention_heads_per_layer")?;
    let all_heads = f.heads("num_attention_heads")?;
    let softplus = GateActivation::Softplus;
    let output_gate = match f.flag_or_word("gating")? {
        "true" | "per-head" => OutputGate::Heads(softplus),
        "per-element" => OutputGate::Numbers(softplus),
        other => return Err(Error::Model(format!("gating {other} is not supported; per-head and per-element are"))),
    };
    let ropes = [true, false].map(|slides| {
        let kind = if slides { "sliding_attention" } else { "full_attention" };
        kinds.contains(&slides).then(|| f.rope_of(kind, head_dim, 10_000.0)).transpose()
    });
    let [sliding, full] = ropes;
    let (sliding, full) = (sliding?, full?);
    let attention = |layer: usize| {
        let (rope, window) = if kinds[layer] { (&sliding, Some(window)) } else { (&full, None) };
        let num_heads = heads.as_ref().map_or(all_heads, |heads| heads[layer]);
        let plain = gqa([num_heads, kv_heads, head_dim], rope.clone())?;
        Ok(Gqa { qk_norm: QkNorm::PerHead, bias, window, output_gate: Some(output_gate), ..plain })
    };
    let attentions: Vec<Gqa> = (0..f.num_layers()?).map(attention).collect::<Result<_>>()?;
    let cap = f.f64_or("moe_router_logit_softcapping", 0.0)? as f32;
    let router = Router {
        correction_bias: true,
        normalize: true,
        softcap: (cap > 0.0).then_some(cap),
        scaling: f.f64_or("moe_routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::Sigmoid)
    };
    let moe = Moe {
        shared: Some(SharedExpert::plain(Mlp::silu(f.dim("shared_expert_intermediate_size")?))),
        ..Moe::new(f.num_experts(&["num_experts"])?, f.dim("moe_intermediate_size")?, router)
    };
    let sparse = f.layer_kinds("mlp_layer_types", ["sparse", "dense"])?;
    let is_moe = |layer: usize| sparse.as_ref().map_or(layer > 0, |sparse| sparse[layer]);
    let ffn = |layer| if is_moe(layer) { Ok(Ffn::Moe(moe.clone())) } else { f.dense() };
    let names = Names {
        correction_bias: "mlp.experts.e_score_correction_bias",
        shared_expert: "mlp.shared_expert",
        ..Names::COMMON
    };
    let layers = super::layers(f, |layer| Attention::Gqa(attentions[layer].clone()), ffn)?;
    Ok(ModelConfig { names, ..super::model(f, layers)? })
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "laguna",
        tensors: &[
            ("attn_gate.weight", "self_attn.g_proj.weight"),
            ("exp_probs_b.bias", "mlp.experts.e_score_correction_bias"),
            ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
            ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
            ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
        ],
        permuted: &[],
    },
    model_types: &["laguna"],
    config: |header| {
        let own = |key: &str| header.metadata.own(key);
        let slides = header.number("attention.sliding_window").is_some_and(|window| window > 0);
        let windowed = header.windowed(|layer| slides && layer % 4 != 0);
        let heads = match own("attention.head_count") {
            Some(Value::Array(heads)) => heads.clone(),
            heads => header.each_layer(|_| heads.cloned().unwrap_or_default()),
        };
        let gate = header.checkpoint.get("model.layers.0.self_attn.g_proj.weight").map(|gate| gate.shape[0]);
        let per_head = gate.map(|rows| rows as u64) == heads.first().and_then(Value::as_u64);
        let rope = |theta: &str, dim: &str| {
            json!({
                "rope_theta": own(theta).or(own("rope.freq_base")),
                "partial_rotary_factor": header.partial_rotary_factor(dim, header.head_dim()),
            })
        };
        let mut full = rope("rope.freq_base", "rope.dimension_count");
        if let (Some(Value::Object(scaling)), Some(full)) = (header.rope_scaling()?, full.as_object_mut()) {
            full.extend(scaling);
        }
        let dense = header.dense_layers();
        let kind = |layer| if dense.contains(&layer) { "dense" } else { "sparse" };
        Ok(json!({
            "model_type": "laguna",
            "layer_types": layer_types(&windowed),
            "head_dim": header.head_dim(),
            "num_attention_heads": heads.first(),
            "num_attention_heads_per_layer": heads,
            "gating": if per_head { "per-head" } else { "per-element" },
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": rope("rope.freq_base_swa", "rope.dimension_count_swa"),
            },
            "num_experts": header.experts(),
            "mlp_layer_types": header.each_layer(kind),
            "shared_expert_intermediate_size": header.number("expert_shared_feed_forward_length"),
            "moe_routed_scaling_factor": own("expert_weights_scale"),
        }))
    },
};
