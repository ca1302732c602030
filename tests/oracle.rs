//! The engine against HF transformers: logits, hidden states, routing and greedy tokens of small checkpoints, in
//! float32.
//!
//! `tests/fixtures/README.md` says what the reference is.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod common;

use common::checkpoint::Checkpoint;
use common::{Fixture, greedy, worst_row};
use moebius::config::{DenseBits, EngineConfig, ExpertBits, KvBits};
use moebius::engine::capture::{Layers, Wanted, capture};
use moebius::load::Loaded;
use moebius::model::families;
use moebius::model::{Activation, Attention};
use serde_json::{Value, json};

/// Largest error of a logit or hidden state, relative to the largest magnitude of its row: f32 noise is below 2e-5.
const TOLERANCE: f32 = 1e-4;

/// Gemma's scores are not divided by the square root of the heads' width: what the cache's 16 bits of mantissa leave
/// out counts more.
fn tolerance(name: &str) -> f32 {
    if name == "gemma4" { 2.0 * TOLERANCE } else { TOLERANCE }
}

fn exact() -> EngineConfig {
    EngineConfig { experts: ExpertBits::Bf16, dense: DenseBits::Bf16, kv: KvBits::Bf16x2, ..Default::default() }
}

fn check(name: &str) {
    let fixture = Fixture::open(name);
    check_loaded(name, &fixture, fixture.load(&exact()));
}

/// The language model of a checkpoint with vision: `fixture`'s, its config nested, its tensors `renamed`.
fn check_nested(fixture: &str, model_type: &str, renamed: fn(&str) -> String) {
    let fixture = Fixture::open(fixture);
    let copy = Checkpoint::copy_of(&fixture.dir);
    copy.json("config.json", |config| {
        *config = json!({"model_type": model_type, "text_config": config.take(), "vision_config": {"depth": 1}});
    });
    copy.tensors("model.safetensors", |header, _| {
        let tensors = header.as_object().unwrap().iter();
        *header = tensors.map(|(name, entry)| (renamed(name), entry.clone())).collect();
    });
    let loaded = common::load(&copy.dir(), &exact());
    assert_eq!(loaded.model.config().architecture, model_type);
    check_loaded(model_type, &fixture, loaded);
}

fn check_loaded(name: &str, fixture: &Fixture, mut loaded: Loaded) {
    let (vocab, streams) = (loaded.model.config().vocab_size, loaded.model.config().streams());
    let all = Wanted { logits: true, hidden: Some(Layers::All), router: true };

    for prompt in ["short", "mid"] {
        let tokens = fixture.tokens(&format!("{prompt}.input_ids"));
        let got = capture(&mut loaded, &tokens, &all, 512).unwrap();
        let error = worst_row(&got.logits, &fixture.floats(&format!("{prompt}.logits")), vocab);
        assert!(error < tolerance(name), "{name} {prompt}: logits off by {error}");

        let states = fixture.floats(&format!("{prompt}.hidden_states"));
        for (layer, want) in states.chunks(tokens.len() * streams.width()).skip(1).enumerate() {
            let error = worst_row(&got.hidden[&layer], want, streams.hidden_size);
            assert!(error < tolerance(name), "{name} {prompt}: hidden state after layer {layer} off by {error}");
        }
        if prompt == "mid" {
            assert_eq!(got.router.len(), loaded.model.config().moe_layers().count());
            check_routing(name, fixture, &got.router);
        }
    }

    let tokens = fixture.tokens("long.input_ids");
    let got = capture(&mut loaded, &tokens, &all, 512).unwrap();
    let error = worst_row(&got.logits[(tokens.len() - 32) * vocab..], &fixture.floats("long.logits_last32"), vocab);
    assert!(error < tolerance(name), "{name} long: logits off by {error}");

    let mut compared = 0;
    for prompt in ["short", "mid", "long"] {
        let (want, margins) =
            (fixture.tokens(&format!("{prompt}.greedy")), fixture.floats(&format!("{prompt}.greedy_margin")));
        let got = greedy(&mut loaded, &fixture.tokens(&format!("{prompt}.input_ids")), want.len());
        let sure = margins.iter().position(|&m| m < 0.05).map_or(want.len(), |i| i + 1);
        let sure = if sure < want.len() { sure - 1 } else { sure };
        assert_eq!(got[..sure], want[..sure], "{name} {prompt}: greedy tokens");
        compared += sure;
    }
    assert!(compared > 0, "{name}: the reference is unsure of the first token of every prompt");
}

