//! MiniMax-M2: QK norm over all heads together, a part of each head rotated, sigmoid routing with a correction bias;
//! and M3, whose heads are normed one by one and attend to blocks that an indexer chooses.
//!
//! Sources: HF modeling_minimax_m2 and modeling_minimax_m3_vl.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::Gguf;
use super::mixtral;
use crate::model::{
    Activation, Attention, ChosenBy, Ffn, Gqa, Indexer, Mlp, ModelConfig, Moe, Names, QkNorm, Router, Score, Scoring,
    Selection, SharedExpert,
};
use crate::{Error, Result};

/// `minimax_m2`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("scoring_func", "sigmoid".into())?;
    f.expect("use_qk_norm", true.into())?;
    f.expect("qk_norm_type", "per_layer".into())?;
    f.expect("use_routing_bias", true.into())?;
    f.expect("shared_intermediate_size", 0.into())?;
    if f.layers("attn_type_list")?.iter().any(|&kind| kind != 1) {
        return Err(Error::Model(
            "attn_type_list names linear attention, which is not supported for minimax_m2; 1 in every layer is".into(),
        ));
    }
    let rope = f.rope(f.rotary_dim(1.0)?, 5_000_000.0)?;
    let attention = Gqa { qk_norm: QkNorm::FullWidth, ..f.gqa(rope)? };
    let moe = mixtral::moe(
        f,
        Router { correction_bias: true, normalize: true, ..Router::new(f.top_k()?, Scoring::Sigmoid) },
    )?;
    let layers = super::layers(f, |_| Attention::Gqa(attention.clone()), |_| Ok(Ffn::Moe(moe.clone())))?;
    Ok(ModelConfig { names: mixtral::NAMES, ..super::model(f, layers)? })
}

/// `minimax_m3_vl`: the language model is nested, and so are its tensor names.
pub(super) fn m3(f: &Fields<'_>) -> Result<ModelConfig> {
    let model = super::nested(f, "language_model.model.", m3_text)?;
    Ok(ModelConfig { names: Names { head: "language_model.lm_head", ..model.names }, ..model })
}

/// `minimax_m3_vl_text`
pub(super) fn m3_text(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect("hidden_act", "swigluoai".into())?;
    f.expect("scoring_func", "sigmoid".into())?;
    f.expect("use_qk_norm", true.into())?;
    f.expect("qk_norm_type", "per_head".into())?;
    f.expect("use_gemma_norm", true.into())?;
    f.expect("use_routing_bias", true.into())?;
    f.expect("n_shared_experts", 1.into())?;
    let limit = f.f64_or("swiglu_limit", 7.0)?;
    if limit <= 0.0 {
        return Err(Error::Model(format!("swiglu_limit {limit} is not a positive number")));
    }
    let activation = Activation::ClampedSwiglu { limit: limit as f32, alpha: f.f64_or("swiglu_alpha", 1.702)? as f32 };
    let mlp = |intermediate_size| Mlp { intermediate_size, activation };
    let rope = f.rope(f.rotary_dim(0.5)?, 5_000_000.0)?;
    let attention = Gqa { qk_norm: QkNorm::PerHead, ..f.gqa(rope)? };
    let (sparse, indexer) = m3_indexer(f, &attention)?;
    let router = Router {
        correction_bias: true,
        normalize: true,
        scaling: f.f64_or("routed_scaling_factor", 2.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::Sigmoid)
    };
    let shared = SharedExpert::plain(mlp(f.dim("shared_intermediate_size")?));
    let moe = Moe { activation, shared: Some(shared), ..mixtral::moe(f, router)? };
    let dense = Ffn::Dense(mlp(f.dim_or("dense_intermediate_size", 12288)?));
    let is_moe = f.layer_flags("moe_layer_freq")?;
    let layers = super::layers(
        f,
        |layer| {
            let selects = sparse.get(layer).is_some_and(|&sparse| sparse);
            let selection = selects.then(|| indexer.clone()).flatten();
            let selection = selection.map(|indexer| Selection { by: ChosenBy::Own, indexer });
            Attention::Gqa(Gqa { selection, ..attention.clone() })
        },
        |layer| if is_moe.as_ref().is_none_or(|is| is[layer]) { Ok(Ffn::Moe(moe.clone())) } else { Ok(dense.clone()) },
    )?;
    // In GGUF files the one is part of the weights.
    let norm_offset = f.f64_or("norm_offset", 1.0)? as f32;
    Ok(ModelConfig { names: mixtral::NAMES, norm_offset, ..super::model(f, layers)? })
}

