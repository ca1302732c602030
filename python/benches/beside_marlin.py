# mypy: ignore-errors
"""Speed of experts in VRAM beside Marlin's MoE kernels, as SGLang 0.5.23 runs them: all routed experts of a layer, INT4
in groups of 128, for 1 to 8,192 tokens.

    python python/benches/beside_marlin.py [--shapes NAME,...] [--tokens N,...] [--routing uniform,local] [--out FILE]

Both get the same choices of experts, from a file: uniform ones, or such as repeat from token to token (the generator of
`moebius bench --routing local`). Marlin's time is that of CUDA graphs of `fused_marlin_moe`, a layer after the other:
alignment, both products, the activation between, and the sum. Moebius's is the sum of its kernels `experts_*` in
`moebius bench --ops`, each by events around its launch, which adds one or two microseconds to each. Rows are
microseconds per layer; of several runs the median. Needs torch, sglang, moebius and a GPU.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GROUP = 128
#: hidden, intermediate, experts, top k, dense layers before the first of experts, layers of experts to run
SHAPES = {
    "deepseek-v2-lite": (2048, 1408, 64, 6, 1, 4),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0, 4),
    "deepseek-v3": (7168, 2048, 256, 8, 3, 2),
}


def choices(routing, layers, experts, top_k, tokens):
    """[layers, tokens, top_k] int32; the parts of a score are those of src/cli/measure/bench/routing.rs."""
    import torch

    torch.manual_seed(7)
    if routing == "uniform":
        return torch.rand(layers, tokens, experts).topk(top_k).indices.int()

    def walk(deviation, fade):
        keep, state, rows = math.exp(-1 / fade), deviation * torch.randn(layers, experts), []
        for _ in range(tokens):
            state = keep * state + deviation * math.sqrt(1 - keep * keep) * torch.randn(layers, experts)
            rows.append(state)
        return torch.stack(rows, 1)

    scores = 0.412 * torch.randn(layers, 1, experts) + walk(0.482, 175) + walk(0.720, 3.85)
    return (scores + 0.280 * torch.randn(layers, tokens, experts)).topk(top_k).indices.int()


def marlin(shape, ids, tokens):
    """Microseconds per layer."""
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe

    hidden, width, experts, top_k, _, layers = shape

    def weights(rows, cols):
        codes = torch.randint(-(2**31), 2**31, (experts, cols // 16, rows * 2), dtype=torch.int32, device="cuda")
        return codes, torch.rand(experts, cols // GROUP, rows, device="cuda").mul_(0.01).bfloat16()

    stack = [(*weights(2 * width, hidden), *weights(hidden, width)) for _ in range(layers)]
    for count in tokens:
        x = torch.randn(count, hidden, device="cuda").bfloat16()
        weight = torch.full((count, top_k), 1 / top_k, device="cuda")
        chosen = [layer[:count].contiguous().cuda() for layer in ids]
        router = torch.zeros(count, experts, device="cuda")

        def layer(i):
            up, up_scale, down, down_scale = stack[i]
            fused_marlin_moe(x, up, down, up_scale, down_scale, router, weight, chosen[i], num_bits=4)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for i in range(layers):
                layer(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(layers):
                layer(i)
        times = []
        for _ in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * start.elapsed_time(end) / layers)
        yield count, statistics.median(times[2:])


def moebius(name, shape, file, tokens, command):
    """The same of Moebius."""
    dense, layers = shape[4:]
    flags = ["--shape", name, "--layers", str(dense + layers), "--experts", "int4", "--resident-experts", str(shape[2])]
    flags += ["--prompt-tokens", ",".join(map(str, tokens)), "--decode-tokens", "0", "--routing", str(file)]
    flags += ["--max-batch-tokens", "8192", "--runs", "3", "--ops", "--json"]
    done = subprocess.run([*command, "bench", *flags], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    report = json.loads(done.stdout)
    for row in report["rows"]:
        own = {op["name"]: op["us"] / layers for op in row["ops"] if op["name"].startswith("experts_")}
        yield row["tokens"], sum(own.values()), own


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--routing", default="uniform,local")
    parser.add_argument("--moebius", default="moebius", help="its command")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch
    from safetensors.torch import save_file

    if not torch.cuda.is_available():
        return print("skipped: there is no GPU")
    tokens, rows = [int(n) for n in given.tokens.split(",")], []
    for name in given.shapes.split(","):
        hidden, width, experts, top_k, dense, layers = shape = SHAPES[name]
        for routing in given.routing.split(","):
            ids = choices(routing, layers, experts, top_k, max(tokens))
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(scratch) / "choices.safetensors"
                save_file({f"router.{dense + i}.ids": layer.contiguous() for i, layer in enumerate(ids)}, file)
                own = {n: (us, ops) for n, us, ops in moebius(name, shape, file, tokens, given.moebius.split())}
            for count, us in marlin(shape, ids, tokens):
                torch.cuda.empty_cache()
                ours, ops = own[count]
                row = dict(shape=name, routing=routing, tokens=count, marlin_us=round(us, 1), moebius_us=round(ours, 1))
                row |= dict(ratio=round(us / ours, 2), ops={op: round(us, 1) for op, us in ops.items()})
                row["tflops"] = round(6e-6 * count * top_k * hidden * width / ours, 1)
                rows.append(row)
                print(json.dumps(row), flush=True)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    return None


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_PLUGINS", "none")
    main()
