//! Small models of random weights, made on the spot from a config alone: for what must hold whatever the numbers are.

use std::path::Path;

use moebius::Result;
use moebius::backend::source::TensorSource;
use moebius::backend::tensor::HostTensor;
use moebius::config::EngineConfig;
use moebius::load::synthetic;
use moebius::load::{self, Budget, Kept, Loaded, Spec, Stored};
use moebius::machine::topology::Topology;
use moebius::model::ModelConfig;
use moebius::model::families;
use serde_json::{Value, json};

/// One of every kind of layer: sinks in a window, gated DeltaNet beside gated attention, norms over the whole width,
/// latents of chosen positions, chosen blocks for each KV head, streams with n-grams and chosen units, Mamba-2 and
/// experts without a gate or behind every mixer, Kimi delta attention beside latents with and without rope and gates,
/// connected streams with units by gates, entries of several positions.
pub const MODELS: &[&str] = &[
    "gpt-oss",
    "qwen3-next",
    "minimax-m2",
    "glm-5",
    "minimax-m3",
    "qwen4-exp",
    "nemotron-h",
    "granite-4",
    "kimi-linear",
    "ling-3",
    "glm-5.3-flash",
    "deepseek-v4",
    "deepseek-v4.1",
];

/// What every model here has in common.
fn base(model_type: &str, other: Value) -> Value {
    let mut config = json!({"model_type": model_type, "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 3,
            "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5});
    config.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
    config
}

/// The `config.json` of a small model of each family that has no checkpoint here, or whose blocks others do not have.
pub fn config(name: &str) -> Value {
    let gpt_oss = |window: usize| {
        let yarn =
            json!({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128, "truncate": false});
        base(
            "gpt_oss",
            json!({"num_hidden_layers": 3, "num_local_experts": 7, "sliding_window": window, "rope_scaling": yarn}),
        )
    };
    let qwen = json!({"num_hidden_layers": 4, "full_attention_interval": 2, "num_experts": 8,
        "shared_expert_intermediate_size": 96,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24,
            "linear_value_head_dim": 48});
    let glm_5 = |top_k: usize| {
        base(
            "glm_moe_dsa",
            json!({"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1,
                "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
                "index_topk": top_k, "index_head_dim": 32, "index_n_heads": 4, "index_topk_pattern": "FFS"}),
        )
    };
    let minimax_m3 = |block: usize, blocks: usize| {
        let sparse = json!({"sparse_num_index_heads": 2, "sparse_index_dim": 24, "sparse_block_size": block,
            "sparse_topk_blocks": blocks, "sparse_attention_freq": [0, 1, 1]});
        let text = json!({"num_hidden_layers": 3, "num_local_experts": 8, "rotary_dim": 16, "moe_layer_freq": [0, 1, 1],
            "shared_intermediate_size": 64, "dense_intermediate_size": 96, "hidden_act": "swigluoai",
            "sparse_attention_config": sparse});
        json!({"model_type": "minimax_m3_vl", "text_config": base("minimax_m3_vl_text", text),
            "vision_config": {"depth": 1}})
    };
    // Streams, n-grams with ends among the tokens, and units of positions, of which fewer are chosen than a prompt has.
    let qwen4_exp = |budget: usize| {
        let mut config = base("qwen4_exp_text", qwen.clone());
        let more = json!({"hc_count": 3, "hc_lowrank": 32, "ple_layer_ids": [1, 3], "ple_embed_dim": 64,
            "ngram_size": 3, "heads_per_ngram": 4, "ple_conv_kernel_size": 4, "ngram_vocab_size_base": 1000,
            "eos_token_id": 7, "output_gate_type": "sigmoid", "indexer_n_heads": 2, "indexer_head_dim": 16,
            "indexer_budget": budget, "indexer_compress_ratio": 4});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    match name {
        "qwen4-exp" => qwen4_exp(40),
        "qwen4-exp-long" => qwen4_exp(1100),
        "minimax-m3" => minimax_m3(8, 5),
        "minimax-m3-long" => minimax_m3(128, 9),
        "glm-5" => glm_5(40),
        "glm-5-long" => glm_5(1100),
        "gpt-oss" => gpt_oss(24),
        "gpt-oss-wide" => gpt_oss(300),
        "nemotron-h" => base(
            "nemotron_h",
            json!({"num_hidden_layers": 5, "hybrid_override_pattern": "MEM*E", "n_routed_experts": 8,
                "moe_latent_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 24, "ssm_state_size": 16,
                "n_groups": 2}),
        ),
        "kimi-linear" => {
            let linear = json!({"kda_layers": [1, 2], "num_heads": 3, "head_dim": 32, "short_conv_kernel_size": 4});
            base(
                "kimi_linear",
                json!({"num_hidden_layers": 3, "first_k_dense_replace": 1, "linear_attn_config": linear,
                    "mla_use_nope": true, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
                    "v_head_dim": 32, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1}),
            )
        }
        "ling-3" => base(
            "bailing_hybrid",
            json!({"num_hidden_layers": 3, "first_k_dense_replace": 1, "layer_group_size": 3, "num_experts": 8,
                "num_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": null, "kv_lora_rank": 64,
                "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "short_conv_kernel_size": 4,
                "expert_swiglu_limit_list": [0, 0, 1], "share_expert_swiglu_limit_list": [0, 2, 0]}),
        ),
        "granite-4" => base(
            "granitemoehybrid",
            json!({"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "position_embedding_type": "nope",
                "mamba_n_heads": 8, "mamba_d_head": 24, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 4,
                "num_local_experts": 8, "shared_intermediate_size": 96, "embedding_multiplier": 12,
                "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 0.5}),
        ),
        "glm-5.3-flash" => base(
            "glm5_next_text",
            json!({"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1,
                "layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_num_heads": 3,
                "linear_head_dim": 32, "linear_conv_kernel_dim": 4, "q_lora_rank": 64, "kv_lora_rank": 64,
                "qk_nope_head_dim": 32, "qk_rope_head_dim": 0, "v_head_dim": 32, "index_n_heads": 4,
                "index_head_dim": 32, "index_topk": 40, "index_kpool": 4, "swiglu_limit": 2.0, "hc_mult": 3,
                "hc_sinkhorn_iters": 5}),
        ),
        "deepseek-v4" => base(
            "deepseek_v4",
            json!({"num_hidden_layers": 4, "compress_ratios": [0, 4, 24, 4], "num_attention_heads": 4,
                "num_key_value_heads": 1, "head_dim": 48, "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_groups": 2,
                "o_lora_rank": 32, "sliding_window": 17, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 5,
                "num_hash_layers": 2, "n_routed_experts": 8, "n_shared_experts": 1, "swiglu_limit": 2.0,
                "hc_mult": 3, "hc_sinkhorn_iters": 5}),
        ),
        "deepseek-v4.1" => {
            let text = base(
                "deepseek_v41_text",
                json!({"num_hidden_layers": 6, "compress_ratios": [0, 2, 2, 1, 1, 1], "kv_source_layer_ids": [1, 3],
                    "index_source_layer_ids": [1, 3, 4], "num_attention_heads": 4, "num_key_value_heads": 1,
                    "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32,
                    "sliding_window": 17, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 9,
                    "candidate_source_layer_id": 3, "candidate_topk_blocks": 5, "candidate_block_size": 4,
                    "engram_layer_ids": [1, 3], "engram_max_ngram_size": 4, "engram_vocab_size": 100,
                    "engram_n_heads": 2, "engram_head_dim": 16, "engram_compressed_vocab_size": 1024,
                    "n_routed_experts": 8, "n_shared_experts": 1, "swiglu_limit": 2.0, "hc_mult": 4,
                    "hc_sinkhorn_iters": 5}),
            );
            json!({"model_type": "deepseek_v41", "text_config": text, "image_token_id": 1000})
        }
        "qwen3-next" => base("qwen3_next", qwen),
        "qwen3.5" => {
            json!({"model_type": "qwen3_5_moe", "text_config": base("qwen3_5_moe_text", qwen),
                "vision_config": {"depth": 1}})
        }
        "minimax-m2" => base("minimax_m2", json!({"num_hidden_layers": 2, "num_local_experts": 8, "rotary_dim": 16})),
        "llama" => {
            let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64});
            base("llama", json!({"num_hidden_layers": 2, "rope_scaling": scaling, "tie_word_embeddings": true}))
        }
        other => panic!("no small model is called {other}"),
    }
}

/// Weights that depend on name and place. Biases, sinks and taps are not zero: what leaves one out is noticed.
pub struct Random;

impl TensorSource for Random {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostTensor<'_>> {
        let scale = if name.contains("embed_tokens") { 1.0 } else { 1.5 / (cols as f32).sqrt() };
        Ok(HostTensor::F32 { data: numbers(name, rows * cols, scale).into(), cols })
    }

    fn vector(&self, name: &str, len: usize) -> Result<HostTensor<'_>> {
        let middle = if name.contains("norm") { 1.0 } else { 0.0 };
        Ok(numbers(name, len, 0.3).into_iter().map(|x| middle + x).collect::<Vec<_>>().into())
    }
}

/// Uniform, of that root mean square.
fn numbers(name: &str, len: usize, scale: f32) -> Vec<f32> {
    let mut state = name.bytes().fold(1u64, |hash, b| (hash ^ b as u64).wrapping_mul(0x100_0000_01b3)) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 12f32.sqrt() * scale
    };
    (0..len).map(|_| half::bf16::from_f32(next()).to_f32()).collect()
}

/// A small model by name, ready to run on the CPU.
pub fn load(name: &str, config: &EngineConfig) -> Loaded {
    of(families::parse(&self::config(name).to_string()).unwrap(), config)
}

/// A model of any configuration, whose weights depend on their names alone.
pub fn of(model: ModelConfig, config: &EngineConfig) -> Loaded {
    let machine = load::machine(config, &Topology::read()).unwrap();
    let spec = Spec::new(&model, config, Kept::NOTHING).unwrap();
    let budget = Budget::new(&spec, &machine).unwrap();
    let experts = spec.precision.clone().map(|precision| synthetic::experts(&model, precision).unwrap());
    load::assemble(&spec, Stored { resident: &Random, experts }, budget, machine, &|_| {}).unwrap()
}

/// A demo model or a small one.
pub fn model(name: &str, config: &EngineConfig) -> Loaded {
    let dir = super::demo_dir(name);
    if Path::is_dir(&dir) {
        load::load(&super::folder("test", &dir), config, &|_| {}).unwrap()
    } else {
        load(name, config)
    }
}
