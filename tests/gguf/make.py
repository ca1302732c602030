"""GGUF files for tests, made by the `gguf` package: an implementation of the format that is not ours.

    make.py model FIXTURE OUT TYPE[,EXPERT_TYPE...] [--split N] [--fuse] [--old] [--config JSON]
                              the fixture's weights; OUT.gguf, and what its blocks stand for: OUT/model.safetensors;
                              fields of its config replaced;
                              gate and up of experts in one tensor; the delta rule's projections in one, as the oldest
                              files of Qwen3-Next
    make.py vocabulary IN OUT the tokenizer of a GGUF file that has nothing else, in a file that looks like a model
    make.py blocks OUT        random blocks of every type, each beside what `gguf` dequantizes them to

Several types are given to the matrices of experts in turn, so that they differ from layer to layer and from gate to
up to down.
"""

import argparse
import json
import pathlib
import re
import shutil
import struct
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

ARCHITECTURES = {
    "qwen3_moe": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
    "deepseek_v2": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "deepseek_v3": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "glm_moe_dsa": ("glm-dsa", gguf.MODEL_ARCH.GLM_DSA),
    "deepseek_v32": ("deepseek32", gguf.MODEL_ARCH.GLM_DSA),  # whose names it has
    "qwen2_moe": ("qwen2moe", gguf.MODEL_ARCH.QWEN2MOE),
    "mixtral": ("llama", gguf.MODEL_ARCH.LLAMA),
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "olmoe": ("olmoe", gguf.MODEL_ARCH.OLMOE),
    "glm4_moe": ("glm4moe", gguf.MODEL_ARCH.GLM4_MOE),
    "minimax_m2": ("minimax-m2", gguf.MODEL_ARCH.MINIMAXM2),
    "llama": ("llama", gguf.MODEL_ARCH.LLAMA),
    "gpt_oss": ("gpt-oss", gguf.MODEL_ARCH.GPT_OSS),
    "qwen3_next": ("qwen3next", gguf.MODEL_ARCH.QWEN3NEXT),
    "qwen3_5_moe_text": ("qwen35moe", gguf.MODEL_ARCH.QWEN35MOE),
    "qwen3_5_text": ("qwen35", gguf.MODEL_ARCH.QWEN35),
    "qwen3_vl_moe_text": ("qwen3vlmoe", gguf.MODEL_ARCH.QWEN3VLMOE),
    "qwen3_vl_text": ("qwen3vl", gguf.MODEL_ARCH.QWEN3VL),
    "glm4_moe_lite": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "mistral4": ("mistral4", gguf.MODEL_ARCH.MISTRAL4),
    "ernie4_5_moe": ("ernie4_5-moe", gguf.MODEL_ARCH.ERNIE4_5_MOE),
    # llama.cpp knows it and the package does not; these tensors have the same names.
    "hy_v3": ("hy_v3", gguf.MODEL_ARCH.EXAONE_MOE),
    "mimo_v2_flash": ("mimo2", gguf.MODEL_ARCH.MIMO2),
    "step3p5": ("step35", gguf.MODEL_ARCH.STEP35),
    "gemma4_text": ("gemma4", gguf.MODEL_ARCH.GEMMA4),
    "llama4_text": ("llama4", gguf.MODEL_ARCH.LLAMA4),
    # As hy_v3.
    "laguna": ("laguna", gguf.MODEL_ARCH.STEP35),
    "cohere2_moe": ("cohere2moe", gguf.MODEL_ARCH.DEEPSEEK2),
    "qwen4_exp_text": ("qwen4exp", gguf.MODEL_ARCH.QWEN35MOE),
    "lfm2_moe": ("lfm2moe", gguf.MODEL_ARCH.LFM2MOE),
    "kimi_linear": ("kimi-linear", gguf.MODEL_ARCH.KIMI_LINEAR),
    "nemotron_h": ("nemotron_h_moe", gguf.MODEL_ARCH.NEMOTRON_H_MOE),
    "granitemoehybrid": ("granitehybrid", gguf.MODEL_ARCH.GRANITE_HYBRID),
    "minimax_m3_vl_text": ("minimax-m3", gguf.MODEL_ARCH.GLM4_MOE),
    "deepseek_v4": ("deepseek4", gguf.MODEL_ARCH.DEEPSEEK2),
    "glm5_next_text": ("glm5-next", gguf.MODEL_ARCH.KIMI_LINEAR),
    "bailing_hybrid": ("bailingmoe3", gguf.MODEL_ARCH.KIMI_LINEAR),
}
# All that DeepSeek-V4 has outside of its experts.
DEEPSEEK4 = {
    "embed.weight": "token_embd",
    "norm.weight": "output_norm",
    "head.weight": "output",
    "hc_head_fn": "output_hc_fn",
    "hc_head_base": "output_hc_base",
    "hc_head_scale": "output_hc_scale",
    **{f"hc_{part}_{of}": f"hc_{part}_{of}" for part in ("attn", "ffn") for of in ("fn", "base", "scale")},
    "attn.attn_sink": "attn_sinks",
    "attn.wq_a.weight": "attn_q_a",
    "attn.wq_b.weight": "attn_q_b",
    "attn.q_norm.weight": "attn_q_a_norm",
    "attn.wkv.weight": "attn_kv",
    "attn.kv_norm.weight": "attn_kv_a_norm",
    "attn.wo_a.weight": "attn_output_a",
    "attn.wo_b.weight": "attn_output_b",
    "attn.compressor.ape": "attn_compressor_ape",
    "attn.compressor.wkv.weight": "attn_compressor_kv",
    "attn.compressor.wgate.weight": "attn_compressor_gate",
    "attn.compressor.norm.weight": "attn_compressor_norm",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b",
    "attn.indexer.weights_proj.weight": "indexer.proj",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm",
    "attn_norm.weight": "attn_norm",
    "ffn_norm.weight": "ffn_norm",
    "ffn.gate.weight": "ffn_gate_inp",
    "ffn.gate.bias": "exp_probs_b",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp",
    "ffn.shared_experts.w2.weight": "ffn_down_shexp",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp",
}
# What else llama.cpp calls something that the package does not know.
NAMES = {
    "hyper_connection_mixer.hc_norm": "output_hc_norm",
    "hyper_connection_mixer.input_mix_weight_down": "output_hc_down",
    "hyper_connection_mixer.input_mix_weight_up": "output_hc_up",
    "attn_hyper_connection.hc_norm": "hc_attn_norm",
    "attn_hyper_connection.input_mix_weight_down": "hc_attn_down",
    "attn_hyper_connection.input_mix_weight_up": "hc_attn_up",
    "attn_hyper_connection.block_inject_weight": "hc_attn_inject",
    "mlp_hyper_connection.hc_norm": "hc_ffn_norm",
    "mlp_hyper_connection.input_mix_weight_down": "hc_ffn_down",
    "mlp_hyper_connection.input_mix_weight_up": "hc_ffn_up",
    "mlp_hyper_connection.block_inject_weight": "hc_ffn_inject",
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query",
    "ple.norm_conv": "ple_norm_conv",
    "ple.conv1d": "ple_conv1d",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.index_q_proj": "indexer.q_proj",
    "self_attn.index_k_proj": "indexer.k_proj",
    "self_attn.index_q_norm": "indexer.q_norm",
    "self_attn.index_k_norm": "indexer.k_norm",
    "block_sparse_moe.shared_experts.gate_proj": "ffn_gate_shexp",
    "block_sparse_moe.shared_experts.up_proj": "ffn_up_shexp",
    "block_sparse_moe.shared_experts.down_proj": "ffn_down_shexp",
}
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe", "qwen4exp")
LATENTS = ("deepseek2", "mistral4", "glm-dsa", "deepseek32")
# Their converters keep the layer that drafts further tokens.
DRAFTS = ("glm4moe", "hy_v3")
# Tensors of a layer that are no weight or bias of something.
ALONE = {
    "layer_scalar": "layer_output_scale.weight",
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
    "D": "ssm_d",
}
PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def read_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw = data[8 + size + start : 8 + size + end]
        if entry["dtype"] in ("U8", "I64"):
            yield name, np.frombuffer(raw, "u1" if entry["dtype"] == "U8" else "<i8").reshape(entry["shape"])
            continue
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, "<f4")
        yield name, values.reshape(entry["shape"]).astype(np.float32)


