//! GLM-5.3-Flash: Kimi delta attention in most layers, latent attention without rope behind an indexer of pooled keys
//! in the others, between hyper-connections of several residual streams; DeepSeek-V3's experts.
//!
//! Source: HF modeling_glm5_next.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::{CONV_WIDTHS, Fields, wrong};
use super::gguf::{Gguf, Tensors, joined};
use super::{deepseek, kimi_linear};
use crate::model::{
    Activation, Attention, ChosenBy, Connections, Ffn, Indexer, Kda, KdaDecay, LastRead, LayerConfig, Mla, Mlp,
    ModelConfig, Moe, Residual, Score, Selection, SharedExpert,
};
use crate::{Error, Result};

/// Streams, and times that a connection is balanced, at most.
const MAX_STREAMS: usize = 16;
const MAX_ITERATIONS: usize = 100;

/// `glm5_next`: the language model is nested, and so are its tensor names.
pub(super) fn nested(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", text)
}

/// `glm5_next_text`.
pub(super) fn text(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("attention_bias", false.into())?;
    f.expect("qk_rope_head_dim", 0.into())?;
    f.expect("index_kpool_always_select_tail", true.into())?;
    f.expect("mla_use_nope", true.into())?;
    f.expect("mhc", true.into())?;
    f.expect("index_kpool_compress", true.into())?;
    let kda = kda(f)?;
    let latent = f.dim("q_lora_rank")?;
    let nope = f.dim("qk_nope_head_dim")?;
    let mla = Mla {
        num_heads: f.dim("num_attention_heads")?,
        q_lora_rank: Some(latent),
        kv_lora_rank: f.dim("kv_lora_rank")?,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: 0,
        rope: None,
        v_head_dim: f.dim("v_head_dim")?,
        bias: false,
        head_gate: false,
        scale: 1.0 / (nope as f32).sqrt(),
        position_scale: None,
        norm_eps: f.norm_eps()?,
        selection: Some(Selection { by: ChosenBy::Own, indexer: indexer(f, latent)? }),
    };
    if let Some(kinds) = f.texts("indexer_types")?
        && kinds.iter().any(|kind| *kind != "full")
    {
        return Err(Error::Model("field `indexer_types` names layers that share a choice; full ones are known".into()));
    }
    // The published config says deepseek_sparse_attention, HF's own indexed_attention, before that full_attention.
    let kinds = f.texts("layer_types")?.unwrap_or_default();
    let words = ["full_attention", "indexed_attention"].into_iter().find(|word| kinds.contains(word));
    let full = words.unwrap_or("deepseek_sparse_attention");
    let kinds = f.layer_kinds("layer_types", [full, "linear_attention"])?;
    let is_full = |layer: usize| kinds.as_ref().map_or(layer % 4 == 3, |kinds| kinds[layer]);
    let attention = |layer| if is_full(layer) { Attention::Mla(mla.clone()) } else { Attention::Kda(kda.clone()) };
    let activation = activation(f)?;
    let moe = deepseek::moe(f, deepseek::v3_router(f)?, 1)?;
    let shared = moe.shared.map(|shared| SharedExpert { mlp: Mlp { activation, ..shared.mlp }, ..shared });
    let of_layer = deepseek::ffn(f, Moe { activation, shared, ..moe }, 3)?;
    let ffn = |layer| match of_layer(layer)? {
        Ffn::Dense(mlp) => Ok(Ffn::Dense(Mlp { activation, ..mlp })),
        other => Ok(other),
    };
    let connections = connections(f, LastRead::Mean)?;
    let layers = super::layers(f, attention, ffn)?;
    let connected = |layer| LayerConfig { residual: Residual::Connected(connections), ..layer };
    super::model(f, layers.into_iter().map(connected).collect())
}

/// Kimi delta attention: in an object of its own, as published, or among the other fields, as HF writes them.
fn kda(f: &Fields<'_>) -> Result<Kda> {
    let of = |f: &Fields<'_>, [heads, dim, width, lower]: [&str; 4]| {
        let head_dim = f.heads(dim)?;
        Ok(Kda {
            num_heads: f.heads(heads)?,
            head_dim,
            conv_width: f.within(width, CONV_WIDTHS)?,
            decay: KdaDecay::Bounded { lower: f.f64_or(lower, -5.0)? as f32 },
            gate_rank: Some(head_dim),
        })
    };
    match f.object("linear_attn_config")? {
        Some(linear) => of(&linear, ["num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound"]),
        None => of(f, ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "linear_lower_bound"]),
    }
}

