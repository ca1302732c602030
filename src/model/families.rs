//! From `config.json` to a [`ModelConfig`], and what GGUF files call the same: one file per family of architectures,
//! and this registry.

mod cohere2_moe;
mod deepseek;
mod deepseek_v4;
mod deepseek_v41;
mod ernie4_5_moe;
mod fields;
mod gemma4;
pub mod gguf;
mod glm4_moe;
mod glm5_next;
mod gpt_oss;
mod granite;
mod hy_v3;
mod kimi_linear;
mod laguna;
mod lfm2_moe;
mod llama;
mod llama4;
mod mimo_v2;
mod minimax_m2;
mod mixtral;
mod nemotron_h;
mod numpy;
mod olmoe;
mod qwen3_next;
mod qwen4_exp;
mod qwen_moe;
pub mod shapes;
mod step3p5;

use moebius_cache::Checkpoint;
use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::Value;

use crate::model::{Attention, Ffn, LayerConfig, ModelConfig, Moe, Names, Norm, Residual};
use crate::{Error, Result};
use fields::Fields;
use gguf::Gguf;

type Reader = fn(&Fields<'_>) -> Result<ModelConfig>;

/// An architecture the engine runs.
pub struct Architecture {
    /// `model_type` of its config.
    pub model_type: &'static str,
    /// Models of it, for people.
    pub models: &'static str,
    reader: Reader,
}

const fn architecture(model_type: &'static str, models: &'static str, reader: Reader) -> Architecture {
    Architecture { model_type, models, reader }
}

/// Every architecture the engine runs.
pub const ARCHITECTURES: &[Architecture] = &[
    architecture("deepseek_v2", "DeepSeek-V2, V2-Lite, V2.5", deepseek::v2),
    architecture("deepseek_v3", "DeepSeek-V3, R1, V3.1", deepseek::v3),
    architecture("deepseek_v32", "DeepSeek-V3.2", deepseek::v32),
    architecture("deepseek_v4", "DeepSeek-V4-Flash, Pro", deepseek_v4::config),
    architecture("deepseek_v41", "DeepSeek-V4.1-Flash (text)", deepseek_v41::nested),
    architecture("glm_moe_dsa", "GLM-5, 5.1, 5.2, 5.3", deepseek::glm_dsa),
    architecture("kimi_k2", "Kimi K2, K2-Thinking", deepseek::v3),
    architecture("kimi_k25", "Kimi K2.5, K2.6, K2.7 (text)", deepseek::kimi_k25),
    architecture("kimi_linear", "Kimi-Linear-48B-A3B", kimi_linear::kimi_linear),
    architecture("bailing_hybrid", "Ling-3.0-flash, 3.1-flash", kimi_linear::bailing_hybrid),
    architecture("glm5_next", "GLM-5.3-Flash (text)", glm5_next::nested),
    architecture("glm5_next_text", "GLM-5.3-Flash without vision", glm5_next::text),
    architecture("glm4_moe_lite", "GLM-4.7-Flash", deepseek::v3),
    architecture("mistral3", "Mistral Small 4 (text)", deepseek::mistral3),
    architecture("mistral4", "Mistral Small 4 without vision", deepseek::mistral4),
    architecture("qwen3_moe", "Qwen3-30B-A3B, 235B-A22B, Coder", qwen_moe::qwen3),
    architecture("qwen3_vl_moe", "Qwen3-VL-30B-A3B, 235B-A22B (text)", qwen_moe::qwen3_vl),
    architecture("qwen3_vl_moe_text", "Qwen3-VL MoE without vision", qwen_moe::qwen3_vl_text),
    architecture("qwen2_moe", "Qwen2-57B-A14B, Qwen1.5-MoE-A2.7B", qwen_moe::qwen2),
    architecture("qwen3_next", "Qwen3-Next-80B-A3B", qwen3_next::qwen3_next),
    architecture("qwen3_5_moe", "Qwen3.5, Qwen3.6 MoE (text)", qwen3_next::qwen3_5_moe),
    architecture("qwen3_5_moe_text", "Qwen3.5, Qwen3.6 MoE without vision", qwen3_next::qwen3_5_moe_text),
    architecture("qwen3_5", "Qwen3.5, 3.6, 3.8 (dense, text)", qwen3_next::qwen3_5),
    architecture("qwen3_5_text", "Qwen3.5, 3.6, 3.8 (dense) without vision", qwen3_next::qwen3_5_text),
    architecture("qwen4_exp", "Qwen3.8-Flash-Next (text)", qwen4_exp::nested),
    architecture("qwen4_exp_text", "Qwen3.8-Flash-Next without vision", qwen4_exp::text),
    architecture("glm4_moe", "GLM-4.5, 4.5-Air, 4.6, 4.7", glm4_moe::config),
    architecture("glm4v_moe", "GLM-4.5V, 4.6V (text)", glm4_moe::vision),
    architecture("glm4v_moe_text", "GLM-4.5V, 4.6V without vision", glm4_moe::config),
    architecture("hy_v3", "Hy3", hy_v3::config),
    architecture("ernie4_5_moe", "ERNIE-4.5-21B-A3B, 300B-A47B", ernie4_5_moe::config),
    architecture("mimo_v2_flash", "MiMo-V2-Flash", mimo_v2::config),
    architecture("mimo_v2", "MiMo-V2.5, 2.6 (text)", mimo_v2::config),
    architecture("step3p5", "Step-3.5-Flash", step3p5::config),
    architecture("step3p7", "Step-3.7-Flash (text)", step3p5::nested),
    architecture("gemma4", "Gemma 4 26B-A4B (text)", gemma4::nested),
    architecture("gemma4_text", "Gemma 4 26B-A4B without vision", gemma4::text),
    architecture("laguna", "Laguna XS, S", laguna::config),
    architecture("llama4", "Llama 4 Scout, Maverick (text)", llama4::nested),
    architecture("llama4_text", "Llama 4 without vision", llama4::text),
    architecture("lfm2_moe", "LFM2-8B-A1B, 24B-A2B, LFM2.5 MoE", lfm2_moe::config),
    architecture("nemotron_h", "Nemotron 3 Nano, Super, 3.5 Lightning", nemotron_h::config),
    architecture("granitemoehybrid", "Granite 4 H Small, Tiny", granite::config),
    architecture("cohere2_moe", "North-Mini-Code, Command A+ without vision", cohere2_moe::config),
    architecture("cohere2_vision", "Command A+ (text)", cohere2_moe::vision),
    architecture("minimax_m2", "MiniMax-M2", minimax_m2::config),
    architecture("minimax_m3_vl", "MiniMax-M3 (text)", minimax_m2::m3),
    architecture("minimax_m3_vl_text", "MiniMax-M3 without vision", minimax_m2::m3_text),
    architecture("gpt_oss", "gpt-oss-20b, 120b", gpt_oss::config),
    architecture("mixtral", "Mixtral-8x7B, 8x22B", mixtral::config),
    architecture("olmoe", "OLMoE-1B-7B", olmoe::config),
    architecture("qwen3", "Qwen3 (dense)", llama::qwen3),
    architecture("qwen3_vl", "Qwen3-VL (dense, text)", llama::qwen3_vl),
    architecture("qwen3_vl_text", "Qwen3-VL (dense) without vision", llama::qwen3),
    architecture("llama", "Llama 2, 3 (dense)", llama::llama),
];

/// Every architecture of GGUF files that holds models the engine runs.
pub const GGUF: &[Gguf] = &[
    deepseek::GGUF,
    deepseek::GGUF_MISTRAL4,
    deepseek::GGUF_V32,
    deepseek::GGUF_GLM,
    deepseek_v4::GGUF,
    glm5_next::GGUF,
    qwen_moe::GGUF_QWEN3,
    qwen_moe::GGUF_QWEN3_VL,
    qwen_moe::GGUF_QWEN2,
    glm4_moe::GGUF,
    hy_v3::GGUF,
    ernie4_5_moe::GGUF,
    minimax_m2::GGUF,
    minimax_m2::GGUF_M3,
    gpt_oss::GGUF,
    llama::GGUF,
    olmoe::GGUF,
    qwen3_next::GGUF_NEXT,
    qwen3_next::GGUF_QWEN3_5_MOE,
    qwen3_next::GGUF_QWEN3_5,
    qwen4_exp::GGUF,
    llama::GGUF_QWEN3,
    llama::GGUF_QWEN3_VL,
    mimo_v2::GGUF,
    step3p5::GGUF,
    gemma4::GGUF,
    laguna::GGUF,
    llama4::GGUF,
    cohere2_moe::GGUF,
    lfm2_moe::GGUF,
    kimi_linear::GGUF,
    kimi_linear::GGUF_HYBRID,
    nemotron_h::GGUF_MOE,
    granite::GGUF,
];

/// What GGUF files call the tensors of each family.
pub fn gguf_names() -> Vec<GgufNames> {
    GGUF.iter().map(|gguf| gguf.names).collect()
}

/// The supported `model_type`s.
pub fn supported() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.model_type)
}

