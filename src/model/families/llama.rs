//! Llama and Qwen3, dense models.
//!
//! Sources: HF modeling_llama and modeling_qwen3.

use super::fields::Fields;
use crate::Result;
use crate::model::{Attention, Bias, Gqa, ModelConfig, QkNorm};

/// `llama`.
pub(super) fn llama(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect("mlp_bias", false.into())?;
    config(f, QkNorm::None)
}

/// `qwen3`: QK norm.
pub(super) fn qwen3(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect("use_sliding_window", false.into())?;
    config(f, QkNorm::PerHead)
}

fn config(f: &Fields<'_>, qk_norm: QkNorm) -> Result<ModelConfig> {
    f.expect_silu()?;
    let bias = if f.bool_or("attention_bias", false)? { Bias::All } else { Bias::None };
    let attention = Gqa { qk_norm, bias, ..f.gqa()? };
    let (rope, _) = f.rope(attention.head_dim, false, 10_000.0)?;
    super::model(f, rope, super::layers(f, |_| Attention::Gqa(attention.clone()), |_| f.dense())?)
}
