"""Write yarn.json: rotary frequencies, cos and sin, and softmax scales of real configs, as HF transformers computes
them.

usage: yarn_reference.py OUT.json      (needs torch and transformers)
"""

import json, sys
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

POSITIONS = [0, 1, 2, 63, 100, 1000, 4095, 4096, 32768, 100000, 131072]
MLA = dict(
    num_hidden_layers=1,
    num_attention_heads=2,
    q_lora_rank=None,
    kv_lora_rank=8,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=8,
    hidden_size=16,
)
CASES = {
    "deepseek-v2-lite": dict(
        rope_theta=10000.0,
        max_position_embeddings=163840,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            original_max_position_embeddings=4096,
            beta_fast=32,
            beta_slow=1,
            mscale=0.707,
            mscale_all_dim=0.707,
        ),
    ),
    "deepseek-v3": dict(
        rope_theta=10000.0,
        max_position_embeddings=163840,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            original_max_position_embeddings=4096,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
    "kimi-k2": dict(
        rope_theta=50000.0,
        max_position_embeddings=131072,
        rope_scaling=dict(
            type="yarn",
            factor=32,
            original_max_position_embeddings=4096,
            beta_fast=1,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
    "kimi-k2.5": dict(
        rope_theta=50000.0,
        max_position_embeddings=262144,
        rope_scaling=dict(
            type="yarn",
            factor=64.0,
            original_max_position_embeddings=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
    "mscale-differs": dict(
        rope_theta=10000.0,
        max_position_embeddings=163840,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            original_max_position_embeddings=4096,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=0.707,
        ),
    ),
    "qwen3-yarn": dict(
        rope_theta=1000000.0,
        max_position_embeddings=40960,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    ),
    "qwen3": dict(rope_theta=1000000.0, max_position_embeddings=40960, rope_scaling=None),
}


def case(name, c):
    if name.startswith("qwen3"):
        cfg = Qwen3MoeConfig(head_dim=128, num_hidden_layers=1, **c)
    else:
        cfg = DeepseekV3Config(**MLA, **c)
    p = cfg.rope_parameters
    if p.get("rope_type", "default") == "yarn":
        inv, factor = ROPE_INIT_FUNCTIONS["yarn"](cfg, device="cpu")
    else:
        dim = cfg.head_dim
        inv, factor = 1.0 / (p["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)), 1.0
    angles = torch.tensor(POSITIONS, dtype=torch.float32)[:, None] * inv[None].float()
    scale = DeepseekV3Attention(cfg, 0).scaling if not name.startswith("qwen3") else cfg.head_dim**-0.5
    config = dict(c, model_type="qwen3_moe" if name.startswith("qwen3") else "deepseek_v3")
    return dict(
        config=config,
        inv_freq=inv.tolist(),
        attention_factor=float(factor),
        scaling=float(scale),
        cos=(angles.cos() * factor).tolist(),
        sin=(angles.sin() * factor).tolist(),
    )


json.dump(dict(positions=POSITIONS, cases={n: case(n, c) for n, c in CASES.items()}), open(sys.argv[1], "w"))
