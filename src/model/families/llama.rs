//! Llama, Qwen3 and the text part of Qwen3-VL, dense models.
//!
//! Sources: HF modeling_llama, modeling_qwen3 and modeling_qwen3_vl.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::Fields;
use super::gguf::Gguf;
use crate::Result;
use crate::model::{Attention, Bias, Gqa, ModelConfig, QkNorm};

/// `llama`.
pub(super) fn llama(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect("mlp_bias", false.into())?;
    config(f, QkNorm::None)
}

/// `qwen3_vl`: the language model is nested, and so are its tensor names.
pub(super) fn qwen3_vl(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", qwen3)
}

/// `qwen3` and `qwen3_vl_text`: QK norm.
pub(super) fn qwen3(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect("use_sliding_window", false.into())?;
    config(f, QkNorm::PerHead)
}

fn config(f: &Fields<'_>, qk_norm: QkNorm) -> Result<ModelConfig> {
    f.expect_silu()?;
    let bias = if f.bool_or("attention_bias", false)? { Bias::All } else { Bias::None };
    let attention = Gqa { qk_norm, bias, ..f.gqa(f.rope(f.head_dim()?, 10_000.0)?)? };
    super::model(f, super::layers(f, |_| Attention::Gqa(attention.clone()), |_| f.dense())?)
}

/// `llama` and `mixtral` in GGUF files, which give both one name.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "llama",
        tensors: &[
            ("ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
            ("ffn_gate_exps.weight", "block_sparse_moe.experts.w1.weight"),
            ("ffn_down_exps.weight", "block_sparse_moe.experts.w2.weight"),
            ("ffn_up_exps.weight", "block_sparse_moe.experts.w3.weight"),
        ],
        permuted: &[("attn_q", "attention.head_count"), ("attn_k", "attention.head_count_kv")],
    },
    model_types: &["mixtral", "llama"],
    config: |header| match header.experts() {
        0 => Ok(json!({"model_type": "llama", "head_dim": header.head_dim()})),
        experts => Ok(json!({"model_type": "mixtral", "head_dim": header.head_dim(), "num_local_experts": experts})),
    },
};

/// `qwen3` in GGUF files.
pub(super) const GGUF_QWEN3: Gguf = Gguf {
    names: GgufNames { architecture: "qwen3", tensors: &[], permuted: &[] },
    model_types: &["qwen3"],
    config: |header| Ok(json!({"model_type": "qwen3", "head_dim": header.head_dim()})),
};

/// `qwen3_vl_text` in GGUF files.
pub(super) const GGUF_QWEN3_VL: Gguf = Gguf {
    names: GgufNames { architecture: "qwen3vl", tensors: &[], permuted: &[] },
    model_types: &["qwen3_vl_text"],
    config: |header| Ok(json!({"model_type": "qwen3_vl_text", "head_dim": header.head_dim()})),
};
