//! DeepSeek-V2, V3 and V3.2, Kimi K2, the text part of Kimi K2.5, GLM-4.7-Flash, GLM-5 and Mistral Small 4.
//!
//! Sources: the DeepSeek-V2 and V3 reports; HF modeling_deepseek_v2, modeling_deepseek_v3, modeling_glm4_moe_lite,
//! modeling_mistral4, modeling_deepseek_v32 and modeling_glm_moe_dsa.

use moebius_cache::checkpoint::gguf::GgufNames;
use serde_json::{Value, json};

use super::fields::Fields;
use super::gguf::{Gguf, Header, Tensors};
use crate::model::{
    Attention, ChosenBy, Ffn, GroupScore, Groups, Indexer, Mla, Mlp, ModelConfig, Moe, Names, Router, Score, Scoring,
    Selection, SharedExpert,
};
use crate::{Error, Result};

/// `deepseek_v2`: softmax scores, groups scored by their best expert, weights never renormalized (HF ignores
/// `norm_topk_prob` here, and every published V2 has it false).
pub(super) fn v2(f: &Fields<'_>) -> Result<ModelConfig> {
    let group_limited = match f.str_or("topk_method", "greedy")? {
        "greedy" => false,
        "group_limited_greedy" => true,
        other => {
            return Err(Error::Model(format!(
                "topk_method `{other}` is not supported; greedy and group_limited_greedy are"
            )));
        }
    };
    let router = Router {
        groups: if group_limited { groups(f, GroupScore::Max)? } else { None },
        scaling: f.f64_or("routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::Softmax)
    };
    config(f, router)
}

/// `deepseek_v3`, `kimi_k2` and `glm4_moe_lite`: sigmoid scores, a correction bias for choosing, groups scored by their
/// best two.
pub(super) fn v3(f: &Fields<'_>) -> Result<ModelConfig> {
    for (field, expected) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        let value = f.str_or(field, expected)?;
        if value != expected {
            return Err(Error::Model(format!(
                "{field} `{value}` is not supported for this architecture; {expected} is"
            )));
        }
    }
    config(f, v3_router(f)?)
}

