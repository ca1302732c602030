//! From the names of tensors in GGUF files to those of Hugging Face checkpoints: one table.

/// Tensors outside of layers.
const GLOBAL: &[(&str, &str)] =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

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

const ANY: &[&str] = &[];
/// Architectures whose shared expert is one, with a gate.
const GATED: &[&str] = &["qwen2moe", "qwen3next", "qwen35moe"];

/// Where names differ from the table, the suffix included: (architectures, GGUF name, Hugging Face name). The first
/// that fits is taken.
const SPECIAL: &[(&[&str], &str, &str)] = &[
    (GATED, "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    (GATED, "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    (GATED, "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
    (GATED, "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
    (&["gpt-oss"], "ffn_gate_inp.weight", "mlp.router.weight"),
    (&["gpt-oss"], "ffn_gate_inp.bias", "mlp.router.bias"),
    (&["gpt-oss"], "ffn_gate_exps.bias", "mlp.experts.gate_proj_bias"),
    (&["gpt-oss"], "ffn_up_exps.bias", "mlp.experts.up_proj_bias"),
    (&["gpt-oss"], "ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
    (&["minimax-m2"], "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
    (&["minimax-m2"], "exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"),
    (&["minimax-m2"], "ffn_gate_exps.weight", "block_sparse_moe.experts.w1.weight"),
    (&["minimax-m2"], "ffn_down_exps.weight", "block_sparse_moe.experts.w2.weight"),
    (&["minimax-m2"], "ffn_up_exps.weight", "block_sparse_moe.experts.w3.weight"),
    (&["llama"], "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
    (&["llama"], "ffn_gate_exps.weight", "block_sparse_moe.experts.w1.weight"),
    (&["llama"], "ffn_down_exps.weight", "block_sparse_moe.experts.w2.weight"),
    (&["llama"], "ffn_up_exps.weight", "block_sparse_moe.experts.w3.weight"),
    (ANY, "attn_sinks.weight", "self_attn.sinks"),
    (ANY, "exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    (ANY, "exp_probs_b", "mlp.gate.e_score_correction_bias"),
    (ANY, "ssm_dt.bias", "linear_attn.dt_bias"),
    // Minus the exponential of Hugging Face's A_log.
    (ANY, "ssm_a", "linear_attn.A"),
];

/// What Hugging Face calls the tensor `name` of a GGUF file; a name that is in no table stays.
pub fn hf_name(architecture: &str, name: &str) -> String {
    let (stem, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
    let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        let found = GLOBAL.iter().find(|(theirs, _)| *theirs == stem);
        return found.map_or_else(|| name.to_string(), |(_, ours)| format!("{ours}.{suffix}"));
    };
    let special =
        SPECIAL.iter().find(|(of, theirs, _)| (of.is_empty() || of.contains(&architecture)) && *theirs == part);
    if let Some((.., ours)) = special {
        return format!("model.layers.{layer}.{ours}");
    }
    let stem = part.rsplit_once('.').map_or(part, |(stem, _)| stem);
    match LAYER.iter().find(|(theirs, _)| *theirs == stem) {
        Some((_, ours)) => format!("model.layers.{layer}.{ours}.{suffix}"),
        None => name.to_string(),
    }
}

/// Under which key the metadata has the number of heads whose rows the converter reordered (half-split rotation to
/// pairs); `None`: it did not.
pub(super) fn permuted_heads(architecture: &str, name: &str) -> Option<&'static str> {
    let part = name.strip_prefix("blk.")?.split_once('.')?.1;
    match (architecture, part.rsplit_once('.')?.0) {
        ("llama", "attn_q") => Some("llama.attention.head_count"),
        ("llama", "attn_k") => Some("llama.attention.head_count_kv"),
        _ => None,
    }
}
