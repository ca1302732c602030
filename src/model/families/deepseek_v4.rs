//! DeepSeek-V4: one key head with a window and compressed entries, between hyper-connections of several residual
//! streams; experts everywhere, in the first layers by the token's id.
//!
//! Source: HF modeling_deepseek_v4.

use super::fields::{Fields, checked, missing, wrong};
use super::{deepseek, glm5_next};
use crate::model::{
    Attention, ChosenBy, Compressed, Compressor, Ffn, Indexer, LastRead, LayerConfig, Mlp, ModelConfig, Moe, Names,
    Residual, Rope, RopeScaling, Router, Score, Scoring, Selection, SharedExpert,
};
use crate::{Error, Result};

/// Positions of an entry where entries overlap, and an indexer chooses among them.
const CHOSEN_RATIO: usize = 4;

/// Positions of a window, at most: what a sequence keeps grows with it.
const MAX_WINDOW: usize = 1 << 16;

/// `deepseek_v4`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("attention_bias", false.into())?;
    f.expect("num_key_value_heads", 1.into())?;
    f.expect("scoring_func", "sqrtsoftplus".into())?;
    f.expect("topk_method", "noaux_tc".into())?;
    f.expect("n_group", 1.into())?;
    let attentions = attentions(f)?;
    let hashed = f.count_or("num_hash_layers", 0)?;
    let router = Router {
        normalize: f.bool_or("norm_topk_prob", true)?,
        scaling: f.f64_or("routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::SqrtSoftplus)
    };
    let activation = glm5_next::activation(f)?;
    let moe = deepseek::moe(f, router, 1)?;
    let shared = moe.shared.map(|shared| SharedExpert { mlp: Mlp { activation, ..shared.mlp }, ..shared });
    let moe = Moe { activation, shared, ..moe };
    let ffn = |layer| {
        let by_token = layer < hashed;
        let router = Router { by_token, correction_bias: !by_token, ..moe.router.clone() };
        Ok(Ffn::Moe(Moe { router, ..moe.clone() }))
    };
    let connections = glm5_next::connections(f, LastRead::Shares)?;
    let layers = super::layers(f, |layer| Attention::Compressed(attentions[layer].clone()), ffn)?;
    let connected = |layer| LayerConfig { residual: Residual::Connected(connections), ..layer };
    let names = Names {
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
    Ok(ModelConfig { names, ..super::model(f, layers.into_iter().map(connected).collect())? })
}

/// The attention of each layer.
fn attentions(f: &Fields<'_>) -> Result<Vec<Compressed>> {
    let (num_heads, head_dim) = (f.heads("num_attention_heads")?, f.heads("head_dim")?);
    let (q_lora_rank, groups) = (f.dim("q_lora_rank")?, f.heads("o_groups")?);
    let rotated = f.dim("qk_rope_head_dim")?;
    let narrow = |name: &str, dim: usize| match dim < rotated {
        true => Err(wrong(name, &format!("at least the {rotated} rotated numbers"))),
        false => Ok(dim),
    };
    narrow("head_dim", head_dim)?;
    if num_heads % groups != 0 {
        return Err(Error::Model(format!("`o_groups` {groups} do not divide {num_heads} heads")));
    }
    let windowed = Compressed {
        num_heads,
        head_dim,
        q_lora_rank,
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
        selection: None,
    };
    let mut rope =
        Rope { theta: f.f64_or("compress_rope_theta", 160_000.0)?, ..f.rope_and_mscale(rotated, true, 10_000.0)?.0 };
    if let RopeScaling::Yarn(yarn) = &mut rope.scaling {
        yarn.attention_factor = 1.0;
    }
    let rope = checked(rope)?;
    let of_layer = |ratio: &i64| -> Result<Compressed> {
        let ratio = match usize::try_from(*ratio) {
            Ok(0) => return Ok(windowed.clone()),
            Ok(ratio @ 1..=MAX_WINDOW) => ratio,
            _ => return Err(wrong("compress_ratios", &format!("integers from 0 to {MAX_WINDOW}"))),
        };
        let chosen = ratio == CHOSEN_RATIO;
        let selection = if chosen {
            let indexer = Indexer {
                num_heads: f.heads("index_n_heads")?,
                head_dim: narrow("index_head_dim", f.heads("index_head_dim")?)?,
                interleaved: true,
                unit: ratio,
                top_k: f.dim("index_topk")?,
                score: Score::Entries { latent: q_lora_rank },
            };
            Some(Selection { by: ChosenBy::Own, indexer })
        } else {
            None
        };
        let compressor = Some(Compressor { dim: head_dim, ratio, overlaps: chosen });
        Ok(Compressed { rope: rope.clone(), compressor, selection, ..windowed.clone() })
    };
    let ratios = f.integers("compress_ratios")?.ok_or_else(|| missing("compress_ratios"))?;
    let layers = f.num_layers()?;
    // Further ones are draft layers'.
    let ratios = ratios.get(..layers).ok_or_else(|| wrong("compress_ratios", &format!("one for each of {layers}")))?;
    ratios.iter().map(of_layer).collect()
}
