# mypy: ignore-errors
"""Speed of SGLang with Moebius's experts beside SGLang with kt-kernel's and beside `moebius serve`, in Qwen3-30B-A3B's
shape at full depth: decode of 1, 8 and 32 requests, prompts of 512 and 8,192 tokens, and the time to ready.

Makes a model of random weights. All experts are INT4 in groups of 32, as compressed-tensors packs them: kt-kernel's
RAWINT4, and nothing to convert for Moebius but the order. The dense weights, and of each layer the experts that SGLang
computes on the GPU, are BF16.

    python python/benches/beside_sglang.py [--layers N] [--gpu-experts N] [--kt FOLDER] [--servers NAME,...]
        [--profile] [--out FOLDER] [-- SGLANG_FLAG...]

All hold the same number of experts on each GPU. The servers:

    moebius, moebius-2                   `moebius serve` on one GPU, and on two
    sglang-moebius                       SGLang computes its first experts, Moebius the others
    sglang-pool                          the experts on the GPU are Moebius's pool, which follows the text
    sglang-pool-1                        SGLang has one expert of each layer, the others are in the pool
    sglang-2-moebius, sglang-2-pool      on two GPUs, which divide Moebius's experts (--kt-divide-experts 1)
    ...-first                            on two GPUs, of which the first one computes Moebius's experts
    sglang-kt                            SGLang with kt-kernel

Servers with a + between them start together, and are asked one after the other. --profile says where a step of one
request goes in SGLang, from 24 steps under torch's profiler.

FOLDER of --kt has kt_kernel 0.7.2 (`pip install --no-deps --target FOLDER kt-kernel==0.7.2`). SGLang 0.5.23 passes a
number of experts where kt-kernel wants a mask; a plugin of a few lines, written beside the logs, says the one for the
other. The model of 48 layers takes 24 GiB of disk, and Moebius's packed experts 16.
"""

import argparse
import collections
import concurrent.futures
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "tests"))

from sglang_servers import COMMAND, Moebius, Sglang, missing  # noqa: E402

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


def profile(server, folder):
    """Of each rank, where a step of one request goes: `step_of` of 24 steps."""
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(server.greedy, prompt(64, 7), 400)
        time.sleep(0.4)
        server.post("/start_profile", dict(output_dir=str(folder), num_steps=24, activities=["GPU"])).read()
        decoding.result()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files, before = sorted(folder.rglob("*.json.gz")), None
        sizes = [file.stat().st_size for file in files]
        time.sleep(2)
        if files and sizes == [file.stat().st_size for file in files]:
            break
    ranks = []
    for file in files:
        with gzip.open(file, "rt") as text:
            ranks.append(step_of(json.load(text)["traceEvents"]))
    return ranks


