//! Kimi-Linear and Ling 3: Kimi delta attention in most layers, latent attention in the others; DeepSeek-V3's experts.
//!
//! Source: HF modeling_kimi_linear and modeling_bailing_hybrid.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::json;

use super::fields::{Fields, missing};
use super::gguf::{Gguf, Tensors};
use crate::model::{
    Activation, Attention, Ffn, GroupScore, Groups, Kda, KdaDecay, Mla, Mlp, ModelConfig, Moe, Names, Router, Scoring,
    SharedExpert,
};
use crate::{Error, Result};

/// HF gives these norms its default, whatever `rms_norm_eps` says.
const LATENT_NORM_EPS: f32 = 1e-6;

/// `kimi_linear`.
pub(super) fn kimi_linear(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("moe_router_activation_func", "sigmoid".into())?;
    f.expect("moe_layer_freq", 1.into())?;
    let linear = f.object("linear_attn_config")?.ok_or_else(|| missing("linear_attn_config"))?;
    let head_dim = linear.heads("head_dim")?;
    let kda = Kda {
        num_heads: linear.heads("num_heads")?,
        head_dim,
        conv_width: linear.conv_width("short_conv_kernel_size")?,
        decay: KdaDecay::Softplus,
        gate_rank: Some(head_dim),
    };
    // Layers are counted from 1.
    let of_kda = linear.integers("kda_layers")?.ok_or_else(|| missing("kda_layers"))?;
    let is_kda = |layer: usize| of_kda.contains(&(layer as i64 + 1));
    let rotates = !f.bool_or("mla_use_nope", false)?;
    let mla = mla(f, rotates)?;
    let attention = |layer| if is_kda(layer) { Attention::Kda(kda.clone()) } else { Attention::Mla(mla.clone()) };
    let router = Router {
        correction_bias: true,
        groups: groups(f, "num_expert_group")?,
        normalize: f.bool_or("moe_renormalize", true)?,
        scaling: f.f64_or("routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.up_to_top_k("num_experts_per_token")?, Scoring::Sigmoid)
    };
    let layers = super::layers(f, attention, ffn(f, moe(f, router)?)?)?;
    // In GGUF files they are as most families'.
    let names = match f.bool_or("common_names", false)? {
        true => Names::COMMON,
        false => Names {
            router: "block_sparse_moe.gate",
            correction_bias: "block_sparse_moe.gate.e_score_correction_bias",
            shared_expert: "block_sparse_moe.shared_experts",
            experts: "block_sparse_moe.experts",
            expert_projections: ["w1", "w3", "w2"],
            ..Names::COMMON
        },
    };
    Ok(ModelConfig { names, ..super::model(f, layers)? })
}

/// `bailing_hybrid`.
pub(super) fn bailing_hybrid(f: &Fields<'_>) -> Result<ModelConfig> {
    f.expect_silu()?;
    f.expect("score_function", "sigmoid".into())?;
    f.expect("no_kda_lora", true.into())?;
    f.expect("use_mla_nope", false.into())?;
    f.expect("gated_attention_proj_granularity_type", "head_wise".into())?;
    let kda = Kda {
        num_heads: f.heads("num_attention_heads")?,
        head_dim: f.head_dim()?,
        conv_width: f.conv_width("short_conv_kernel_size")?,
        decay: match f.bool_or("kda_safe_gate", true)? {
            true => KdaDecay::Bounded { lower: f.f64_or("kda_lower_bound", -5.0)? as f32 },
            false => KdaDecay::Softplus,
        },
        gate_rank: None,
    };
    // Layers behind the last whole group are its kind's too (inclusionAI's modeling_bailing_moe_v3).
    let (group, num_layers) = (f.dim("layer_group_size")?, f.num_layers()?);
    let is_mla = |layer: usize| (layer + 1).is_multiple_of(group) || layer >= num_layers / group * group;
    let mla = Mla { head_gate: true, ..mla(f, true)? };
    let attention = |layer| if is_mla(layer) { Attention::Mla(mla.clone()) } else { Attention::Kda(kda.clone()) };
    let router = Router {
        correction_bias: f.bool_or("moe_router_enable_expert_bias", true)?,
        groups: groups(f, "n_group")?,
        normalize: f.bool_or("norm_topk_prob", true)?,
        scaling: f.f64_or("routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::Sigmoid)
    };
    // The last layers of Ling-3.0-flash are trained with bounds. HF's code does not read them; vLLM's and SGLang's
    // bailing_moe_v3.py do.
    let [limits, shared_limits] =
        [f.each_layer_or("expert_swiglu_limit_list", 0.0)?, f.each_layer_or("share_expert_swiglu_limit_list", 0.0)?];
    let unbounded = ffn(f, moe(f, router)?)?;
    let bounded = |layer: usize| {
        let mut ffn = unbounded(layer)?;
        if let Ffn::Moe(moe) = &mut ffn {
            moe.activation = Activation::silu_within(limits[layer]);
            if let Some(shared) = &mut moe.shared {
                shared.mlp.activation = Activation::silu_within(shared_limits[layer]);
            }
        }
        Ok(ffn)
    };
    let layers = super::layers(f, attention, bounded)?;
    // In GGUF files they are as most families'.
    let names = match f.bool_or("common_names", false)? {
        true => Names::COMMON,
        false => Names {
            embedding: "word_embeddings",
            attention: "attention",
            o: "dense",
            correction_bias: "mlp.gate.expert_bias",
            ..Names::COMMON
        },
    };
    Ok(ModelConfig { names, ..super::model(f, layers)? })
}

fn mla(f: &Fields<'_>, rotates: bool) -> Result<Mla> {
    let (nope, rope_dim) = (f.dim("qk_nope_head_dim")?, f.dim("qk_rope_head_dim")?);
    let (rope, mscale) = match rotates {
        true => {
            let (rope, mscale) = f.rope_and_mscale(rope_dim, f.bool_or("rope_interleave", true)?, 10_000.0)?;
            (Some(rope), mscale)
        }
        false => (None, 1.0),
    };
    Ok(Mla {
        num_heads: f.dim("num_attention_heads")?,
        q_lora_rank: f.optional_dim("q_lora_rank")?,
        kv_lora_rank: f.dim("kv_lora_rank")?,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: rope_dim,
        rope,
        v_head_dim: f.dim("v_head_dim")?,
        bias: f.bool_or("attention_bias", false)?,
        head_gate: false,
        scale: (mscale * mscale / ((nope + rope_dim) as f64).sqrt()) as f32,
        position_scale: None,
        norm_eps: LATENT_NORM_EPS,
        selection: None,
    })
}

fn groups(f: &Fields<'_>, count: &str) -> Result<Option<Groups>> {
    let (experts, count_of) = (f.num_experts(&["num_experts"])?, f.dim_or(count, 1)?);
    let top_k = f.dim_or("topk_group", 1)?;
    if experts % count_of != 0 || top_k > count_of || (count_of > 1 && experts / count_of < 2) {
        return Err(Error::Model(format!("{top_k} of {count_of} groups cannot be chosen from {experts} experts")));
    }
    Ok((count_of > 1).then_some(Groups { count: count_of, top_k, score: GroupScore::TopTwoSum }))
}

fn moe(f: &Fields<'_>, router: Router) -> Result<Moe> {
    let width = f.dim("moe_intermediate_size")?;
    let (shared, of_shared) =
        (f.count_or("num_shared_experts", 0)?, f.optional_dim("moe_shared_expert_intermediate_size")?.unwrap_or(width));
    let shared = (shared > 0).then(|| SharedExpert::plain(Mlp::silu(shared.saturating_mul(of_shared))));
    Ok(Moe { shared, ..Moe::new(f.num_experts(&["num_experts"])?, width, router) })
}

fn ffn<'a>(f: &'a Fields<'_>, moe: Moe) -> Result<impl Fn(usize) -> Result<Ffn> + 'a> {
    let first = f.count_or("first_k_dense_replace", 0)?;
    Ok(move |layer| if layer >= first { Ok(Ffn::Moe(moe.clone())) } else { f.dense() })
}

/// What GGUF files call tensors of Kimi delta attention.
pub(super) const GGUF_KDA: Tensors<11> = [
    ("ssm_conv1d_q.weight", "self_attn.q_conv1d.weight"),
    ("ssm_conv1d_k.weight", "self_attn.k_conv1d.weight"),
    ("ssm_conv1d_v.weight", "self_attn.v_conv1d.weight"),
    ("ssm_f_a.weight", "self_attn.f_a_proj.weight"),
    ("ssm_f_b.weight", "self_attn.f_b_proj.weight"),
    ("ssm_g_a.weight", "self_attn.g_a_proj.weight"),
    ("ssm_g_b.weight", "self_attn.g_b_proj.weight"),
    ("ssm_beta.weight", "self_attn.b_proj.weight"),
    ("ssm_a", "self_attn.A"),
    ("ssm_dt.bias", "self_attn.dt_bias"),
    ("ssm_norm.weight", "self_attn.o_norm.weight"),
];

/// `kimi_linear` in GGUF files.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames { architecture: "kimi-linear", tensors: &GGUF_KDA, permuted: &[] },
    model_types: &["kimi_linear"],
    config: |header| {
        let is_kda = header.each_layer(|layer| header.has(&format!("model.layers.{layer}.self_attn.f_a_proj.weight")));
        let of_kda: Vec<_> = is_kda.iter().enumerate().filter(|(_, kda)| **kda).map(|(layer, _)| layer + 1).collect();
        let heads = header.number_of("attention.head_count", &is_kda, false);
        let rope = header.need("rope.dimension_count")?;
        let betas = of_kda.first().map(|layer| format!("model.layers.{}.self_attn.b_proj.weight", layer - 1));
        let of_linear = betas.and_then(|name| header.checkpoint.get(&name)?.shape.first().copied());
        Ok(json!({
            "model_type": "kimi_linear",
            "common_names": true,
            "linear_attn_config": {
                "num_heads": of_linear,
                "head_dim": header.number("kda.head_dim"),
                "short_conv_kernel_size": header.number("ssm.conv_kernel"),
                "kda_layers": of_kda,
            },
            "mla_use_nope": true,
            "num_attention_heads": heads,
            "num_key_value_heads": header.number_of("attention.head_count_kv", &is_kda, false),
            "kv_lora_rank": header.need("attention.kv_lora_rank")?,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": header.number("attention.key_length_mla").and_then(|head| head.checked_sub(rope)),
            "v_head_dim": header.number("attention.value_length_mla"),
            "num_experts": header.experts(),
            "num_experts_per_token": header.number("expert_used_count"),
            "num_shared_experts": header.number("expert_shared_count"),
            "first_k_dense_replace": header.number("leading_dense_block_count"),
            "moe_renormalize": header.normalized(true),
            "num_expert_group": header.number("expert_group_count"),
        }))
    },
};

/// What GGUF files call tensors of Ling 3, whose gates are one projection. Layers of either attention have one named
/// alike.
const GGUF_LING: Tensors<10> = [
    ("ssm_conv1d_q.weight", "self_attn.q_conv1d.weight"),
    ("ssm_conv1d_k.weight", "self_attn.k_conv1d.weight"),
    ("ssm_conv1d_v.weight", "self_attn.v_conv1d.weight"),
    ("ssm_f_a.weight", "self_attn.f_proj.weight"),
    ("ssm_g_a.weight", "self_attn.g_proj.weight"),
    ("attn_gate.weight", "self_attn.g_proj.weight"),
    ("ssm_beta.weight", "self_attn.b_proj.weight"),
    ("ssm_a", "self_attn.A"),
    ("ssm_dt.bias", "self_attn.dt_bias"),
    ("ssm_norm.weight", "self_attn.o_norm.weight"),
];

/// `bailing_hybrid` in GGUF files.
pub(super) const GGUF_HYBRID: Gguf = Gguf {
    names: GgufNames { architecture: "bailingmoe3", tensors: &GGUF_LING, permuted: &[] },
    model_types: &["bailing_hybrid"],
    config: |header| {
        let is_kda = header.each_layer(|layer| header.has(&format!("model.layers.{layer}.self_attn.f_proj.weight")));
        // The first layer that is none ends a group.
        let group = is_kda.iter().position(|kda| !*kda).map(|layer| layer + 1);
        let rope = header.need("rope.dimension_count")?;
        Ok(json!({
            "model_type": "bailing_hybrid",
            "common_names": true,
            "layer_group_size": group,
            "num_key_value_heads": header.number("attention.head_count"),
            "head_dim": header.need("kda.head_dim")?,
            "short_conv_kernel_size": header.need("ssm.conv_kernel")?,
            "kda_safe_gate": header.metadata.own("kda.safe_gate"),
            "kda_lower_bound": header.metadata.own("kda.gate_lower_bound"),
            "q_lora_rank": header.number("attention.q_lora_rank"),
            "kv_lora_rank": header.need("attention.kv_lora_rank")?,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": header.number("attention.key_length_mla").and_then(|head| head.checked_sub(rope)),
            "v_head_dim": header.need("attention.value_length_mla")?,
            "num_experts": header.experts(),
            "num_shared_experts": header.number("expert_shared_count"),
            "first_k_dense_replace": header.number("leading_dense_block_count"),
            "norm_topk_prob": header.normalized(true),
            "moe_shared_expert_intermediate_size": header.number("expert_shared_feed_forward_length"),
            "expert_swiglu_limit_list": header.metadata.own("swiglu_clamp_exp"),
            "share_expert_swiglu_limit_list": header.metadata.own("swiglu_clamp_shexp"),
        }))
    },
};
