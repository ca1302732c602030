//! Qwen4-Exp, the text part of Qwen3.8-Flash-Next: Qwen3.5's layers between mixers of several residual streams, without
//! norms, and rows of a table of n-grams before one of them.
//!
//! Source: HF modeling_qwen4_exp.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::{Value, json};

use super::fields::{Fields, missing, wrong};
use super::gguf::{Gguf, Header};
use super::{qwen_moe, qwen3_next};
use crate::model::{
    Attention, ChosenBy, Hash, Indexer, LayerConfig, Mixer, ModelConfig, Ngrams, Residual, Score, Selection,
};
use crate::{Error, Result};

/// Streams at most.
const MAX_STREAMS: usize = 16;
/// Tokens of an n-gram, its heads for each length, and inputs of its convolution, at most: what a token and a sequence
/// take grows with them.
const MAX_NGRAM: usize = 16;

/// `qwen4_exp_text`
pub(super) fn text(f: &Fields<'_>) -> Result<ModelConfig> {
    let moe = qwen3_next::moe(f, f.bool_or("norm_topk_prob", true)?)?;
    let model = qwen3_next::config(f, qwen_moe::ffn(f, &moe)?)?;
    let mixer = Mixer { count: up_to(f, "hc_count", 2, MAX_STREAMS)?, rank: f.heads("hc_lowrank")? };
    let numbers = f.layers("ple_layer_ids")?; // the first is 1
    if let Some(layer) = numbers.iter().find(|layer| !(1..=model.layers.len()).contains(layer)) {
        return Err(Error::Model(format!(
            "field `ple_layer_ids` names layer {layer}, and there are 1 to {}",
            model.layers.len()
        )));
    }
    let ngrams = if numbers.is_empty() { None } else { Some(ngrams(f)?) };
    let indexer = indexer(f)?;
    let layers = model.layers.into_iter().enumerate().map(|(i, mut layer)| {
        if let Attention::Gqa(attention) = &mut layer.attention {
            attention.selection = Some(Selection { by: ChosenBy::Own, indexer: indexer.clone() });
        }
        let ngrams = ngrams.clone().filter(|_| numbers.contains(&(i + 1)));
        LayerConfig { residual: Residual::Streams(mixer), ngrams, ..layer }
    });
    Ok(ModelConfig { layers: layers.collect(), ..model })
}

fn indexer(f: &Fields<'_>) -> Result<Indexer> {
    f.expect("indexer_kv_heads", 1.into())?;
    let (budget, unit, head_dim) =
        (f.dim("indexer_budget")?, f.dim("indexer_compress_ratio")?, f.heads("indexer_head_dim")?);
    // Units are whole in the blocks of the cache.
    if 64 % unit != 0 || budget % unit != 0 {
        return Err(wrong("indexer_compress_ratio", &format!("a divisor of 64 and of `indexer_budget` {budget}")));
    }
    if head_dim < f.rotary_dim(0.25)? {
        return Err(wrong("indexer_head_dim", "at least the rotated part of a head"));
    }
    Ok(Indexer {
        num_heads: f.heads("indexer_n_heads")?,
        head_dim,
        interleaved: false,
        unit,
        top_k: budget / unit,
        score: Score::Pooled,
        candidates: None,
    })
}

/// `qwen4_exp`: the language model is nested, and so are its tensor names.
pub(super) fn nested(f: &Fields<'_>) -> Result<ModelConfig> {
    super::nested(f, "model.language_model.", text)
}

fn up_to(f: &Fields<'_>, name: &str, least: usize, most: usize) -> Result<usize> {
    match f.dim(name)? {
        n if (least..=most).contains(&n) => Ok(n),
        _ => Err(wrong(name, &format!("an integer from {least} to {most}"))),
    }
}

fn ngrams(f: &Fields<'_>) -> Result<Ngrams> {
    let (max_tokens, heads) = (up_to(f, "ngram_size", 2, MAX_NGRAM)?, up_to(f, "heads_per_ngram", 1, MAX_NGRAM)?);
    let rows = (max_tokens - 1) * heads;
    let width = f.dim("ple_embed_dim")?;
    if width % rows != 0 {
        return Err(Error::Model(format!("`ple_embed_dim` {width} cannot be cut into {rows} rows of n-grams")));
    }
    let end_token = match f.layers("eos_token_id") {
        Ok(list) => list.first().copied().ok_or_else(|| missing("eos_token_id"))?,
        Err(_) => f.count_or("eos_token_id", 0)?,
    };
    let end_token = end_token.try_into().map_err(|_| wrong("eos_token_id", "a token"))?;
    let base = f.table_rows("ngram_vocab_size_base")?;
    Ok(Ngrams {
        max_tokens,
        heads,
        row_dim: width / rows,
        conv_width: Some(up_to(f, "ple_conv_kernel_size", 2, MAX_NGRAM)?),
        end_token,
        filler: end_token,
        kinds: None,
        alike: None,
        table_rows: base.saturating_mul(rows),
        hash: hash(f, max_tokens, rows)?,
    })
}

