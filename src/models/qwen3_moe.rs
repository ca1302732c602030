//! Qwen3-MoE: grouped queries with QK norm, softmax routing, some layers dense by configuration.
//!
//! Source: HF modeling_qwen3_moe.

use super::fields::Fields;
use crate::model::{Attention, Gqa, ModelConfig, Moe, Router, Scoring};
use crate::{Error, Result};

/// `qwen3_moe`.
pub(super) fn config(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    if f.bool_or("use_sliding_window", false)? {
        return Err(Error::Model("use_sliding_window is not supported for qwen3_moe".into()));
    }
    let hidden_size = f.dim("hidden_size")?;
    let num_heads = f.dim("num_attention_heads")?;
    let num_kv_heads = f.dim_or("num_key_value_heads", num_heads)?;
    let head_dim = f.dim_or("head_dim", (hidden_size / num_heads).max(1))?;
    if num_heads % num_kv_heads != 0 {
        return Err(Error::Model(format!("{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")));
    }
    let attention = Attention::Gqa(Gqa {
        num_heads,
        num_kv_heads,
        head_dim,
        qk_norm: true,
        bias: f.bool_or("attention_bias", false)?,
        scale: 1.0 / (head_dim as f32).sqrt(),
    });
    let moe = Moe {
        num_experts: f.num_experts(&["num_experts", "num_local_experts"])?,
        intermediate_size: f.dim("moe_intermediate_size")?,
        shared_intermediate_size: None,
        router: Router {
            top_k: f.top_k()?,
            scoring: Scoring::Softmax,
            correction_bias: false,
            groups: None,
            normalize: f.bool_or("norm_topk_prob", false)?,
            scaling: 1.0,
        },
    };
    let (dense_layers, step) = (f.layers("mlp_only_layers")?, f.dim_or("decoder_sparse_step", 1)?);
    let (rope, _) = f.rope(head_dim, false, 10_000.0)?;
    super::uniform(f, rope, attention, moe, |layer| !dense_layers.contains(&layer) && (layer + 1) % step == 0)
}
