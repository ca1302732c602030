//! DeepSeek-V4: one key head with a window and compressed entries, between hyper-connections of several residual
//! streams; experts everywhere, in the first layers by the token's id.
//!
//! Source: HF modeling_deepseek_v4.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::{Fields, checked, missing, wrong};
use super::gguf::{Gguf, joined};
use super::{deepseek, glm5_next};
use crate::model::{
    Attention, ChosenBy, Compressed, Compressor, EntryKeys, Ffn, Indexer, LastRead, LayerConfig, Mlp, ModelConfig, Moe,
    Names, Residual, Rope, RopeScaling, Router, Score, Scoring, Selection, SharedExpert,
};
use crate::{Error, Result};

/// Positions of an entry where entries overlap, and an indexer chooses among them.
const CHOSEN_RATIO: usize = 4;

/// Positions of a window, at most: what a sequence keeps grows with it.
const MAX_WINDOW: usize = 1 << 16;

/// What the checkpoint calls its tensors.
pub(super) const NAMES: Names = Names {
    body: "",
    embedding: "embed",
    head: "head",
    attention_norm: "attn_norm",
    ffn_norm: "ffn_norm",
    attention: "attn",
    sinks: "attn_sink",
    mlp_projections: ["w1", "w3", "w2"],
    router: "ffn.gate",
    correction_bias: "ffn.gate.bias",
    shared_expert: "ffn.shared_experts",
    experts: "ffn.experts",
    expert_projections: ["w1", "w3", "w2"],
    ..Names::COMMON
};

/// `deepseek_v4`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    let attentions = attentions(f)?;
    let hashed = f.count_or("num_hash_layers", 0)?;
    let moe = moe(f)?;
    let ffn = |layer| {
        let by_token = layer < hashed;
        let router = Router { by_token, correction_bias: !by_token, ..moe.router.clone() };
        Ok(Ffn::Moe(Moe { router, ..moe.clone() }))
    };
    let connections = glm5_next::connections(f, LastRead::Shares)?;
    let layers = super::layers(f, |layer| Attention::Compressed(attentions[layer].clone()), ffn)?;
    let connected = |layer| LayerConfig { residual: Residual::Connected(connections), ..layer };
    // In GGUF files they are as most families'.
    let names = if f.bool_or("common_names", false)? { Names::COMMON } else { NAMES };
    Ok(ModelConfig { names, ..super::model(f, layers.into_iter().map(connected).collect())? })
}

