# mypy: ignore-errors
"""Speed of experts in VRAM beside Marlin's MoE kernels, as SGLang 0.5.23 runs them: all routed experts of a layer, INT4
in groups of 128, for 1 to 8,192 tokens.

    python python/benches/beside_marlin.py [--shapes NAME,...] [--tokens N,...] [--routing uniform,local] [--out FILE]

Both get the same choices of experts, from a file: uniform ones, or such as repeat from token to token (the generator of
`moebius bench --routing local`). Marlin's time is that of CUDA graphs of what SGLang's `fused_marlin_moe` launches, a
layer after the other: alignment, both products, the activation between, and the sum, the latter by `moe_topk_sum`,
which is faster than the sum that SGLang takes for INT4. SGLang chooses the tokens of a block by the pairs of an expert;
this tries its neighbours too, and the fastest counts. Before, Marlin's results are compared with products in float32 of
the weights that its codes and scales stand for. Moebius's time is that of CUDA graphs as well, of all its kernels of a
layer of experts (benches/experts_in_vram.rs). Rows are microseconds per layer, medians. Needs torch, sglang, a GPU, and
`cargo bench --bench experts_in_vram` or what it builds.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROUP = 128
#: Tokens of a block of Marlin's.
BLOCKS = (8, 16, 32, 48, 64)
#: hidden, intermediate, experts, top k, layers to run: together several times what a GPU's L2 holds, also of the few
#: experts that one token reads
SHAPES = {
    "deepseek-v2-lite": (2048, 1408, 64, 6, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 8),
    "deepseek-v3": (7168, 2048, 256, 8, 2),
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


class Layer:
    """Random experts in Marlin's order: codes [experts, inputs / 16, 2 * outputs] and scales [experts, groups, outputs]
    of gate and up, and of down."""

    def __init__(self, shape):
        import torch

        hidden, width, self.experts = shape[:3]

        def weights(rows, cols):
            size = (self.experts, cols // 16, 2 * rows)
            codes = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device="cuda")
            scales = torch.empty(self.experts, cols // GROUP, rows, dtype=torch.bfloat16, device="cuda")
            return codes, scales.uniform_(0.001, 0.01)

        self.up, self.down = weights(2 * width, hidden), weights(hidden, width)
        self.locks = 4 * torch.cuda.get_device_properties("cuda").multi_processor_count

    def forward(self, x, ids, weight, block):
        """What `fused_marlin_moe` does on Hopper with as many tokens in a block."""
        import torch
        from sgl_kernel.scalar_type import scalar_types
        from sglang.kernels.ops.activation.activation import silu_and_mul
        from sglang.kernels.ops.moe.moe_align_single_token import moe_align_single_token
        from sglang.kernels.ops.moe.moe_topk_sum import moe_topk_sum
        from sglang.kernels.ops.moe.moe_wna16_marlin import moe_wna16_marlin_gemm
        from sglang.srt.layers.moe.moe_runner.triton_utils import moe_align_block_size

        (tokens, hidden), top_k = x.shape, ids.shape[1]
        if tokens == 1:
            order, of_block, count = moe_align_single_token(ids, block, return_inactive_prefix_count=True)
        else:
            order, of_block, count = moe_align_block_size(ids, block, self.experts, return_inactive_prefix_count=True)
        locks = torch.zeros(self.locks, dtype=torch.int32, device=x.device)

        def product(a, packed, top_k, **kwargs):
            codes, scales = packed
            rows, inputs, outputs = a.shape[0], a.shape[1], scales.shape[2]
            out = a.new_empty(rows * top_k, outputs)
            return moe_wna16_marlin_gemm(
                a,
                out,
                codes,
                None,
                scales,
                None,
                None,
                None,
                None,
                locks,
                order,
                of_block,
                count,
                weight,
                moe_block_size=block,
                top_k=top_k,
                is_ep=False,
                b_q_type=scalar_types.uint4b8,
                size_m=rows,
                size_n=outputs,
                size_k=inputs,
                use_atomic_add=True,
                use_fp32_reduce=True,
                expert_ids_are_sorted=True,
                has_inactive_prefix_count=True,
                **kwargs,
            )

        gate_up = product(x, self.up, top_k, mul_topk_weights=False)
        h = x.new_empty(tokens * top_k, gate_up.shape[1] // 2)
        silu_and_mul(gate_up, h)
        y = product(h, self.down, 1, mul_topk_weights=True, zero_inactive_output=True)
        return moe_topk_sum(y.view(tokens, top_k, hidden), torch.empty_like(x))

    def reference(self, x, ids, weight):
        """The same in float32."""
        import torch
        from torch.nn.functional import silu

        out = torch.zeros_like(x, dtype=torch.float32)
        for e in ids.unique().tolist():
            up, down = (dequantized(codes[e], scales[e]) for codes, scales in (self.up, self.down))
            row, slot = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[row].float() @ up).chunk(2, dim=1)
            out.index_add_(0, row, weight[row, slot, None] * ((silu(gate) * up) @ down))
        return out


def dequantized(codes, scales):
    """Weights [inputs, outputs] of an expert. Marlin's order, of 16 inputs and 64 outputs: a lane of a warp has eight
    codes of each of four tiles, in the order in which an instruction takes them; and scales of every eighth output."""
    import torch

    inputs, outputs = 16 * codes.shape[0], codes.shape[1] // 2
    lane, nibble = torch.arange(32, device=codes.device)[:, None], torch.arange(8, device=codes.device)
    element = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device=codes.device)
    row = 2 * (lane % 4) + (element % 4) // 2 * 8 + element % 2
    col = lane // 4 + 8 * (element // 4)
    values = ((codes.view(inputs // 16, -1, 32, 4, 1) >> 4 * nibble) & 15) - 8
    tiles = torch.empty(inputs // 16, outputs // 64, 4, 16, 16, device=codes.device)
    tiles[:, :, :, row, col] = values.permute(0, 1, 3, 2, 4).float()
    weights = tiles.permute(0, 3, 1, 2, 4).reshape(inputs, outputs)
    scales = scales.float().view(-1, outputs // 64, 8, 8).transpose(2, 3).reshape(-1, outputs)
    return weights * scales.repeat_interleave(inputs // scales.shape[0], dim=0)


def suited(shape, tokens):
    """The place in BLOCKS that SGLang chooses."""
    pairs = tokens * shape[3] / shape[2]
    return next((i for i, block in enumerate(BLOCKS) if pairs / block < 0.9), len(BLOCKS) - 1)


def check(shape, layer, ids):
    """Largest error of Marlin's results, as a share of their norm."""
    import torch

    errors = []
    for tokens in (1, 6, 24):  # each is aligned by another kernel
        x, chosen = torch.randn(tokens, shape[0], device="cuda").bfloat16(), ids[0, :tokens].contiguous().cuda()
        weight = torch.rand(tokens, shape[3], device="cuda") + 0.1
        exact = layer.reference(x, chosen, weight)
        for block in BLOCKS:
            error = (layer.forward(x, chosen, weight, block).float() - exact).norm() / exact.norm()
            errors.append(error.item())
    if not max(errors) < 0.02:
        raise RuntimeError(f"Marlin's results differ from products in float32 by {errors} of their norm")
    return max(errors)