fn check_routing(name: &str, fixture: &Fixture, router: &std::collections::HashMap<usize, moebius::backend::Routing>) {
    for (layer, got) in router {
        let (ids, weights) = (
            fixture.tokens(&format!("mid.router_topk.{layer}")),
            fixture.floats(&format!("mid.router_weights.{layer}")),
        );
        for t in 0..ids.len() / got.top_k {
            let row = t * got.top_k..(t + 1) * got.top_k;
            let mut want: Vec<_> =
                ids[row.clone()].iter().map(|&i| i as i32).zip(weights[row.clone()].iter().copied()).collect();
            let mut have: Vec<_> = got.ids[row.clone()].iter().copied().zip(got.weights[row].iter().copied()).collect();
            want.sort_by_key(|p| p.0);
            have.sort_by_key(|p| p.0);
            for (h, w) in have.iter().zip(&want) {
                let weight = match name {
                    "cohere2_moe" | "cohere2_vision" => 0.5 * w.1, // the average with the shared expert is in it
                    "granitemoehybrid" => 0.6 * w.1,               // as is what results are multiplied with
                    "llama4" => 1.0,                               // the reference's multiplies the expert's input
                    _ => w.1,
                };
                assert!(
                    h.0 == w.0 && (h.1 - weight).abs() < 1e-3 * weight.abs(),
                    "{name} layer {layer} token {t}: {have:?} instead of {want:?}"
                );
            }
        }
    }
}

#[test]
fn deepseek_v2_lite() {
    check("deepseek_v2_lite");
}

#[test]
fn deepseek_v2_full() {
    check("deepseek_v2_full");
}

#[test]
fn deepseek_v3() {
    check("deepseek_v3");
}

#[test]
fn deepseek_v32() {
    check("deepseek_v32");
}

#[test]
fn glm_moe_dsa() {
    check("glm_moe_dsa");
}

#[test]
fn qwen3_moe() {
    check("qwen3_moe");
}

#[test]
fn qwen3_moe_dense_layer_sharded() {
    check("qwen3_moe_dense_layer_sharded");
}

#[test]
fn qwen3_dense() {
    check("qwen3_dense");
}

#[test]
fn mixtral() {
    check("mixtral");
}

#[test]
fn qwen2_moe() {
    check("qwen2_moe");
}

#[test]
fn olmoe() {
    check("olmoe");
}

#[test]
fn glm4_moe() {
    check("glm4_moe");
}

#[test]
fn mimo_v2_flash() {
    check("mimo_v2_flash");
}

#[test]
fn step3p5() {
    check("step3p5");
}

#[test]
fn laguna() {
    check("laguna");
}

#[test]
fn llama4() {
    check("llama4");
}

#[test]
fn cohere2_moe() {
    check("cohere2_moe");
}

#[test]
fn gemma4() {
    check("gemma4");
}

#[test]
fn lfm2_moe() {
    check("lfm2_moe");
}

#[test]
fn nemotron_h() {
    check("nemotron_h");
}

#[test]
fn nemotron_h_latent() {
    check("nemotron_h_latent");
}

#[test]
fn granitemoehybrid() {
    check("granitemoehybrid");
}

#[test]
fn kimi_linear() {
    check("kimi_linear");
}

#[test]
fn bailing_hybrid() {
    check("bailing_hybrid");
}

#[test]
fn glm5_next() {
    check("glm5_next");
}

#[test]
fn deepseek_v4() {
    check("deepseek_v4");
}

#[test]
fn deepseek_v4_fp4() {
    check("deepseek_v4_fp4");
}

#[test]
fn deepseek_v41() {
    check("deepseek_v41");
}

#[test]
fn qwen4_exp() {
    check("qwen4_exp");
}

#[test]
fn minimax_m2() {
    check("minimax_m2");
}

#[test]
fn minimax_m3() {
    check("minimax_m3");
}

#[test]
fn qwen3_next() {
    check("qwen3_next");
}

#[test]
fn llama() {
    check("llama");
}

#[test]
fn qwen3_5_moe() {
    check("qwen3_5_moe");
}

#[test]
fn qwen3_5_dense() {
    check("qwen3_5_dense");
}

#[test]
fn hy_v3() {
    check("hy_v3");
}

#[test]
fn mistral4() {
    check("mistral4");
}

#[test]
fn ernie4_5_moe() {
    check("ernie4_5_moe");
}