/// Sigmoid scores, a correction bias for choosing, groups scored by their best two.
pub(super) fn v3_router(f: &Fields<'_>) -> Result<Router> {
    Ok(Router {
        correction_bias: true,
        groups: groups(f, GroupScore::TopTwoSum)?,
        normalize: f.bool_or("norm_topk_prob", true)?,
        scaling: f.f64_or("routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::Sigmoid)
    })
}

/// `mistral4`: softmax scores, and queries that grow with their position.
pub(super) fn mistral4(f: &Fields<'_>) -> Result<ModelConfig> {
    let router = Router {
        groups: groups(f, GroupScore::TopTwoSum)?,
        normalize: f.bool_or("norm_topk_prob", true)?,
        scaling: f.f64_or("routed_scaling_factor", 1.0)? as f32,
        ..Router::new(f.top_k()?, Scoring::Softmax)
    };
    config(f, router)
}

/// `kimi_k25`.
pub(super) fn kimi_k25(f: &Fields<'_>) -> Result<ModelConfig> {
    language_model(f, v3)
}

/// `mistral3`, which may hold another model than `mistral4`.
pub(super) fn mistral3(f: &Fields<'_>) -> Result<ModelConfig> {
    let text = f.object("text_config")?.map_or(Ok("mistral"), |text| text.str_or("model_type", "mistral"))?;
    if text != "mistral4" {
        return Err(Error::Model(format!("text_config is `{text}`, which is not supported in mistral3; mistral4 is")));
    }
    language_model(f, mistral4)
}

/// The language model is nested, and so are its tensor names.
fn language_model(f: &Fields<'_>, reader: super::Reader) -> Result<ModelConfig> {
    let model = super::nested(f, "language_model.model.", reader)?;
    Ok(ModelConfig { names: Names { head: "language_model.lm_head", ..model.names }, ..model })
}

/// `deepseek_v32`: V3, each layer with an indexer, which rotates halves.
pub(super) fn v32(f: &Fields<'_>) -> Result<ModelConfig> {
    selecting(f, false, |_| ChosenBy::Own)
}

/// `glm_moe_dsa`: the same, but the indexer rotates neighbours, and some layers take the choice of an earlier one.
pub(super) fn glm_dsa(f: &Fields<'_>) -> Result<ModelConfig> {
    let listed = match f.layer_kinds("indexer_types", ["full", "shared"])? {
        Some(kinds) => Some(kinds),
        None => f.layer_letters("index_topk_pattern", ['F', 'S'])?,
    };
    let (every, offset) = (f.count_or("index_topk_freq", 1)?.max(1), f.count_or("index_skip_topk_offset", 2)?);
    let is_own = |layer: usize| match &listed {
        Some(kinds) => kinds[layer],
        None => (layer + 1).saturating_sub(offset).is_multiple_of(every),
    };
    if !is_own(0) {
        return Err(Error::Model("`indexer_types` has no indexer in the first layer: download it again".into()));
    }
    selecting(f, true, |layer| if is_own(layer) { ChosenBy::Own } else { ChosenBy::Earlier })
}

/// V3 whose queries attend to what an indexer chooses.
fn selecting(f: &Fields<'_>, interleaved: bool, by: impl Fn(usize) -> ChosenBy) -> Result<ModelConfig> {
    let mut model = v3(f)?;
    let (head_dim, rotated) = (f.heads("index_head_dim")?, f.dim("qk_rope_head_dim")?);
    if head_dim < rotated {
        return Err(Error::Model(format!("`index_head_dim` {head_dim} is less than the {rotated} rotated numbers")));
    }
    let indexer = Indexer {
        num_heads: f.heads("index_n_heads")?,
        head_dim,
        interleaved: f.bool_or("indexer_rope_interleave", interleaved)?,
        unit: 1,
        top_k: f.dim("index_topk")?,
        score: Score::Weighted { latent: f.dim("q_lora_rank")? },
        candidates: None,
    };
    for (i, layer) in model.layers.iter_mut().enumerate() {
        if let Attention::Mla(attention) = &mut layer.attention {
            attention.selection = Some(Selection { by: by(i), indexer: indexer.clone() });
        }
    }
    Ok(model)
}

/// A token's open groups are bits of a word.
const MAX_GROUPS: usize = 64;

fn groups(f: &Fields<'_>, score: GroupScore) -> Result<Option<Groups>> {
    let (count, top_k, experts) = (f.dim_or("n_group", 1)?, f.dim_or("topk_group", 1)?, num_experts(f)?);
    if count == 1 {
        return Ok(None);
    }
    if count > MAX_GROUPS
        || experts % count != 0
        || top_k > count
        || (score == GroupScore::TopTwoSum && experts / count < 2)
    {
        return Err(Error::Model(format!(
            "{experts} experts cannot be chosen from the best {top_k} of {count} groups"
        )));
    }
    Ok(Some(Groups { count, top_k, score }))
}

pub(super) fn num_experts(f: &Fields<'_>) -> Result<usize> {
    f.num_experts(&["n_routed_experts", "num_local_experts", "num_experts"])
}

/// Experts, and as many shared ones, as wide together, as the config says, or else `shared`.
pub(super) fn moe(f: &Fields<'_>, router: Router, shared: usize) -> Result<Moe> {
    let intermediate_size = f.dim("moe_intermediate_size")?;
    let shared = f.count_or("n_shared_experts", shared)?;
    let shared = (shared > 0).then(|| SharedExpert::plain(Mlp::silu(shared * intermediate_size)));
    Ok(Moe { shared, ..Moe::new(num_experts(f)?, intermediate_size, router) })
}

/// HF gives these norms its default, whatever `rms_norm_eps` says.
const LATENT_NORM_EPS: f32 = 1e-6;

pub(super) fn config(f: &Fields<'_>, router: Router) -> Result<ModelConfig> {
    f.expect_silu()?;
    let rope_dim = f.dim("qk_rope_head_dim")?;
    let (rope, mscale) = f.rope_and_mscale(rope_dim, f.bool_or("rope_interleave", true)?, 10_000.0)?;
    let qk_nope_head_dim = f.dim("qk_nope_head_dim")?;
    let attention = Attention::Mla(Mla {
        num_heads: f.dim("num_attention_heads")?,
        q_lora_rank: f.optional_dim("q_lora_rank")?,
        kv_lora_rank: f.dim("kv_lora_rank")?,
        qk_nope_head_dim,
        qk_rope_head_dim: rope_dim,
        rope: Some(rope),
        v_head_dim: f.dim("v_head_dim")?,
        bias: f.bool_or("attention_bias", false)?,
        head_gate: false,
        scale: (mscale * mscale / ((qk_nope_head_dim + rope_dim) as f64).sqrt()) as f32,
        position_scale: f.position_scale()?,
        norm_eps: LATENT_NORM_EPS,
        selection: None,
    });
    let moe = moe(f, router, 0)?;
    super::model(f, super::layers(f, |_| attention.clone(), ffn(f, moe, 0)?)?)
}

/// Experts in the layers that `mlp_layer_types` names, or behind the first dense ones; `dense`: as many where the
/// config does not say.
pub(super) fn ffn<'a>(f: &'a Fields<'_>, moe: Moe, dense: usize) -> Result<impl Fn(usize) -> Result<Ffn> + 'a> {
    let (first_dense, frequency) = (f.count_or("first_k_dense_replace", dense)?, f.dim_or("moe_layer_freq", 1)?);
    let kinds = f.layer_kinds("mlp_layer_types", ["sparse", "dense"])?;
    let is_moe = move |layer: usize| match &kinds {
        Some(kinds) => kinds[layer],
        None => layer >= first_dense && layer % frequency == 0,
    };
    Ok(move |layer| if is_moe(layer) { Ok(Ffn::Moe(moe.clone())) } else { f.dense() })
}

/// All of them in GGUF files, which mostly give them one name; how scores are made tells them apart.
pub(super) const GGUF: Gguf = Gguf {
    names: GgufNames { architecture: "deepseek2", tensors: &[], permuted: &[] },
    model_types: &["deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"],
    config: gguf,
};

/// `mistral4` in GGUF files that were converted from Hugging Face's layout.
pub(super) const GGUF_MISTRAL4: Gguf = Gguf {
    names: GgufNames { architecture: "mistral4", tensors: &[], permuted: &[] },
    model_types: &["mistral4"],
    config: gguf,
};

/// DeepSeek-V3.2 in GGUF files.
pub(super) const GGUF_V32: Gguf = Gguf {
    names: GgufNames { architecture: "deepseek32", tensors: &INDEXER, permuted: &[] },
    model_types: &["deepseek_v32"],
    config: |header| gguf_selecting(header, "deepseek_v32"),
};

/// GLM-5 in GGUF files.
pub(super) const GGUF_GLM: Gguf = Gguf {
    names: GgufNames { architecture: "glm-dsa", tensors: &INDEXER, permuted: &[] },
    model_types: &["glm_moe_dsa"],
    config: |header| gguf_selecting(header, "glm_moe_dsa"),
};

/// What GGUF files call tensors of an indexer.
pub(super) const INDEXER: Tensors<5> = [
    ("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"),
    ("indexer.attn_k.weight", "self_attn.indexer.wk.weight"),
    ("indexer.proj.weight", "self_attn.indexer.weights_proj.weight"),
    ("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"),
    ("indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"),
];

/// Layers without tensors of an indexer share the choice of an earlier one.
fn gguf_selecting(header: &Header<'_>, model_type: &str) -> Result<Value> {
    let mut config = gguf(header)?;
    let kinds = header.each_layer(|layer| {
        let own = header.has(&format!("model.layers.{layer}.self_attn.indexer.wk.weight"));
        if own { "full" } else { "shared" }
    });
    config["model_type"] = model_type.into();
    config["index_n_heads"] = header.need("attention.indexer.head_count")?.into();
    config["index_head_dim"] = header.need("attention.indexer.key_length")?.into();
    config["index_topk"] = header.need("attention.indexer.top_k")?.into();
    config["indexer_types"] = kinds.into();
    Ok(config)
}

fn gguf(header: &Header<'_>) -> Result<Value> {
    let rope = header.need("rope.dimension_count")?;
    // Where latent attention was converted as such, the plain lengths are those of the latent.
    let head = header.number("attention.key_length_mla").or(header.head_dim()).unwrap_or(0);
    let value = header.number("attention.value_length_mla").or(header.number("attention.value_length"));
    let Some(nope) = head.checked_sub(rope).filter(|nope| *nope > 0) else {
        return Err(Error::Model(format!(
            "its heads of {head} elements have no room for {rope} rotated ones: convert the model again"
        )));
    };
    let grouped = header.number("expert_group_count").unwrap_or(1) > 1;
    // Early files of GLM-4.7-Flash do not say; only sigmoid scores have a bias.
    let has_bias = |layer| header.has(&format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"));
    let silent = if header.each_layer(has_bias).contains(&true) { 2 } else { 1 };
    let (model_type, method, scoring) = match header.number("expert_gating_func").filter(|f| *f > 0).unwrap_or(silent) {
        1 if !grouped && header.normalized(false) => ("mistral4", "greedy", "softmax"),
        1 => ("deepseek_v2", if grouped { "group_limited_greedy" } else { "greedy" }, "softmax"),
        2 => ("deepseek_v3", "noaux_tc", "sigmoid"),
        other => {
            return Err(Error::Model(format!(
                "{}.expert_gating_func is {other}, which is not supported; 1 and 2 are",
                header.metadata.architecture
            )));
        }
    };
    Ok(json!({
        "model_type": model_type,
        "topk_method": method,
        "scoring_func": scoring,
        "n_routed_experts": header.experts(),
        "norm_topk_prob": header.normalized(false),
        "n_shared_experts": header.number("expert_shared_count"),
        "first_k_dense_replace": header.number("leading_dense_block_count"),
        "q_lora_rank": header.number("attention.q_lora_rank"),
        "kv_lora_rank": header.need("attention.kv_lora_rank")?,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "rope_scaling": { "llama_4_scaling_beta": header.metadata.own("attention.temperature_scale") },
    }))
}
