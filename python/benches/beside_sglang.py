# mypy: ignore-errors
"""Speed of SGLang with Moebius's experts beside SGLang with kt-kernel's and beside `moebius serve`, in Qwen3-30B-A3B's
shape at full depth: decode of 1, 8 and 32 requests, prompts of 512 and 8,192 tokens, and the time to ready.

Makes a model of random weights. All experts are INT4 in groups of 32, as compressed-tensors packs them: kt-kernel's
RAWINT4, and nothing to convert for Moebius but the order. The dense weights, and of each layer the experts that SGLang
computes on the GPU, are BF16. All hold the same number of experts on the GPU; with `sglang-pool` SGLang has one of each
layer, and the others are in Moebius's pool, which follows the text.

    python python/benches/beside_sglang.py [--layers N] [--gpu-experts N] [--kt FOLDER] [--servers NAME,...]
        [--out FOLDER] [-- SGLANG_FLAG...]

FOLDER of --kt has kt_kernel 0.7.2 (`pip install --no-deps --target FOLDER kt-kernel==0.7.2`). SGLang 0.5.23 passes a
number of experts where kt-kernel wants a mask; a plugin of a few lines, written beside the logs, says the one for the
other. The model of 48 layers takes 24 GiB of disk, and Moebius's packed experts 16.
"""

import argparse
import concurrent.futures
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "tests"))

from sglang_servers import Moebius, Sglang, missing  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, EXPERTS, TOP_K, VOCABULARY = 2048, 32, 4, 128, 768, 128, 8, 4096
GROUP, MAX_CONTEXT = 32, 16384
KT_PLUGIN = '''
import torch


def plugin():
    from kt_kernel import KTMoEWrapper
    from sglang.srt.layers.moe import kt_ep_wrapper

    def wrapper(*, num_gpu_experts, num_experts, **more):
        mask = torch.arange(num_experts) < num_gpu_experts
        return KTMoEWrapper(gpu_experts_mask=mask, num_experts=num_experts, **more)

    kt_ep_wrapper.KTMoEWrapper, kt_ep_wrapper.KTRANSFORMERS_AVAILABLE = wrapper, True
'''


