//! Nemotron-H with experts: layers that are Mamba-2, attention without rope, experts or an MLP alone; squared ReLU
//! without a gate; experts behind a projection in the larger ones.
//!
//! Source: HF modeling_nemotron_h.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::deepseek;
use super::fields::{Fields, MAX_LAYERS, gqa, missing};
use super::gguf::{Gguf, Header};
use crate::model::{
    Activation, Attention, Ffn, LayerConfig, Mamba2, Mlp, ModelConfig, Moe, Names, Nothing, Residual, SharedExpert,
};
use crate::{Error, Result};

/// What a layer is.
#[derive(Clone, Copy, PartialEq)]
enum Block {
    Mamba,
    Attention,
    Experts,
    Mlp,
}

/// `nemotron_h`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    for name in ["attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"] {
        f.expect(name, false.into())?;
    }
    f.expect("mamba_hidden_act", "silu".into())?;
    f.expect("mlp_hidden_act", "relu2".into())?;
    let heads = f.dim("num_attention_heads")?;
    let full = gqa([heads, f.dim_or("num_key_value_heads", heads)?, f.head_dim()?], None)?;
    let mamba = mamba(f, ["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"])?;
    let mamba = Mamba2 { conv_bias: f.bool_or("use_conv_bias", true)?, ..mamba };
    let blocks = blocks(f)?;
    let relu2 = |width: usize| Mlp { intermediate_size: width, activation: Activation::ReluSquared };
    let experts = || {
        let shared = f.count_or("n_shared_experts", 1)?;
        let width = f.dim("moe_intermediate_size")?;
        let of_shared = f.dim_or("moe_shared_expert_intermediate_size", width)?;
        Ok::<_, Error>(Ffn::Moe(Moe {
            shared: (shared > 0).then(|| SharedExpert::plain(relu2(shared.saturating_mul(of_shared)))),
            activation: Activation::ReluSquared,
            latent: f.optional_dim("moe_latent_size")?,
            ..Moe::new(f.num_experts(&["n_routed_experts"])?, width, deepseek::v3_router(f)?)
        }))
    };
    let layer = |block: &Block| {
        let (attention, ffn) = match block {
            Block::Mamba => (Attention::Mamba2(mamba.clone()), Ffn::None),
            Block::Attention => (Attention::Gqa(full.clone()), Ffn::None),
            Block::Experts => (Attention::Nothing(Nothing), experts()?),
            Block::Mlp => (Attention::Nothing(Nothing), Ffn::Dense(relu2(f.dim("intermediate_size")?))),
        };
        Ok(LayerConfig { attention, ffn, residual: Residual::PreNorm, ngrams: None })
    };
    let layers = blocks.iter().map(layer).collect::<Result<_>>()?;
    // In GGUF files they are as most families'.
    let ends = match f.bool_or("common_names", false)? {
        true => Names::COMMON,
        false => Names { body: "backbone.", embedding: "embeddings", final_norm: "norm_f", ..Names::COMMON },
    };
    let names = Names {
        attention_norm: "norm",
        ffn_norm: "norm",
        attention: "mixer",
        mamba: "mixer",
        mlp: "mixer",
        mlp_projections: ["up_proj", "up_proj", "down_proj"],
        router: "mixer.gate",
        correction_bias: "mixer.gate.e_score_correction_bias",
        shared_expert: "mixer.shared_experts",
        latent: ["mixer.fc1_latent_proj", "mixer.fc2_latent_proj"],
        experts: "mixer.experts",
        expert_projections: ["up_proj", "up_proj", "down_proj"],
        ..ends
    };
    Ok(ModelConfig { names, ..super::model(f, layers)? })
}

/// Mamba-2 by the names of its heads, their width, the state's, the groups and the convolution's width.
pub(super) fn mamba(f: &Fields<'_>, [heads, dim, state, groups, conv]: [&str; 5]) -> Result<Mamba2> {
    let mamba = Mamba2 {
        num_heads: f.heads(heads)?,
        head_dim: f.heads(dim)?,
        state_dim: f.heads(state)?,
        num_groups: f.heads_or(groups, 1)?,
        conv_width: f.conv_width(conv)?,
        conv_bias: true,
        output_scale: 1.0,
    };
    if mamba.num_heads % mamba.num_groups != 0 {
        let (heads, groups) = (mamba.num_heads, mamba.num_groups);
        return Err(Error::Model(format!("{heads} heads of Mamba-2 cannot be in {groups} equal groups")));
    }
    Ok(mamba)
}

