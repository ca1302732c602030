# mypy: ignore-errors
"""`MoE` in the order of CUDA streams: kernels, events, host functions and graphs on kernels/emulator, where no GPU is
needed."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from device import EMULATOR, Driver
from moe_reference import ROUNDING, error, random_batch, random_weights, reference

if "MOEBIUS_TEST_EMULATED" not in os.environ:
    # A process of its own: libcuda is loaded once, and other tests may have looked for a real one.
    def test_on_the_emulator():
        if not EMULATOR.exists():
            pytest.skip(f"{EMULATOR} is not built: make emulator")
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", __file__],
            env=os.environ | {"MOEBIUS_TEST_EMULATED": "1"},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]

else:
    import moebius

    EXPERTS, WIDTH, HIDDEN, TOP_K = 8, 64, 96, 3

    @pytest.fixture(scope="module")
    def driver():
        return Driver(EMULATOR)

    @pytest.fixture(scope="module")
    def moe():
        return moebius.MoE(weights=random_weights(np.random.default_rng(0), EXPERTS, WIDTH, HIDDEN), precision="bf16")

    @pytest.fixture(scope="module")
    def other():
        return moebius.MoE(weights=random_weights(np.random.default_rng(9), EXPERTS, WIDTH, HIDDEN), precision="bf16")

    def expected(moe, x, ids, weights, mask=None):
        return reference([moe.expert_weights(e) for e in range(EXPERTS)], x, ids, weights, mask)

    def check(moe, got, x, ids, weights, mask=None):
        assert error(got, expected(moe, x, ids, weights, mask)) < 1e-4

    def on_device(driver, batch):
        return [driver.array(a) for a in batch]

    @pytest.mark.parametrize("tokens", [1, 2, 7, 64])
    @pytest.mark.parametrize("ids_type", [np.int32, np.int64])
    def test_a_batch(driver, moe, tokens, ids_type):
        batch = random_batch(np.random.default_rng(tokens), tokens, TOP_K, EXPERTS, HIDDEN)
        batch[1][0, 0] = -1
        arrays = on_device(driver, (batch[0], batch[1].astype(ids_type), batch[2]))
        out, stream = driver.array(np.zeros_like(batch[0])), driver.stream()
        moe.submit_forward(*arrays, stream)
        # SGLang does this to what it has just given.
        arrays[1].write(np.full(batch[1].shape, -1, ids_type), stream)
        moe.sync_forward(arrays[0], stream, out=out)
        check(moe, out.read(stream), *batch)

    def test_the_default_stream_and_no_tokens(driver, moe):
        batch = random_batch(np.random.default_rng(3), 2, TOP_K, EXPERTS, HIDDEN)
        arrays, out = on_device(driver, batch), driver.array(np.zeros_like(batch[0]))
        moe.submit_forward(*arrays, 0)
        check(moe, moe.sync_forward(arrays[0], 0, out=out).read(0), *batch)
        none = on_device(driver, random_batch(np.random.default_rng(3), 0, TOP_K, EXPERTS, HIDDEN))
        moe.submit_forward(*none, 0)
        moe.sync_forward(none[0], 0, out=none[0])

    def test_two_layers_in_flight_on_two_streams(driver, moe, other):
        rng = np.random.default_rng(5)
        streams = [driver.stream(), driver.stream()]
        for _ in range(20):
            batches = [random_batch(rng, int(rng.integers(1, 9)), TOP_K, EXPERTS, HIDDEN) for _ in range(4)]
            calls = [
                (layer, stream, batch)
                for (layer, stream), batch in zip([(moe, 0), (other, 0), (moe, 1), (other, 1)], batches)
            ]
            arrays = [on_device(driver, batch) for batch in batches]
            outs = [driver.array(np.zeros_like(batch[0])) for batch in batches]
            for (layer, stream, _), array in zip(calls, arrays):
                layer.submit_forward(*array, streams[stream])
            for (layer, stream, _), array, out in zip(calls, arrays, outs):
                layer.sync_forward(array[0], streams[stream], out=out)
            for (layer, stream, batch), out in zip(calls, outs):
                check(layer, out.read(streams[stream]), *batch)

    def test_a_graph_replayed_with_other_inputs(driver, moe, other):
        rng = np.random.default_rng(6)
        stream = driver.stream()
        graphs = {}
        for tokens in (1, 4):
            batch = random_batch(rng, tokens, TOP_K, EXPERTS, HIDDEN)
            arrays = on_device(driver, batch)
            outs = [driver.array(np.zeros_like(batch[0])) for _ in range(2)]

            def layers(arrays=arrays, outs=outs):
                for layer, out in zip((moe, other), outs):
                    layer.submit_forward(*arrays, stream)
                    layer.sync_forward(arrays[0], stream, out=out)

            graphs[tokens] = driver.capture(stream, layers), arrays, outs
        mask = moe.gpu_experts_mask
        for i in range(60):
            tokens = (1, 4)[i % 2]
            graph, arrays, outs = graphs[tokens]
            batch = random_batch(rng, tokens, TOP_K, EXPERTS, HIDDEN)
            mask[:] = rng.random(EXPERTS) < 0.3
            for array, values in zip(arrays, batch):
                array.write(values, stream)
            driver.launch(graph, stream)
            check(moe, outs[0].read(stream), *batch, mask)
            check(other, outs[1].read(stream), *batch)
            if i % 20 == 0:
                # Not recorded, in between.
                extra = random_batch(rng, 3, TOP_K, EXPERTS, HIDDEN)
                given = on_device(driver, extra)
                out = driver.array(np.zeros_like(extra[0]))
                moe.submit_forward(*given, stream)
                moe.sync_forward(given[0], stream, out=out)
                check(moe, out.read(stream), *extra, mask)
        mask[:] = False

    def test_layers_of_a_graph_that_are_far_apart(driver, moe, other):
        # Longer than the experts' thread looks for what comes next; the graph wakes it once.
        stream, rng, wait = driver.stream(), np.random.default_rng(8), ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        pause = wait(lambda _: time.sleep(0.02))
        batches = [random_batch(rng, 2, TOP_K, EXPERTS, HIDDEN) for _ in range(4)]
        given, outs = [on_device(driver, batch) for batch in batches], []

        def run():
            for layer, arrays in zip((moe, other, other, moe), given):
                layer.submit_forward(*arrays, stream)
                outs.append(driver.array(np.zeros_like(batches[0][0])))
                driver("cuLaunchHostFunc", ctypes.c_void_p(stream), pause, None)
                layer.sync_forward(arrays[0], stream, out=outs[-1])
                driver("cuLaunchHostFunc", ctypes.c_void_p(stream), pause, None)

        graph = driver.capture(stream, run)
        for round in range(3):
            for _ in range(1 + round):
                driver.launch(graph, stream)
            for layer, out, batch in zip((moe, other, other, moe), outs, batches):
                check(layer, out.read(stream), *batch)
            # Not recorded: this thread wakes it.
            out = driver.array(np.zeros_like(batches[0][0]))
            moe.submit_forward(*given[0], stream)
            check(moe, moe.sync_forward(given[0][0], stream, out=out).read(stream), *batches[0])
            time.sleep(0.02)

    def bf16(x):
        """The bits of the nearest bf16 numbers."""
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def f32(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    @pytest.mark.parametrize("precision", ["bf16", "int8"])
    def test_prompts_on_the_device(driver, precision):
        # A ring of one expert in each half, so that a layer crosses in parts; buffers of 24 tokens, so that 60 do.
        layers = [moebius.MoE("demo", i, precision=precision) for i in range(moebius.MoE("demo")._layer.place[1])]
        experts, hidden, rng = layers[0].num_experts, layers[0].hidden_size, np.random.default_rng(11)
        weights = [[layer.expert_weights(e) for e in range(experts)] for layer in layers]
        for layer in layers:
            layer.compute_prompts(0, from_tokens=16, tokens=24, top_k=TOP_K, ring_bytes=1)
        streams = [driver.stream(), driver.stream()]
        # The last batch has fewer experts of a token than there is room for, and no more tokens at once for that.
        rounds = [(16, TOP_K), (24, TOP_K), (60, TOP_K), (5, TOP_K), (60, TOP_K), (60, 1)]
        for round, (tokens, top_k) in enumerate(rounds):
            calls = []
            for i, layer in enumerate(layers):
                layer.gpu_experts_mask[:] = rng.random(experts) < 0.3 * (round % 2)
                stream = streams[i % 2]
                x, ids, topk = random_batch(rng, tokens, top_k, experts, hidden)
                ids[0, 0] = -1
                ids = ids.astype([np.int32, np.int64][round % 2])
                arrays = [driver.array(bf16(x), "bfloat16"), driver.array(ids), driver.array(topk)]
                layer.submit_forward(*arrays, stream)
                # All that was given is overwritten at once.
                for array in arrays:
                    array.write(np.zeros(array.shape, array.dtype), stream)
                calls.append((i, stream, arrays[0], f32(bf16(x)), ids, topk, layer.gpu_experts_mask.copy()))
                if i % 2 or i == len(layers) - 1:
                    # Two layers are in flight.
                    for i, stream, given, x, ids, topk, mask in calls:
                        out = driver.array(np.zeros((tokens, hidden), np.uint16), "bfloat16")
                        layers[i].sync_forward(given, stream, out=out)
                        got, expected = f32(out.read(stream)), reference(weights[i], x, ids, topk, mask)
                        assert error(got, expected) < 0.02, (i, tokens)
                        on_cpu = layers[i].forward(x, ids, topk)
                        same = np.array_equal(bf16(on_cpu), bf16(got))
                        assert same == (tokens < 16), "the device rounds between products"
                    calls.clear()

    def test_a_recorded_prompt_is_computed_by_the_cpu(driver):
        layer = moebius.MoE("demo", 0, precision="bf16")
        layer.compute_prompts(0, from_tokens=16, tokens=24, top_k=TOP_K)
        stream = driver.stream()
        x, ids, topk = random_batch(np.random.default_rng(12), 20, TOP_K, layer.num_experts, layer.hidden_size)
        arrays = [driver.array(bf16(x), "bfloat16"), driver.array(ids), driver.array(topk)]
        out = driver.array(np.zeros(x.shape, np.uint16), "bfloat16")

        def run():
            layer.submit_forward(*arrays, stream)
            layer.sync_forward(arrays[0], stream, out=out)

        driver.launch(driver.capture(stream, run), stream)
        assert np.array_equal(out.read(stream), bf16(layer.forward(f32(bf16(x)), ids, topk)))

    class Held:
        """The demo's layers, some of whose experts the device holds: graphs of all layers one after the other."""

        def __init__(self, driver, cache_dir, held, precision="bf16", tokens=64, own=1):
            self.driver, self.stream, self.precision = driver, driver.stream(), precision
            given = dict(precision=precision, cache_dir=cache_dir, num_gpu_experts=own)
            first = moebius.MoE("demo", 0, **given)
            self.layers = [first] + [moebius.MoE("demo", i, **given) for i in range(1, first._layer.place[1])]
            self.weights = [[layer.expert_weights(e) for e in range(first.num_experts)] for layer in self.layers]
            matrix = {"bf16": 2, "int8": 1.07}[precision]
            expert = int(3 * matrix * first.hidden_size * first.intermediate_size * len(self.layers)) + 1
            for layer in self.layers:
                layer.hold_experts(0, pool_bytes=held * expert, tokens=tokens, top_k=TOP_K)
            self.rng, self.graphs = np.random.default_rng(held), {}

        def arrays(self, tokens):
            x = np.zeros((tokens, self.layers[0].hidden_size), np.uint16)
            ids, topk = np.zeros((tokens, TOP_K), np.int32), np.zeros((tokens, TOP_K), np.float32)
            array, bits = self.driver.array, "bfloat16"
            return [([array(x, bits), array(ids), array(topk)], array(x, bits)) for _ in self.layers]

        def run(self, arrays):
            for layer, (given, out) in zip(self.layers, arrays):
                layer.submit_forward(*given, self.stream)
                layer.sync_forward(given[0], self.stream, out=out)

        def batch(self, tokens, topic):
            """Choices that go from topic to topic, some that are SGLang's, and some of no expert."""
            x = self.rng.standard_normal((tokens, self.layers[0].hidden_size)).astype(np.float32)
            ids = (topic + np.array([self.rng.permutation(4)[:TOP_K] for _ in range(tokens)])) % 8
            none = self.rng.random(ids.shape) < 0.05
            return bf16(x), np.where(none, [-1, 8, 2**31 - 1][topic % 3], ids).astype(np.int32), self.rng.random(
                ids.shape
            ).astype(np.float32)

        def step(self, tokens, step, graph=True):
            """Runs all layers, and checks what each returns. Gives their errors."""
            if graph and tokens not in self.graphs:
                arrays = self.arrays(tokens)
                self.graphs[tokens] = arrays, self.driver.capture(self.stream, lambda: self.run(arrays))
            arrays = self.graphs[tokens][0] if graph else self.arrays(tokens)
            batches = [self.batch(tokens, step // 40 + 2 * layer) for layer in range(len(self.layers))]
            for (given, _), batch in zip(arrays, batches):
                for array, values in zip(given, batch):
                    array.write(values, self.stream)
            if graph:
                self.driver.launch(self.graphs[tokens][1], self.stream)
            else:
                self.run(arrays)
            errors = []
            for i, ((_, out), (x, ids, topk)) in enumerate(zip(arrays, batches)):
                mask = self.layers[i].gpu_experts_mask
                expected = reference(self.weights[i], f32(x), ids, topk, mask)
                errors.append(error(f32(out.read(self.stream)), expected))
                assert errors[-1] < self.allowed(i, (f32(x), ids, topk), expected), (step, tokens, i)
            return errors

        def allowed(self, i, batch, expected):
            """How far a layer may be off, as `error` counts. Of integers what the CPU loses of each choice alone, added
            up: whichever of them it computes, it loses no more."""
            if self.precision == "bf16":
                return 0.02
            x, *choices = batch
            lost = 0.0
            for k in range(TOP_K):
                ids, topk = (np.ascontiguousarray(of[:, k : k + 1]) for of in choices)
                alone = reference(self.weights[i], x, ids, topk, self.layers[i].gpu_experts_mask)
                lost += np.linalg.norm(self.layers[i].forward(x, ids, topk) - alone)
            return ROUNDING["bfloat16"] + lost / (np.linalg.norm(expected) or 1.0)

    # Where the caller computes no expert, products are on its own stream.
    @pytest.mark.parametrize("held, own", [(1, 1), (2, 1), (4, 1), (7, 1), (1, 0), (5, 0), (8, 0)])
    def test_many_steps_are_the_same_with_any_pool(driver, tmp_path, held, own):
        model = Held(driver, tmp_path, held, own=own)
        for step in range(250):
            model.step((1, 1, 2, 1, 5, 1, 8, 1)[step % 8], step, graph=step % 50 != 49)
        room, hits, misses = model.layers[0].held_experts(0)
        print(f"{held} of {8 - own} experts: {hits / (hits + misses):.2f} of the choices are held")
        assert room == held and hits > 0 and (misses == 0) == (held == 8 - own)
        # Topics of 4 experts in each layer, or 3 beside SGLang's: a list would hold its share.
        assert held != 4 or hits > 0.7 * (hits + misses)

    def test_held_experts_of_integers(driver, tmp_path):
        model = Held(driver, tmp_path, 3, precision="int8")
        # With all experts on the CPU 1.3%; which steps are computed there is up to the machine's timing.
        errors = [model.step((1, 6)[step % 2], step) for step in range(60)]
        assert np.sqrt(np.mean(np.square(errors))) < 0.015

    def test_replays_that_do_not_wait_for_each_other(driver, tmp_path):
        model = Held(driver, tmp_path, 3)
        model.step(2, 0)
        arrays, graph = model.graphs[2]
        for round in range(6):
            inputs = [[model.batch(2, round + layer) for layer in range(len(arrays))] for _ in range(12)]
            outs = [model.arrays(2) for _ in inputs]
            for batches, out in zip(inputs, outs):
                for (given, _), batch in zip(arrays, batches):
                    for array, values in zip(given, batch):
                        array.write(values, model.stream)
                driver.launch(graph, model.stream)
                for (_, from_), (_, to) in zip(arrays, out):
                    to.copy(from_, model.stream)
            for batches, out in zip(inputs, outs):
                for i, ((x, ids, topk), (_, got)) in enumerate(zip(batches, out)):
                    expected = reference(model.weights[i], f32(x), ids, topk, model.layers[i].gpu_experts_mask)
                    assert error(f32(got.read(model.stream)), expected) < 0.02

    def test_graphs_of_single_layers(driver, tmp_path):
        # As SGLang cuts a pass where a kernel cannot be recorded.
        model = Held(driver, tmp_path, 2)
        arrays = model.arrays(1)
        graphs = []
        for layer, (given, out) in zip(model.layers, arrays):

            def run(layer=layer, given=given, out=out):
                layer.submit_forward(*given, model.stream)
                layer.sync_forward(given[0], model.stream, out=out)

            graphs.append(driver.capture(model.stream, run))
        for step in range(20):
            for i, graph in enumerate(graphs):
                x, ids, topk = model.batch(1, step)
                for array, values in zip(arrays[i][0], (x, ids, topk)):
                    array.write(values, model.stream)
                driver.launch(graph, model.stream)
                expected = reference(model.weights[i], f32(x), ids, topk, model.layers[i].gpu_experts_mask)
                assert error(f32(arrays[i][1].read(model.stream)), expected) < 0.02

    def test_what_held_experts_do_not_take_is_the_cpus(driver, tmp_path):
        model = Held(driver, tmp_path, 3, tokens=4)
        layer, before = model.layers[1], model.layers[1].held_experts(0)
        x, ids, topk = random_batch(np.random.default_rng(1), 6, TOP_K, 8, layer.hidden_size)
        for tokens, kind in ((6, "bfloat16"), (2, "float32")):
            values = x[:tokens] if kind == "float32" else bf16(x)
            given = [driver.array(values, kind), driver.array(ids[:tokens]), driver.array(topk[:tokens])]
            out = driver.array(np.zeros_like(values), kind)
            layer.submit_forward(*given, model.stream)
            got = layer.sync_forward(given[0], model.stream, out=out).read(model.stream)
            on_cpu = layer.forward(values if kind == "float32" else f32(values), ids[:tokens], topk[:tokens])
            assert np.array_equal(got, on_cpu if kind == "float32" else bf16(on_cpu))
        assert layer.held_experts(0) == before

    def test_a_pool_without_room_is_told(driver, tmp_path):
        layer = moebius.MoE("demo", 0, precision="bf16", cache_dir=tmp_path)
        assert layer.held_experts(0) is None
        with pytest.raises(ValueError, match="0 MiB hold no expert of each of 3 layers: give at least 1 MiB"):
            layer.hold_experts(0, pool_bytes=1000, top_k=TOP_K)

    def test_mistakes_are_told(driver, moe):
        batch = random_batch(np.random.default_rng(7), 2, TOP_K, EXPERTS, HIDDEN)
        arrays, out = on_device(driver, batch), driver.array(np.zeros_like(batch[0]))
        stream = driver.stream()
        with pytest.raises(RuntimeError, match="submit_forward before sync_forward"):
            moe.sync_forward(arrays[0], stream, out=out)
        with pytest.raises(TypeError, match="different devices"):
            moe.submit_forward(arrays[0], batch[1], arrays[2], stream)
        with pytest.raises(TypeError, match="CPU arrays"):
            moe.forward(*arrays, out=out)
        moe.submit_forward(*arrays, stream)
        with pytest.raises(ValueError, match="expected"):
            moe.sync_forward(arrays[0], stream, out=driver.array(np.zeros((3, HIDDEN), np.float32)))
        moe.sync_forward(arrays[0], stream, out=out)
        check(moe, out.read(stream), *batch)
        for _ in range(8):
            moe.submit_forward(*arrays, stream)
        with pytest.raises(ValueError, match="sync_forward"):
            moe.submit_forward(*arrays, stream)
        for _ in range(8):
            moe.sync_forward(arrays[0], stream, out=out)
            check(moe, out.read(stream), *batch)

    def test_a_failing_expert_gives_nan_and_is_told_at_the_next_call(driver, damaged):
        batch = random_batch(np.random.default_rng(8), 1, damaged[1], damaged[0].num_experts, damaged[0].hidden_size)
        arrays, out = on_device(driver, batch), driver.array(np.zeros_like(batch[0]))
        stream = driver.stream()
        damaged[0].submit_forward(*arrays, stream)
        damaged[0].sync_forward(arrays[0], stream, out=out)
        assert np.isnan(out.read(stream)).all()
        with pytest.raises(RuntimeError, match="damaged"):
            damaged[0].submit_forward(*arrays, stream)

    @pytest.fixture
    def damaged(tmp_path):
        last = moebius.MoE("demo", load=False, layer=0, cache_dir=tmp_path)._layer.place[1] - 1
        (path,) = [p for p in tmp_path.rglob("*") if p.is_file() and p.open("rb").read(8) == b"MOEBIUS\0"]
        copy = tmp_path / "damaged"
        data = bytearray(path.read_bytes())
        data[-4096:] = bytes(4096)
        copy.write_bytes(data)
        moe = moebius.MoE(copy, layer=last, load=False)
        return moe, moe.num_experts

    def test_the_owner_sleeps_when_nothing_comes(driver, moe):
        import time

        batch = random_batch(np.random.default_rng(7), 2, TOP_K, EXPERTS, HIDDEN)
        arrays, out = on_device(driver, batch), driver.array(np.zeros_like(batch[0]))
        stream = driver.stream()
        for _ in range(50):
            moe.submit_forward(*arrays, stream)
            moe.sync_forward(arrays[0], stream, out=out)
        out.read(stream)
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.02