def step_of(events):
    """Milliseconds of a step of decode by who is at work on the GPU, medians; and each kernel's microseconds and number
    in a step. A step begins with Moebius's take_table."""
    sources = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.cu*"))
    declared = re.findall(r"KERNEL\w*\(\s*(\w+)(##)?", sources)
    ours = re.compile("|".join(name + (r"\w*" if joined else "") for name, joined in declared))
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event]
    work.sort(key=lambda event: event["ts"])
    begins = [event["ts"] for event in work if event["name"] == "take_table"]
    steps, names = [], collections.defaultdict(lambda: [0.0, 0])
    for begin, end in zip(begins[1:], begins[2:]):
        marks = []
        for event in work:
            if begin <= event["ts"] < end:
                name = event["name"]
                who = "waits" if name == "fetch_rows" else "moebius" if ours.fullmatch(name) else "sglang"
                marks += [(event["ts"], 1, who), (min(event["ts"] + event["dur"], end), -1, who)]
                names[name][0] += event["dur"]
                names[name][1] += 1
        shares, running, last = collections.Counter(), collections.Counter(), begin
        for at, change, who in sorted(marks):
            # Of what runs at the same time, the first of these.
            busy = next((who for who in ("sglang", "moebius", "waits") if running[who] > 0), "nothing")
            shares[busy] += (at - last) / 1000
            running[who] += change
            last = at
        shares["nothing"] += (end - last) / 1000
        steps.append(dict(shares, step=(end - begin) / 1000))
    if not steps:
        return dict(steps=0)
    keys = sorted(set().union(*steps))
    result = {key: round(statistics.median(step.get(key, 0.0) for step in steps), 3) for key in keys}
    most = sorted(names.items(), key=lambda item: -item[1][0])[:40]
    kernels = {n[:90]: [round(us / c, 2), round(c / len(steps), 2)] for n, (us, c) in most}
    return dict(result, steps=len(steps), kernels=kernels)


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
    parser.add_argument("--profile", action="store_true", help="say where a step of SGLang's servers goes")
    parser.add_argument("--model", type=Path, help="made by an earlier run, and kept; made there if it is not")
    parser.add_argument("--out", type=Path, help="folder of logs and results")
    given = parser.parse_args(own)
    if reason := missing("cuda"):
        return print(f"skipped: {reason}")
    version = subprocess.run([*COMMAND, "--version"], check=True, capture_output=True, text=True).stdout
    print(version, flush=True)
    if "build: release" not in version:
        sys.exit("Moebius has debug assertions, which are slow: build it with maturin's --release")

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
    # Those that start together see each other's memory come and go, and must not take a core while they wait.
    sglang += ["--max-total-tokens", "49152", "--sleep-on-idle"]
    fixed = ["--kt-num-gpu-experts", resident]
    # Of an expert: codes of half a byte, and a scale of two bytes for each group.
    expert_gib = 3 * HIDDEN * WIDTH * (0.5 + 2 / GROUP) / 2**30
    pools = [1.001 * (given.gpu_experts - own) * given.layers * expert_gib for own in range(2)]
    pool, pool_1 = (["--kt-num-gpu-experts", str(n), "--kt-gpu-pool-gib", f"{gib:.4f}"] for n, gib in enumerate(pools))
    two, first = (["--tp-size", "2", "--kt-divide-experts", divides] for divides in "10")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    kt = ["--kt-method", "RAWINT4", "--kt-cpuinfer", str(given.kt_threads), "--kt-threadpool-count", str(nodes)]
    ours = [int4, "--resident-experts", resident, "--max-sequences", "32", "--max-context", str(MAX_CONTEXT)]
    # Two GPUs have room for twice as many.
    twice = [*ours[:2], str(2 * given.gpu_experts), *ours[3:], "--device", "cuda:0,1"]
    starts = {
        "sglang-moebius": lambda log: Sglang(log, [*sglang, *fixed], cache),
        "sglang-pool": lambda log: Sglang(log, [*sglang, *pool], cache),
        "sglang-pool-1": lambda log: Sglang(log, [*sglang, *pool_1], cache),
        "sglang-2-moebius": lambda log: Sglang(log, [*sglang, *fixed, *two], cache),
        "sglang-2-moebius-first": lambda log: Sglang(log, [*sglang, *fixed, *first], cache),
        "sglang-2-pool": lambda log: Sglang(log, [*sglang, *pool, *two], cache),
        "sglang-2-pool-first": lambda log: Sglang(log, [*sglang, *pool, *first], cache),
        "moebius": lambda log: Moebius(log, [*ours, "--device", "cuda:0"], cache),
        "moebius-2": lambda log: Moebius(log, twice, cache),
        "sglang-kt": lambda log: Sglang(
            log, [*sglang, *fixed, *kt, "--disable-prefill-cuda-graph"], kt_environment(given.kt, out / "kt-plugin")
        ),
    }

    def measure(name, future):
        """Its speeds, as far as they were measured."""
        record = dict(server=name, layers=given.layers, gpu_experts=given.gpu_experts)
        try:
            server = future.result()
            record["ready_s"] = server.ready_s
            speeds(server, record)
            if given.profile and name.startswith("sglang") and name != "sglang-kt":
                record["profile"] = profile(server, out / "traces" / name)
        except Exception as error:  # the others' numbers must not be lost
            record["error"] = f"{type(error).__name__}: {error}"
        return {key: round(value, 1) if isinstance(value, float) else value for key, value in record.items()}

    failed = False
    for group in given.servers.split(","):
        names = group.split("+")
        if "sglang-kt" in names and given.kt is None:
            print("sglang-kt: skipped without --kt")
            names.remove("sglang-kt")
        with concurrent.futures.ThreadPoolExecutor(len(names) or 1) as starters:
            started = {name: starters.submit(starts[name], out / f"{name}.log") for name in names}
            concurrent.futures.wait(started.values())
            for name, future in started.items():
                record = measure(name, future)
                failed |= "error" in record
                print(json.dumps(record), flush=True)
                with open(out / "speed.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
            for future in started.values():
                if future.exception() is None:
                    starters.submit(future.result().stop)
    sys.exit(failed)


if __name__ == "__main__":
    main()
