# mypy: ignore-errors
"""`MoE` of several ranks, each with a device, of kernels/emulator or real: the sum of what they return is the layer's.
Skipped by name without the emulator, and where there are fewer real GPUs."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from device import EMULATOR, Driver
from moe_reference import error, random_batch, random_weights, reference

TOP_K = 3
LIBRARIES = {"emulator": str(EMULATOR), "gpu": "libcuda.so.1"}
LIBRARY = LIBRARIES.get(os.environ.get("MOEBIUS_TEST_RANKS"))
#: Devices round between products.
TOLERANCE = {"bf16": 0.02, "int8": 0.03, "int4": 0.03}


def bf16(x):
    """The bits of the nearest bf16 numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Rank:
    """One rank's layers on its device, and graphs of them all. `model`: of `moebius.MoE`, without the layer."""

    def __init__(self, rank, ranks, layers, **model):
        import moebius

        self.driver, self.rank = Driver(LIBRARY, rank), rank
        model = dict(num_gpu_experts=1) | model
        self.layers = [moebius.MoE(layer=i, rank=rank, ranks=ranks, **model) for i in layers]
        self.stream, self.graphs, self.given = self.driver.stream(), {}, {}

    def compute_prompts(self, **sizes):
        for layer in self.layers:
            layer.compute_prompts(self.rank, top_k=TOP_K, **sizes)

    def hold_experts(self, pool, **sizes):
        """Returns what the others are given."""
        for layer in self.layers:
            self.held = layer.hold_experts(self.rank, top_k=TOP_K, pool=pool, **sizes)
        return self.layers[0].pool(self.rank)

    def arrays(self, x, ids, weights, kind="bfloat16"):
        array = self.driver.array
        return [array(x, kind), array(ids), array(weights)], array(np.zeros_like(x), kind)

    def run(self, arrays):
        for layer, (given, out) in zip(self.layers, arrays):
            layer.submit_forward(*given, self.stream)
            layer.sync_forward(given[0], self.stream, out=out)

    def begin(self, batches, graph):
        """Enqueues a pass of a batch for each layer."""
        tokens = len(batches[0][0])
        if not graph:
            self.now = [self.arrays(*batch) for batch in batches]
            return self.run(self.now)
        if tokens not in self.graphs:
            self.given[tokens] = [self.arrays(*batch) for batch in batches]
            self.graphs[tokens] = self.driver.capture(self.stream, lambda: self.run(self.given[tokens]))
        self.now = self.given[tokens]
        for (given, _), batch in zip(self.now, batches):
            for array, values in zip(given, batch):
                array.write(values, self.stream)
        self.driver.launch(self.graphs[tokens], self.stream)

    def end(self):
        """What each layer returned."""
        return [f32(out.read(self.stream)) for _, out in self.now]


class Model:
    """The demo's layers, to be held against. `own`: experts of each that the caller computes."""

    def __init__(self, precision, cache_dir, own=1):
        import moebius

        self.given = dict(model="demo", precision=precision, cache_dir=cache_dir, num_gpu_experts=own)
        if precision == "int4":
            self.given["group_size"] = 32  # a width of 128 in larger groups has one part
        first = moebius.MoE(layer=0, **self.given)
        self.number, self.precision = first._layer.place[1], precision
        layers = [first, *(moebius.MoE(layer=i, **self.given) for i in range(1, self.number))]
        self.weights = [[layer.expert_weights(e) for e in range(first.num_experts)] for layer in layers]
        self.mask, self.hidden, self.experts = first.gpu_experts_mask, first.hidden_size, first.num_experts
        self.rng = np.random.default_rng(len(precision))
        bits = {"bf16": 16, "int8": 8.5, "int4": 4.5}[precision]
        self.expert_bytes = int(3 * bits / 8 * self.hidden * first.intermediate_size * self.number) + 1

    def batches(self, tokens, topic):
        """Choices that go from topic to topic, other ones in each layer, some of no expert."""

        def batch(topic):
            x = bf16(self.rng.standard_normal((tokens, self.hidden)).astype(np.float32))
            ids = (topic + np.array([self.rng.permutation(4)[:TOP_K] for _ in range(tokens)])) % self.experts
            none = self.rng.random(ids.shape) < 0.05
            return x, np.where(none, -1, ids).astype(np.int32), self.rng.random(ids.shape).astype(np.float32)

        return [batch(topic + 2 * i) for i in range(self.number)]

    def check(self, batches, results, when):
        """`results`: of each rank, what each layer returned."""
        for i, ((x, ids, weights), parts) in enumerate(zip(batches, zip(*results))):
            expected = reference(self.weights[i], f32(x), ids, weights, self.mask)
            assert error(sum(parts), expected) < TOLERANCE[self.precision], (when, i)


def another(pipe, rank, ranks, given, layers, pool, sizes):
    """A rank in a process of its own: batches come through the pipe, what it returns goes back."""
    one = Rank(rank, ranks, range(layers), **given)
    one.compute_prompts(**sizes["prompts"])
    one.hold_experts(pool, **sizes["held"])
    pipe.send(one.layers[0].threads)
    while (asked := pipe.recv()) is not None:
        one.begin(*asked)
        pipe.send(one.end())


