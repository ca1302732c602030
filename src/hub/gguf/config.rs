//! The `config.json` that a GGUF file's metadata amount to. What only some architectures have is in the files of
//! their families, which also say whether the model can be run.

use serde_json::{Map, Value};

use crate::model::families::GGUF;
use crate::model::families::gguf::Header;
use crate::{Error, Result};

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
    ("num_nextn_predict_layers", "nextn_predict_layers"),
];

/// The config of the model whose header this is. Errors: `Error::Model` naming the architecture or the key.
pub(super) fn config(header: &Header<'_>) -> Result<Value> {
    let Header { metadata, checkpoint } = header;
    let Some(gguf) = GGUF.iter().find(|gguf| gguf.names.architecture == metadata.architecture) else {
        let known: Vec<_> = GGUF.iter().map(|gguf| gguf.names.architecture).collect();
        return Err(Error::Model(format!(
            "the architecture `{}` of GGUF files is not supported; {} are: use the model's safetensors checkpoint",
            metadata.architecture,
            known.join(", ")
        )));
    };
    let Value::Object(mut own) = (gguf.config)(header)? else { unreachable!("a config is an object") };
    own.retain(|_, value| !value.is_null());
    let mut config = Map::new();
    for (name, key) in COMMON {
        if let Some(value) = metadata.own(key).filter(|_| !own.contains_key(*name)) {
            config.insert((*name).into(), uniform(key, value)?);
        }
    }
    let Some(embedding) = checkpoint.get("model.embed_tokens.weight") else {
        return Err(Error::Model("it has no token_embd.weight: it is a part of a model, or an adapter".into()));
    };
    config.insert("num_hidden_layers".into(), header.num_layers().into());
    config.insert("vocab_size".into(), embedding.shape[0].into());
    config.insert("tie_word_embeddings".into(), (!header.has("lm_head.weight")).into());
    for (name, key) in
        [("bos_token_id", "tokenizer.ggml.bos_token_id"), ("eos_token_id", "tokenizer.ggml.eos_token_id")]
    {
        if let Some(id) = metadata.get(key) {
            config.insert(name.into(), id.clone());
        }
    }
    if let Some(scaling) = header.rope_scaling()? {
        config.insert("rope_scaling".into(), scaling);
    }
    for (name, value) in own {
        match (config.get_mut(&name), value) {
            // A family may add to what all have.
            (Some(Value::Object(common)), Value::Object(more)) => common.extend(more),
            (_, value) => drop(config.insert(name, value)),
        }
    }
    Ok(Value::Object(config))
}

/// A number that a converter may have written for each layer. Errors: they differ.
fn uniform(key: &str, value: &Value) -> Result<Value> {
    let Some(list) = value.as_array() else { return Ok(value.clone()) };
    match list.first() {
        Some(first) if list.iter().all(|value| value == first) => Ok(first.clone()),
        _ => Err(Error::Model(format!("{key} differs from layer to layer, which is not supported: use another model"))),
    }
}