/// The experts of a layer, chosen with a bias.
pub(super) fn moe(f: &Fields<'_>) -> Result<Moe> {
    f.expect_silu()?;
    f.expect("scoring_func", "sqrtsoftplus".into())?;
    f.expect("topk_method", "noaux_tc".into())?;
    f.expect("n_group", 1.into())?;
    let router = Router {
        correction_bias: true,
        normalize: f.bool_or("norm_topk_prob", true)?,
        scaling: f.f64_or("routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::SqrtSoftplus)
    };
    let activation = glm5_next::activation(f)?;
    let moe = deepseek::moe(f, router, 1)?;
    let shared = moe.shared.map(|shared| SharedExpert { mlp: Mlp { activation, ..shared.mlp }, ..shared });
    Ok(Moe { activation, shared, ..moe })
}

/// The attention of each layer.
fn attentions(f: &Fields<'_>) -> Result<Vec<Compressed>> {
    let windowed = windowed(f)?;
    let rope = rope(f, windowed.rope.dim)?;
    let of_layer = |ratio: usize| -> Result<Compressed> {
        if ratio == 0 {
            return Ok(windowed.clone());
        }
        let chosen = ratio == CHOSEN_RATIO;
        let keys = EntryKeys::OfPositions;
        let indexer = if chosen { Some(indexer(f, &windowed, ratio, keys)?) } else { None };
        let selection = indexer.map(|indexer| Selection { by: ChosenBy::Own, indexer });
        let compressor = Some(Compressor { dim: windowed.head_dim, ratio, overlaps: chosen, bias: true });
        Ok(Compressed { rope: rope.clone(), compressor, selection, ..windowed.clone() })
    };
    ratios(f)?.into_iter().map(of_layer).collect()
}

/// Positions of an entry in each layer; 0: it has only a window. Further ones are draft layers'.
pub(super) fn ratios(f: &Fields<'_>) -> Result<Vec<usize>> {
    const NAME: &str = "compress_ratios";
    let ratios = f.integers(NAME)?.ok_or_else(|| missing(NAME))?;
    let layers = f.num_layers()?;
    let ratios = ratios.get(..layers).ok_or_else(|| wrong(NAME, &format!("one for each of {layers}")))?;
    let valid = |ratio: &i64| usize::try_from(*ratio).ok().filter(|ratio| *ratio <= MAX_WINDOW);
    let ratios = ratios.iter().map(valid).collect::<Option<_>>();
    ratios.ok_or_else(|| wrong(NAME, &format!("integers from 0 to {MAX_WINDOW}")))
}

/// Attention that has only its window.
pub(super) fn windowed(f: &Fields<'_>) -> Result<Compressed> {
    f.expect("attention_bias", false.into())?;
    f.expect("num_key_value_heads", 1.into())?;
    let (num_heads, groups) = (f.heads("num_attention_heads")?, f.heads("o_groups")?);
    let rotated = f.dim("qk_rope_head_dim")?;
    if num_heads % groups != 0 {
        return Err(Error::Model(format!("`o_groups` {groups} do not divide {num_heads} heads")));
    }
    Ok(Compressed {
        num_heads,
        head_dim: rotated_in(f, "head_dim", rotated)?,
        q_lora_rank: f.dim("q_lora_rank")?,
        norms_queries: true,
        rope: checked(Rope {
            dim: rotated,
            theta: f.f64_or("rope_theta", 10_000.0)?,
            interleaved: true,
            scaling: RopeScaling::None,
        })?,
        window: f.within("sliding_window", 1..=MAX_WINDOW)?,
        groups,
        o_lora_rank: f.dim("o_lora_rank")?,
        compressor: None,
        borrows: false,
        selection: None,
    })
}

/// The width of heads of which so many numbers are rotated.
fn rotated_in(f: &Fields<'_>, name: &str, rotated: usize) -> Result<usize> {
    match f.heads(name)? {
        dim if dim < rotated => Err(wrong(name, &format!("at least the {rotated} rotated numbers"))),
        dim => Ok(dim),
    }
}

/// The rope of layers that have entries.
pub(super) fn rope(f: &Fields<'_>, rotated: usize) -> Result<Rope> {
    let mut rope =
        Rope { theta: f.f64_or("compress_rope_theta", 160_000.0)?, ..f.rope_and_mscale(rotated, true, 10_000.0)?.0 };
    if let RopeScaling::Yarn(yarn) = &mut rope.scaling {
        yarn.attention_factor = 1.0;
    }
    checked(rope)
}

/// What chooses among entries of `unit` positions.
pub(super) fn indexer(f: &Fields<'_>, of: &Compressed, unit: usize, keys: EntryKeys) -> Result<Indexer> {
    Ok(Indexer {
        num_heads: f.heads("index_n_heads")?,
        head_dim: rotated_in(f, "index_head_dim", of.rope.dim)?,
        interleaved: true,
        unit,
        top_k: f.dim("index_topk")?,
        score: Score::Entries { latent: of.q_lora_rank, keys },
        candidates: None,
    })
}

/// `deepseek_v4` in GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "deepseek4",
        tensors: &joined::<6, 18, 24>(
            glm5_next::GGUF_CONNECTIONS,
            [
                ("attn_q_a.weight", "self_attn.wq_a.weight"),
                ("attn_q_a_norm.weight", "self_attn.q_norm.weight"),
                ("attn_q_b.weight", "self_attn.wq_b.weight"),
                ("attn_kv.weight", "self_attn.wkv.weight"),
                ("attn_kv_a_norm.weight", "self_attn.kv_norm.weight"),
                ("attn_output_a.weight", "self_attn.wo_a.weight"),
                ("attn_output_b.weight", "self_attn.wo_b.weight"),
                ("attn_compressor_kv.weight", "self_attn.compressor.wkv.weight"),
                ("attn_compressor_gate.weight", "self_attn.compressor.wgate.weight"),
                ("attn_compressor_ape.weight", "self_attn.compressor.ape"),
                ("attn_compressor_norm.weight", "self_attn.compressor.norm.weight"),
                ("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"),
                ("indexer.proj.weight", "self_attn.indexer.weights_proj.weight"),
                ("indexer_compressor_kv.weight", "self_attn.indexer.compressor.wkv.weight"),
                ("indexer_compressor_gate.weight", "self_attn.indexer.compressor.wgate.weight"),
                ("indexer_compressor_ape.weight", "self_attn.indexer.compressor.ape"),
                ("indexer_compressor_norm.weight", "self_attn.indexer.compressor.norm.weight"),
                ("ffn_gate_tid2eid.weight", "mlp.gate.tid2eid"),
            ],
        ),
        permuted: &[],
    },
    model_types: &["deepseek_v4"],
    config: |header| {
        // One limit for each layer, all equal.
        let limit = header.metadata.own("swiglu_clamp_exp").and_then(|limits| limits.as_array()?.first().cloned());
        Ok(json!({
            "model_type": "deepseek_v4",
            "common_names": true,
            "head_dim": header.head_dim(),
            "qk_rope_head_dim": header.need("rope.dimension_count")?,
            "q_lora_rank": header.need("attention.q_lora_rank")?,
            "o_groups": header.need("attention.output_group_count")?,
            "o_lora_rank": header.need("attention.output_lora_rank")?,
            "compress_ratios": header.metadata.own("attention.compress_ratios"),
            "compress_rope_theta": header.metadata.own("attention.compress_rope_freq_base"),
            "index_n_heads": header.need("attention.indexer.head_count")?,
            "index_head_dim": header.need("attention.indexer.key_length")?,
            "index_topk": header.need("attention.indexer.top_k")?,
            "n_routed_experts": header.experts(),
            "n_shared_experts": header.number("expert_shared_count"),
            "norm_topk_prob": header.normalized(true),
            "num_hash_layers": header.number("hash_layer_count"),
            "swiglu_limit": limit,
            "hc_mult": header.need("hyper_connection.count")?,
            "hc_sinkhorn_iters": header.need("hyper_connection.sinkhorn_iterations")?,
            "hc_eps": header.metadata.own("hyper_connection.epsilon"),
        }))
    },
};