/// What the layers are: a letter for each, or a list of words.
fn blocks(f: &Fields<'_>) -> Result<Vec<Block>> {
    // Nemotron 3 Ultra's config has the list alone.
    let count = if f.has("num_hidden_layers") { Some(f.num_layers()?) } else { None };
    let (name, blocks): (_, Option<Vec<Block>>) = match f.texts("layers_block_type")? {
        Some(words) => {
            let block = |word: &str| match word {
                "mamba" => Some(Block::Mamba),
                "attention" => Some(Block::Attention),
                "moe" => Some(Block::Experts),
                "mlp" => Some(Block::Mlp),
                _ => None,
            };
            ("layers_block_type", words.into_iter().map(block).collect())
        }
        None if f.has("hybrid_override_pattern") => {
            let block = |letter| match letter {
                'M' => Some(Block::Mamba),
                '*' => Some(Block::Attention),
                'E' => Some(Block::Experts),
                '-' => Some(Block::Mlp),
                _ => None,
            };
            ("hybrid_override_pattern", f.str("hybrid_override_pattern")?.chars().map(block).collect())
        }
        None => return Err(missing("hybrid_override_pattern")),
    };
    let fits = |blocks: &Vec<Block>| {
        (1..=MAX_LAYERS).contains(&(blocks.len() as u64)) && count.is_none_or(|n| n == blocks.len())
    };
    blocks.filter(fits).ok_or_else(|| {
        let layers = count.map_or("each layer".into(), |count| format!("each of {count} layers"));
        Error::Model(format!("`{name}` does not say Mamba, attention, experts or MLP for {layers}"))
    })
}

const TENSORS: &[(&str, &str)] = &[
    ("attn_norm.weight", "norm.weight"),
    ("attn_q.weight", "mixer.q_proj.weight"),
    ("attn_k.weight", "mixer.k_proj.weight"),
    ("attn_v.weight", "mixer.v_proj.weight"),
    ("attn_output.weight", "mixer.o_proj.weight"),
    ("ssm_in.weight", "mixer.in_proj.weight"),
    ("ssm_conv1d.weight", "mixer.conv1d.weight"),
    ("ssm_conv1d.bias", "mixer.conv1d.bias"),
    ("ssm_dt.bias", "mixer.dt_bias"),
    ("ssm_a", "mixer.A"),
    ("ssm_d", "mixer.D"),
    ("ssm_norm.weight", "mixer.norm.weight"),
    ("ssm_out.weight", "mixer.out_proj.weight"),
    ("ffn_up.weight", "mixer.up_proj.weight"),
    ("ffn_down.weight", "mixer.down_proj.weight"),
    ("ffn_gate_inp.weight", "mixer.gate.weight"),
    ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    ("ffn_latent_down.weight", "mixer.fc1_latent_proj.weight"),
    ("ffn_latent_up.weight", "mixer.fc2_latent_proj.weight"),
    ("ffn_up_exps.weight", "mixer.experts.up_proj.weight"),
    ("ffn_down_exps.weight", "mixer.experts.down_proj.weight"),
    ("ffn_up_shexp.weight", "mixer.shared_experts.up_proj.weight"),
    ("ffn_down_shexp.weight", "mixer.shared_experts.down_proj.weight"),
];

/// With experts, in GGUF files.
pub(super) const GGUF_MOE: Gguf = Gguf {
    names: GgufNames { architecture: "nemotron_h_moe", tensors: TENSORS, permuted: &[] },
    model_types: &["nemotron_h"],
    config: gguf,
};

fn gguf(header: &Header<'_>) -> Result<serde_json::Value> {
    let has = |layer: u64, part: &str| header.has(&format!("model.layers.{layer}.mixer.{part}.weight"));
    let block = |layer| match () {
        () if has(layer, "in_proj") => "mamba",
        () if has(layer, "q_proj") => "attention",
        () if has(layer, "gate") => "moe",
        () => "mlp",
    };
    let blocks = header.each_layer(block);
    let attends: Vec<bool> = blocks.iter().map(|block| *block == "attention").collect();
    let is_mlp: Vec<bool> = blocks.iter().map(|block| *block == "mlp").collect();
    let heads = header.number("ssm.time_step_rank").unwrap_or(0);
    let inner = header.number("ssm.inner_size").unwrap_or(0);
    let latent = (0..blocks.len()).find_map(|layer| {
        let name = format!("model.layers.{layer}.mixer.fc1_latent_proj.weight");
        header.checkpoint.get(&name).and_then(|view| view.shape.first().copied())
    });
    Ok(json!({
        "model_type": "nemotron_h",
        "common_names": true,
        "layers_block_type": blocks,
        "head_dim": header.head_dim(),
        "num_attention_heads": header.number_of("attention.head_count", &attends, true),
        "num_key_value_heads": header.number_of("attention.head_count_kv", &attends, true),
        // Of an MLP; nothing reads it where there is none.
        "intermediate_size": header.number_of("feed_forward_length", &is_mlp, true).unwrap_or(1),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner.checked_div(heads),
        "ssm_state_size": header.number("ssm.state_size"),
        "n_groups": header.number("ssm.group_count"),
        "conv_kernel": header.number("ssm.conv_kernel"),
        "use_conv_bias": blocks.iter().enumerate().any(|(layer, _)| {
            header.has(&format!("model.layers.{layer}.mixer.conv1d.bias"))
        }),
        "n_routed_experts": header.experts(),
        // The file's number is the width of all shared experts together.
        "n_shared_experts": u64::from(header.number("expert_shared_count").unwrap_or(0) > 0),
        "moe_shared_expert_intermediate_size": header.number("expert_shared_feed_forward_length"),
        "moe_latent_size": latent,
        "norm_topk_prob": header.normalized(true),
        "n_group": header.number("expert_group_count").unwrap_or(1),
        "topk_group": header.number("expert_group_used_count").unwrap_or(1),
        "routed_scaling_factor": header.metadata.own("expert_weights_scale"),
    }))
}
