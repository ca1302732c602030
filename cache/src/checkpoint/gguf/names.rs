//! From the names of tensors in GGUF files to those of Hugging Face checkpoints: what most architectures share.

/// Tensors outside of layers.
const GLOBAL: &[(&str, &str)] = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("token_embd_norm", "model.embedding_norm"), // LFM2's last norm all the same
    ("output", "lm_head"),
    ("output_hc_norm", "model.hyper_connection_mixer.hc_norm"),
    ("output_hc_down", "model.hyper_connection_mixer.input_mix_weight_down"),
    ("output_hc_up", "model.hyper_connection_mixer.input_mix_weight_up"),
];

/// Tensors outside of layers whose suffix does not stay.
const GLOBAL_WHOLE: &[(&str, &str)] = &[
    ("output_hc_fn.weight", "model.hc_head_fn"),
    ("output_hc_base.weight", "model.hc_head_base"),
    ("output_hc_scale.weight", "model.hc_head_scale"),
];

/// Tensors of a layer: after `blk.N.` there, after `model.layers.N.` here.
const LAYER: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    // `codec::latent` joins these two to the one above.
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_in", "linear_attn.in_proj_qkvz"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];

/// Tensors of a layer whose suffix does not stay: theirs and ours, suffix included.
const WHOLE: &[(&str, &str)] = &[
    ("attn_sinks.weight", "self_attn.sinks"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("exp_probs_b", "mlp.gate.e_score_correction_bias"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    // Minus the exponential of Hugging Face's A_log.
    ("ssm_a", "linear_attn.A"),
];

/// What the GGUF files of an architecture call tensors, where that differs from the tables here. The caller knows
/// architectures; the default is one without differences.
#[derive(Clone, Copy, Debug, Default)]
pub struct GgufNames {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Tensors of a layer, suffix included: after `blk.N.` there, after `model.layers.N.` here.
    pub tensors: &'static [(&'static str, &'static str)],
    /// Tensors of a layer, without suffix, whose rows the converter reordered (half-split rotation to pairs), and the
    /// key, after the architecture's name, of the number of their heads.
    pub permuted: &'static [(&'static str, &'static str)],
}

impl GgufNames {
    /// What Hugging Face calls the tensor `name` of a GGUF file; a name that is in no table stays.
    pub fn hf_name(&self, name: &str) -> String {
        let (stem, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
        let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            if let Some((_, ours)) = GLOBAL_WHOLE.iter().find(|(theirs, _)| *theirs == name) {
                return ours.to_string();
            }
            let found = GLOBAL.iter().find(|(theirs, _)| *theirs == stem);
            return found.map_or_else(|| name.to_string(), |(_, ours)| format!("{ours}.{suffix}"));
        };
        if let Some((_, ours)) = self.tensors.iter().chain(WHOLE).find(|(theirs, _)| *theirs == part) {
            return format!("model.layers.{layer}.{ours}");
        }
        let stem = part.rsplit_once('.').map_or(part, |(stem, _)| stem);
        match LAYER.iter().find(|(theirs, _)| *theirs == stem) {
            Some((_, ours)) => format!("model.layers.{layer}.{ours}.{suffix}"),
            None => name.to_string(),
        }
    }

    /// Under which key the metadata have the number of heads whose rows the converter reordered; `None`: it did not.
    pub(super) fn permuted_heads(&self, name: &str) -> Option<String> {
        let stem = name.strip_prefix("blk.")?.split_once('.')?.1.rsplit_once('.')?.0;
        let (_, key) = self.permuted.iter().find(|(theirs, _)| *theirs == stem)?;
        Some(format!("{}.{key}", self.architecture))
    }
}
