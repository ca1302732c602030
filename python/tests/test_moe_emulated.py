# mypy: ignore-errors
"""`MoE` in the order of CUDA streams: kernels, events, host functions and graphs on kernels/emulator, where no GPU is
needed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from device import EMULATOR, Driver
from moe_reference import error, random_batch, random_weights, reference

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
        for round, tokens in enumerate([16, 24, 60, 5, 60]):
            calls = []
            for i, layer in enumerate(layers):
                layer.gpu_experts_mask[:] = rng.random(experts) < 0.3 * (round % 2)
                stream = streams[i % 2]
                x, ids, topk = random_batch(rng, tokens, TOP_K, experts, hidden)
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
