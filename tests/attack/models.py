"""Hostile checkpoints: weights, config and other JSON, tokenizers and GGUF files. Each is loaded or refused in words,
in little time and memory."""

import copy
import json
import struct

from common import FIXTURES, model_folder

SOURCES = ["qwen3_moe", "deepseek_v3", "gpt_oss_mxfp4", "qwen3_moe_gptq", "qwen3_moe_dense_layer_sharded"]
TEXTS = [
    "config.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors.index.json",
]
ODD = [
    None,
    True,
    [],
    {},
    "",
    "x" * 100_000,
    "\u0000",
    "../../x",
    0,
    -1,
    1,
    7,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    1e308,
    -1e-308,
    float("nan"),
    float("inf"),
    [[]] * 1000,
    {str(i): i for i in range(1000)},
    [2**40] * 8,
    "é" * 3000,
]
NORMALIZERS = [  # of the first attack: an index out of bounds, a panic, memory
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}] * 4},
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 100_000}] * 100},
    {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 10_000},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
    {"type": "Precompiled", "precompiled_charsmap": "/////w==" + "A" * 4000},
    {"type": "Strip", "strip_left": 3},
    {"type": "Sequence", "normalizers": []},
]
PROMPT = "Hello there, the sea e e e e"


def load(area, path, **options):
    """Loads a model and lets it say two tokens, to a message if it has a template."""
    command = ["generate", path, PROMPT, "--max-tokens", 2, "--threads", 1, "--max-context", 128]
    return area.run(*command, timeout=40, **options)


def try_one(area, what, path):
    result = load(area, path)
    return area.check(what, result.problem(20), str(result), keep=path)


# JSON


def places(value, path=()):
    """Paths to all values in a JSON value, but not to more than ten of a long list."""
    yield path
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in items[:10] + items[-3:] if len(items) > 40 else items:
        yield from places(inner, (*path, key))


def change(rng, value):
    """A JSON value with something else at some place of it."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        path = rng.choice(list(places(value)))
        if not path:
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        old, kind = parent[path[-1]], rng.random()
        if kind < 0.15:
            del parent[path[-1]]
        elif kind < 0.4 and isinstance(old, int):
            parent[path[-1]] = rng.choice([old + 1, old - 1, old * 2, -old, old * 2**20, 0, old + 0.5, str(old)])
        elif kind < 0.5 and isinstance(parent, list):
            parent.extend([old] * rng.choice([1, 100, 5000]))
        else:
            parent[path[-1]] = copy.deepcopy(rng.choice(ODD))
    return value


def garble(rng, data):
    """Bytes with some of them other, gone or doubled."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.choice(
                [b"[" * 100_000, b'{"a":' * 50_000, b"\xff", b"\0", b'"', b"9" * 5000, b"1e999", b"\\ud800"]
            )
        elif kind == 3:
            data[at : at + rng.choice([1, 50])] = b""
        else:
            data[at:at] = data[at : at + 300]
    return bytes(data)


def hostile_json(area, rng):
    source = FIXTURES / rng.choice(SOURCES)
    names = [name for name in TEXTS if (source / name).is_file()] or ["config.json"]
    name = rng.choice(names)
    text = (source / name).read_bytes()
    data = garble(rng, text) if rng.random() < 0.25 else json.dumps(change(rng, json.loads(text))).encode()
    return f"{source.name}/{name}", model_folder(area, "hostile", source, **{name: data})


def hostile_tokenizer(area, rng):
    tokenizer = json.loads((FIXTURES / "_tokenizer/tokenizer.json").read_text())
    kind = rng.randrange(5)
    if kind == 0:
        tokenizer["normalizer"] = rng.choice(NORMALIZERS)
    elif kind == 1:
        tokenizer["normalizer"] = {
            "type": "Sequence",
            "normalizers": [rng.choice(NORMALIZERS) for _ in range(rng.randrange(1, 5))],
        }
    elif kind == 2:
        tokenizer["model"]["merges"] = [
            ["e", rng.choice(["l", "", "zz", "e" * 5000])] for _ in range(rng.choice([1, 1000]))
        ]
    elif kind == 3:
        tokenizer["added_tokens"] = [
            {**t, "id": rng.choice([0, 2**31, -1, t["id"]]), "content": rng.choice(["", "e", t["content"], "x" * 9999])}
            for t in tokenizer["added_tokens"]
        ]
    else:
        tokenizer = change(rng, tokenizer)
    return "a tokenizer", model_folder(area, "hostile", **{"tokenizer.json": json.dumps(tokenizer)})


