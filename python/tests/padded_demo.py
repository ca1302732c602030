# mypy: ignore-errors
"""The demo models with heads as wide as kernels for GPUs want them: 128 for Qwen3-MoE, DeepSeek-V2-Lite's sizes for
MLA. They compute the same function.

python padded_demo.py DEMO_FOLDER OUT

What attention reads of a wider head or latent is zero beyond what the demo has. Under an RMS norm stand copies instead,
which leave the mean of squares as it is, and the norm's weight drops them. The softmax scale follows the width, so
queries are doubled where the width is four times as large. RoPE turns pair i of d / 2 by theta^(-2i / d) per position:
the demo's pairs come first, and theta^4 keeps their angles. All values are the demo's, some times two: exact in BF16.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np


def read(path):
    """Names to BF16 tensors, as their bits."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16"
        start, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data, "<u2", (end - start) // 2, 8 + length + start).reshape(entry["shape"])
    return tensors


def write(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        header[name] = dict(dtype="BF16", shape=list(tensor.shape), data_offsets=[at, at + tensor.nbytes])
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def first(old, new):
    """The demo's `old` places, then none."""
    return [i if i < old else -1 for i in range(new)]


def copies(old, new):
    return [i % old for i in range(new)]


def halves(part, old, new):
    """`part` in each half, as RoPE pairs place i with place i + d / 2."""
    half = part(old // 2, new // 2)
    return half + [i if i < 0 else i + old // 2 for i in half]


def heads(count, *parts):
    """Places of `count` heads, each of parts (old width, places)."""
    width, places = sum(old for old, _ in parts), []
    for head in range(count):
        start = head * width
        for old, part in parts:
            places += [i if i < 0 else start + i for i in part]
            start += old
    return places


def placed(tensor, places, axis=0):
    taken = np.take(tensor, np.maximum(places, 0), axis)
    unused = [slice(None)] * tensor.ndim
    unused[axis] = np.array(places) < 0
    taken[tuple(unused)] = 0
    return taken


def doubled(tensor):
    return np.where(tensor & 0x7FFF, tensor + 0x80, tensor).astype("<u2")


def pad_gqa(config, tensors):
    old, new = config["head_dim"], 128
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    used, copied = halves(first, old, new), halves(copies, old, new)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}.self_attn."
        for name, count, places in [("q", queries, copied), ("k", keys, copied), ("v", keys, used)]:
            tensors[f"{p}{name}_proj.weight"] = placed(tensors[f"{p}{name}_proj.weight"], heads(count, (old, places)))
        tensors[p + "o_proj.weight"] = placed(tensors[p + "o_proj.weight"], heads(queries, (old, used)), 1)
        tensors[p + "q_norm.weight"] = doubled(placed(tensors[p + "q_norm.weight"], used))
        tensors[p + "k_norm.weight"] = placed(tensors[p + "k_norm.weight"], used)
    config["head_dim"] = new


def pad_mla(config, tensors):
    sizes = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    grown = {name: (config[name], size) for name, size in sizes.items()}
    count = config["num_attention_heads"]
    latent, query = grown["kv_lora_rank"], grown["q_lora_rank"]
    nope, rope, value = ((old, first(old, new)) for old, new in list(grown.values())[2:])
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}.self_attn."

        def change(name, places, axis=0):
            tensors[p + name] = placed(tensors[p + name], places, axis)

        change("kv_a_proj_with_mqa.weight", heads(1, (latent[0], copies(*latent)), rope))
        change("kv_a_layernorm.weight", first(*latent))
        change("kv_b_proj.weight", first(*latent), 1)
        change("kv_b_proj.weight", heads(count, nope, value))
        change("q_a_proj.weight", copies(*query))
        change("q_a_layernorm.weight", first(*query))
        change("q_b_proj.weight", first(*query), 1)
        change("q_b_proj.weight", heads(count, nope, rope))
        change("o_proj.weight", heads(count, value), 1)
        tensors[p + "q_a_layernorm.weight"] = doubled(tensors[p + "q_a_layernorm.weight"])
    config.update(sizes)


def pad(demo, out):
    """Writes the model in folder `demo`, padded, to folder `out`."""
    demo, out = Path(demo), Path(out)
    shutil.copytree(demo, out, dirs_exist_ok=True)
    config, tensors = json.loads((demo / "config.json").read_text()), read(demo / "model.safetensors")
    (pad_mla if "kv_lora_rank" in config else pad_gqa)(config, tensors)
    config["rope_theta"] **= 4
    write(out / "model.safetensors", tensors)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    pad(*sys.argv[1:])
