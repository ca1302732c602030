"""One layer of routed experts, `moebius.MoE` beside kt-kernel, from the same INT4 weights in groups of 32 (kt's
RAWINT4): time and error against f64.

Needs torch (for bf16 tensors) and kt-kernel (`pip install --no-deps kt-kernel==0.7.2`). Its wrapper class needs CUDA,
so what is driven is its extension.
Each takes its turn in blocks, with a pause between them: kt's threads go on spinning for 50 ms after a call.

    python python/benches/beside_kt.py [--threads 2] [--out benches/record/NAME.json]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from kt_kernel import kt_kernel_ext as kt

import moebius

GROUP = 32
PARTS = ("gate_proj", "up_proj", "down_proj")


def checkpoint(folder, experts, width, hidden, rng):
    """A layer in compressed-tensors' packed INT4: codes and scales by part, experts first."""
    shapes = dict(gate_proj=(width, hidden), up_proj=(width, hidden), down_proj=(hidden, width))
    packed, scales = {}, {}
    for part, (n, k) in shapes.items():
        packed[part] = rng.integers(0, 256, (experts, n, k // 2), np.uint8)
        scale = (rng.random((experts, n, k // GROUP), np.float32) + 0.5) / (4.6 * np.sqrt(k))
        scales[part] = torch.from_numpy(scale).to(torch.bfloat16)
    header, at, blobs = {}, 0, []

    def put(name, dtype, shape, data):
        nonlocal at
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + len(data)])
        at += len(data)
        blobs.append(data)

    for e in range(experts):
        for part, (n, k) in shapes.items():
            name = f"model.layers.0.mlp.experts.{e}.{part}"
            put(f"{name}.weight_packed", "I32", [n, k // 8], packed[part][e].tobytes())
            put(f"{name}.weight_scale", "BF16", [n, k // GROUP], scales[part][e].view(torch.int16).numpy().tobytes())
            put(f"{name}.weight_shape", "I64", [2], np.array([n, k]).tobytes())
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    config = dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=hidden,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=8,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=1024,
        intermediate_size=6144,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=4096,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        hidden_act="silu",
        tie_word_embeddings=False,
        quantization_config=dict(
            quant_method="compressed-tensors",
            format="pack-quantized",
            quantization_status="compressed",
            ignore=["lm_head"],
            config_groups=dict(
                group_0=dict(
                    targets=["Linear"],
                    weights=dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP),
                )
            ),
        ),
    )
    (folder / "config.json").write_text(json.dumps(config))
    return packed, scales


class KtKernel:
    def __init__(self, packed, scales, experts, width, hidden, top_k, threads, max_tokens):
        pool = kt.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self.cpu = kt.CPUInfer(pool)
        self.keep = packed, scales, torch.zeros(experts, dtype=torch.bool), torch.arange(experts)
        config = kt.moe.MOEConfig(experts, top_k, hidden, width, self.keep[2].data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, self.cpu.backend_, max_tokens
        for part, name in zip(PARTS, ("gate", "up", "down")):
            setattr(config, f"{name}_projs", [[packed[part][e].ctypes.data for e in range(experts)]])
            setattr(config, f"{name}_scales", [[scales[part][e].data_ptr() for e in range(experts)]])
        config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, GROUP, False
        self.moe = kt.moe.AMXInt4_KGroup_MOE(config)
        self.cpu.submit(self.moe.load_weights_task(self.keep[3].data_ptr()))
        self.cpu.sync()

    def forward(self, x, ids, weights):
        count, out = torch.tensor([x.shape[0]], dtype=torch.int32), torch.empty_like(x)
        self.cpu.submit(
            self.moe.forward_task(
                count.data_ptr(), ids.shape[1], ids.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr(), False
            )
        )
        self.cpu.sync()
        return out


def reference(moe, x, ids, weights):
    x, out = x.double().numpy(), np.zeros(x.shape)
    for e in sorted(set(ids.flatten().tolist())):
        gate, up, down = (w.astype(np.float64) for w in moe.expert_weights(e))
        rows, at = np.nonzero(ids.numpy() == e)
        a = x[rows] @ gate.T
        out[rows] += weights.numpy()[rows, at][:, None] * ((a / (1 + np.exp(-a)) * (x[rows] @ up.T)) @ down.T)
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kt-threads", type=int, help="of kt-kernel, which wants a core for its queue beside them")
    parser.add_argument("--shape", default="128,768,2048,8", help="experts, width, hidden, top_k")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    experts, width, hidden, top_k = map(int, arguments.shape.split(","))
    rng = np.random.default_rng(0)
    batches = [int(n) for n in arguments.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        packed, scales = checkpoint(Path(folder), experts, width, hidden, rng)
        ours = moebius.MoE(folder, 0, cache_dir=Path(folder) / "cache", threads=arguments.threads)
        kt_threads = arguments.kt_threads or arguments.threads
        theirs = KtKernel(packed, scales, experts, width, hidden, top_k, kt_threads, max(batches))
        print(
            f"{experts} experts of {hidden} x {width}, top {top_k}, {ours.precision}, {ours.threads} threads; kt "
            f"{kt.__cpu_variant__}, {kt_threads}"
        )
        record = dict(
            shape=arguments.shape,
            threads=arguments.threads,
            kt_threads=kt_threads,
            precision=ours.precision,
            kt_variant=kt.__cpu_variant__,
            batches={},
        )
        for tokens in batches:
            x = torch.randn(tokens, hidden).to(torch.bfloat16)
            # Many routings, so that one layer's weights do not stay in caches more than a model's do.
            routings = [
                (
                    torch.from_numpy(np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])),
                    torch.rand(tokens, top_k),
                )
                for _ in range(16)
            ]
            times = {"moebius": [], "kt": []}
            runs = max(3, min(40, 400 // tokens))
            for _ in range(5):
                for name, engine in (("moebius", ours), ("kt", theirs)):
                    for i in range(runs):
                        start = time.perf_counter()
                        engine.forward(x, *routings[i % 16])
                        if i >= 2:
                            times[name].append(1e6 * (time.perf_counter() - start))
                    time.sleep(0.2)
            expected = reference(ours, x, *routings[0])
            errors = {
                name: float(
                    np.linalg.norm(engine.forward(x, *routings[0]).double().numpy() - expected)
                    / np.linalg.norm(expected)
                )
                for name, engine in (("moebius", ours), ("kt", theirs))
            }
            median = {name: statistics.median(t) for name, t in times.items()}
            best = {name: min(t) for name, t in times.items()}
            record["batches"][tokens] = dict(median_us=median, best_us=best, error=errors)
            print(
                f"batch {tokens:4}: moebius {median['moebius']:9.0f} us (best {best['moebius']:.0f}), kt "
                f"{median['kt']:9.0f} (best {best['kt']:.0f}), "
                f"{median['kt'] / median['moebius']:.2f} times as fast; error {errors['moebius']:.2e}, kt "
                f"{errors['kt']:.2e}"
            )
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
