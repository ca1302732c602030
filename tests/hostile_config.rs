//! Any `config.json`: refused by name, or a model of sane size with which everything before loading works.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use std::sync::Arc;

use common::{demo_dir, fixture_dir, small};
use moebius::config::{DenseBits, Device, EngineConfig, ExpertBits};
use moebius::kernel;
use moebius::load::{Budget, CpuPlan, Kept, Machine, Spec};
use moebius::machine::heap::Heap;
use moebius::machine::workers::Team;
use moebius::model::families;
use proptest::prelude::*;
use serde_json::{Value, json};

const FIXTURES: &[&str] = &[
    "deepseek_v2_full",
    "deepseek_v2_lite",
    "deepseek_v3",
    "kimi_k2_fp8",
    "kimi_k25_ct_int4_sharded",
    "qwen3_moe",
    "qwen3_moe_dense_layer_sharded",
];

fn configs() -> Vec<Value> {
    const LATER: &[&str] = &[
        "qwen2_moe",
        "mixtral",
        "olmoe",
        "glm4_moe",
        "minimax_m2",
        "qwen3_dense",
        "qwen3_5_dense",
        "hy_v3",
        "mistral4",
        "ernie4_5_moe",
        "deepseek_v32",
        "glm_moe_dsa",
        "minimax_m3",
        "mimo_v2_flash",
        "step3p5",
        "laguna",
        "llama4",
        "cohere2_moe",
        "gemma4",
        "qwen4_exp",
        "nemotron_h_latent",
        "granitemoehybrid",
        "kimi_linear",
        "bailing_hybrid",
        "glm5_next",
        "deepseek_v4",
        "deepseek_v41",
    ];
    let small = ["gpt-oss", "qwen3-next", "qwen3.5", "llama"].map(small::config);
    let dirs = FIXTURES
        .iter()
        .map(|name| fixture_dir(name))
        .chain(["moe-gqa", "moe-mla"].map(demo_dir))
        .chain(LATER.iter().map(|name| fixture_dir(name)));
    dirs.map(|dir| serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap())
        .chain(small)
        .collect()
}

fn any_config(of: prop::sample::Index) -> Value {
    let mut all = configs();
    all.swap_remove(of.index(all.len()))
}

/// The last config of this `model_type`.
fn named(model_type: &str) -> Value {
    configs().into_iter().rfind(|config| config["model_type"] == model_type).unwrap()
}

/// What a field may be turned into.
fn hostile() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(2),
        json!(3),
        json!(-1),
        json!(0.5),
        json!(-0.0),
        json!(1e300),
        json!(-1e300),
        json!(1e-300),
        json!(63),
        json!(65),
        json!(4096),
        json!(1 << 16),
        json!(1 << 24),
        json!((1 << 24) + 1),
        json!(u32::MAX),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(""),
        json!("yarn"),
        json!("linear"),
        json!("llama3"),
        json!("group_limited_greedy"),
        json!("full_attention"),
        json!("FSFS"),
        json!("SFFF"),
        json!("9"),
        json!([]),
        json!([0]),
        json!([-1, 1.5, "x", null]),
        json!({}),
        json!({"rope_type": "yarn", "factor": 1e-38, "mscale": -1e30, "mscale_all_dim": 1e30}),
        json!({"type": "yarn", "factor": 4, "beta_fast": 0, "beta_slow": -1, "original_max_position_embeddings": 1}),
        json!({"rope_type": "llama3", "factor": 1e-38, "low_freq_factor": 4.0, "high_freq_factor": 1e38,
            "original_max_position_embeddings": 1}),
        json!(["shared", "full", "full", "full"]),
        json!(["linear_attention", "linear_attention", "linear_attention", "linear_attention"]),
        json!(["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"]),
        json!([0, 0, 0, 0]),
        json!([4, 1e300, 0.5, -1]),
        json!([65, 65, 65, 65]),
        json!([[[[[[[[{"a": [null]}]]]]]]]]),
    ]
}

/// Paths of all fields, those inside of objects too.
fn fields(value: &Value) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (name, value) in value.as_object().into_iter().flatten() {
        found.push(vec![name.clone()]);
        found.extend(fields(value).into_iter().map(|rest| [vec![name.clone()], rest].concat()));
    }
    found
}

