//! Dimensions of well-known models, for benches and plans on a box that does not have their weights.

use crate::model::ModelConfig;
use crate::{Error, Result};

/// Name and the dimensions of its `config.json`.
const SHAPES: &[(&str, &str)] = &[
    (
        "deepseek-v2-lite",
        r#"{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 102400,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "max_position_embeddings": 163840, "rope_theta": 10000,
        "rope_scaling":
        {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707}}"#,
    ),
    (
        "deepseek-v3",
        r#"{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 129280,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
        "rope_theta": 10000, "rope_scaling":
        {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}}"#,
    ),
    (
        "deepseek-v3.2",
        r#"{"model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "vocab_size": 129280,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
        "rope_theta": 10000, "rope_scaling":
        {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}}"#,
    ),
    (
        "deepseek-v4-flash",
        r#"{"model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
        "o_lora_rank": 1024, "sliding_window": 128, "compress_ratios":
        [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
        4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4],
        "compress_rope_theta": 160000, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "num_hash_layers": 3, "scoring_func": "sqrtsoftplus", "norm_topk_prob": true,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "max_position_embeddings": 1048576, "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 16,
        "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}}"#,
    ),
    (
        "deepseek-v4.1-flash",
        r#"{"model_type": "deepseek_v41", "image_token_id": 129264, "text_config": {"hidden_size": 5120,
        "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "compress_rope_theta": 160000, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "engram_layer_ids": [1, 14], "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8,
        "engram_head_dim": 256, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
        "vocab_size": 129280, "n_routed_experts": 384, "num_experts_per_tok": 6, "n_shared_experts": 1,
        "moe_intermediate_size": 2304, "scoring_func": "sqrtsoftplus", "norm_topk_prob": true,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rms_norm_eps": 1e-20, "max_position_embeddings": 1048576, "rope_theta": 10000, "rope_scaling":
        {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}}}"#,
    ),
    (
        "glm-5",
        r#"{"model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "vocab_size": 154880,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752, "rope_theta": 1000000}"#,
    ),
    (
        "kimi-k2",
        r#"{"model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 163840,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "max_position_embeddings": 131072,
        "rope_theta": 50000, "rope_scaling":
        {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "beta_fast": 1, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}}"#,
    ),
    (
        "kimi-linear-48b-a3b",
        r#"{"model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": true, "linear_attn_config": {"num_heads": 32,
        "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers":
        [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]}, "vocab_size": 163840,
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1, "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
        "moe_renormalize": true, "rms_norm_eps": 1e-5, "model_max_length": 1048576}"#,
    ),
    (
        "qwen3-30b-a3b",
        r#"{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": true, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0}"#,
    ),
    (
        "qwen3-235b-a22b",
        r#"{"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "norm_topk_prob": true, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0}"#,
    ),
    (
        "glm-4.5",
        r#"{"model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": true,
        "use_qk_norm": true, "vocab_size": 151552,
        "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1536,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 131072, "rope_theta": 1000000}"#,
    ),
    (
        "glm-4.5-air",
        r#"{"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": true,
        "use_qk_norm": false, "vocab_size": 151552,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "max_position_embeddings": 131072, "rope_theta": 1000000}"#,
    ),
    (
        "glm-4.7-flash",
        r#"{"model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "vocab_size": 154880,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "max_position_embeddings": 202752,
        "rope_theta": 1000000}"#,
    ),
    (
        "gpt-oss-20b",
        r#"{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4,
        "max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": false}}"#,
    ),
    (
        "gpt-oss-120b",
        r#"{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "vocab_size": 201088,
        "num_local_experts": 128, "num_experts_per_tok": 4,
        "max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": false}}"#,
    ),
    (
        "minimax-m2",
        r#"{"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "vocab_size": 200064, "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 196608, "rope_theta": 5000000}"#,
    ),
    (
        "minimax-m3",
        r#"{"model_type": "minimax_m3_vl", "text_config": {"hidden_size": 6144, "intermediate_size": 3072,
        "num_hidden_layers": 60, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64, "vocab_size": 200064, "num_local_experts": 128,
        "num_experts_per_tok": 4, "shared_intermediate_size": 3072, "dense_intermediate_size": 12288,
        "hidden_act": "swigluoai", "routed_scaling_factor": 2.0, "max_position_embeddings": 524288,
        "rope_theta": 5000000, "moe_layer_freq":
        [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        "sparse_attention_config": {"sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128,
        "sparse_topk_blocks": 16, "sparse_attention_freq":
        [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}}}"#,
    ),
    (
        "mixtral-8x7b",
        r#"{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0}"#,
    ),
    (
        "qwen3-next-80b-a3b",
        r#"{"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "vocab_size": 151936,
        "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": true,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144, "rope_theta": 10000000}"#,
    ),
    (
        "qwen3.5-35b-a3b",
        r#"{"model_type": "qwen3_5_moe", "text_config": {"hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "vocab_size": 248320,
        "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144, "rope_theta": 10000000}}"#,
    ),
    (
        "qwen3.8-27b",
        r#"{"model_type": "qwen3_5", "text_config": {"hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25, "vocab_size": 248320,
        "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144, "rope_theta": 10000000}}"#,
    ),
    (
        "gemma-4-26b-a4b",
        r#"{"model_type": "gemma4", "text_config": {"hidden_size": 2816, "intermediate_size": 2112,
        "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "num_global_key_value_heads": 2, "global_head_dim": 512, "attention_k_eq_v": true, "sliding_window": 1024,
        "vocab_size": 262144, "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144, "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000}}}}"#,
    ),
    (
        "mimo-v2-flash",
        r#"{"model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "swa_num_key_value_heads": 8, "sliding_window": 128, "partial_rotary_factor": 0.334,
        "attention_value_scale": 0.707, "vocab_size": 152576,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 262144, "rope_theta": 5000000, "swa_rope_theta": 10000}"#,
    ),
    (
        "step-3.5-flash",
        r#"{"model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
        "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128, "sliding_window": 512,
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
        "use_head_wise_attn_gate": true, "vocab_size": 128896,
        "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
        "moe_router_scaling_factor": 3.0, "max_position_embeddings": 262144,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention"],
        "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4,
        1e4, 5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4, 5e6, 1e4, 1e4, 1e4, 5e6,
        1e4, 1e4, 1e4, 5e6],
        "partial_rotary_factors": [0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5, 1, 1, 1,
        0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5],
        "moe_layers_enum": [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26,
        27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44]}"#,
    ),
    (
        "glm-5.3-flash",
        r#"{"model_type": "glm5_next_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 45,
        "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0, "v_head_dim": 256, "linear_attn_config": {"num_heads": 64, "head_dim": 128,
        "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4, "vocab_size": 154880,
        "n_routed_experts": 288, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576}"#,
    ),
    (
        "nemotron-3-nano",
        r#"{"model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "use_conv_bias": true, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 262144}"#,
    ),
    (
        "ling-3.0-flash",
        r#"{"model_type": "bailing_hybrid", "hidden_size": 2560, "intermediate_size": 6144, "num_hidden_layers": 42,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "layer_group_size": 6,
        "short_conv_kernel_size": 4, "kda_safe_gate": true, "kda_lower_bound": -5.0, "q_lora_rank": null,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 157184, "num_experts": 512, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 768, "first_k_dense_replace": 2, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "expert_swiglu_limit_list":
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        4, 4, 4, 4, 4, 4, 4], "share_expert_swiglu_limit_list":
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        5, 5, 5, 5, 5, 5, 7, 7],
        "max_position_embeddings": 262144, "rope_theta": 6000000}"#,
    ),
    (
        "granite-4.0-h-small",
        r#"{"model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "position_embedding_type": "nope", "layer_types":
        ["mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
        "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
        "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
        "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba"],
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "vocab_size": 100352,
        "embedding_multiplier": 12, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
        "logits_scaling": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}"#,
    ),
    (
        "qwen3.8-flash-next",
        r#"{"model_type": "qwen4_exp", "text_config": {"hidden_size": 2560, "num_hidden_layers": 48,
        "num_attention_heads": 24,
        "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "vocab_size": 248320,
        "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid",
        "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4,
        "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20000000, "eos_token_id": 248046,
        "indexer_n_heads": 4, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
        "max_position_embeddings": 262144, "rope_theta": 10000000}}"#,
    ),
];