# Safetensors


def hostile_weights(area, rng):
    source = FIXTURES / rng.choice(SOURCES)
    file = rng.choice(sorted(source.glob("model*.safetensors")))
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, kind = json.loads(data[8 : 8 + size]), rng.randrange(6)
    if kind == 0:
        data = (
            struct.pack("<Q", rng.choice([0, 1, 7, size - 1, size + 1, len(data), 2**40, 2**63, 2**64 - 1])) + data[8:]
        )
    elif kind == 1:
        data = data[: rng.choice([0, 1, 8, 9, 8 + size, rng.randrange(len(data))])]
    elif kind == 2:
        data = garble(rng, data[: 8 + size]) + data[8 + size :]
    else:
        if kind == 3:
            header = change(rng, header)
        else:
            entry = header[rng.choice([name for name in header if name != "__metadata__"])]
            field = rng.choice(["dtype", "shape", "data_offsets"])
            a, b = entry["data_offsets"]
            entry[field] = rng.choice(
                {
                    "dtype": ["F32", "U8", "I64", "F8_E4M3", "BF16", "nothing", 3],
                    "shape": [
                        [],
                        [0],
                        [1],
                        [2**32, 2**32],
                        [-1, 4],
                        entry["shape"][::-1],
                        [*entry["shape"], 1],
                        [2**63],
                    ],
                    "data_offsets": [
                        [0, 0],
                        [b, a],
                        [a, b + 2],
                        [a + 1, b + 1],
                        [0, 2**63],
                        [a, 2**64 - 1],
                        [-1, b],
                        [a],
                        [0, b],
                    ],
                }[field]
            )
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + data[8 + size :]
    return f"{source.name}/{file.name}", model_folder(area, "hostile", source, **{file.name: data})


# GGUF


def gguf_value(value):
    """A metadata value: its type and bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value & 0xFFFFFFFF)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, struct.pack("<Q", len(value.encode())) + value.encode()
    kind = gguf_value(value[0])[0] if value else 8
    return 9, struct.pack("<IQ", kind, len(value)) + b"".join(gguf_value(v)[1] for v in value)


def gguf_file(metadata, tensors):
    """A GGUF file of version 3. `tensors`: name, shape (the innermost dimension last), type, bytes."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        kind, data = gguf_value(value)
        out += gguf_value(name)[1] + struct.pack("<I", kind) + data
    at, body = 0, b""
    for name, shape, kind, data in tensors:
        out += gguf_value(name)[1] + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, at)
        body += data + bytes(-len(data) % 32)
        at = len(body)
    return out + bytes(-len(out) % 32) + body