def make_model(folder, layers, gpu_experts):
    """`folder`/bf16: dense weights and `gpu_experts` of each layer. `folder`/int4: dense weights and all experts."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    index = {"bf16": {}, "int4": {}}
    for name in index:
        (folder / name).mkdir(parents=True, exist_ok=True)

    def numbers(rows, cols, gain=1.0):
        return (torch.randn(rows, cols, device="cuda") * gain * cols**-0.5).to(torch.bfloat16)

    def save(name, tensors, *kinds):
        tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        save_file(tensors, folder / kinds[0] / name, metadata={"format": "pt"})
        for kind in kinds:
            index[kind] |= dict.fromkeys(tensors, name)
        for kind in kinds[1:]:
            os.link(folder / kinds[0] / name, folder / kind / name)

    def ones(n):
        return torch.ones(n, dtype=torch.bfloat16)

    def dense(prefix):
        attention = prefix + "self_attn."
        return {
            prefix + "input_layernorm.weight": ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": ones(HIDDEN),
            prefix + "mlp.gate.weight": numbers(EXPERTS, HIDDEN, 2.0),
            attention + "q_norm.weight": ones(HEAD_DIM),
            attention + "k_norm.weight": ones(HEAD_DIM),
            attention + "q_proj.weight": numbers(HEADS * HEAD_DIM, HIDDEN),
            attention + "k_proj.weight": numbers(KV_HEADS * HEAD_DIM, HIDDEN),
            attention + "v_proj.weight": numbers(KV_HEADS * HEAD_DIM, HIDDEN),
            attention + "o_proj.weight": numbers(HIDDEN, HEADS * HEAD_DIM),
        }

    def experts(prefix):
        """Codes -8 to 7 are stored as 0 to 15, the first of each pair in the lower bits."""
        packed, plain = {}, {}
        # So that the sum of eight weighs as much as the stream it is added to.
        for part, rows, cols, gain in [
            ("gate_proj", WIDTH, HIDDEN, 1.5),
            ("up_proj", WIDTH, HIDDEN, 1.5),
            ("down_proj", HIDDEN, WIDTH, 2.0),
        ]:
            codes = torch.randint(0, 256, (EXPERTS, rows, cols // 2), dtype=torch.uint8, device="cuda")
            scales = torch.rand(EXPERTS, rows, cols // GROUP, device="cuda") + 0.5
            scales = (scales * gain * cols**-0.5 / 4.6).to(torch.bfloat16)
            shape = torch.tensor([rows, cols])
            words, few = codes.view(torch.int32).cpu(), codes[:gpu_experts]
            values = torch.stack([few & 15, few >> 4], -1).flatten(-2).to(torch.bfloat16) - 8
            values = (values.unflatten(-1, (-1, GROUP)) * scales[:gpu_experts, :, :, None]).flatten(-2).cpu()
            scales = scales.cpu()
            for expert in range(EXPERTS):
                name = f"{prefix}mlp.experts.{expert}.{part}."
                packed |= {name + "weight_packed": words[expert], name + "weight_scale": scales[expert]}
                packed[name + "weight_shape"] = shape.clone()
                if expert < gpu_experts:
                    plain[name + "weight"] = values[expert]
        return packed, plain

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        saved = []
        for i in range(layers):
            packed, plain = experts(f"model.layers.{i}.")
            saved.append(pool.submit(save, f"int4-{i:02}.safetensors", packed, "int4"))
            saved.append(pool.submit(save, f"bf16-{i:02}.safetensors", plain, "bf16"))
            saved.append(pool.submit(save, f"dense-{i:02}.safetensors", dense(f"model.layers.{i}."), "bf16", "int4"))
            if i >= 4:
                saved[3 * (i - 4)].result()
        for future in saved:
            future.result()
    rest = {
        "model.embed_tokens.weight": numbers(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": numbers(VOCABULARY, HIDDEN, 4.0),
    }
    save("rest.safetensors", rest, "bf16", "int4")
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    quantization = dict(
        quant_method="compressed-tensors",
        format="pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        config_groups=dict(group_0=dict(targets=["Linear"], weights=weights)),
    )
    for kind, more in [("bf16", {}), ("int4", dict(quantization_config=quantization))]:
        config = dict(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            attention_bias=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            decoder_sparse_step=1,
            head_dim=HEAD_DIM,
            hidden_act="silu",
            hidden_size=HIDDEN,
            intermediate_size=6144,
            max_position_embeddings=MAX_CONTEXT,
            max_window_layers=layers,
            mlp_only_layers=[],
            moe_intermediate_size=WIDTH,
            norm_topk_prob=True,
            num_attention_heads=HEADS,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            num_hidden_layers=layers,
            num_key_value_heads=KV_HEADS,
            output_router_logits=False,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000.0,
            sliding_window=None,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            use_cache=True,
            use_sliding_window=False,
            vocab_size=VOCABULARY,
        )
        (folder / kind / "config.json").write_text(json.dumps(config | more))
        text = json.dumps({"metadata": {}, "weight_map": index[kind]})
        (folder / kind / "model.safetensors.index.json").write_text(text)
        # Prompts are token ids; a tokenizer is wanted all the same.
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / kind / name).write_bytes((ROOT / "demo" / "moe-gqa" / name).read_bytes())


def prompt(tokens, seed):
    numbers = random.Random(seed)
    return [numbers.randrange(3, VOCABULARY) for _ in range(tokens)]


def speeds(server, record):
    """Adds tokens per second to `record`: of three prompts the best, of two rounds of decode."""

    def seconds(ids, tokens):
        start = time.perf_counter()
        server.greedy(ids, tokens)
        return time.perf_counter() - start

    for requests, decoded in [(1, 128), (8, 96), (32, 64)]:
        with concurrent.futures.ThreadPoolExecutor(requests) as pool:
            took = {1: [], 1 + decoded: []}
            for seed in range(2):
                seeds = [100_000 * requests + 1000 * seed + i for i in range(requests)]
                for tokens, times in took.items():
                    start = time.perf_counter()
                    list(pool.map(lambda i: server.greedy(prompt(64, i + 500 * (tokens > 1)), tokens), seeds))
                    times.append(time.perf_counter() - start)
            record[f"decode_{requests}"] = decoded * requests / (min(took[1 + decoded]) - min(took[1]))
    for tokens in (512, 8192):
        record[f"prompt_{tokens}"] = tokens / min(seconds(prompt(tokens, 1000 * tokens + seed), 1) for seed in range(3))


def kt_environment(kt, folder):
    """Puts kt-kernel and its plugin where SGLang's processes find them."""
    info = folder / "kt_in_sglang-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / "kt_in_sglang.py").write_text(KT_PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kt_in_sglang\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkt = kt_in_sglang:plugin\n")
    path = os.pathsep.join(filter(None, [str(folder), str(kt), os.environ.get("PYTHONPATH")]))
    # All NUMA nodes compute, as with Moebius.
    return {"PYTHONPATH": path, "SGLANG_PLUGINS": "kt", "SGLANG_AUTO_NUMA_BIND": "0"}