/// Sets or, without a value, removes a field; does nothing where an earlier change took its parent away.
fn change(config: &mut Value, path: &[String], to: Option<Value>) {
    let (name, parents) = path.split_last().unwrap();
    let parent = parents.iter().try_fold(config, |value, name| value.get_mut(name));
    let Some(object) = parent.and_then(Value::as_object_mut) else { return };
    match to {
        Some(value) => object.insert(name.clone(), value),
        None => object.remove(name),
    };
}

/// Everything that is done with a config before weights are looked at.
fn survives(config: &Value) {
    let model = match families::parse(&config.to_string()) {
        Ok(model) => model,
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
            return;
        }
    };
    assert!((1..=4096).contains(&model.layers.len()));
    assert!(model.moe_layers().map(|(_, moe)| moe.num_experts).sum::<usize>() <= 1 << 18);
    assert!(model.ropes().len() <= model.layers.len());
    for rope in model.ropes() {
        assert!(rope.attention_factor().is_finite());
        assert!(rope.dim > 1 << 16 || rope.inv_freq().iter().all(|f| f.is_finite()), "{rope:?}");
    }
    // Every choice once with each amount of memory.
    let (int4, bf16) = (ExpertBits::Int4, ExpertBits::Bf16);
    for (experts, dense, max_context, available_bytes) in [
        (int4, DenseBits::Bf16, None, 8 << 30),
        (bf16, DenseBits::Int8, Some(model.max_context), 0),
        (int4, DenseBits::Int4, Some(model.max_context), u64::MAX),
        (bf16, DenseBits::Bf16, None, u64::MAX),
    ] {
        let engine = EngineConfig { device: Device::Cpu, experts, dense, max_context, ..EngineConfig::default() };
        let (team, kernel) = (Arc::new(Team::new(&[0]).unwrap()), kernel::best());
        let machine = Machine { team, kernel, heap: Heap::default(), available_bytes };
        let budget = Spec::new(&model, &engine, Kept::NOTHING).and_then(|spec| Budget::new(&spec, &machine));
        if let Ok(Budget::Cpu(CpuPlan { max_context, kv_blocks, .. })) = budget {
            assert!(max_context <= model.max_context && kv_blocks > 0);
        }
    }
}

#[test]
fn every_field_turned_into_anything() {
    for config in configs() {
        survives(&config);
        assert!(families::parse(&config.to_string()).is_ok());
        for path in fields(&config) {
            for to in hostile().into_iter().map(Some).chain([None]) {
                let mut changed = config.clone();
                change(&mut changed, &path, to);
                survives(&changed);
            }
        }
    }
}