#[test]
fn language_models_of_checkpoints_with_vision() {
    let body = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.into(),
    };
    check_nested("qwen3_moe", "qwen3_vl_moe", body);
    check_nested("qwen3_dense", "qwen3_vl", body);
    check_nested("glm4_moe", "glm4v_moe", body);
    check_nested("cohere2_moe", "cohere2_vision", body);
    // Its plain and FP8 files, and its NVFP4 files.
    check_nested("step3p5", "step3p7", str::to_string);
    check_nested("step3p5", "step3p7", body);
    check_nested("mistral4", "mistral3", |name| match name {
        "__metadata__" => name.into(),
        _ => format!("language_model.{name}"),
    });
}

/// GLM-4.7-Flash is DeepSeek-V3 by another name.
#[test]
fn glm4_moe_lite() {
    let fixture = Fixture::open("deepseek_v3");
    let copy = Checkpoint::copy_of(&fixture.dir);
    copy.config(json!({"model_type": "glm4_moe_lite", "num_nextn_predict_layers": 1}));
    let loaded = common::load(&copy.dir(), &exact());
    assert_eq!(loaded.model.config().draft_layers, 1);
    check_loaded("glm4_moe_lite", &fixture, loaded);
}

/// DeepSeek-V4 has a ratio for the layers that draft, whose tensors are `mtp.`; Ling 3 has such a layer behind the
/// others.
#[test]
fn draft_layers_are_read_past() {
    for (name, of_drafts, config) in [
        ("deepseek_v4", "mtp.0", json!({"num_nextn_predict_layers": 1})),
        ("bailing_hybrid", "model.layers.4", json!({"num_nextn_predict_layers": 1})),
    ] {
        let fixture = Fixture::open(name);
        let copy = Checkpoint::copy_of(&fixture.dir);
        copy.config(config);
        copy.json("config.json", |config| {
            if let Some(ratios) = config["compress_ratios"].as_array_mut() {
                ratios.push(0.into());
            }
        });
        copy.tensors("model.safetensors", |header, data| {
            let first = if of_drafts == "mtp.0" { "layers.0." } else { "model.layers.0." };
            for (tensor, mut entry) in header.as_object().unwrap().clone() {
                let Some(part) = tensor.strip_prefix(first) else { continue };
                let [start, end] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize);
                entry["data_offsets"] = json!([data.len(), data.len() + end - start]);
                data.extend_from_within(start..end);
                header[format!("{of_drafts}.{part}")] = entry;
            }
        });
        let loaded = common::load(&copy.dir(), &exact());
        assert_eq!(loaded.model.config().draft_layers, 1);
        check_loaded(name, &fixture, loaded);
    }
}

/// MiMo-V2.5 joins queries, keys and values, in as many parts as full layers have KV heads.
#[test]
fn mimo_v2() {
    let fixture = Fixture::open("mimo_v2_flash");
    let copy = Checkpoint::copy_of(&fixture.dir);
    let text = std::fs::read_to_string(fixture.dir.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let parts = config["num_key_value_heads"].as_u64().unwrap() as usize;
    copy.config(json!({"model_type": "mimo_v2", "attention_projection_layout": "fused_qkv"}));
    copy.tensors("model.safetensors", |header, data| {
        let (mut old, bytes) = (header.as_object().unwrap().clone(), std::mem::take(data));
        let range = |entry: &Value| [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize);
        let mut new = serde_json::Map::new();
        let mut put = |name: String, like: &Value, rows: u64, parts: Vec<&[u8]>| {
            let start = data.len();
            parts.iter().for_each(|part| data.extend_from_slice(part));
            let mut entry = like.clone();
            entry["shape"][0] = rows.into();
            entry["data_offsets"] = json!([start, data.len()]);
            new.insert(name, entry);
        };
        for layer in 0..config["num_hidden_layers"].as_u64().unwrap() {
            let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}_proj.weight");
            let entries = ["q", "k", "v"].map(|part| old.remove(&name(part)).unwrap());
            let rows = entries.iter().map(|entry| entry["shape"][0].as_u64().unwrap()).sum();
            let part_of = |entry: &Value, part: usize| {
                let [from, to] = range(entry);
                let len = (to - from) / parts;
                &bytes[from + part * len..from + (part + 1) * len]
            };
            let all = (0..parts).flat_map(|part| entries.iter().map(move |entry| (entry, part)));
            put(name("qkv"), &entries[0], rows, all.map(|(entry, part)| part_of(entry, part)).collect());
        }
        for (name, entry) in old.iter().filter(|(name, _)| *name != "__metadata__") {
            let [from, to] = range(entry);
            put(name.clone(), entry, entry["shape"][0].as_u64().unwrap(), vec![&bytes[from..to]]);
        }
        *header = new.into();
    });
    check_loaded("mimo_v2", &fixture, common::load(&copy.dir(), &exact()));
}

