"""Builds of a cache that are killed, run side by side, or lose their source: the next one is right, bit for bit, and
leaves nothing behind."""

import hashlib
import json
import struct
import threading

from caches import Cache
from common import run

LAYERS, EXPERTS, HIDDEN, WIDTH = 4, 24, 1024, 512


def checkpoint(area):
    """A random Qwen3-MoE of 300 MB in two files, large enough that kills come in the middle."""
    path = area.folder("model")
    bits = area.random.randbytes(1 << 20)
    # Weights of a size that models have: random signs and fractions, exponents near 2^-7.
    block = bytes(b & 0x7F if i % 2 == 0 else 0x3C | b & 0x80 for i, b in enumerate(bits))
    tensors = {
        "model.embed_tokens.weight": [544, HIDDEN],
        "lm_head.weight": [544, HIDDEN],
        "model.norm.weight": [HIDDEN],
    }
    for layer in range(LAYERS):
        head = f"model.layers.{layer}"
        tensors |= {
            f"{head}.input_layernorm.weight": [HIDDEN],
            f"{head}.post_attention_layernorm.weight": [HIDDEN],
            f"{head}.self_attn.q_norm.weight": [64],
            f"{head}.self_attn.k_norm.weight": [64],
            f"{head}.mlp.gate.weight": [EXPERTS, HIDDEN],
            **{
                f"{head}.self_attn.{name}_proj.weight": shape
                for name, shape in (
                    ("q", [256, HIDDEN]),
                    ("k", [64, HIDDEN]),
                    ("v", [64, HIDDEN]),
                    ("o", [HIDDEN, 256]),
                )
            },
        }
        for e in range(EXPERTS):
            for name, shape in (("gate", [WIDTH, HIDDEN]), ("up", [WIDTH, HIDDEN]), ("down", [HIDDEN, WIDTH])):
                tensors[f"{head}.mlp.experts.{e}.{name}_proj.weight"] = shape
    names = list(tensors)
    index = {}
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        index |= dict.fromkeys(part, file)
        write(path / file, {name: tensors[name] for name in part}, block, area.random)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 544,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def write(path, tensors, block, rng):
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * (shape[0] * (shape[1] if len(shape) > 1 else 1))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            start = 2 * rng.randrange(len(block) // 2)  # no two tensors alike
            data = (block[start:] + block[:start]) * (size // len(block) + 1)
            file.write(data[:size])


def digest(folder):
    """The cache files of a folder and what is in them, but for their descriptions: these hold the times of the
    sources."""
    found = {}
    for file in sorted(folder.glob("*.moebius")):
        data = file.read_bytes()
        found[file.name] = hashlib.sha256(data[Cache(data).table :]).hexdigest()
    return found


def left_over(folder):
    return [file.name for file in folder.iterdir() if file.suffix in (".partial", ".lock")]


def finish(area, model, cache, want, what, how, options):
    """The next build ends, verifies, is the same file, and leaves nothing."""
    result = area.run("cache", "build", model, *options, cache=cache, timeout=120)
    verified = area.run("cache", "verify", model, *options, cache=cache, timeout=120)
    got, left = digest(cache), left_over(cache)
    problem = result.problem(120, codes=(0,)) or verified.problem(120, codes=(0,))
    problem = problem or (got != want and f"other bytes: {got}, not {want}") or (left and f"left behind: {left}")
    area.check(what, problem, f"{how}\n{result}\n{verified}")


def attack(area):
    model = checkpoint(area)
    ways = {}
    for precision in ("int4", "int8"):
        cache = area.folder(f"reference-{precision}")
        whole = area.run("cache", "build", model, "--experts", precision, cache=cache, timeout=300)
        area.check(f"a build in {precision}", whole.problem(300, codes=(0,)), str(whole))
        ways[precision] = digest(cache), whole.seconds
        for file in cache.iterdir():
            file.unlink()
    side_by_side(area, model, ways["int4"][0])
    cut_source(area, model, ways["int4"])
    rounds, middle, kills = 0, 0, 0
    while rounds < 3 or area.time():
        precision = area.random.choice(list(ways))
        want, seconds = ways[precision]
        cache, options, how = area.folder("cache"), ["--experts", precision], []
        for _ in range(area.random.choice([1, 1, 1, 2, 3, 4])):
            after = area.random.random() * seconds * 1.1
            command = area.command("cache", "build", model, *options, cache=cache)
            run(command, kill_after=after)
            kills, middle = kills + 1, middle + bool(list(cache.glob("*.partial")))
            how.append(f"SIGKILL after {after:.3f} s")
        finish(area, model, cache, want, "a build that was killed", "\n".join(how), options)
        rounds += 1
    area.note(f"{kills} kills, {middle} of them in the middle, {rounds} rounds")


def side_by_side(area, model, want):
    cache = area.folder("cache")
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(
                area.run("cache", "build", model, "--experts", "int4", cache=cache, timeout=200)
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    problem = "; ".join(filter(None, (r.problem(200, codes=(0,)) for r in results)))
    area.check("four builds at once", problem, "\n".join(map(str, results)))
    finish(area, model, cache, want, "what four builds left", "four at once", ["--experts", "int4"])


def cut_source(area, model, way):
    """A shard that becomes shorter while it is converted: a sentence, and the next build, of the whole shard again,
    is right."""
    want, seconds = way
    shard = model / "model-00002-of-00002.safetensors"
    whole, size = shard.read_bytes(), shard.stat().st_size
    for share in (0.1, 0.3, 0.6):
        cache = area.folder("cache")

        def cut(keep=area.random.randrange(1, size)):
            with open(shard, "r+b") as file:
                file.truncate(keep)

        timer = threading.Timer(seconds * share, cut)
        timer.start()
        result = area.run("cache", "build", model, "--experts", "int4", cache=cache, timeout=120)
        timer.join()
        area.check(f"a shard is cut at {share:.0%} of a build", result.problem(120), str(result))
        shard.write_bytes(whole)
        finish(area, model, cache, want, "the build after it", str(result), ["--experts", "int4"])