/// As GGUF files have it.
fn hash(f: &Fields<'_>, max_tokens: usize, rows: usize) -> Result<Option<Hash>> {
    let list = |name: &str, len: usize| match f.integers(name)? {
        Some(list) if list.len() == len => Ok(Some(list)),
        Some(_) => Err(wrong(name, &format!("a list of {len} integers"))),
        None => Ok(None),
    };
    let multipliers = list("ngram_multipliers", max_tokens)?;
    let (sizes, offsets) = (list("ngram_head_sizes", rows)?, list("ngram_head_offsets", rows)?);
    Ok(multipliers.zip(sizes).zip(offsets).map(|((multipliers, sizes), offsets)| Hash { multipliers, sizes, offsets }))
}

/// `qwen4_exp_text` in GGUF files, whose value heads are tiled.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames {
        architecture: "qwen4exp",
        tensors: &[
            ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
            ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
            ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
            ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
            ("hc_attn_norm.weight", "attn_hyper_connection.hc_norm.weight"),
            ("hc_attn_down.weight", "attn_hyper_connection.input_mix_weight_down.weight"),
            ("hc_attn_up.weight", "attn_hyper_connection.input_mix_weight_up.weight"),
            ("hc_attn_inject.weight", "attn_hyper_connection.block_inject_weight.weight"),
            ("hc_ffn_norm.weight", "mlp_hyper_connection.hc_norm.weight"),
            ("hc_ffn_down.weight", "mlp_hyper_connection.input_mix_weight_down.weight"),
            ("hc_ffn_up.weight", "mlp_hyper_connection.input_mix_weight_up.weight"),
            ("hc_ffn_inject.weight", "mlp_hyper_connection.block_inject_weight.weight"),
            ("ple_key.weight", "ple.key_proj.weight"),
            ("ple_value.weight", "ple.value_proj.weight"),
            ("ple_norm_key.weight", "ple.norm_key.weight"),
            ("ple_norm_query.weight", "ple.norm_query.weight"),
            ("ple_norm_conv.weight", "ple.norm_conv.weight"),
            ("ple_conv1d.weight", "ple.conv1d.weight"),
            ("indexer.q_proj.weight", "self_attn.indexer.q_proj.weight"),
            ("indexer.k_proj.weight", "self_attn.indexer.k_proj.weight"),
            ("indexer.q_norm.weight", "self_attn.indexer.q_layernorm.weight"),
            ("indexer.k_norm.weight", "self_attn.indexer.k_layernorm.weight"),
        ],
        permuted: &[],
    },
    model_types: &["qwen4_exp_text"],
    config: gguf,
};

fn gguf(header: &Header<'_>) -> Result<Value> {
    let mut config = qwen3_next::gguf(header, "qwen4_exp_text", true);
    let own = |key: &str| header.metadata.own(key).cloned();
    // The first layer is 0 there.
    let layers = own("ple.layers").and_then(|list| {
        list.as_array().map(|list| list.iter().filter_map(Value::as_u64).map(|layer| layer + 1).collect::<Vec<_>>())
    });
    let (tokens, heads) = (header.number("ple.ngram_size").unwrap_or(2), header.number("ple.heads_per_ngram"));
    let rows = tokens.saturating_sub(1).saturating_mul(heads.unwrap_or(0));
    let width = header.number("embedding_length_per_layer_input").map(|dim| dim.saturating_mul(rows));
    let sizes = own("ple.head_vocab_sizes");
    // Of each layer; 0: it has no indexer.
    let ratio = own("attention.compress_ratios")
        .and_then(|list| list.as_array()?.iter().find_map(|n| n.as_u64().filter(|n| *n > 0)));
    let more = json!({
        "indexer_n_heads": header.number("attention.indexer.head_count"),
        "indexer_head_dim": header.number("attention.indexer.key_length"),
        "indexer_budget": header.number("attention.indexer.top_k"),
        "indexer_compress_ratio": ratio,
        "output_gate_type": "sigmoid",
        "hc_count": header.number("hyper_connection.count"),
        "hc_lowrank": header.number("hyper_connection.low_rank"),
        "ple_layer_ids": layers,
        "ple_embed_dim": width,
        "ple_conv_kernel_size": header.number("ple.conv_kernel"),
        "ngram_size": header.number("ple.ngram_size"),
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": sizes.as_ref().and_then(|sizes| sizes.get(0)?.as_u64()),
        "eos_token_id": header.number("ple.eos_token_id"),
        "ngram_multipliers": own("ple.layer_multipliers"),
        "ngram_head_sizes": sizes,
        "ngram_head_offsets": own("ple.head_offsets"),
    });
    let (Value::Object(config), Value::Object(more)) = (&mut config, more) else { unreachable!("both are objects") };
    config.extend(more);
    Ok(Value::Object(std::mem::take(config)))
}