/// Reads the text of a `config.json`. Errors: as [`from_json`], and what is not JSON.
pub fn parse(text: &str) -> Result<ModelConfig> {
    let json: Value =
        serde_json::from_str(text).map_err(|e| Error::Model(format!("not valid JSON ({e}): download it again")))?;
    from_json(&json)
}

/// Reads a `config.json`; what it gives is of sane size, whatever the JSON.
///
/// Errors: `Error::Model` naming the field, or the architecture and the supported ones.
pub fn from_json(json: &Value) -> Result<ModelConfig> {
    let fields = Fields::new(json)?;
    // Which methods there are is for the codecs to say; whether they read this one is said before weights are looked
    // for.
    moebius_cache::codec::Quantization::parse(json).map_err(Error::Model)?;
    let kind = fields.str("model_type")?;
    let Some(Architecture { reader, .. }) = ARCHITECTURES.iter().find(|architecture| architecture.model_type == kind)
    else {
        let known = match &nearest(kind)[..] {
            [] => format!("supported are {}", supported().collect::<Vec<_>>().join(", ")),
            near => format!("the nearest ones that are: {}", near.join(", ")),
        };
        let kind: String = kind.chars().take(64).collect(); // a file may say anything
        return Err(Error::Model(format!("architecture `{kind}` is not supported; {known}")));
    };
    let model = reader(&fields)?;
    match model.moe_layers().map(|(_, moe)| moe.num_experts).sum::<usize>() {
        0..=MAX_EXPERTS => Ok(model),
        n => Err(Error::Model(format!(
            "{n} experts in {} layers are more than any model has: download config.json again",
            model.layers.len()
        ))),
    }
}