/// Hyper-connections; `last`: what the output head reads.
pub(super) fn connections(f: &Fields<'_>, last: LastRead) -> Result<Connections> {
    Ok(Connections {
        count: f.within("hc_mult", 2..=MAX_STREAMS)?,
        iterations: f.within("hc_sinkhorn_iters", 1..=MAX_ITERATIONS)?,
        eps: f.f64_or("hc_eps", 1e-6)? as f32,
        last,
    })
}

/// What is between the products of an MLP: its inputs are clamped where the config says at what.
pub(super) fn activation(f: &Fields<'_>) -> Result<Activation> {
    Ok(match f.f64_or("swiglu_limit", 0.0)? {
        limit if limit > 0.0 => Activation::SiluOfClamped { limit: limit as f32 },
        _ => Activation::Silu,
    })
}

fn indexer(f: &Fields<'_>, latent: usize) -> Result<Indexer> {
    let (budget, unit) = (f.dim("index_topk")?, f.dim_or("index_kpool", 1)?);
    // Units are whole in the blocks of the cache.
    if 64 % unit != 0 || budget % unit != 0 {
        return Err(wrong("index_kpool", &format!("a divisor of 64 and of `index_topk` {budget}")));
    }
    Ok(Indexer {
        num_heads: f.heads("index_n_heads")?,
        head_dim: f.heads("index_head_dim")?,
        interleaved: false,
        unit,
        top_k: budget / unit,
        score: Score::Gated { latent },
        candidates: None,
    })
}

/// What GGUF files call tensors of hyper-connections.
pub(super) const GGUF_CONNECTIONS: Tensors<6> = [
    ("hc_attn_fn.weight", "hc_attn_fn"),
    ("hc_attn_base.weight", "hc_attn_base"),
    ("hc_attn_scale.weight", "hc_attn_scale"),
    ("hc_ffn_fn.weight", "hc_ffn_fn"),
    ("hc_ffn_base.weight", "hc_ffn_base"),
    ("hc_ffn_scale.weight", "hc_ffn_scale"),
];

const GGUF_INDEXER: Tensors<7> = joined(
    deepseek::INDEXER,
    [
        ("indexer_compressor_gate.weight", "self_attn.indexer.index_kpool_compress_gate"),
        ("indexer_compressor_ape.weight", "self_attn.indexer.index_kpool_compress_ape"),
    ],
);

/// `glm5_next` in GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "glm5-next",
        tensors: &joined::<11, 13, 24>(kimi_linear::GGUF_KDA, joined::<7, 6, 13>(GGUF_INDEXER, GGUF_CONNECTIONS)),
        permuted: &[],
    },
    model_types: &["glm5_next_text"],
    config: |header| {
        let is_kda = header.each_layer(|layer| header.has(&format!("model.layers.{layer}.self_attn.f_a_proj.weight")));
        let kinds: Vec<_> = is_kda.iter().map(|&kda| if kda { "linear_attention" } else { "full_attention" }).collect();
        let first = is_kda.iter().position(|kda| *kda);
        let betas = first.map(|layer| format!("model.layers.{layer}.self_attn.b_proj.weight"));
        let linear_heads = betas.and_then(|name| header.checkpoint.get(&name)?.shape.first().copied());
        // One limit for each layer, all equal.
        let limit = header.metadata.own("swiglu_clamp_exp").and_then(|limits| limits.as_array()?.first().cloned());
        Ok(json!({
            "model_type": "glm5_next_text",
            "layer_types": kinds,
            "num_key_value_heads": 1,
            "linear_num_heads": linear_heads,
            "linear_head_dim": header.need("kda.head_dim")?,
            "linear_conv_kernel_dim": header.need("ssm.conv_kernel")?,
            "linear_lower_bound": header.metadata.own("kda.gate_lower_bound"),
            "q_lora_rank": header.need("attention.q_lora_rank")?,
            "kv_lora_rank": header.need("attention.kv_lora_rank")?,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": header.need("attention.key_length_mla")?,
            "v_head_dim": header.need("attention.value_length_mla")?,
            "index_n_heads": header.need("attention.indexer.head_count")?,
            "index_head_dim": header.need("attention.indexer.key_length")?,
            "index_topk": header.need("attention.indexer.top_k")?,
            "index_kpool": header.need("attention.indexer.kpool")?,
            "index_kpool_always_select_tail": header.metadata.own("attention.indexer.kpool_select_tail"),
            "n_routed_experts": header.experts(),
            "n_shared_experts": header.number("expert_shared_count"),
            "first_k_dense_replace": header.number("leading_dense_block_count"),
            "norm_topk_prob": header.normalized(true),
            "swiglu_limit": limit,
            "hc_mult": header.need("hyper_connection.count")?,
            "hc_sinkhorn_iters": header.need("hyper_connection.sinkhorn_iterations")?,
            "hc_eps": header.metadata.own("hyper_connection.epsilon"),
        }))
    },
};