def write_safetensors(path, tensors):
    header, data = {}, []
    at = 0
    for name, values in tensors.items():
        dtype = {"u1": "U8", "i8": "I64"}.get(values.dtype.str[1:], "F32")
        raw = (values.astype("<f4") if dtype == "F32" else values).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def text_side(fixture, name):
    """The fixture's own file, or that of the one whose tokenizer all have."""
    return fixture / name if (fixture / name).exists() else fixture.parent / "qwen3_moe" / name


def byte_tokens(tokenizer):
    vocab = dict(tokenizer["model"]["vocab"])
    special = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    by_id = {i: t for t, i in {**vocab, **special}.items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
    kinds = [3 if t in special else 1 if i in by_id else 5 for i, t in enumerate(tokens)]
    return tokens, kinds, special


def renamed(arch, c):
    """The config with its fields under the names that most configs have; lists are of layers."""
    windowed = [kind == "sliding_attention" for kind in c.get("layer_types", [])]
    by_kind = lambda full, sliding: [sliding if windows else full for windows in windowed]
    if arch == "ernie4_5-moe":
        return c | {"num_experts": c["moe_num_experts"], "num_experts_per_tok": c["moe_k"]}
    if arch == "mimo2":
        windowed = c["hybrid_layer_pattern"]
        return c | {
            "windowed": windowed,
            "num_key_value_heads": by_kind(c["num_key_value_heads"], c["swa_num_key_value_heads"]),
            "rms_norm_eps": c["layernorm_epsilon"],
        }
    if arch == "step35":
        other = c["attention_other_setting"]
        full, sliding = c["rope_theta"][:2]
        return c | {
            "windowed": windowed,
            "num_attention_heads": by_kind(c["num_attention_heads"], other["num_attention_heads"]),
            "num_key_value_heads": by_kind(c["num_attention_groups"], other["num_attention_groups"]),
            "num_experts": c["moe_num_experts"],
            "num_experts_per_tok": c["moe_top_k"],
            "shared_expert_intermediate_size": c["share_expert_dim"],
            "rope_theta": full,
            "swa_rope_theta": sliding,
        }
    if arch == "laguna":
        # The converter writes no pattern.
        return c | {"num_attention_heads": c["num_attention_heads_per_layer"]}
    if arch == "llama4":
        return c | {"intermediate_size": c["intermediate_size_mlp"], "moe_intermediate_size": c["intermediate_size"]}
    if arch == "cohere2moe":
        return c | {
            "windowed": windowed,
            "intermediate_size": c["prefix_dense_intermediate_size"],
            "moe_intermediate_size": c["intermediate_size"],
            "shared_expert_intermediate_size": c["intermediate_size"] * c["num_shared_experts"],
        }
    if arch == "lfm2moe":
        heads = c["num_key_value_heads"]
        kinds = c["layer_types"]
        return c | {
            "num_key_value_heads": [heads if kind == "full_attention" else 0 for kind in kinds],
            "rms_norm_eps": c["norm_eps"],
        }
    if arch == "kimi-linear":
        full = [layer + 1 in c["linear_attn_config"]["full_attn_layers"] for layer in range(c["num_hidden_layers"])]
        return c | {
            "num_key_value_heads": [int(attends) for attends in full],
            "num_experts_per_tok": c["num_experts_per_token"],
            "max_position_embeddings": c["model_max_length"],
        }
    if arch == "bailingmoe3":
        group, layers = c["layer_group_size"], c["num_hidden_layers"]
        attends = [(layer + 1) % group == 0 or layer >= layers // group * group for layer in range(layers)]
        return c | {
            "num_key_value_heads": [int(attending) for attending in attends],
            "shared_expert_intermediate_size": c["moe_intermediate_size"],
        }
    if arch == "nemotron_h_moe":
        blocks = c["hybrid_override_pattern"]
        return c | {
            "num_key_value_heads": [c["num_key_value_heads"] * (block == "*") for block in blocks],
            "intermediate_size": [c["moe_intermediate_size"] * (block == "E") for block in blocks],
            "shared_expert_intermediate_size": c["moe_shared_expert_intermediate_size"],
            "rms_norm_eps": c["layer_norm_epsilon"],
            "ssm": [c[f] for f in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")],
        }
    if arch == "granitehybrid":
        attends = [kind == "attention" for kind in c["layer_types"]]
        return c | {
            "num_key_value_heads": [c["num_key_value_heads"] * attending for attending in attends],
            "shared_expert_intermediate_size": c["shared_intermediate_size"],
            "ssm": [c["mamba_" + f] for f in ("n_heads", "d_head", "d_state", "n_groups", "d_conv")],
        }
    if arch == "minimax-m3":
        return c | {"intermediate_size": c["dense_intermediate_size"], "moe_intermediate_size": c["intermediate_size"]}
    if arch == "gemma4":
        return c | {
            "windowed": windowed,
            "num_key_value_heads": by_kind(c["num_global_key_value_heads"], c["num_key_value_heads"]),
            "num_experts_per_tok": c["top_k_experts"],
            "head_dim": c["global_head_dim"],
            "head_dim_swa": c["head_dim"],
        }
    return c


def add_ngrams(w, c, tensors):
    """What the metadata of qwen4exp have of n-grams, without their tensors."""
    count = lambda key, value: w.add_uint32("qwen4exp." + key, value)
    list_of = lambda key, values, kind: w.add_key_value("qwen4exp." + key, values, gguf.GGUFValueType.ARRAY, kind)
    integers = lambda name: next(values for key, values in tensors.items() if key.endswith(name)).tolist()
    list_of("ple.layers", [layer - 1 for layer in c["ple_layer_ids"]], gguf.GGUFValueType.INT32)
    count("ple.ngram_size", c["ngram_size"])
    count("ple.heads_per_ngram", c["heads_per_ngram"])
    count("ple.conv_kernel", c["ple_conv_kernel_size"])
    count("ple.eos_token_id", c["eos_token_id"])
    count("ple.image_token_id", c["image_token_id"])
    count("embedding_length_per_layer_input", c["ple_embed_dim"] // ((c["ngram_size"] - 1) * c["heads_per_ngram"]))
    for key, name in [
        ("ple.layer_multipliers", "layer_multipliers"),
        ("ple.head_offsets", "ngram_heads_offsets"),
        ("ple.head_vocab_sizes", "ngram_heads_vocab_sizes"),
    ]:
        list_of(key, integers(name), gguf.GGUFValueType.UINT64)


def add_metadata(w, arch, c, fixture, experts):
    tokenizer = json.loads(text_side(fixture, "tokenizer.json").read_text())
    template = json.loads(text_side(fixture, "tokenizer_config.json").read_text()).get("chat_template", "")
    tokens, kinds, special = byte_tokens(tokenizer)
    drafts = c.get("num_nextn_predict_layers", 0) if arch in DRAFTS else 0
    w.add_block_count(c["num_hidden_layers"] + drafts)
    if drafts:
        w.add_nextn_predict_layers(drafts)
    w.add_embedding_length(c["hidden_size"])
    w.add_context_length(c["max_position_embeddings"])
    if "intermediate_size" in c:
        w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    if "rms_norm_eps" in c:
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    rope = c.get("rope_parameters") or c
    full = rope.get("full_attention", rope)
    if "rope_theta" in full:
        w.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope or "swa_rope_theta" in c:
        w.add_rope_freq_base_swa(rope.get("sliding_attention", {"rope_theta": c.get("swa_rope_theta")})["rope_theta"])
    if "windowed" in c:
        w.add_sliding_window_pattern(c["windowed"])
    w.add_vocab_size(c["vocab_size"])
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(c["num_experts_per_tok"])
    if "moe_intermediate_size" in c:
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    if arch == "minimax-m2":
        w.add_expert_feed_forward_length(c["intermediate_size"])
        w.add_rope_dimension_count(c["rotary_dim"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch in ("deepseek4", "glm5-next"):
        w.add_q_lora_rank(c["q_lora_rank"])
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_uint32(f"{arch}.hyper_connection.count", c["hc_mult"])
        w.add_uint32(f"{arch}.hyper_connection.sinkhorn_iterations", c["hc_sinkhorn_iters"])
        w.add_float32(f"{arch}.hyper_connection.epsilon", c["hc_eps"])
        for part in ("exp", "shexp"):
            w.add_array(f"{arch}.swiglu_clamp_{part}", [float(c["swiglu_limit"])] * c["num_hidden_layers"])
    if arch == "deepseek4":
        w.add_rope_dimension_count(c["qk_rope_head_dim"])
        w.add_sliding_window(c["sliding_window"])
        for key, field in [
            ("attention.output_group_count", "o_groups"),
            ("attention.output_lora_rank", "o_lora_rank"),
            ("hash_layer_count", "num_hash_layers"),
        ]:
            w.add_uint32(f"deepseek4.{key}", c[field])
        w.add_float32("deepseek4.attention.compress_rope_freq_base", c["compress_rope_theta"])
        w.add_array("deepseek4.attention.compress_ratios", c["compress_ratios"])
    if arch == "glm5-next":
        w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        w.add_kv_lora_rank(c["kv_lora_rank"])
        w.add_rope_dimension_count(0)
        w.add_key_length_mla(c["qk_nope_head_dim"])
        w.add_value_length_mla(c["v_head_dim"])
        w.add_leading_dense_block_count(c["mlp_layer_types"].count("dense"))
        for key, field in [
            ("kda.head_dim", "linear_head_dim"),
            ("attention.indexer.kpool", "index_kpool"),
        ]:
            w.add_uint32(f"glm5-next.{key}", c[field])
        w.add_bool("glm5-next.attention.indexer.kpool_select_tail", c["index_kpool_always_select_tail"])
        w.add_float32("glm5-next.kda.gate_lower_bound", c["linear_lower_bound"])
    if arch in ("bailingmoe3", "kimi-linear"):
        linear = c.get("linear_attn_config", c)
        w.add_ssm_conv_kernel(linear["short_conv_kernel_size"])
        w.add_uint32(f"{arch}.kda.head_dim", linear["head_dim"])
        w.add_kv_lora_rank(c["kv_lora_rank"])
        w.add_rope_dimension_count(c["qk_rope_head_dim"])
        w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        w.add_value_length_mla(c["v_head_dim"])
        w.add_leading_dense_block_count(c["first_k_dense_replace"])
        w.add_expert_shared_count(c["num_shared_experts"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_weights_norm(c["norm_topk_prob" if arch == "bailingmoe3" else "moe_renormalize"])
    if arch == "bailingmoe3":
        w.add_bool("bailingmoe3.kda.safe_gate", c["kda_safe_gate"])
        w.add_float32("bailingmoe3.kda.gate_lower_bound", c["kda_lower_bound"])
        w.add_expert_group_count(c["n_group"])
        w.add_expert_group_used_count(c["topk_group"])
    if arch == "kimi-linear":
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "ssm" in c:
        heads, dim, state, groups, conv = c["ssm"]
        w.add_ssm_conv_kernel(conv)
        w.add_ssm_inner_size(heads * dim)
        w.add_ssm_group_count(groups)
        w.add_ssm_state_size(state)
        w.add_ssm_time_step_rank(heads)
    if arch == "nemotron_h_moe":
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_expert_group_count(c["n_group"])
        w.add_expert_group_used_count(c["topk_group"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "granitehybrid":
        w.add_embedding_scale(c["embedding_multiplier"])
        w.add_residual_scale(c["residual_multiplier"])
        w.add_attention_scale(c["attention_multiplier"])
        w.add_logit_scale(c["logits_scaling"])
        w.add_rope_scaling_finetuned(False)
    if arch == "lfm2moe":
        w.add_shortconv_l_cache(c["conv_L_cache"])
        w.add_leading_dense_block_count(c["num_dense_layers"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "minimax-m3":
        sparse = c["sparse_attention_config"]
        w.add_rope_dimension_count(c["rotary_dim"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_weights_norm(True)
        w.add_leading_dense_block_count(c["moe_layer_freq"].index(1))
        w.add_indexer_head_count(sparse["sparse_num_index_heads"])
        w.add_indexer_key_length(sparse["sparse_index_dim"])
        w.add_indexer_top_k(sparse["sparse_topk_blocks"])
        w.add_uint32("minimax-m3.attention.indexer.block_size", sparse["sparse_block_size"])
        w.add_uint32("minimax-m3.attention.indexer.local_blocks", sparse["sparse_local_block"])
    if arch == "gpt-oss":
        w.add_expert_feed_forward_length(c["intermediate_size"])
    if arch in ("gpt-oss", "mimo2", "step35", "laguna", "cohere2moe", "gemma4"):
        w.add_sliding_window(c["sliding_window"])
    if arch == "mimo2":
        w.add_rope_dimension_count(int(head_dim * c["partial_rotary_factor"]))
        w.add_float32("mimo2.attention.value_scale", c["attention_value_scale"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_expert_group_count(c["n_group"])
        w.add_expert_group_used_count(c["topk_group"])
    if arch == "step35":
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_expert_weights_scale(c["moe_router_scaling_factor"])
        w.add_expert_weights_norm(c["norm_expert_weight"])
        w.add_leading_dense_block_count(int(c["moe_layers_enum"].split(",")[0]))
        w.add_swiglu_clamp_exp(c["swiglu_limits"])
        w.add_swiglu_clamp_shexp(c["swiglu_limits_shared"])
    if arch == "laguna":
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_expert_weights_scale(c["moe_routed_scaling_factor"])
        w.add_expert_weights_norm(True)
        w.add_leading_dense_block_count(c["mlp_layer_types"].index("sparse"))
        w.add_rope_dimension_count(int(head_dim * full["partial_rotary_factor"]))
        w.add_rope_dimension_count_swa(int(head_dim * rope["sliding_attention"]["partial_rotary_factor"]))
    if arch == "llama4":
        w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
        w.add_rope_dimension_count(head_dim)
    if arch == "cohere2moe":
        softmax = c["expert_selection_fn"] == "softmax"
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID)
        w.add_layer_norm_eps(c["layer_norm_eps"])
        w.add_logit_scale(c["logit_scale"])
        w.add_leading_dense_block_count(c["first_k_dense_replace"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_expert_shared_count(c["num_shared_experts"])
        w.add_rope_dimension_count(head_dim)
        w.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if arch == "gemma4":
        w.add_uint32("gemma4.attention.shared_kv_layers", c["num_kv_shared_layers"])
        w.add_uint32("gemma4.embedding_length_per_layer_input", c["hidden_size_per_layer_input"])
        w.add_key_length_swa(c["head_dim_swa"])
        w.add_value_length_swa(c["head_dim_swa"])
        w.add_rope_dimension_count(head_dim)
        w.add_rope_dimension_count_swa(c["head_dim_swa"])
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
    if arch in DELTA_NETS:
        w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        w.add_ssm_state_size(c["linear_key_head_dim"])
        w.add_ssm_group_count(c["linear_num_key_heads"])
        w.add_ssm_time_step_rank(c["linear_num_value_heads"])
        w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
        w.add_full_attention_interval(c.get("full_attention_interval", 4))
        w.add_rope_dimension_count(int(head_dim * (c.get("rope_parameters") or c)["partial_rotary_factor"]))
    if arch == "qwen4exp":
        full = [kind == "full_attention" for kind in c["layer_types"]]
        w.add_array("qwen4exp.attention.recurrent_layers", [not attends for attends in full])
        w.add_array("qwen4exp.attention.compress_ratios", [c["indexer_compress_ratio"] * attends for attends in full])
        w.add_indexer_head_count(c["indexer_n_heads"])
        w.add_indexer_key_length(c["indexer_head_dim"])
        w.add_indexer_top_k(c["indexer_budget"])
        w.add_uint32("qwen4exp.hyper_connection.count", c["hc_count"])
        w.add_uint32("qwen4exp.hyper_connection.low_rank", c["hc_lowrank"])
    if "shared_expert_intermediate_size" in c:
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if arch == "glm4moe":
        w.add_rope_dimension_count(int(head_dim * c["partial_rotary_factor"]))
        w.add_leading_dense_block_count(c["first_k_dense_replace"])
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_expert_group_count(c["n_group"])
        w.add_expert_group_used_count(c["topk_group"])
    if arch == "hy_v3":
        w.add_expert_shared_feed_forward_length(c["moe_intermediate_size"] * c["num_shared_experts"])
        w.add_expert_weights_scale(c["router_scaling_factor"])
        w.add_expert_weights_norm(c["route_norm"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "ernie4_5-moe":
        w.add_interleave_moe_layer_step(c["moe_layer_interval"])
        w.add_leading_dense_block_count(c["moe_layer_start_index"])
        w.add_expert_shared_count(c["moe_num_shared_experts"])
        # Not the width of the shared experts, but what the converter writes.
        w.add_expert_shared_feed_forward_length(c["intermediate_size"] // c["num_key_value_heads"])
    if arch not in LATENTS:
        w.add_head_count_kv(c["num_key_value_heads"])
        if arch != "lfm2moe":  # whose config does not say
            w.add_key_length(head_dim)
            w.add_value_length(c.get("v_head_dim", head_dim))
    else:
        w.add_head_count_kv(1)
        w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
        w.add_value_length(c["kv_lora_rank"])
        w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        w.add_value_length_mla(c["v_head_dim"])
        if c["q_lora_rank"]:
            w.add_q_lora_rank(c["q_lora_rank"])
        w.add_kv_lora_rank(c["kv_lora_rank"])
        w.add_rope_dimension_count(c["qk_rope_head_dim"])
        w.add_leading_dense_block_count(c["first_k_dense_replace"])
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        # The first files of GLM-4.7-Flash do not say, nor do Mistral's.
        if c["model_type"] not in ("glm4_moe_lite", "mistral4"):
            v3 = c["model_type"] != "deepseek_v2"
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if v3 else gguf.ExpertGatingFuncType.SOFTMAX)
        if c["n_group"] and c.get("topk_method") != "greedy":
            w.add_expert_group_count(c["n_group"])
            w.add_expert_group_used_count(c["topk_group"])
    if "index_topk" in c:
        w.add_indexer_head_count(c["index_n_heads"])
        w.add_indexer_key_length(c["index_head_dim"])
        w.add_indexer_top_k(c["index_topk"])
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if "llama_4_scaling_beta" in rope:
        w.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope.get("rope_type", rope.get("type")) == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        w.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "mscale_all_dim" in rope:
            w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    for key, add in [("bos_token_id", w.add_bos_token_id), ("eos_token_id", w.add_eos_token_id)]:
        if isinstance(c.get(key), int):
            add(c[key])
    w.add_add_bos_token(False)
    w.add_chat_template(template)


def mxfp4_blocks(blocks, scales):
    """From pairs side by side to halves 16 apart, each block behind its scale."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    data = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
    return data.reshape(*blocks.shape[:2], -1)


def llama3_factors(rope, dim):
    """What llama.cpp's converter makes of the frequencies that Llama 3 stretches by their wavelength."""
    frequencies = 1.0 / rope["theta"] ** (np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    with np.errstate(divide="ignore"):  # no ramp between equal factors
        kept = np.clip((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0, 1)
    return 1 / ((1 - kept) / rope["factor"] + kept)


def delta_orders(c, tiled):
    """Where the rows of the delta rule's projections and its heads go: what the file has at i is the checkpoint's
    order[i]."""
    keys, heads, key_dim, dim = (
        c["linear_" + name] for name in ["num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"]
    )
    each = heads // keys
    if not tiled:
        groups = np.arange(2 * keys * key_dim + 2 * heads * dim).reshape(keys, -1)
        q, k, v, z = np.split(groups, np.cumsum([key_dim, key_dim, each * dim]), axis=1)
        return {"qkv": np.concatenate([part.ravel() for part in (q, k, v)]), "z": z.ravel()}
    tile = lambda width: np.arange(heads * width).reshape(keys, each, width).swapaxes(0, 1).ravel()
    before = 2 * keys * key_dim
    return {"heads": tile(1), "values": tile(dim), "channels": np.concatenate([np.arange(before), before + tile(dim)])}


def model(fixture, out, types, split, fuse, old, changes):
    fixture, out = pathlib.Path(fixture), pathlib.Path(out)
    config = json.loads((fixture / "config.json").read_text())
    config.get("text_config", config).update(changes)
    c = config | config.get("text_config", {})
    arch, model_arch = ARCHITECTURES[c["model_type"]]
    c = renamed(arch, c)
    experts = c.get("num_experts", c.get("n_routed_experts", c.get("num_local_experts", 0)))
    layers = c["num_hidden_layers"]
    tensors = dict(t for f in sorted(fixture.glob("model*.safetensors")) for t in read_safetensors(f))
    # Layers beyond the last draft tokens; what is computed from the config is not converted.
    keep = layers + (c.get("num_nextn_predict_layers", 0) if arch in DRAFTS else 0)
    beyond = lambda name: (
        "rotary_emb" in name
        or name.startswith(("mtp.", "model.visual."))
        or (match := re.match(r"model\.layers\.(\d+)\.", name))
        and int(match[1]) >= keep
    )
    tensors = {name: values for name, values in tensors.items() if not beyond(name)}
    table = gguf.get_tensor_name_map(model_arch, keep)

    def name_of(stem):
        stem = stem.replace("language_model.", "").replace(".final_layernorm", ".shared_head.norm")
        layer = re.search(r"layers\.(\d+)", stem)
        if arch == "bailingmoe3":
            stem = stem.replace(".attention.", ".self_attn.").replace("self_attn.dense", "self_attn.o_proj")
            stem = stem.replace("word_embeddings", "embed_tokens")
            if stem.endswith("self_attn.f_proj"):
                return f"blk.{layer[1]}.ssm_f_a"
            if stem.endswith("self_attn.g_proj"):
                attends = c["num_key_value_heads"][int(layer[1])]
                return f"blk.{layer[1]}.{'attn_gate' if attends else 'ssm_g_a'}"
        part = re.sub(r"^model\.(layers\.\d+\.)?", "", stem)
        return (f"blk.{layer[1]}." if layer else "") + NAMES[part] if part in NAMES else table.get_name(stem)

    options = {"split_max_tensors": split} if split else {}
    w = gguf.GGUFWriter(out.with_suffix(".gguf"), arch, **options)
    add_metadata(w, arch, c, fixture, experts)
    if "ple_layer_ids" in c:
        add_ngrams(w, c, tensors)
    stand_for = {}

    def add(name, values, kind):
        """Quantizes and adds one tensor; what it then stands for comes back."""
        if values.ndim < 2 or kind == Type.F32:
            w.add_tensor(name, values.astype(np.float32))
            return values
        # Rows that blocks do not fill are of another type.
        if kind == Type.F16 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            w.add_tensor(name, values.astype(np.float16))
            return values.astype(np.float16).astype(np.float32)
        codes = random_blocks(values, kind) if kind in MADE_UP else gguf.quants.quantize(values, kind)
        w.add_tensor(name, codes, raw_dtype=kind)
        return gguf.quants.dequantize(codes, kind)

    def reorder(name, key, values, kind, order, axis=0):
        back = add(name, np.ascontiguousarray(values.take(order, axis).squeeze()), kind).reshape(values.shape)
        stand_for[key] = back.take(np.argsort(order), axis)

    types = [Type[t] for t in types.split(",")]
    rope = c.get("rope_scaling") or {}
    factors = None
    if rope.get("rope_type") == "llama3":
        # Step's full layers rotate half of a head, and the converter fills up.
        dim = c["head_dim"] // 2 if arch == "step35" else c["head_dim"]
        factors = np.ones(c["head_dim"] // 2)
        factors[: dim // 2] = llama3_factors(rope | {"theta": c["rope_theta"]}, dim)
    if arch == "gemma4":
        turning = int(c["head_dim"] * c["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
        factors = np.repeat([1.0, 1e30], [turning, c["head_dim"] // 2 - turning])
    if factors is not None:
        w.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    orders = delta_orders(c, arch != "qwen3next") if arch in DELTA_NETS else {}
    turn = 0
    fused = {}
    for first in [name for name in tensors if ".experts.0." in name]:
        head, part = re.match(r"(.*\.experts)\.0\.(\w+)\.weight", first).groups()
        keys = [key for e in range(experts) if (key := f"{head}.{e}.{part}.weight") in tensors]
        stacked = np.stack([tensors.pop(k) for k in keys])
        if changes.get("moe_intermediate_size", 0) > min(stacked.shape[1:]):  # the same ones twice
            axis = 2 if part == "down_proj" else 1
            stacked = np.concatenate([stacked, stacked], axis) * (0.5 if axis == 2 else 1)
        layer = re.search(r"layers\.(\d+)", head)[1]
        if fuse and part in ("gate_proj", "up_proj"):
            fused[head, part] = keys, stacked
            if (head, "gate_proj") in fused and (head, "up_proj") in fused:
                both = [fused[head, part] for part in ("gate_proj", "up_proj")]
                values = add(
                    f"blk.{layer}.ffn_gate_up_exps.weight",
                    np.concatenate([stacked for _, stacked in both], 1),
                    types[0],
                )
                for (keys, _), half in zip(both, np.split(values, 2, 1)):
                    stand_for.update(zip(keys, half))
            continue
        name = name_of(f"{head}.{part}") or f"blk.{layer}.ffn_{PARTS[part]}_exps"
        values = add(name + ".weight", stacked, types[turn % len(types)])
        stand_for.update(zip(keys, values))
        turn += 1
    shards = [name for name in tensors if ".ngram_embedding.shard_" in name]
    if shards:
        shards.sort(key=lambda name: int(re.search(r"shard_(\d+)", name)[1]))
        parts = [tensors.pop(name) for name in shards]
        whole = add("per_layer_token_embd.weight", np.concatenate(parts), types[0])
        stand_for.update(zip(shards, np.split(whole, np.cumsum([len(part) for part in parts])[:-1])))
    for key, values in tensors.items():
        stem, _, suffix = key.rpartition(".")
        layer = re.search(r"layers\.(\d+)", key)
        block = f"blk.{layer[1]}" if layer else ""
        if arch == "glm5-next" and suffix.startswith(("hc_", "index_kpool_compress_")):
            name = suffix.replace("index_kpool_compress_", "indexer_compressor_")
            stand_for[key] = add(f"{block}.{name}.weight", values, Type.F32)
            continue
        if arch == "deepseek4":
            name = DEEPSEEK4[re.sub(r"^layers\.\d+\.", "", key)]
            name = (f"{block}." if layer else "") + name + (".bias" if name == "exp_probs_b" else ".weight")
            if values.dtype == np.int64:
                w.add_tensor(name, values.astype(np.int32))
                stand_for[key] = values
                continue
            small = key.endswith(("ape", "ffn.gate.weight")) or ".hc_" in f".{key}"
            stand_for[key] = add(name, values, Type.F32 if small else types[0])
            continue
        if suffix in ("e_score_correction_bias", "router_bias", "expert_bias"):
            has_ending = suffix != "expert_bias" or arch in ("lfm2moe", "bailingmoe3")
            name = f"{block}.exp_probs_b" + (".bias" if has_ending else "")
            stand_for[key] = add(name, values.squeeze(), Type.F32).reshape(values.shape)
            continue
        if values.dtype == np.int64:  # is metadata
            stand_for[key] = values
            continue
        if suffix in ALONE:
            stand_for[key] = add(f"{block}.{ALONE[suffix]}", values, Type.F32)
            continue
        if suffix in ("sinks", "attention_sink_bias"):
            stand_for[key] = add(f"{block}.attn_sinks.weight", values, Type.F32)
            continue
        if stem.endswith("index_qk_proj"):
            queries = c["indexer_n_heads"] * c["indexer_head_dim"]
            back = [
                add(f"{block}.indexer.{part}_proj.weight", rows, types[0])
                for part, rows in zip("qk", np.split(values, [queries]))
            ]
            stand_for[key] = np.concatenate(back)
            continue
        if suffix == "gate_up_proj" and arch == "qwen4exp":
            halves = zip(("gate", "up"), np.split(values, 2, 1))
            back = [add(f"{block}.ffn_{part}_exps.weight", half, types[0]) for part, half in halves]
            stand_for[key] = np.concatenate(back, 1)
            continue
        if stem.endswith(("mixer.norm", "mamba.norm")):  # of groups
            rows = values.reshape(c["ssm"][3], -1)
            stand_for[key] = add(f"{block}.ssm_norm.weight", rows, Type.F32).reshape(values.shape)
            continue
        if stem.endswith("_linear") and "input" in stem:  # Granite's gate, then up
            end = "shexp" if values.ndim == 2 else "exps"
            halves = zip(("gate", "up"), np.split(values, 2, values.ndim - 2))
            back = [add(f"{block}.ffn_{part}_{end}.weight", half, types[0]) for part, half in halves]
            stand_for[key] = np.concatenate(back, values.ndim - 2)
            continue
        if stem.endswith(".experts") and arch in ("mistral4", "gemma4", "qwen4exp"):
            part = suffix.removesuffix("_proj")
            stand_for[key] = add(f"{block}.ffn_{part}_exps.weight", values, types[0])
            continue
        if stem.endswith(".experts") and arch == "llama4":  # turned, gate and up side by side
            parts = suffix.removesuffix("_proj").split("_")
            halves = np.split(np.ascontiguousarray(values.swapaxes(1, 2)), len(parts), 1)
            back = [add(f"{block}.ffn_{part}_exps.weight", half, types[0]) for part, half in zip(parts, halves)]
            stand_for[key] = np.ascontiguousarray(np.concatenate(back, 1).swapaxes(1, 2))
            continue
        if stem.endswith(".experts"):  # gpt-oss stacks them, gate and up alternating
            part, kind = re.match(r"(down|gate_up)_proj_(blocks|scales|bias)", suffix).groups()
            stand_for[key] = values
            for i, part in enumerate(part.split("_")):
                of = (lambda v: v) if part == "down" else (lambda v: v[:, i::2])
                if kind == "bias":
                    add(f"{block}.ffn_{part}_exps.bias", of(values), Type.F32)
                elif kind == "blocks":
                    data = mxfp4_blocks(of(values), of(tensors[key.replace("_blocks", "_scales")]))
                    w.add_tensor(f"{block}.ffn_{part}_exps.weight", data, raw_dtype=Type.MXFP4)
            continue
        if stem.endswith("kv_b_proj") and arch in (*LATENTS, "kimi-linear", "glm5-next", "bailingmoe3"):
            heads, v = c["num_attention_heads"], c["v_head_dim"]
            by_head = values.reshape(heads, -1, c["kv_lora_rank"])
            k_b, v_b = by_head[:, :-v], by_head[:, -v:]
            k_b = add(
                name_of(stem.replace("kv_b_proj", "k_b_proj")) + ".weight",
                np.ascontiguousarray(k_b.transpose(0, 2, 1)),
                types[0],
            )
            v_b = add(name_of(stem.replace("kv_b_proj", "v_b_proj")) + ".weight", np.ascontiguousarray(v_b), types[0])
            stand_for[key] = np.concatenate([k_b.transpose(0, 2, 1), v_b], 1).reshape(values.shape)
            continue
        is_norm = key.endswith("norm.weight") or ".ple.norm_" in key
        if (orders or arch in ("step35", "minimax-m3")) and is_norm and "linear_attn" not in key:
            add(name_of(stem) + ".weight", values + np.float32(1), Type.F32)
            stand_for[key] = values
            continue
        if key.endswith(".A_log"):
            order = orders.get("heads", np.arange(len(values)))
            rates = np.exp(values.astype(np.float64)).astype(np.float32)[order]
            # Of this one alone the converter keeps the sign.
            add(f"{block}.ssm_a", rates.reshape(-1, 1) if arch == "bailingmoe3" else -rates, Type.F32)
            stand_for[key] = values
            continue
        if key.endswith(".dt_bias"):
            reorder(f"{block}.ssm_dt.bias", key, values, Type.F32, orders.get("heads", np.arange(len(values))))
            continue
        if stem.endswith(".in_proj_qkvz") and old:
            stand_for[key] = add(f"{block}.ssm_in.weight", values, types[0])
            continue
        if stem.endswith(".in_proj_qkvz"):
            stand_for[key] = np.empty_like(values)
            for part, name in [("qkv", "attn_qkv"), ("z", "attn_gate")]:
                stand_for[key][orders[part]] = add(f"{block}.{name}.weight", values[orders[part]], types[0])
            continue
        if ".linear_attn." in key and "heads" in orders and not stem.endswith(".norm"):
            part = stem.rsplit(".", 1)[1]
            order = orders[
                {"in_proj_qkv": "channels", "conv1d": "channels", "in_proj_a": "heads", "in_proj_b": "heads"}.get(
                    part, "values"
                )
            ]
            kind = Type.F32 if part == "conv1d" else types[0]
            reorder(name_of(stem) + ".weight", key, values, kind, order, axis=1 if part == "out_proj" else 0)
            continue
        if arch == "llama" and re.search(r"self_attn\.[qk]_proj$", stem):
            # Halves of a head's rows become pairs.
            heads = c["num_attention_heads"] if "q_proj" in stem else c["num_key_value_heads"]
            pairs = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            back = add(name_of(stem) + ".weight", pairs, types[0])
            stand_for[key] = back.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            continue
        # llama.cpp keeps the router in F32 whatever the rest is, and no dimension of one row.
        kept = (
            ".gate.weight",
            ".router.weight",
            ".proj.weight",
            "shared_expert_gate.weight",
            ".conv1d.weight",
            ".conv.weight",
        )
        kind = Type.F32 if key.endswith(kept) or ".index_" in key else types[0]
        stand_for[key] = add(name_of(stem) + "." + suffix, values.squeeze(), kind).reshape(values.shape)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    for name in ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]:
        if text_side(fixture, name).exists():
            shutil.copyfile(text_side(fixture, name), out / name)
    write_safetensors(out / "model.safetensors", stand_for)


BLOCKS = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()
BLOCKS += "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S TQ1_0 TQ2_0".split()
# Where a block has its f16 scales: random bits there would be infinities.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ1_S": [0],
    "IQ1_M": [],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "MXFP4": [],
}


# Types that the package reads, but does not write; their halves begin so that weights have a mean of about zero.
MADE_UP = {
    Type.Q2_K: [1, 1.5],
    Type.Q3_K: [1],
    Type.Q4_K: [1, 7.5],
    Type.Q5_K: [1, 15.5],
    Type.Q6_K: [1],
    Type.IQ4_NL: [1],
    Type.IQ4_XS: [1],
    Type.IQ2_XXS: [1],
    Type.IQ2_XS: [1],
    Type.IQ2_S: [1],
    Type.IQ3_XXS: [1],
    Type.IQ3_S: [1],
    Type.IQ1_S: [1],
    Type.IQ1_M: [],
}


def put_quarters(data, scale):
    """Scales of IQ1_M: a quarter of each in four places."""
    for part in range(4):
        nibble = (scale.view(np.uint16) >> (4 * part) & 15).astype(np.uint8)
        data[..., 49 + 2 * part] = data[..., 49 + 2 * part] & 15 | nibble << 4


def random_blocks(values, kind):
    """Random blocks in the place of some weights, of their size."""
    random = np.random.default_rng(values.size + kind)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    shape = values.shape[:-1] + (values.shape[-1] // per_block, size)
    data = random.integers(0, 256, shape, dtype=np.uint8)
    scale = 1.0
    for _ in range(2):
        for at, factor in zip(HALVES[kind.name], MADE_UP[kind]):
            data[..., at : at + 2] = np.array([scale * factor], "<f2").view(np.uint8)
        if kind == Type.IQ1_M:
            put_quarters(data, np.full(shape[:-1], scale, "<f2"))
        codes = data.reshape(values.shape[:-1] + (-1,))
        scale = values.std() / gguf.quants.dequantize(codes, kind).std()
    return codes


def blocks(out):
    random = np.random.default_rng(5)
    w = gguf.GGUFWriter(out, "blocks")
    for kind in BLOCKS:
        per_block, size = gguf.GGML_QUANT_SIZES[Type[kind]]
        rows, count = 24, 768 // per_block
        data = random.integers(0, 256, (rows, count, size), dtype=np.uint8)
        for at in HALVES[kind]:
            scale = (random.standard_normal((rows, count)) * 0.01).astype("<f2")
            data[:, :, at : at + 2] = scale.view(np.uint8).reshape(rows, count, 2)
        if kind == "IQ1_M":
            put_quarters(data, (random.standard_normal((rows, count)) * 0.01).astype("<f2"))
        if kind == "MXFP4":
            data[:, :, 0] = random.integers(100, 140, (rows, count))
        data = data.reshape(rows, -1)
        w.add_tensor(kind, data, raw_dtype=Type[kind])
        w.add_tensor(kind + ".expected", gguf.quants.dequantize(data, Type[kind]).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def vocabulary(source, out):
    fields = {name: field for name, field in gguf.GGUFReader(source).fields.items() if name.startswith("tokenizer.")}
    w = gguf.GGUFWriter(out, "qwen3")
    w.add_block_count(1)
    for name, field in fields.items():
        w.add_key_value(name, field.contents(), *field.types[:2])
    w.add_tensor("token_embd.weight", np.zeros((len(fields["tokenizer.ggml.tokens"].data), 1), np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["model", "vocabulary", "blocks"])
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--config", type=json.loads, default={})
    given = parser.parse_args()
    if given.what == "model":
        model(*given.paths, given.split, given.fuse, given.old, given.config)
    elif given.what == "vocabulary":
        vocabulary(*given.paths)
    else:
        blocks(*given.paths)
