//! Qwen2-MoE, Qwen3-MoE and the text part of Qwen3-VL MoE: grouped queries, softmax routing, some layers dense by
//! configuration.
//!
//! Sources: HF modeling_qwen2_moe, modeling_qwen3_moe and modeling_qwen3_vl_moe.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::{Value, json};

use super::fields::Fields;
use super::gguf::{Gguf, Header};
use crate::Result;
use crate::model::{Attention, Bias, Ffn, Gqa, Mlp, ModelConfig, Moe, Names, QkNorm, Router, Scoring, SharedExpert};

/// `qwen2_moe`: biases, and a gated shared expert.
pub(super) fn qwen2(f: &Fields<'_>) -> Result<ModelConfig> {
    let bias = if f.bool_or("qkv_bias", true)? { Bias::Qkv } else { Bias::None };
    let moe = Moe { shared: Some(shared(f)?), ..moe(f, f.bool_or("norm_topk_prob", false)?)? };
    let names = Names { shared_expert: "mlp.shared_expert", ..Names::COMMON };
    Ok(ModelConfig { names, ..config(f, Gqa { bias, ..gqa(f)? }, moe)? })
}

/// `qwen3_moe`: QK norm.
pub(super) fn qwen3(f: &Fields<'_>) -> Result<ModelConfig> {
    with_qk_norm(f, f.bool_or("norm_topk_prob", false)?)
}

/// `qwen3_vl_moe_text`: the same, weights always normalized. Experts are stacked and transposed.
pub(super) fn qwen3_vl_text(f: &Fields<'_>) -> Result<ModelConfig> {
    with_qk_norm(f, true)
}

/// `qwen3_vl_moe`: the language model is nested, and so are its tensor names.
pub(super) fn qwen3_vl(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", qwen3_vl_text)
}

fn with_qk_norm(f: &Fields<'_>, normalize: bool) -> Result<ModelConfig> {
    let bias = if f.bool_or("attention_bias", false)? { Bias::All } else { Bias::None };
    config(f, Gqa { bias, qk_norm: QkNorm::PerHead, ..gqa(f)? }, moe(f, normalize)?)
}

fn gqa(f: &Fields<'_>) -> Result<Gqa> {
    f.gqa(f.rope(f.head_dim()?, 10_000.0)?)
}

fn config(f: &Fields<'_>, attention: Gqa, moe: Moe) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("use_sliding_window", false.into())?;
    super::model(f, super::layers(f, |_| Attention::Gqa(attention.clone()), ffn(f, &moe)?)?)
}

/// The shared expert and its gate.
pub(super) fn shared(f: &Fields<'_>) -> Result<SharedExpert> {
    let mlp = Mlp::silu(f.dim("shared_expert_intermediate_size")?);
    Ok(SharedExpert { gate: true, ..SharedExpert::plain(mlp) })
}

/// Qwen's experts, weighted by a softmax.
pub(super) fn moe(f: &Fields<'_>, normalize: bool) -> Result<Moe> {
    let router = Router { normalize, ..Router::new(f.top_k()?, Scoring::Softmax) };
    Ok(Moe::new(f.num_experts(&["num_experts", "num_local_experts"])?, f.dim("moe_intermediate_size")?, router))
}

/// Which layers are dense.
pub(super) fn ffn<'a>(f: &'a Fields<'_>, moe: &'a Moe) -> Result<impl Fn(usize) -> Result<Ffn> + 'a> {
    let (dense_layers, step) = (f.layers("mlp_only_layers")?, f.dim_or("decoder_sparse_step", 1)?);
    let is_moe = move |layer| !dense_layers.contains(&layer) && (layer + 1) % step == 0;
    Ok(move |layer| if is_moe(layer) { Ok(Ffn::Moe(moe.clone())) } else { f.dense() })
}

/// The shared expert, which is one and has a gate, in GGUF files.
pub(super) const GGUF_SHARED: &[(&str, &str)] = &[
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
];

/// `qwen3_moe` in GGUF files.
pub(super) const GGUF_QWEN3: Gguf = Gguf {
    names: GgufNames { architecture: "qwen3moe", tensors: &[], permuted: &[] },
    model_types: &["qwen3_moe"],
    config: |header| Ok(gguf_qwen3(header, "qwen3_moe")),
};

/// `qwen3_vl_moe_text` in GGUF files.
pub(super) const GGUF_QWEN3_VL: Gguf = Gguf {
    names: GgufNames { architecture: "qwen3vlmoe", tensors: &[], permuted: &[] },
    model_types: &["qwen3_vl_moe_text"],
    config: |header| Ok(gguf_qwen3(header, "qwen3_vl_moe_text")),
};

fn gguf_qwen3(header: &Header<'_>, model_type: &str) -> Value {
    json!({
        "model_type": model_type,
        "head_dim": header.head_dim(),
        "num_experts": header.experts(),
        "norm_topk_prob": header.normalized(true),
        "mlp_only_layers": header.dense_layers(),
    })
}

/// `qwen2_moe` in GGUF files.
pub(super) const GGUF_QWEN2: Gguf = Gguf {
    names: GgufNames { architecture: "qwen2moe", tensors: GGUF_SHARED, permuted: &[] },
    model_types: &["qwen2_moe"],
    config: |header| {
        Ok(json!({
            "model_type": "qwen2_moe",
            "num_experts": header.experts(),
            "norm_topk_prob": header.normalized(false),
            "shared_expert_intermediate_size": header.number("expert_shared_feed_forward_length"),
            "mlp_only_layers": header.dense_layers(),
        }))
    },
};