#[test]
fn numbers_beyond_reason_are_named() {
    let qwen = configs().swap_remove(5);
    let v3 = configs().swap_remove(2);
    for (config, field, value) in [
        (&qwen, "num_hidden_layers", 4097u64),
        (&qwen, "num_hidden_layers", 16_777_216),
        (&qwen, "num_experts", 65_537),
        (&qwen, "num_experts_per_tok", 257),
        (&qwen, "hidden_size", 16_777_217),
        (&qwen, "vocab_size", u64::MAX),
        (&v3, "num_hidden_layers", 1 << 40),
        (&v3, "n_routed_experts", 65_537),
        (&v3, "rms_norm_eps", 2),
    ] {
        let mut config = config.clone();
        config[field] = json!(value);
        let text = families::parse(&config.to_string()).unwrap_err().to_string();
        assert!(text.contains(field), "{text}");
    }
    let (glm, next, oss) = (named("glm4_moe"), named("qwen3_next"), named("gpt_oss"));
    let (minimax, olmoe, llama) = (named("minimax_m2"), named("olmoe"), named("llama"));
    let (hy, ernie) = (named("hy_v3"), named("ernie4_5_moe"));
    let (mimo, step, laguna) = (named("mimo_v2_flash"), named("step3p5"), named("laguna"));
    let cohere = named("cohere2_moe");
    let (kimi, ling) = (named("kimi_linear"), named("bailing_hybrid"));
    let (nemotron, granite) = (named("nemotron_h"), named("granitemoehybrid"));
    let v4 = named("deepseek_v4");
    let [llama4, gemma, glm5] = ["llama4", "gemma4", "glm5_next"].map(|name| named(name)["text_config"].clone());
    for (config, field, value) in [
        (&glm, "partial_rotary_factor", json!(1.5)),
        (&glm, "partial_rotary_factor", json!(-0.5)),
        (&next, "linear_num_key_heads", json!(4097)),
        (&next, "linear_value_head_dim", json!(1 << 20)),
        (&next, "linear_conv_kernel_dim", json!(1)),
        (&next, "linear_conv_kernel_dim", json!(65)),
        (&next, "layer_types", json!(["linear_attention"])),
        (&next, "use_sliding_window", json!(true)),
        (&oss, "layer_types", json!(["sliding_attention", "full_attention", "other"])),
        (&oss, "sliding_window", json!(0)),
        (&oss, "swiglu_limit", json!(-7)),
        (&minimax, "rotary_dim", json!(33)),
        (&minimax, "attn_type_list", json!([1, 0])),
        (&minimax, "scoring_func", json!("softmax")),
        (&minimax, "shared_intermediate_size", json!(64)),
        (&olmoe, "clip_qkv", json!(8.0)),
        (&llama, "mlp_bias", json!(true)),
        (&hy, "qk_norm", json!(false)),
        (&hy, "moe_router_use_sigmoid", json!(false)),
        (&hy, "mlp_layer_types", json!(["dense"])),
        (&hy, "num_nextn_predict_layers", json!(-1)),
        (&ernie, "use_bias", json!(true)),
        (&ernie, "moe_num_experts", json!(65_537)),
        (&ernie, "moe_layer_interval", json!(0)),
        (&mimo, "attention_projection_layout", json!("other")),
        (&mimo, "hybrid_layer_pattern", json!([0, 1])),
        (&mimo, "swa_v_head_dim", json!(0)),
        (&mimo, "partial_rotary_factor", json!(2)),
        (&step, "layer_types", json!(["full_attention"])),
        (&step, "rope_theta", json!([1e6, "x", 1e6, 1e6])),
        (&step, "partial_rotary_factors", json!([0.5])),
        (&step, "swiglu_limits", json!({})),
        (&step, "moe_layers_enum", json!("1,x")),
        (&step, "moe_router_activation", json!("softmax")),
        (&laguna, "gating", json!("per-token")),
        (&laguna, "num_attention_heads_per_layer", json!([4, 6, 6, 4097])),
        (&laguna, "rope_parameters", json!({"full_attention": {}})),
        (&llama4, "num_experts_per_tok", json!(2)),
        (&llama4, "attention_chunk_size", json!(0)),
        (&llama4, "no_rope_layers", json!([1])),
        (&cohere, "expert_selection_fn", json!("sparsemax")),
        (&cohere, "shared_expert_combination_strategy", json!("max")),
        (&cohere, "layer_types", json!([])),
        (&nemotron, "hybrid_override_pattern", json!("MEM*EM")),
        (&nemotron, "hybrid_override_pattern", json!("MEM*EMX")),
        (&kimi, "linear_attn_config", json!(null)),
        (&kimi, "moe_router_activation_func", json!("softmax")),
        (&ling, "layer_group_size", json!(0)),
        (&ling, "short_conv_kernel_size", json!(1)),
        (&glm5, "hc_mult", json!(1)),
        (&glm5, "hc_sinkhorn_iters", json!(1u64 << 40)),
        (&glm5, "index_kpool", json!(7)),
        (&glm5, "indexer_types", json!(["full", "shared", "full", "full"])),
        (&glm5, "qk_rope_head_dim", json!(64)),
        (&glm5, "linear_attn_config", json!([])),
        (&glm5, "layer_types", json!(["deepseek_sparse_attention", "sliding_attention", "x", "y"])),
        (&glm5, "mhc", json!(false)),
        (&ling, "use_mla_nope", json!(true)),
        (&ling, "no_kda_lora", json!(false)),
        (&ling, "expert_swiglu_limit_list", json!([0.0, 0.0, 7.0])),
        (&ling, "share_expert_swiglu_limit_list", json!("none")),
        (&v4, "compress_ratios", json!([0, 4, 16])),
        (&v4, "compress_ratios", json!([0, 4, -16, 4])),
        (&v4, "o_groups", json!(3)),
        (&v4, "sliding_window", json!(0)),
        (&v4, "sliding_window", json!(1 << 20)),
        (&v4, "index_head_dim", json!(8)),
        (&v4, "head_dim", json!(8)),
        (&v4, "scoring_func", json!("sigmoid")),
        (&v4, "num_key_value_heads", json!(2)),
        (&nemotron, "mlp_hidden_act", json!("silu")),
        (&nemotron, "use_bias", json!(true)),
        (&nemotron, "mamba_num_heads", json!(4097)),
        (&nemotron, "conv_kernel", json!(1)),
        (&nemotron, "moe_latent_size", json!(-1)),
        (&granite, "layer_types", json!(["mamba"])),
        (&granite, "mamba_d_conv", json!(65)),
        (&granite, "num_local_experts", json!(0)),
        (&granite, "normalization_function", json!("layernorm")),
        (&gemma, "enable_moe_block", json!(false)),
        (&gemma, "hidden_size_per_layer_input", json!(256)),
        (&gemma, "num_kv_shared_layers", json!(2)),
        (&gemma, "hidden_activation", json!("silu")),
        (&gemma, "global_head_dim", json!(8192)),
    ] {
        let mut config = config.clone();
        config[field] = value;
        let text = families::parse(&config.to_string()).unwrap_err().to_string();
        assert!(text.contains(field), "{text}");
    }
    for (field, value) in [
        ("compress_ratios", json!([0, 3, 3, 1, 1, 1])),
        ("kv_source_layer_ids", json!([0, 1, 3])),
        ("index_source_layer_ids", json!([1, 4])),
        ("index_source_layer_ids", json!([1, 3, 6])),
        ("candidate_source_layer_id", json!(1)),
        ("candidate_source_layer_id", json!("3")),
        ("candidate_topk_blocks", json!(2)),
        ("engram_layer_ids", json!([1, 1])),
        ("engram_layer_ids", json!([6])),
        ("engram_max_ngram_size", json!(1)),
        ("engram_vocab_size", json!(1u64 << 30)),
        ("engram_compressed_vocab_size", json!(0)),
        ("gate_temp", json!(0)),
    ] {
        let mut config = named("deepseek_v41");
        config["text_config"][field] = value;
        let text = families::parse(&config.to_string()).unwrap_err().to_string();
        assert!(text.contains(field), "{text}");
    }
    let mut other = json!({"model_type": "mistral3", "text_config": named("mistral4")});
    assert!(families::parse(&other.to_string()).is_ok());
    other["text_config"]["rope_parameters"]["llama_4_scaling_beta"] = json!("0.1");
    assert!(families::parse(&other.to_string()).unwrap_err().to_string().contains("llama_4_scaling_beta"));
    other["text_config"]["model_type"] = json!("ministral3");
    assert!(families::parse(&other.to_string()).unwrap_err().to_string().contains("text_config is `ministral3`"));
    let mut uneven = next.clone();
    uneven["linear_num_value_heads"] = json!(5);
    assert!(families::parse(&uneven.to_string()).unwrap_err().to_string().contains("5 value heads"));
    let mut all_linear = next;
    all_linear["layer_types"] = json!(vec!["linear_attention"; 4]);
    assert!(families::parse(&all_linear.to_string()).unwrap_err().to_string().contains("full attention"));
    let mut groups = v3;
    for (field, value) in [("n_group", 128), ("topk_group", 4), ("n_routed_experts", 256)] {
        groups[field] = json!(value);
    }
    let text = families::parse(&groups.to_string()).unwrap_err().to_string();
    assert!(text.contains("128 groups"), "{text}");
}

#[test]
fn text_that_is_no_config() {
    let deep = "[".repeat(100_000);
    for text in ["", "{", "null", "[]", "1", "\"x\"", "{}", "\0", "{\"model_type\": 1}", &deep] {
        assert!(!families::parse(text).unwrap_err().to_string().contains('\n'));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn several_fields_turned_into_anything(
        of: prop::sample::Index,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(),
            any::<Option<u64>>()), 1..6),
    ) {
        let mut config = any_config(of);
        let (paths, values) = (fields(&config), hostile());
        for (path, value, number) in changes {
            // Half of the numbers small, where a dimension is likely to be accepted.
            let to = number.map_or_else(|| values[value.index(values.len())].clone(),
                |n| json!(if n % 2 == 0 { n % 300 } else { n }));
            change(&mut config, &paths[path.index(paths.len())], Some(to));
        }
        survives(&config);
    }

    #[test]
    fn any_byte_changed(of: prop::sample::Index, at: prop::sample::Index, byte: u8) {
        let mut text = any_config(of).to_string().into_bytes();
        let at = at.index(text.len());
        text[at] = byte;
        let _ = std::str::from_utf8(&text).map(families::parse);
    }
}