def marlin(shape, layers, ids):
    """Microseconds per layer: with the block that SGLang chooses, with the fastest, and the latter's tokens."""
    import torch

    tokens = ids.shape[1]
    x = torch.randn(tokens, shape[0], device="cuda").bfloat16()
    weight = torch.full((tokens, shape[3]), 1 / shape[3], device="cuda")
    chosen = [of_layer.contiguous().cuda() for of_layer in ids]
    at, medians = suited(shape, tokens), {}
    for block in BLOCKS[max(at - 1, 0) : at + 2]:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for layer, own in zip(layers, chosen, strict=True):
                layer.forward(x, own, weight, block)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer, own in zip(layers, chosen, strict=True):
                layer.forward(x, own, weight, block)
        times = []
        for _ in range(13):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * start.elapsed_time(end) / len(layers))
        medians[block] = statistics.median(times[2:])
    fastest = min(medians, key=medians.get)
    return medians[BLOCKS[at]], medians[fastest], fastest


def moebius(shape, file, tokens, command):
    """Microseconds per layer of Moebius's kernels, by tokens."""
    dimensions, layers = "x".join(map(str, shape[:4])), shape[4]
    flags = [f"shape={dimensions}", f"layers={layers}", f"ids={file}", "tokens=" + ",".join(map(str, tokens))]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return {row["tokens"]: row["us"] for row in map(json.loads, done.stdout.splitlines())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--routing", default="uniform,local")
    parser.add_argument("--moebius", default="cargo bench --bench experts_in_vram --", help="the command of its bench")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        return print("skipped: there is no GPU")
    tokens, rows = [int(n) for n in given.tokens.split(",")], []
    for name in given.shapes.split(","):
        hidden, width, experts, top_k, layers = shape = SHAPES[name]
        began, own, all_ids = time.monotonic(), {}, {}
        for routing in given.routing.split(","):
            ids = all_ids[routing] = choices(routing, layers, experts, top_k, max(tokens))
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(scratch) / "ids"
                file.write_bytes(ids.contiguous().numpy().tobytes())
                own[routing] = moebius(shape, file, tokens, given.moebius.split())
        print(f"{name}: Moebius took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        began, stack = time.monotonic(), [Layer(shape) for _ in range(layers)]
        error = check(shape, stack[0], next(iter(all_ids.values())))
        print(f"{name}: Marlin's results differ from float32 by {error:.4f} of their norm", file=sys.stderr, flush=True)
        for routing, ids in all_ids.items():
            for count in tokens:
                of_sglang, fastest, block = marlin(shape, stack, ids[:, :count])
                ours = own[routing][count]
                row = dict(shape=name, routing=routing, tokens=count, marlin_us=round(fastest, 1), marlin_block=block)
                row |= dict(sglang_us=round(of_sglang, 1), moebius_us=round(ours, 1), ratio=round(fastest / ours, 2))
                row["tflops"] = round(6e-6 * count * top_k * hidden * width / ours, 1)
                rows.append(row)
                print(json.dumps(row), flush=True)
                if given.out:
                    given.out.write_text(json.dumps(rows, indent=1) + "\n")
        del stack
        torch.cuda.empty_cache()
        print(f"{name}: Marlin took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return None


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_PLUGINS", "none")
    main()
