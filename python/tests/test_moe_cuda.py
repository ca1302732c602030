# mypy: ignore-errors
"""`MoE` on a real GPU with torch: inside CUDA graphs, on several streams, from two processes. Skipped by name where
there is no GPU."""

import multiprocessing
import os
import statistics
import time

import numpy as np
import pytest

from moe_reference import TOLERANCE, error, random_weights, reference

torch = pytest.importorskip(
    "torch", reason="torch is not installed: the GPU side of MoE is tested on the emulator only"
)
if not torch.cuda.is_available():
    pytest.skip("there is no GPU: the GPU side of MoE is tested on the emulator only", allow_module_level=True)

import moebius  # noqa: E402

EXPERTS, WIDTH, HIDDEN, TOP_K = 16, 128, 256, 4


def make(seed, precision="bf16", shape=(EXPERTS, WIDTH, HIDDEN), **kwargs):
    return moebius.MoE(weights=random_weights(np.random.default_rng(seed), *shape), precision=precision, **kwargs)


def recorded(run):
    """A graph of what ``run`` enqueues, which has run once before."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def batch(tokens, top_k=TOP_K, experts=EXPERTS, hidden=HIDDEN, dtype=torch.bfloat16, device="cuda"):
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    ids = torch.stack([torch.randperm(experts, device=device)[:top_k] for _ in range(tokens)]).to(torch.int32)
    return x, ids, torch.rand(tokens, top_k, device=device)


def check(moe, got, x, ids, weights, mask=None, precision="bf16"):
    experts = [moe.expert_weights(e) for e in range(moe.num_experts)]
    expected = reference(experts, x.float().cpu().numpy(), ids.cpu().numpy(), weights.cpu().numpy(), mask)
    rounding = {torch.float32: 0, torch.float16: 1e-3, torch.bfloat16: 5e-3}[got.dtype]
    assert error(got.float().cpu().numpy(), expected) < TOLERANCE[precision] + rounding


def current():
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 8, 100, 513])
def test_eager(dtype, tokens):
    moe = make(0)
    x, ids, weights = batch(tokens, dtype=dtype)
    given = ids.clone()
    moe.submit_forward(x, given, weights, current())
    given.fill_(-1)
    out = moe.sync_forward(x, current())
    assert out.dtype == dtype and out.shape == x.shape and out.is_cuda
    check(moe, out, x, ids, weights)


def test_forward_takes_torch_cpu_tensors():
    moe = make(0)
    x, ids, weights = batch(5, device="cpu")
    check(moe, moe.forward(x, ids, weights), x, ids, weights)


def test_a_graph_replayed_1000_times_with_changing_inputs_and_masks():
    layers = [make(1), make(2), make(3)]
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    layers[1].gpu_experts_mask = mask
    graphs = {}
    for tokens in (1, 4, 32):
        x, ids, weights = batch(tokens)
        outs = []

        def run():
            outs.clear()
            h = x
            for moe in layers:
                given = ids.clone()
                moe.submit_forward(h, given, weights, current())
                given.fill_(-1)
                beside = h * 0.5
                outs.append(moe.sync_forward(h, current()))
                h = beside + outs[-1]

        graphs[tokens] = recorded(run), x, ids, weights, list(outs)
    for i in range(1000):
        graph, x, ids, weights, outs = graphs[(1, 4, 32)[i % 3]]
        torch.cuda.synchronize()
        new = batch(x.shape[0])
        for to, value in zip((x, ids, weights), new):
            to.copy_(value)
        mask.copy_(torch.rand(EXPERTS) < 0.3)
        graph.replay()
        torch.cuda.synchronize()
        if i % 10 < 3:
            check(layers[0], outs[0], x, ids, weights)
            h = x * 0.5 + outs[0]
            check(layers[1], outs[1], h, ids, weights, mask.numpy())
            check(layers[2], outs[2], h * 0.5 + outs[1], ids, weights)


@pytest.mark.parametrize("held", [1, 3, 7])
def test_held_experts_follow_1000_replays(tmp_path, held):
    """Topics of four experts, one of which is the caller's in the first."""
    layers = [moebius.MoE("demo", i, precision="bf16", cache_dir=tmp_path, num_gpu_experts=1) for i in range(3)]
    hidden, width = layers[0].hidden_size, layers[0].intermediate_size
    experts = [[layer.expert_weights(e) for e in range(8)] for layer in layers]
    for layer in layers:
        pool_bytes = held * 3 * (3 * 2 * hidden * width) + 1
        assert layer.hold_experts(torch.cuda.current_device(), pool_bytes=pool_bytes, top_k=3) == held
    graphs = {}
    for tokens in (1, 4, 8):
        given = [batch(tokens, 3, 8, hidden) for _ in layers]
        outs = []

        def run(given=given, outs=outs):
            outs.clear()
            for layer, (x, ids, weights) in zip(layers, given):
                own = x.clone(), ids.clone(), weights.clone()
                layer.submit_forward(*own, current())
                for array in own:
                    array.zero_()
                outs.append(layer.sync_forward(x, current()))

        graphs[tokens] = recorded(run), given, outs
    for step in range(1000):
        graph, given, outs = graphs[(1, 1, 4, 1, 8)[step % 5]]
        for i, (x, ids, weights) in enumerate(given):
            topic = torch.stack([torch.randperm(4, device="cuda")[:3] for _ in range(len(x))])
            x.copy_(torch.randn_like(x))
            ids.copy_((topic + step // 100 + 2 * i) % 8)
            weights.copy_(torch.rand_like(weights))
        graph.replay()
        if step % 10 < 3:  # the others do not wait
            torch.cuda.synchronize()
            for layer, weights_of, (x, ids, weights), out in zip(layers, experts, given, outs):
                arrays = x.float().cpu().numpy(), ids.cpu().numpy(), weights.cpu().numpy()
                expected = reference(weights_of, *arrays, layer.gpu_experts_mask)
                assert error(out.float().cpu().numpy(), expected) < 0.02, step
    _, hits, misses = layers[0].held_experts(torch.cuda.current_device())
    assert hits > 0 and (misses == 0) == (held == 7)


def test_replays_without_waiting_between_them():
    moe = make(4)
    x, ids, weights = batch(2)
    moe.submit_forward(x, ids, weights, current())
    moe.sync_forward(x, current())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe.submit_forward(x, ids, weights, current())
        out = moe.sync_forward(x, current())
    inputs = [batch(2) for _ in range(200)]
    results = []
    for new in inputs:
        for to, value in zip((x, ids, weights), new):
            to.copy_(value)
        graph.replay()
        results.append(out.clone())
    torch.cuda.synchronize()
    for new, result in list(zip(inputs, results))[::20]:
        check(moe, result, *new)


def test_two_streams_and_two_layers_in_flight():
    moes = make(5), make(6)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(50):
        calls = []
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                given = batch(3)
                for moe in moes:
                    moe.submit_forward(*given, current())
                calls.append(given)
        for stream, given in zip(streams, calls):
            with torch.cuda.stream(stream):
                outs = [moe.sync_forward(given[0], current()) for moe in moes]
            stream.synchronize()
            for moe, out in zip(moes, outs):
                check(moe, out, *given)


def rank(number, queue, threads):
    torch.manual_seed(number)
    moe = make(7, threads=threads)
    times = []
    for i in range(300):
        x, ids, weights = batch(4)
        torch.cuda.synchronize()
        start = time.perf_counter()
        moe.submit_forward(x, ids, weights, current())
        out = moe.sync_forward(x, current())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if i % 50 == 0:
            check(moe, out, x, ids, weights)
    queue.put((number, statistics.median(times)))


def test_two_ranks_share_the_box():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=rank, args=(i, queue, os.cpu_count())) for i in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(180)
        assert process.exitcode == 0
    for _ in ranks:
        number, median = queue.get()
        print(f"rank {number} of 2: {1e6 * median:.0f} us a batch of 4, its launches included")
        assert median < 0.05


def test_idle_uses_no_cpu():
    moe = make(8)
    given = batch(2)
    for _ in range(50):
        moe.submit_forward(*given, current())
        moe.sync_forward(given[0], current())
    torch.cuda.synchronize()
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.05


SHAPE = dict(experts=128, width=768, hidden=2048, top_k=8, layers=48)


@pytest.fixture(scope="module")
def qwen3_layers():
    """Four layers, more than a cache holds: of eight random experts, over and over."""
    rng = np.random.default_rng(0)
    sizes = (SHAPE["width"], SHAPE["hidden"]), (SHAPE["width"], SHAPE["hidden"]), (SHAPE["hidden"], SHAPE["width"])
    weights = tuple(
        np.tile(rng.random((8, *size), np.float32) - 0.5, (SHAPE["experts"] // 8, 1, 1)) / 16 for size in sizes
    )
    return [moebius.MoE(weights=weights, precision="int4", group_size=128) for _ in range(4)]


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_time_of_a_layer_of_qwen3_30b(qwen3_layers, tokens):
    """48 layers in one graph, a small kernel between them."""
    moes, layers = qwen3_layers, SHAPE["layers"]
    inputs = [batch(tokens, SHAPE["top_k"], SHAPE["experts"], SHAPE["hidden"]) for _ in range(layers)]

    def run():
        total = torch.zeros_like(inputs[0][0])
        for i in range(layers):
            moes[i % 4].submit_forward(*inputs[i], current())
            total = total + moes[i % 4].sync_forward(inputs[i][0], current())
        return total

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / layers)
    cpu = []
    on_cpu = [tuple(t.cpu() for t in given) for given in inputs]
    for i in range(100):
        start = time.perf_counter()
        moes[i % 4].forward(*on_cpu[i % layers])
        cpu.append(time.perf_counter() - start)
    print(
        f"Qwen3-30B shape, int4-g128, {moes[0].threads} threads, batch {tokens}, "
        f"{len(set(inputs[0][1].flatten().tolist()))} experts of a layer: {1e6 * statistics.median(times):.0f} us a "
        f"layer in a graph, "
        f"best {1e6 * min(times):.0f}; forward on CPU tensors {1e6 * statistics.median(cpu):.0f}"
    )
