//! The `config.json` that a GGUF file's metadata amount to. Whether the model can be run is for `models` to say.

use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::codec::decode_f32;
use serde_json::{Map, Value, json};

use super::Metadata;
use crate::{Error, Result};

/// What GGUF files call architectures, and the `model_type`s of the models they hold.
pub const ARCHITECTURES: &[(&str, &[&str])] = &[
    ("deepseek2", &["deepseek_v2", "deepseek_v3", "kimi_k2"]),
    ("qwen3moe", &["qwen3_moe"]),
    ("qwen2moe", &["qwen2_moe"]),
    ("glm4moe", &["glm4_moe"]),
    ("minimax-m2", &["minimax_m2"]),
    ("gpt-oss", &["gpt_oss"]),
    ("llama", &["mixtral", "llama"]),
    ("olmoe", &["olmoe"]),
    ("qwen3next", &["qwen3_next"]),
    ("qwen35moe", &["qwen3_5_moe_text"]),
    ("qwen3", &["qwen3"]),
];

/// Of a head, at most.
const MAX_FREQUENCIES: usize = 1 << 16;
/// Of a model, at most, as `models` takes it.
const MAX_LAYERS: u64 = 1 << 12;

/// Fields that all architectures have: `config.json`'s name, the key after the architecture's name.
const COMMON: &[(&str, &str)] = &[
    ("hidden_size", "embedding_length"),
    ("max_position_embeddings", "context_length"),
    ("intermediate_size", "feed_forward_length"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("routed_scaling_factor", "expert_weights_scale"),
    ("n_group", "expert_group_count"),
    ("topk_group", "expert_group_used_count"),
    ("sliding_window", "attention.sliding_window"),
];

/// The config of the model whose tensors are in `checkpoint`. Errors: `Error::Model` naming the architecture or the
/// key.
pub(super) fn config(metadata: &Metadata, checkpoint: &Checkpoint) -> Result<Value> {
    let mut config = Map::new();
    for (name, key) in COMMON {
        if let Some(value) = metadata.own(key) {
            config.insert((*name).into(), uniform(key, value)?);
        }
    }
    let has = |name: &str| checkpoint.get(name).is_some();
    let of_layer = |part: &str| has(&format!("model.layers.0.{part}"));
    let Some(embedding) = checkpoint.get("model.embed_tokens.weight") else {
        return Err(Error::Model("it has no token_embd.weight: it is a part of a model, or an adapter".into()));
    };
    let number = |key: &str| metadata.own(key).and_then(Value::as_u64);
    // Layers that only draft further tokens come last, and are not run.
    let layers = number("block_count").unwrap_or(0).saturating_sub(number("nextn_predict_layers").unwrap_or(0));
    config.insert("num_hidden_layers".into(), layers.into());
    config.insert("vocab_size".into(), embedding.shape[0].into());
    config.insert("tie_word_embeddings".into(), (!has("lm_head.weight")).into());
    for (name, key) in
        [("bos_token_id", "tokenizer.ggml.bos_token_id"), ("eos_token_id", "tokenizer.ggml.eos_token_id")]
    {
        if let Some(id) = metadata.get(key) {
            config.insert(name.into(), id.clone());
        }
    }
    if let Some(scaling) = rope_scaling(metadata, checkpoint)? {
        config.insert("rope_scaling".into(), scaling);
    }
    let experts = number("expert_count").unwrap_or(0);
    let normalized = |default: bool| metadata.own("expert_weights_norm").and_then(Value::as_bool).unwrap_or(default);
    let key_length = number("attention.key_length");
    let each_layer = 0..layers.min(MAX_LAYERS);
    let dense_layers = || -> Vec<u64> {
        each_layer.clone().filter(|layer| !has(&format!("model.layers.{layer}.mlp.gate.weight"))).collect()
    };
    let own = match metadata.architecture.as_str() {
        "qwen3moe" => {
            json!({"model_type": "qwen3_moe", "head_dim": key_length, "num_experts": experts,
                "norm_topk_prob": normalized(true),
            "mlp_only_layers": dense_layers()})
        }
        "qwen2moe" => json!({"model_type": "qwen2_moe", "num_experts": experts, "norm_topk_prob": normalized(false),
            "shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
                "mlp_only_layers": dense_layers()}),
        "qwen3" => json!({"model_type": "qwen3", "head_dim": key_length}),
        "olmoe" => json!({"model_type": "olmoe", "num_experts": experts, "norm_topk_prob": normalized(false)}),
        "llama" if experts > 0 => {
            json!({"model_type": "mixtral", "head_dim": key_length, "num_local_experts": experts})
        }
        "llama" => json!({"model_type": "llama", "head_dim": key_length}),
        "minimax-m2" => json!({"model_type": "minimax_m2", "head_dim": key_length, "num_local_experts": experts,
            "intermediate_size": number("expert_feed_forward_length"), "rotary_dim": number("rope.dimension_count"),
                "use_qk_norm": true}),
        "gpt-oss" => {
            json!({"model_type": "gpt_oss", "head_dim": key_length, "num_local_experts": experts,
                "attention_bias": true,
            "intermediate_size": number("expert_feed_forward_length"),
            "layer_types": each_layer.map(|i| if i % 2 == 0 { "sliding_attention" } else {
                "full_attention" }).collect::<Vec<_>>()})
        }
        "glm4moe" => json!({"model_type": "glm4_moe", "head_dim": key_length, "n_routed_experts": experts,
            "n_shared_experts": number("expert_shared_count"),
                "first_k_dense_replace": number("leading_dense_block_count"),
            "norm_topk_prob": normalized(true), "use_qk_norm": of_layer("self_attn.q_norm.weight"),
                "attention_bias": of_layer("self_attn.q_proj.bias"),
            "rotary_dim": number("rope.dimension_count")}),
        "qwen3next" | "qwen35moe" => {
            let (values, heads) = (number("ssm.inner_size").unwrap_or(0), number("ssm.time_step_rank").unwrap_or(0));
            let is_linear = |layer: u64| has(&format!("model.layers.{layer}.linear_attn.A"));
            let kind = |layer| if is_linear(layer) { "linear_attention" } else { "full_attention" };
            let tiled = metadata.architecture == "qwen35moe";
            // The converter adds one to norms.
            json!({"model_type": if tiled { "qwen3_5_moe_text" } else { "qwen3_next" }, "norm_offset": 0,
                "linear_value_heads_tiled": tiled,
                "head_dim": key_length, "num_experts": experts, "norm_topk_prob": normalized(true),
                "shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
                    "mlp_only_layers": dense_layers(),
                "layer_types": each_layer.clone().map(kind).collect::<Vec<_>>(),
                "linear_conv_kernel_dim": number("ssm.conv_kernel"), "linear_key_head_dim": number("ssm.state_size"),
                "linear_num_key_heads": number("ssm.group_count"), "linear_num_value_heads": heads,
                "linear_value_head_dim": values.checked_div(heads),
                "rotary_dim": number("rope.dimension_count")})
        }
        "deepseek2" => deepseek(metadata, experts, normalized(false))?,
        other => {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
            return Err(Error::Model(format!(
                "the architecture `{other}` of GGUF files is not supported; {} are: use the model's safetensors \
                 checkpoint",
                known.join(", ")
            )));
        }
    };
    if let (Some(scaling), "gpt-oss") = (config.get_mut("rope_scaling"), metadata.architecture.as_str()) {
        scaling["truncate"] = false.into();
    }
    let Value::Object(own) = own else { unreachable!("it was written as an object") };
    config.extend(own.into_iter().filter(|(_, value)| !value.is_null()));
    Ok(Value::Object(config))
}

/// DeepSeek-V2, V3 and Kimi K2, which GGUF gives one name; how scores are made tells them apart.
fn deepseek(metadata: &Metadata, experts: u64, normalized: bool) -> Result<Value> {
    let number = |key: &str| metadata.own(key).and_then(Value::as_u64);
    let need = |key: &str| {
        number(key).ok_or_else(|| Error::Model(format!("its metadata lack deepseek2.{key}: convert the model again")))
    };
    let rope = need("rope.dimension_count")?;
    // Where latent attention was converted as such, the plain lengths are those of the latent.
    let head = number("attention.key_length_mla").or(number("attention.key_length")).unwrap_or(0);
    let value = number("attention.value_length_mla").or(number("attention.value_length"));
    let Some(nope) = head.checked_sub(rope).filter(|nope| *nope > 0) else {
        return Err(Error::Model(format!(
            "its heads of {head} numbers have no room for {rope} rotated ones: convert the model again"
        )));
    };
    let grouped = number("expert_group_count").unwrap_or(1) > 1;
    let (model_type, method, scoring) = match number("expert_gating_func").unwrap_or(1) {
        0 | 1 => ("deepseek_v2", if grouped { "group_limited_greedy" } else { "greedy" }, "softmax"),
        2 => ("deepseek_v3", "noaux_tc", "sigmoid"),
        other => {
            return Err(Error::Model(format!(
                "deepseek2.expert_gating_func is {other}, which is not supported; 1 and 2 are"
            )));
        }
    };
    Ok(json!({"model_type": model_type, "topk_method": method, "scoring_func": scoring, "n_routed_experts": experts,
            "norm_topk_prob": normalized,
        "n_shared_experts": number("expert_shared_count"), "first_k_dense_replace": number("leading_dense_block_count"),
        "q_lora_rank": number("attention.q_lora_rank"), "kv_lora_rank": need("attention.kv_lora_rank")?,
        "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value}))
}

/// A number that a converter may have written for each layer. Errors: they differ.
fn uniform(key: &str, value: &Value) -> Result<Value> {
    let Some(list) = value.as_array() else { return Ok(value.clone()) };
    match list.first() {
        Some(first) if list.iter().all(|value| value == first) => Ok(first.clone()),
        _ => Err(Error::Model(format!("{key} differs from layer to layer, which is not supported: use another model"))),
    }
}

fn rope_scaling(metadata: &Metadata, checkpoint: &Checkpoint) -> Result<Option<Value>> {
    // Llama 3's: a tensor, where metadata have no word for it.
    let own = |key: &str| metadata.own(&format!("rope.scaling.{key}")).cloned().unwrap_or_default();
    let kind = own("type");
    let kind = kind.as_str().unwrap_or("none");
    if let Some(view) = checkpoint.get("rope_freqs.weight") {
        if kind != "none" {
            return Err(Error::Model(format!(
                "it has rope_freqs.weight and `{kind}` as rope.scaling.type, of which one can be: convert the model \
                 again"
            )));
        }
        let count = view.shape.iter().product();
        if count > MAX_FREQUENCIES {
            return Err(Error::Model(format!(
                "its rope_freqs.weight has {count} numbers, more than a head: convert the model again"
            )));
        }
        let mut factors = vec![0.0; count];
        decode_f32(&view, &mut factors)?;
        return Ok(Some(json!({"type": "factors", "factors": factors})));
    }
    Ok(match kind {
        "none" => None,
        "yarn" => {
            let mut scaling = Map::new();
            scaling.insert("type".into(), "yarn".into());
            scaling.insert("factor".into(), own("factor"));
            for (name, key) in [
                ("original_max_position_embeddings", "original_context_length"),
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
                ("attention_factor", "attn_factor"),
            ] {
                if !own(key).is_null() {
                    scaling.insert(name.into(), own(key));
                }
            }
            // What the converter keeps of DeepSeek's two factors, which are equal in every published model.
            if let Some(tenth) = own("yarn_log_multiplier").as_f64() {
                // Back from f32 times a tenth to the few digits that it was.
                let factor = (tenth * 10.0 * 1e6).round() / 1e6;
                scaling.insert("mscale".into(), factor.into());
                scaling.insert("mscale_all_dim".into(), factor.into());
            }
            Some(Value::Object(scaling))
        }
        other => Some(json!({"type": other, "factor": own("factor")})),
    })
}