#[test]
fn gpt_oss_mxfp4() {
    check("gpt_oss_mxfp4");
}

/// The defaults of transformers' config classes: a field that is left out means what one with that value does, and not
/// another.
#[test]
fn what_a_config_leaves_out() {
    let layers = |kinds: &str| {
        json!(
            kinds
                .chars()
                .map(|kind| if kind == 's' { "sliding_attention" } else { "full_attention" })
                .collect::<Vec<_>>()
        )
    };
    for (fixture, field, default, other) in [
        ("qwen3_moe", "norm_topk_prob", json!(false), json!(true)),
        ("qwen3_moe", "decoder_sparse_step", json!(1), json!(2)),
        ("qwen2_moe", "norm_topk_prob", json!(false), json!(true)),
        ("qwen2_moe", "qkv_bias", json!(true), json!(false)),
        ("qwen3_next", "norm_topk_prob", json!(true), json!(false)),
        ("qwen3_next", "full_attention_interval", json!(4), json!(2)),
        ("qwen3_next", "partial_rotary_factor", json!(0.25), json!(0.5)),
        ("qwen3_5_moe", "tie_word_embeddings", json!(false), json!(true)),
        ("olmoe", "norm_topk_prob", json!(false), json!(true)),
        ("mixtral", "sliding_window", json!(null), json!(8)),
        ("deepseek_v3", "norm_topk_prob", json!(true), json!(false)),
        ("glm4_moe", "norm_topk_prob", json!(true), json!(false)),
        ("glm4_moe", "partial_rotary_factor", json!(0.5), json!(1.0)),
        ("glm4_moe", "first_k_dense_replace", json!(1), json!(0)),
        ("glm4_moe", "n_shared_experts", json!(1), json!(2)),
        ("glm4_moe", "use_qk_norm", json!(false), json!(true)),
        ("glm4_moe", "attention_bias", json!(false), json!(true)),
        ("glm4_moe", "routed_scaling_factor", json!(1.0), json!(2.5)),
        ("hy_v3", "mlp_layer_types", json!(["dense", "sparse", "sparse"]), json!(["sparse", "sparse", "sparse"])),
        ("hy_v3", "router_scaling_factor", json!(2.826), json!(1.0)),
        ("hy_v3", "num_shared_experts", json!(1), json!(2)),
        ("ernie4_5_moe", "moe_num_shared_experts", json!(2), json!(1)),
        ("ernie4_5_moe", "moe_layer_start_index", json!(1), json!(2)),
        ("ernie4_5_moe", "moe_layer_end_index", json!(-1), json!(2)),
        ("ernie4_5_moe", "moe_layer_interval", json!(1), json!(2)),
        ("ernie4_5_moe", "rope_theta", json!(500_000), json!(10_000)),
        ("gpt_oss_mxfp4", "layer_types", layers("sfs"), layers("fsf")),
        ("gpt_oss_mxfp4", "sliding_window", json!(128), json!(129)),
        ("gpt_oss_mxfp4", "swiglu_limit", json!(7.0), json!(70.0)),
        ("gpt_oss_mxfp4", "swiglu_alpha", json!(1.702), json!(1.0)),
        ("gpt_oss_mxfp4", "attention_bias", json!(true), json!(false)),
    ] {
        let text = std::fs::read_to_string(common::fixture_dir(fixture).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        let with = |value: &Value| {
            let mut config = config.clone();
            config[field] = value.clone();
            families::parse(&config.to_string()).unwrap()
        };
        let (same, different) = (with(&default), with(&other));
        config.as_object_mut().unwrap().remove(field);
        let without = families::parse(&config.to_string()).unwrap();
        assert_eq!(without, same, "{fixture}: {field}");
        assert_ne!(without, different, "{fixture}: {field}");
    }
}

#[test]
fn which_layers_are_what() {
    let parse = |fixture: &str, field: &str, value: Value| {
        let text = std::fs::read_to_string(common::fixture_dir(fixture).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config[field] = value;
        families::parse(&config.to_string()).unwrap()
    };
    // Every second layer has experts, the last of each pair.
    let sparse: Vec<usize> =
        parse("qwen3_moe", "decoder_sparse_step", json!(2)).moe_layers().map(|(layer, _)| layer).collect();
    assert!(!sparse.is_empty() && sparse.iter().all(|layer| layer % 2 == 1), "{sparse:?}");
    let kinds = json!(["full_attention", "linear_attention", "linear_attention", "linear_attention"]);
    let model = parse("qwen3_next", "layer_types", kinds);
    let full: Vec<bool> = model.layers.iter().map(|layer| matches!(layer.attention, Attention::Gqa(_))).collect();
    assert_eq!(full, [true, false, false, false]);
    let limits = parse("bailing_hybrid", "share_expert_swiglu_limit_list", json!([0.0, null, 5, 7.0, 9.0]));
    let bounded = Activation::ClampedSilu { limit: 5.0 };
    let shared = limits.layers[2].ffn.moe().unwrap().shared.as_ref().unwrap().mlp.activation;
    assert_eq!((shared, limits.layers[2].ffn.moe().unwrap().activation), (bounded, Activation::Silu));
    let limits = parse("bailing_hybrid", "expert_swiglu_limit_list", json!([0.0, 0.0, 5, 0.0]));
    let activations: Vec<_> = limits.moe_layers().map(|(_, moe)| moe.activation).collect();
    assert_eq!(activations, [Activation::Silu, bounded, Activation::Silu]);
}

/// What published configs say beside what matters.
#[test]
fn words_that_change_nothing() {
    for (fixture, more) in [
        // Of these the rotated width is the head's own.
        (
            "bailing_hybrid",
            json!({"expert_swiglu_limit_list": null, "share_expert_swiglu_limit_list": null,
                "partial_rotary_factor": 0.5, "rotary_dim": 16, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6_000_000, "rope_type": "default"},
                "rope_interleave": true, "num_kv_heads_for_linear_attn": 0, "linear_silu": true, "group_norm_size": 1,
                "use_qk_norm": true, "use_nGPT": false, "value_norm": false, "up_proj_norm": false,
                "router_dtype": "fp32"}),
        ),
        // Of Qwen3.6-27B and Qwen3.8.
        ("qwen3_5_dense", json!({"output_gate_type": "swish", "attn_output_gate": true, "mamba_ssm_dtype": "float32"})),
        // Of North-Mini-Code.
        (
            "cohere2_moe",
            json!({"tie_word_embeddings": null, "use_parallel_block": true, "use_qk_norm": false,
                "prefix_dense_sliding_window_pattern": 1, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0}),
        ),
        // Of GLM-5.3-Flash.
        (
            "glm5_next",
            json!({"head_dim": 0, "qk_head_dim": 32, "indexer_rope_interleave": true, "mhc": true, "mla_use_nope": true,
                "index_kpool_compress": true, "index_share_for_mtp_iteration": true}),
        ),
        // Of Nemotron 3 Ultra, which has a list of layers in the place of their number.
        (
            "nemotron_h_latent",
            json!({"num_hidden_layers": null, "hybrid_override_pattern": null, "layers_block_type":
                ["mamba", "moe", "mamba", "attention", "moe", "mamba", "moe"], "mtp_layers_block_type":
                ["attention", "moe"]}),
        ),
        // Of Step-3.7: one more entry for each layer that drafts, and what its own code has where nothing is said.
        (
            "step3p5",
            json!({"rms_norm_eps": null, "use_rope_layers": [], "zero_centered": true, "sink": false,
                "rope_theta": [5000000.0, 10000.0, 10000.0, 5000000.0, 10000.0], "swiglu_limits": [0, 0, 1.2, 0, 0],
                "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0], "swiglu_limits_shared": [0, 0, 0, 1.5, 0],
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention",
                    "sliding_attention"]}),
        ),
        ("qwen3_5_moe", json!({"output_gate_type": "swish", "attn_output_gate": true, "output_router_logits": false})),
    ] {
        let text = std::fs::read_to_string(common::fixture_dir(fixture).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        let plain = families::parse(&config.to_string()).unwrap();
        let nested = config.get("text_config").is_some();
        let text = if nested { &mut config["text_config"] } else { &mut config };
        text.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(families::parse(&config.to_string()).unwrap(), plain, "{fixture}");
    }
}