/// The known names.
pub fn names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|(name, _)| *name)
}

/// The text of that model's `config.json`, as far as it says its dimensions. Errors: as [`shape`].
pub fn config(name: &str) -> Result<&'static str> {
    let found = SHAPES.iter().find(|(n, _)| *n == name).map(|(_, json)| *json);
    found.ok_or_else(|| {
        Error::Invalid(format!("shape `{name}` is not known; known are {}", names().collect::<Vec<_>>().join(", ")))
    })
}

/// The model of that name, cut to its first `layers` layers if given.
///
/// Errors: `Error::Invalid` naming the known shapes, or the number of layers there are.
pub fn shape(name: &str, layers: Option<usize>) -> Result<ModelConfig> {
    let mut model = super::parse(config(name)?)?;
    if let Some(layers) = layers {
        if layers == 0 || layers > model.layers.len() {
            return Err(Error::Invalid(format!(
                "{name} has {} layers: --layers {layers} cannot be taken from it",
                model.layers.len()
            )));
        }
        model.layers.truncate(layers);
    }
    Ok(model)
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_shape_parses() {
        for name in super::names() {
            let model = super::shape(name, Some(5)).unwrap();
            assert!(model.layers.len() == 5, "{name}");
            assert_eq!(model.moe().is_none(), name == "qwen3.8-27b", "{name}");
        }
    }
}