/// Experts of all layers: each has names and checksums, and a lying config must not make us list them without end.
const MAX_EXPERTS: usize = 1 << 18;

/// Supported `model_type`s that begin with `kind`, then those that share half of their letters with it, nearest first.
fn nearest(kind: &str) -> Vec<&'static str> {
    const MOST: usize = 3;
    const LONGEST: usize = 64;
    if kind.is_empty() || kind.len() > LONGEST {
        return vec![];
    }
    let rank = |known: &'static str| (!known.starts_with(kind), distance(kind, known), known);
    let mut near: Vec<_> = supported().map(rank).collect();
    near.retain(|(differs, distance, known)| !differs || 2 * distance <= kind.len().max(known.len()));
    near.sort_by_key(|(differs, distance, _)| (*differs, *distance));
    near.into_iter().take(MOST).map(|(_, _, known)| known).collect()
}

/// Letters to insert, remove or replace to make one text of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    // Distances of what of `a` was read to each beginning of `b`.
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, other) in b.iter().enumerate() {
            let replaced = before + usize::from(letter != *other);
            before = row[j + 1];
            row[j + 1] = replaced.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The language model of a checkpoint that has more: its config is a part of the whole, and `body` begins its tensors'
/// names.
fn nested(f: &Fields<'_>, body: &'static str, reader: Reader) -> Result<ModelConfig> {
    let text = f.object("text_config")?.ok_or_else(|| Error::Model("field `text_config` is missing".into()))?;
    let model = reader(&text)?;
    Ok(ModelConfig {
        architecture: f.str("model_type")?.into(),
        tied_embeddings: model.tied_embeddings || f.bool_or("tie_word_embeddings", false)?,
        names: Names { body, ..model.names },
        ..model
    })
}

/// A model whose tensors begin as they do in a checkpoint of it: who wrote it decides, as of Step-3.7, whose plain and
/// FP8 files have `model.` and whose NVFP4 files have `model.language_model.`.
pub fn named(model: ModelConfig, checkpoint: &Checkpoint) -> ModelConfig {
    const BODIES: [&str; 3] = ["model.", "model.language_model.", "language_model.model."];
    const HEADS: [&str; 2] = ["lm_head", "language_model.lm_head"];
    let Names { body, embedding, head, .. } = model.names;
    let find = |own: &'static str, others: &[&'static str], name: &dyn Fn(&str) -> String| {
        let mut all = std::iter::once(own).chain(others.iter().copied());
        all.find(|other| checkpoint.has(&name(other))).unwrap_or(own)
    };
    let body = find(body, &BODIES, &|body| format!("{body}{embedding}.weight"));
    let head = find(head, &HEADS, &|head| format!("{head}.weight"));
    ModelConfig { names: Names { body, head, ..model.names }, ..model }
}