def gguf_parts():
    """The fixture qwen3_moe in GGUF's terms: metadata, and tensors as `gguf_file` takes them."""
    source = FIXTURES / "qwen3_moe"
    config, tokenizer = (json.loads((source / name).read_text()) for name in ("config.json", "tokenizer.json"))
    vocab = {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
    words = {i: t for t, i in vocab.items()}
    special = {t["id"] for t in tokenizer["added_tokens"]}
    size, a = max(words) + 1, "qwen3moe."
    metadata = {
        "general.architecture": "qwen3moe",
        a + "block_count": config["num_hidden_layers"],
        a + "embedding_length": config["hidden_size"],
        a + "context_length": 4096,
        a + "feed_forward_length": config["intermediate_size"],
        a + "attention.head_count": config["num_attention_heads"],
        a + "attention.head_count_kv": config["num_key_value_heads"],
        a + "attention.key_length": config["head_dim"],
        a + "attention.value_length": config["head_dim"],
        a + "attention.layer_norm_rms_epsilon": 1e-6,
        a + "rope.freq_base": 1e6,
        a + "vocab_size": config["vocab_size"],
        a + "expert_count": config["num_experts"],
        a + "expert_used_count": config["num_experts_per_tok"],
        a + "expert_feed_forward_length": config["moe_intermediate_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [words.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [3 if i in special else 1 if i in words else 5 for i in range(size)],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    data = (source / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    of = lambda name: data[start + header[name]["data_offsets"][0] : start + header[name]["data_offsets"][1]]
    names = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "gate": "ffn_gate_inp",
        "lm_head": "output",
    }
    tensors = []
    for name, entry in header.items():
        parts = name.split(".")
        block = f"blk.{parts[2]}." if "layers" in parts else ""
        if name == "__metadata__" or "experts" in parts and parts[5] != "0":
            continue
        if "experts" in parts:
            all_of = b"".join(of(name.replace(".experts.0.", f".experts.{e}.")) for e in range(config["num_experts"]))
            tensors.append(
                (
                    f"{block}ffn_{parts[6].split('_')[0]}_exps.weight",
                    [config["num_experts"], *entry["shape"]],
                    30,
                    all_of,
                )
            )
            continue
        wide = len(entry["shape"]) == 1 or parts[-2] == "gate"  # norms and routers are F32
        raw = b"".join(b"\0\0" + of(name)[i : i + 2] for i in range(0, len(of(name)), 2)) if wide else of(name)
        tensors.append((f"{block}{names[parts[-2]]}.weight", entry["shape"], 0 if wide else 30, raw))
    return metadata, tensors


def hostile_gguf(area, rng):
    metadata, tensors = (copy.copy(part) for part in area.gguf)
    kind = rng.randrange(4)
    if kind == 0:
        name = rng.choice(list(metadata))
        metadata[name] = rng.choice(
            [
                0,
                1,
                2**31,
                2**32 - 1,
                -1,
                "",
                "x" * 100_000,
                1e30,
                float("nan"),
                [],
                [0] * 1000,
                ["x"] * 10,
                True,
                "{{ 1" + "+1" * 50_000 + " }}",
            ]
        )
    elif kind == 1:
        i = rng.randrange(len(tensors))
        name, shape, type_, data = tensors[i]
        tensors[i] = rng.choice(
            [
                (name, shape[::-1], type_, data),
                (name, [2**33, 2**33], type_, data),
                (name, shape, rng.randrange(45), data),
                (name, [0], type_, data),
                (name, [1] * 9, type_, data),
                ("x" * 70_000, shape, type_, data),
                (name, shape, type_, data[:7]),
                tensors[0],
            ]
        )
    data = gguf_file(metadata, tensors)
    if kind == 2:
        data = garble(rng, data[:20_000]) + data[20_000:]
    elif kind == 3:
        at = rng.choice([4, 8, 16, 24, rng.randrange(20_000)])  # a number of 8 bytes
        data = data[:at] + struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1])) + data[at + 8 :]
    path = area.folder("hostile") / "model.gguf"
    path.write_bytes(data)
    return "a GGUF file", path


def attack(area):
    area.gguf = gguf_parts()
    whole = area.folder("whole") / "model.gguf"
    whole.write_bytes(gguf_file(*area.gguf))
    for path in (whole, *(model_folder(area, f"whole-{name}", FIXTURES / name) for name in SOURCES)):
        result = load(area, path)  # else nothing below could be loaded, and all of it would hold
        area.check(f"{path.name} as it is", result.problem(codes=(0,)), str(result))
    for normalizer in NORMALIZERS:
        tokenizer = {**json.loads((FIXTURES / "_tokenizer/tokenizer.json").read_text()), "normalizer": normalizer}
        try_one(
            area,
            f"normalizer {json.dumps(normalizer)[:60]}",
            model_folder(area, "hostile", **{"tokenizer.json": json.dumps(tokenizer)}),
        )
    config = json.loads((FIXTURES / "qwen3_moe/config.json").read_text())
    for name, value in (
        ("hidden_act", "x" * 100_000),
        ("model_type", "x" * 100_000),
        ("num_experts", 2**40),
        ("num_hidden_layers", 2**31),
        ("vocab_size", 2**33),
    ):
        try_one(
            area,
            f"config: {name}",
            model_folder(area, "hostile", **{"config.json": json.dumps(config | {name: value})}),
        )
    while area.time():
        what, path = area.random.choice(
            [hostile_json, hostile_json, hostile_weights, hostile_weights, hostile_tokenizer, hostile_gguf]
        )(area, area.random)
        try_one(area, what, path)