def main():
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--gpu-experts", type=int, default=16, help="of each layer's 128, on the GPU")
    parser.add_argument("--kt", type=Path, help="folder of kt_kernel")
    parser.add_argument("--kt-threads", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--servers", default="moebius,sglang-pool,sglang-moebius,sglang-kt")
    parser.add_argument("--model", type=Path, help="made by an earlier run, and kept; made there if it is not")
    parser.add_argument("--out", type=Path, help="folder of logs and results")
    given = parser.parse_args(own)
    if reason := missing("cuda"):
        return print(f"skipped: {reason}")

    scratch = tempfile.TemporaryDirectory()
    model, out = given.model or Path(scratch.name) / "model", given.out or Path(scratch.name)
    out.mkdir(parents=True, exist_ok=True)
    if not (model / "int4" / "config.json").exists():
        start = time.monotonic()
        # In a process of its own, which gives the GPU's memory back.
        program = "import sys, pathlib, beside_sglang as b; b.make_model(pathlib.Path(sys.argv[1]), {}, {})"
        program = program.format(given.layers, given.gpu_experts)
        command = [sys.executable, "-c", program, str(model)]
        subprocess.run(command, check=True, cwd=Path(__file__).parent)
        print(f"{given.layers} layers were made in {time.monotonic() - start:.0f} s", flush=True)

    int4, resident, cache = str(model / "int4"), str(given.gpu_experts), {"XDG_CACHE_HOME": str(model / "cache")}
    sglang = ["--model-path", str(model / "bf16"), "--kt-weight-path", int4]
    sglang += ["--max-running-requests", "32", "--cuda-graph-max-bs-decode", "32", "--chunked-prefill-size", "8192"]
    sglang += ["--mem-fraction-static", "0.6", "--disable-radix-cache", *flags]
    fixed = ["--kt-num-gpu-experts", resident]
    # Of an expert: codes of half a byte, and a scale of two bytes for each group.
    expert_gib = 3 * HIDDEN * WIDTH * (0.5 + 2 / GROUP) / 2**30
    pool_gib = 1.001 * (given.gpu_experts - 1) * given.layers * expert_gib
    pool = ["--kt-num-gpu-experts", "1", "--kt-gpu-pool-gib", f"{pool_gib:.4f}"]
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    kt = ["--kt-method", "RAWINT4", "--kt-cpuinfer", str(given.kt_threads), "--kt-threadpool-count", str(nodes)]
    ours = [int4, "--resident-experts", resident, "--max-sequences", "32", "--max-context", str(MAX_CONTEXT)]
    starts = {
        "sglang-moebius": lambda log: Sglang(log, [*sglang, *fixed], cache),
        "sglang-pool": lambda log: Sglang(log, [*sglang, *pool], cache),
        "moebius": lambda log: Moebius(log, ours, cache),
        "sglang-kt": lambda log: Sglang(
            log, [*sglang, *fixed, *kt, "--disable-prefill-cuda-graph"], kt_environment(given.kt, out / "kt-plugin")
        ),
    }
    failed = False
    for name in given.servers.split(","):
        if name == "sglang-kt" and given.kt is None:
            print("sglang-kt: skipped without --kt")
            continue
        record = dict(server=name, layers=given.layers, gpu_experts=given.gpu_experts)
        try:
            server = starts[name](out / f"{name}.log")
            record["ready_s"] = server.ready_s
            try:
                speeds(server, record)
            finally:
                server.stop()
        except Exception as error:  # the others' numbers must not be lost
            record["error"], failed = f"{type(error).__name__}: {error}", True
        record = {key: round(value, 1) if isinstance(value, float) else value for key, value in record.items()}
        print(json.dumps(record), flush=True)
        with open(out / "speed.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