/// A model of these layers; what families differ in besides is as in most of them.
fn model(f: &Fields<'_>, layers: Vec<LayerConfig>) -> Result<ModelConfig> {
    let model = ModelConfig {
        // A nested text config may leave it out.
        architecture: f.str_or("model_type", "")?.into(),
        vocab_size: f.dim("vocab_size")?,
        hidden_size: f.dim("hidden_size")?,
        // Kimi-Linear says the other.
        max_context: match f.has("max_position_embeddings") || !f.has("model_max_length") {
            true => f.dim("max_position_embeddings")?,
            false => f.dim("model_max_length")?,
        },
        norm: Norm::Rms,
        norm_eps: f.norm_eps()?,
        norm_offset: 0.0,
        tied_embeddings: f.bool_or("tie_word_embeddings", false)?,
        embedding_scale: 1.0,
        logit_scale: 1.0,
        logit_softcap: None,
        draft_layers: f.count_or("num_nextn_predict_layers", f.count_or("mtp_num_hidden_layers", 0)?)?,
        names: Names::COMMON,
        layers,
        stage: None,
    };
    model.moe().map_or(Ok(()), check_router)?;
    let caches = |attention: &Attention| attention.kv_dims().0 > 0 || attention.entries().is_some();
    if !model.layers.iter().any(|layer| caches(&layer.attention)) {
        return Err(Error::Model("no layer has full attention: is this the config of the whole checkpoint?".into()));
    }
    Ok(model)
}

/// As many layers as the config says.
fn layers(
    f: &Fields<'_>,
    attention: impl Fn(usize) -> Attention,
    ffn: impl Fn(usize) -> Result<Ffn>,
) -> Result<Vec<LayerConfig>> {
    let of = |layer| {
        let (attention, ffn) = (attention(layer), ffn(layer)?);
        Ok(LayerConfig { attention, ffn, residual: Residual::PreNorm, ngrams: None })
    };
    (0..f.num_layers()?).map(of).collect()
}

