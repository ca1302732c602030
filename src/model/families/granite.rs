//! Granite 4 with experts: Mamba-2 in most layers, attention without rope in the others; softmax routing, a shared
//! expert, and factors on embedding, scores, results and logits.
//!
//! Source: HF modeling_granitemoehybrid.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::{Fields, gqa, missing};
use super::gguf::Gguf;
use super::nemotron_h;
use crate::Result;
use crate::model::{Attention, Ffn, Gqa, Mamba2, Mlp, ModelConfig, Moe, Names, Router, Scoring, SharedExpert};

/// `granitemoehybrid`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("attention_bias", false.into())?;
    f.expect("mamba_proj_bias", false.into())?;
    f.expect("normalization_function", "rmsnorm".into())?;
    // Whatever a part gives is multiplied; all of it is linear in what is multiplied here.
    let result_scale = f.f64_or("residual_multiplier", 1.0)? as f32;
    let heads = f.dim("num_attention_heads")?;
    let head_dim = f.head_dim()?;
    let rope = match f.str_or("position_embedding_type", "rope")? {
        "nope" => None,
        _ => Some(f.rope(head_dim, 10_000.0)?),
    };
    let full = gqa([heads, f.dim_or("num_key_value_heads", heads)?, head_dim], rope)?;
    let full = Gqa { scale: f.f64_or("attention_multiplier", 1.0)? as f32, value_scale: result_scale, ..full };
    let names = ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"];
    let mamba = Mamba2 {
        conv_bias: f.bool_or("mamba_conv_bias", true)?,
        output_scale: result_scale,
        ..nemotron_h::mamba(f, names)?
    };
    let kinds = f.layer_kinds("layer_types", ["attention", "mamba"])?.ok_or_else(|| missing("layer_types"))?;
    let attention =
        |layer: usize| if kinds[layer] { Attention::Gqa(full.clone()) } else { Attention::Mamba2(mamba.clone()) };
    let router = Router { normalize: true, scaling: result_scale, ..Router::new(f.top_k()?, Scoring::Softmax) };
    let shared = Mlp::silu(f.dim("shared_intermediate_size")?);
    let moe = Moe {
        shared: Some(SharedExpert { mlp: shared, gate: false, scale: result_scale }),
        ..Moe::new(f.num_experts(&["num_local_experts"])?, f.dim("intermediate_size")?, router)
    };
    let layers = super::layers(f, attention, |_| Ok(Ffn::Moe(moe.clone())))?;
    // In GGUF files they are as most families'.
    let names = match f.bool_or("common_names", false)? {
        true => Names::COMMON,
        false => Names {
            mlp_projections: ["input_linear", "input_linear", "output_linear"],
            router: "block_sparse_moe.router.layer",
            shared_expert: "shared_mlp",
            experts: "block_sparse_moe.experts",
            ..Names::COMMON
        },
    };
    let model = super::model(f, layers)?;
    Ok(ModelConfig {
        names,
        tied_embeddings: f.bool_or("tie_word_embeddings", true)?,
        embedding_scale: f.f64_or("embedding_multiplier", 1.0)? as f32,
        logit_scale: 1.0 / f.f64_or("logits_scaling", 1.0)? as f32,
        ..model
    })
}

/// In GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "granitehybrid",
        tensors: &[
            ("ssm_in.weight", "mamba.in_proj.weight"),
            ("ssm_conv1d.weight", "mamba.conv1d.weight"),
            ("ssm_conv1d.bias", "mamba.conv1d.bias"),
            ("ssm_dt.bias", "mamba.dt_bias"),
            ("ssm_a", "mamba.A"),
            ("ssm_d", "mamba.D"),
            ("ssm_norm.weight", "mamba.norm.weight"),
            ("ssm_out.weight", "mamba.out_proj.weight"),
        ],
        permuted: &[],
    },
    model_types: &["granitemoehybrid"],
    config: |header| {
        let is_mamba = header.each_layer(|layer| header.has(&format!("model.layers.{layer}.mamba.in_proj.weight")));
        let kinds: Vec<_> = is_mamba.iter().map(|mamba| if *mamba { "mamba" } else { "attention" }).collect();
        let heads = header.number("ssm.time_step_rank").unwrap_or(0);
        let inner = header.number("ssm.inner_size").unwrap_or(0);
        let own = |key: &str| header.metadata.own(key).cloned();
        Ok(json!({
            "model_type": "granitemoehybrid",
            "common_names": true,
            "layer_types": kinds,
            "position_embedding_type": match header.metadata.own("rope.scaling.finetuned") {
                Some(turned) if *turned == true => "rope",
                _ => "nope",
            },
            "head_dim": header.head_dim(),
            "num_attention_heads": header.number_of("attention.head_count", &is_mamba, false),
            "num_key_value_heads": header.number_of("attention.head_count_kv", &is_mamba, false),
            "mamba_n_heads": heads,
            "mamba_d_head": inner.checked_div(heads),
            "mamba_d_state": header.number("ssm.state_size"),
            "mamba_n_groups": header.number("ssm.group_count"),
            "mamba_d_conv": header.number("ssm.conv_kernel"),
            "num_local_experts": header.experts(),
            "intermediate_size": header.number_of("feed_forward_length", &is_mamba, false),
            "shared_intermediate_size": header.number("expert_shared_feed_forward_length"),
            "embedding_multiplier": own("embedding_scale"),
            "residual_multiplier": own("residual_scale"),
            "attention_multiplier": own("attention.scale"),
            "logits_scaling": own("logit_scale"),
        }))
    },
};