def count(library):
    """How many devices there are."""
    try:
        cuda, number = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL), ctypes.c_int()
    except OSError:
        return 0
    return number.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0 else 0


if LIBRARY is None:
    # Processes of their own: libcuda is loaded once.
    @pytest.mark.parametrize("where", LIBRARIES)
    def test_ranks(where):
        if where == "emulator" and not EMULATOR.exists():
            pytest.skip(f"{EMULATOR} is not built: make emulator")
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", __file__],
            env=os.environ | {"MOEBIUS_TEST_RANKS": where},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
        if " passed" not in run.stdout:
            pytest.skip("there are no two GPUs: ranks are tested on the emulator only")

else:
    DEVICES = count(LIBRARY)
    import moebius

    @pytest.fixture(autouse=True)
    def as_many_devices(request):
        ranks = getattr(request.node, "callspec", None)
        ranks = ranks.params.get("ranks", 2) if ranks else 2
        if DEVICES < ranks:
            pytest.skip(f"{DEVICES} of {ranks} GPUs")

    # Widths in steps of 32: one of two ranks has twice the other's, one of three a step more or less than another.
    @pytest.mark.parametrize("ranks, width, hidden", [(2, 96, 160), (2, 64, 96), (3, 160, 64), (4, 128, 96)])
    @pytest.mark.parametrize("precision", ["bf16", "int4"])
    def test_parts_of_prompts_and_of_few_tokens_are_the_whole(precision, ranks, width, hidden):
        experts, rng = 8, np.random.default_rng(width)
        weights = random_weights(rng, experts, width, hidden)
        all_ranks = [Rank(rank, ranks, [0], weights=weights, precision=precision) for rank in range(ranks)]
        assert all(rank.layers[0].is_divided for rank in all_ranks)
        pool, largest = None, int(3 * 2 * hidden * -(-width // 32 // ranks) * 32)
        for rank in all_ranks:
            rank.compute_prompts(from_tokens=24, tokens=32, ring_bytes=1)
            pool = rank.hold_experts(pool, pool_bytes=3 * largest, tokens=16) or pool
        numbers = [all_ranks[0].layers[0].expert_weights(e) for e in range(experts)]
        mask = all_ranks[0].layers[0].gpu_experts_mask
        for tokens in (1, 3, 9, 20, 24, 70):
            x, ids, topk = random_batch(rng, tokens, TOP_K, experts, hidden)
            x, ids[0, 0] = bf16(x), -1
            for rank in all_ranks:
                rank.begin([(x, ids, topk)], graph=False)
            parts = [rank.end()[0] for rank in all_ranks]
            assert error(sum(parts), reference(numbers, f32(x), ids, topk, mask)) < TOLERANCE[precision], tokens
            # Neither held nor a prompt: the CPU computes all of it, for the first rank.
            is_cpus = 16 < tokens < 24
            assert tokens <= 16 or all(np.any(part) != is_cpus for part in parts[1:])
            whole = all_ranks[0].layers[0].forward(f32(x), ids, topk)
            assert tokens <= 16 or np.array_equal(bf16(whole), bf16(parts[0])) == is_cpus

    def test_the_cpu_computes_for_the_first_rank_alone():
        weights = random_weights(np.random.default_rng(0), 4, 64, 64)
        x, ids, topk = random_batch(np.random.default_rng(1), 5, TOP_K, 4, 64)
        ranks = [Rank(rank, 2, [0], weights=weights, precision="bf16") for rank in range(2)]
        for kind in ("bfloat16", "float16", "float32"):
            values = bf16(x) if kind == "bfloat16" else x.astype(kind)
            for rank in ranks:
                arrays = [rank.arrays(values, ids, topk, kind)]
                arrays[0][1].write(np.ones_like(values), rank.stream)
                graph = rank.driver.capture(rank.stream, lambda: rank.run(arrays))
                rank.driver.launch(graph, rank.stream)
                assert np.any(arrays[0][1].read(rank.stream)) == (rank.rank == 0)
        assert not np.any(ranks[1].layers[0].forward(x, ids, topk))

    def test_a_width_that_cannot_be_divided_is_the_first_ranks():
        weights = random_weights(np.random.default_rng(0), 4, 32, 64)
        ranks = [Rank(rank, 2, [0], weights=weights, precision="bf16") for rank in range(2)]
        for rank in ranks:
            assert not rank.layers[0].is_divided
            rank.compute_prompts(from_tokens=8, tokens=32)
            assert rank.hold_experts(None, pool_bytes=1 << 20, tokens=4) is None
        numbers, mask = [ranks[0].layers[0].expert_weights(e) for e in range(4)], ranks[0].layers[0].gpu_experts_mask
        for tokens in (2, 12):
            x, ids, topk = random_batch(np.random.default_rng(1), tokens, TOP_K, 4, 64)
            for rank in ranks:
                rank.begin([(bf16(x), ids, topk)], graph=False)
            first, other = [rank.end()[0] for rank in ranks]
            assert error(first, reference(numbers, f32(bf16(x)), ids, topk, mask)) < 0.02 and not np.any(other)

    POOLS = [(2, "bf16", 2, 1), (2, "int4", 4, 1), (2, "int4", 4, 0), (3, "int4", 3, 1), (4, "bf16", 7, 1)]

    @pytest.mark.parametrize("ranks, precision, held, own", POOLS)
    def test_pools_of_all_ranks_follow_the_text_together(tmp_path, ranks, precision, held, own):
        model = Model(precision, tmp_path, own)
        all_ranks, pool = [Rank(rank, ranks, range(model.number), **model.given) for rank in range(ranks)], None
        largest = -(-4 // ranks) / 4 * model.expert_bytes if ranks == 3 else model.expert_bytes / ranks
        for rank in all_ranks:
            pool = rank.hold_experts(pool, pool_bytes=int((held + 0.1) * largest), tokens=64) or pool
        assert {rank.held for rank in all_ranks} == {held}
        for step in range(160):
            tokens = (1, 1, 2, 1, 5, 1, 8, 1)[step % 8]
            batches = model.batches(tokens, step // 40)
            for rank in all_ranks:
                rank.begin(batches, graph=step % 50 != 49)
            model.check(batches, [rank.end() for rank in all_ranks], step)
        room, hits, misses = all_ranks[0].layers[0].held_experts(0)
        print(f"{held} of {8 - own} experts on {ranks} ranks: {hits / (hits + misses):.2f} of the choices are held")
        assert room == held and hits > 0 and (misses == 0) == (held == 8 - own)
        assert held != 4 or hits > 0.7 * (hits + misses), "experts come to all ranks"

    def test_replays_that_do_not_wait_for_each_other(tmp_path):
        model, pool = Model("bf16", tmp_path), None
        ranks = [Rank(rank, 2, range(model.number), **model.given) for rank in range(2)]
        for rank in ranks:
            pool = rank.hold_experts(pool, pool_bytes=int(1.6 * model.expert_bytes)) or pool
        steps = [model.batches(2, round) for round in range(40)]
        results = [[], []]
        for batches in steps:
            for rank, got in zip(ranks, results):
                rank.begin(batches, graph=True)
                outs = [rank.driver.array(np.zeros_like(x), "bfloat16") for x, _, _ in batches]
                for (_, from_), to in zip(rank.now, outs):
                    to.copy(from_, rank.stream)
                got.append(outs)
        for i, batches in enumerate(steps):
            parts = [[f32(out.read(rank.stream)) for out in got[i]] for rank, got in zip(ranks, results)]
            model.check(batches, parts, i)

    def test_ranks_in_processes_of_their_own(tmp_path):
        model, (pipe, theirs) = Model("int4", tmp_path), multiprocessing.Pipe()
        sizes = dict(
            prompts=dict(from_tokens=24, tokens=32, ring_bytes=1),
            held=dict(pool_bytes=int(1.6 * model.expert_bytes), tokens=16),
        )
        first = Rank(0, 2, range(model.number), **model.given)
        first.compute_prompts(**sizes["prompts"])
        pool = first.hold_experts(None, **sizes["held"])
        given = (theirs, 1, 2, model.given, model.number, pool, sizes)
        other = multiprocessing.get_context("spawn").Process(target=another, args=given, daemon=True)
        other.start()
        try:
            assert pipe.poll(120) and pipe.recv() == 1, "its processor has nothing to do"
            for step in range(100):
                tokens = (1, 2, 1, 6, 1, 30, 20, 1)[step % 8]
                asked = model.batches(tokens, step // 25), tokens < 20 and step % 3 > 0
                pipe.send(asked)
                first.begin(*asked)
                assert pipe.poll(120), "the other rank returns"
                model.check(asked[0], [first.end(), pipe.recv()], step)
            room, hits, misses = first.layers[0].held_experts(0)
            assert room == 3 and hits > 0.4 * (hits + misses)
            pipe.send(None)
            other.join(60)
            assert other.exitcode == 0
        finally:
            other.kill()

    def test_mistakes_are_told(tmp_path):
        with pytest.raises(ValueError, match="rank 2 of 2: expected 0 to 1"):
            moebius.MoE("demo", rank=2, ranks=2)
        model = Model("bf16", tmp_path)
        ranks = [Rank(rank, 2, [0], **model.given) for rank in range(2)]
        pool = ranks[0].hold_experts(None, pool_bytes=model.expert_bytes)
        for wrong, text in [(None, "give the first one's pool"), ("/proc/self/fd/9999", "could not be opened")]:
            with pytest.raises((ValueError, RuntimeError), match=text):
                ranks[1].hold_experts(wrong, pool_bytes=model.expert_bytes)
        with pytest.raises(ValueError, match="give each as many bytes"):
            ranks[1].hold_experts(pool, pool_bytes=2 * model.expert_bytes)