/// A router must be able to choose as many experts as it says.
fn check_router(moe: &Moe) -> Result<()> {
    let reachable = match &moe.router.groups {
        Some(g) => moe.num_experts / g.count * g.top_k,
        None => moe.num_experts,
    };
    if moe.router.top_k > reachable {
        return Err(Error::Model(format!("{} experts per token cannot be chosen from {reachable}", moe.router.top_k)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Rope, RopeScaling};

    #[test]
    fn an_unknown_architecture_names_the_nearest() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(nearest("qwen3_omni_moe"), ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_moe"]);
        assert_eq!(nearest("deepseek_v5")[..2], ["deepseek_v2", "deepseek_v3"]);
        assert_eq!(nearest("mamba9"), [""; 0]);
        let error = |kind: &str| from_json(&serde_json::json!({"model_type": kind})).unwrap_err().to_string();
        assert!(error("mamba9").contains("`mamba9` is not supported; supported are deepseek_v2, "));
        assert!(error("glm4").contains("`glm4` is not supported; the nearest ones that are: glm4_moe"));
        assert!(error("minimax_m1").contains("the nearest ones that are: minimax_m2"));
    }

    /// GLM-5.3-Flash as its vendor's file describes it, and as transformers writes it.
    #[test]
    fn both_configs_of_glm_5_3_say_the_same() {
        let common = serde_json::json!({
            "model_type": "glm5_next_text", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 0, "v_head_dim": 16, "vocab_size": 100, "mla_use_nope": true,
            "index_n_heads": 2, "index_head_dim": 16, "index_topk": 32, "index_kpool": 4, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "swiglu_limit": 10.0, "hc_mult": 4,
            "hc_sinkhorn_iters": 20, "max_position_embeddings": 4096, "mlp_layer_types": ["dense", "sparse"]
        });
        let with = |fields: serde_json::Value| {
            let mut config = common.clone();
            fields.as_object().unwrap().iter().for_each(|(name, value)| config[name] = value.clone());
            from_json(&config).unwrap()
        };
        let vendors = with(serde_json::json!({
            "layer_types": ["linear_attention", "deepseek_sparse_attention"],
            "linear_attn_config": {"num_heads": 2, "head_dim": 24, "short_conv_kernel_size": 3,
                "gate_lower_bound": -4.0, "kda_layers": [0], "full_attn_layers": [1]},
        }));
        let transformers = with(serde_json::json!({
            "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "linear_head_dim": 24,
            "linear_conv_kernel_dim": 3, "linear_lower_bound": -4.0,
        }));
        assert_eq!(vendors.layers, transformers.layers);
    }

    /// The same model as the hub's files and as transformers 5 describe it.
    #[test]
    fn both_styles_of_config_say_the_same() {
        let hub = serde_json::json!({
            "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
                "num_hidden_layers": 3,
            "num_attention_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8, "v_head_dim": 16,
            "vocab_size": 100, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
                "first_k_dense_replace": 1,
            "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "max_position_embeddings": 4096,
                "torch_dtype": "bfloat16",
            "rope_theta": 50000.0, "rope_scaling": { "type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0 },
        });
        let mut five = hub.clone();
        let fields = five.as_object_mut().expect("an object");
        let mut rope = fields.remove("rope_scaling").expect("just written");
        rope["rope_type"] = rope["type"].take();
        rope["rope_theta"] = fields.remove("rope_theta").expect("just written");
        fields.insert("rope_parameters".into(), rope);
        let experts = fields.remove("n_routed_experts").expect("just written");
        fields.insert("num_local_experts".into(), experts);
        let dtype = fields.remove("torch_dtype").expect("just written");
        fields.insert("dtype".into(), dtype);
        fields.insert("mlp_layer_types".into(), serde_json::json!(["dense", "sparse", "sparse"]));
        let (hub, five) = (parse(&hub.to_string()).unwrap(), parse(&five.to_string()).unwrap());
        assert!(matches!(hub.ropes()[..], [Rope { scaling: RopeScaling::Yarn(_), .. }]));
        assert_eq!(hub.moe_layers().count(), 2);
        assert_eq!(hub, five);
    }

    #[test]
    fn factors_of_frequencies_are_as_many_as_there_are() {
        let llama = |factors: Value| {
            let config = serde_json::json!({
                "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
                    "num_attention_heads": 8,
                "vocab_size": 100, "max_position_embeddings": 4096, "rope_scaling": { "type": "factors",
                    "factors": factors },
            });
            parse(&config.to_string())
        };
        let plain = llama(serde_json::json!([1, 1, 1, 1])).unwrap().ropes()[0].inv_freq();
        let stretched = llama(serde_json::json!([1, 2.5, 8, 8])).unwrap().ropes()[0].inv_freq();
        assert_eq!(stretched, [plain[0], plain[1] / 2.5, plain[2] / 8.0, plain[3] / 8.0]);
        for wrong in
            [serde_json::json!([1, 1, 1]), serde_json::json!([1, 1, 0, 1]), serde_json::json!("8"), Value::Null]
        {
            let error = llama(wrong).unwrap_err().to_string();
            assert!(error.contains("factors") && error.contains("4 positive numbers"), "{error}");
        }
    }
}