/// Which layers select, and how.
fn m3_indexer(f: &Fields<'_>, attention: &Gqa) -> Result<(Vec<bool>, Option<Indexer>)> {
    let Some(sparse) = f.object("sparse_attention_config")? else { return Ok((vec![], None)) };
    if !sparse.bool_or("use_sparse_attention", true)? {
        return Ok((vec![], None));
    }
    sparse.expect("sparse_local_block", 1.into())?;
    sparse.expect("sparse_init_block", 0.into())?;
    let indexer = Indexer {
        num_heads: sparse.heads("sparse_num_index_heads")?,
        head_dim: sparse.heads("sparse_index_dim")?,
        interleaved: false,
        unit: sparse.heads("sparse_block_size")?,
        top_k: sparse.heads("sparse_topk_blocks")?,
        score: Score::Largest,
        candidates: None,
    };
    let rotated = attention.rope.as_ref().map_or(0, |rope| rope.dim);
    if indexer.num_heads != attention.num_kv_heads || indexer.head_dim < rotated {
        return Err(Error::Model(format!(
            "`sparse_attention_config` has {} heads of {} elements; it needs one for each of {} key/value heads, of at \
             least {rotated}",
            indexer.num_heads, indexer.head_dim, attention.num_kv_heads
        )));
    }
    Ok((sparse.flags("sparse_attention_freq", f.num_layers()?)?.unwrap_or_default(), Some(indexer)))
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames { architecture: "minimax-m2", tensors: GGUF_EXPERTS, permuted: &[] },
    model_types: &["minimax_m2"],
    config: |header| {
        Ok(json!({
            "model_type": "minimax_m2",
            "head_dim": header.head_dim(),
            "num_local_experts": header.experts(),
            "intermediate_size": header.number("expert_feed_forward_length"),
            "rotary_dim": header.number("rope.dimension_count"),
            "use_qk_norm": true,
        }))
    },
};

const GGUF_EXPERTS: &[(&str, &str)] = &[
    ("ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
    ("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"),
    ("ffn_gate_exps.weight", "block_sparse_moe.experts.w1.weight"),
    ("ffn_down_exps.weight", "block_sparse_moe.experts.w2.weight"),
    ("ffn_up_exps.weight", "block_sparse_moe.experts.w3.weight"),
    // Of M3 alone.
    ("ffn_gate_shexp.weight", "block_sparse_moe.shared_experts.gate_proj.weight"),
    ("ffn_down_shexp.weight", "block_sparse_moe.shared_experts.down_proj.weight"),
    ("ffn_up_shexp.weight", "block_sparse_moe.shared_experts.up_proj.weight"),
    ("indexer.q_proj.weight", "self_attn.index_q_proj.weight"),
    ("indexer.k_proj.weight", "self_attn.index_k_proj.weight"),
    ("indexer.q_norm.weight", "self_attn.index_q_norm.weight"),
    ("indexer.k_norm.weight", "self_attn.index_k_norm.weight"),
];

/// M3 in GGUF files.
pub(super) const GGUF_M3: Gguf = Gguf {
    names: GgufNames { architecture: "minimax-m3", tensors: GGUF_EXPERTS, permuted: &[] },
    model_types: &["minimax_m3_vl_text"],
    config: |header| {
        let indexer = |key: &str| header.number(&format!("attention.indexer.{key}"));
        let layers_with = |tensor: &str| {
            header.each_layer(|layer| u8::from(header.has(&format!("model.layers.{layer}.{tensor}.weight"))))
        };
        let width = header.number("expert_feed_forward_length");
        Ok(json!({
            "model_type": "minimax_m3_vl_text",
            "norm_offset": 0, // the converter adds one to norms
            "head_dim": header.head_dim(),
            "num_local_experts": header.experts(),
            "intermediate_size": width,
            "shared_intermediate_size": width,
            "n_shared_experts": header.number("expert_shared_count"),
            "dense_intermediate_size": header.number("feed_forward_length"),
            "moe_layer_freq": layers_with("block_sparse_moe.gate"),
            "rotary_dim": header.number("rope.dimension_count"),
            "sparse_attention_config": {
                "sparse_num_index_heads": indexer("head_count"),
                "sparse_index_dim": indexer("key_length"),
                "sparse_block_size": indexer("block_size"),
                "sparse_topk_blocks": indexer("top_k"),
                "sparse_local_block": indexer("local_blocks"),
                "sparse_attention_freq": layers_with("self_attn.index_q_proj"),
            },
        }))
    },
};
