# mypy: ignore-errors
"""`MoE` on CPU arrays against its naive twin."""

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import moebius
from moe_reference import ROUNDING, TOLERANCE, error, random_batch, random_weights, reference

EXPERTS, WIDTH, HIDDEN, TOP_K = 8, 64, 96, 3
WEIGHTS = random_weights(np.random.default_rng(0), EXPERTS, WIDTH, HIDDEN)


@pytest.fixture(params=["bf16", "int8", "int4"])
def moe(request):
    return moebius.MoE(weights=WEIGHTS, precision=request.param)


def unpacked(moe):
    return [moe.expert_weights(e) for e in range(moe.num_experts)]


def tolerance(moe, dtype="float32"):
    return TOLERANCE[moe.precision.split("-")[0]] + ROUNDING[dtype]


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 16, 17, 100, 512])
def test_random_routing(moe, tokens):
    rng = np.random.default_rng(tokens)
    x, ids, weights = random_batch(rng, tokens, TOP_K, EXPERTS, HIDDEN)
    ids[rng.random(ids.shape) < 0.1] = -1
    ids[rng.random(ids.shape) < 0.1] = EXPERTS
    out = moe.forward(x, ids, weights)
    assert out.dtype == x.dtype and out.shape == x.shape
    assert error(out, reference(unpacked(moe), x, ids, weights)) < tolerance(moe)


def test_all_ids_skipped_is_zero(moe):
    x, ids, weights = random_batch(np.random.default_rng(0), 4, TOP_K, EXPERTS, HIDDEN)
    for ids in (np.full_like(ids, -1), np.full_like(ids, EXPERTS), np.full(ids.shape, 1 << 40, np.int64)):
        assert not moe.forward(x, ids, weights).any()


def test_more_tokens_than_a_part_equals_the_parts(moe):
    x, ids, weights = random_batch(np.random.default_rng(1), 5000, TOP_K, EXPERTS, HIDDEN)
    whole = moe.forward(x, ids, weights)
    parts = [moe.forward(x[i : i + 700], ids[i : i + 700], weights[i : i + 700]) for i in range(0, 5000, 700)]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("ids_type", [np.int32, np.int64])
def test_half_precision_rows(moe, ids_type):
    x, ids, weights = random_batch(np.random.default_rng(2), 9, TOP_K, EXPERTS, HIDDEN, np.float16)
    out = moe.forward(x, ids.astype(ids_type), weights)
    assert out.dtype == np.float16
    assert error(out, reference(unpacked(moe), x, ids, weights)) < tolerance(moe, "float16")


def test_packed_weights_are_near_the_given_ones():
    for precision, most in (("bf16", 0.003), ("int8", 0.01), ("int4", 0.13)):
        moe = moebius.MoE(weights=WEIGHTS, precision=precision)
        for matrix, given in zip(moe.expert_weights(3), WEIGHTS):
            assert error(matrix, given[3]) < most


def test_the_mask_is_read_at_every_call(moe):
    rng = np.random.default_rng(3)
    mask = np.zeros(EXPERTS, bool)
    moe.gpu_experts_mask = mask
    x, ids, weights = random_batch(rng, 7, TOP_K, EXPERTS, HIDDEN)
    for _ in range(20):
        mask[:] = rng.random(EXPERTS) < 0.5
        assert error(moe.forward(x, ids, weights), reference(unpacked(moe), x, ids, weights, mask)) < tolerance(moe)
    assert moe.gpu_experts_mask is mask


def test_the_first_experts_are_the_callers():
    moe = moebius.MoE(weights=WEIGHTS, precision="bf16", num_gpu_experts=3)
    x, ids, weights = random_batch(np.random.default_rng(4), 7, TOP_K, EXPERTS, HIDDEN)
    mask = np.arange(EXPERTS) < 3
    assert np.array_equal(moe.gpu_experts_mask, mask)
    assert error(moe.forward(x, ids, weights), reference(unpacked(moe), x, ids, weights, mask)) < tolerance(moe)


def test_ids_may_be_physical():
    moe = moebius.MoE(weights=WEIGHTS, precision="bf16")
    logical = np.array([3, 3, 0, 1, 2, 7, 6, 5, 4, 0])
    moe.load_weights(logical)
    moe.gpu_experts_mask[:2] = True
    x, ids, weights = random_batch(np.random.default_rng(5), 7, TOP_K, len(logical), HIDDEN)
    experts = unpacked(moe)
    mask = np.arange(len(logical)) < 2
    assert error(
        moe.forward(x, ids, weights), reference([experts[e] for e in logical], x, ids, weights, mask)
    ) < tolerance(moe)
    with pytest.raises(ValueError, match="names expert 8 of 8"):
        moe.load_weights(np.array([0, 8]))


def test_submit_and_sync_of_two_layers():
    layers = [moebius.MoE(weights=WEIGHTS, precision="bf16") for _ in range(2)]
    batches = [random_batch(np.random.default_rng(i), i + 1, TOP_K, EXPERTS, HIDDEN) for i in range(2)]
    for layer, batch in zip(layers, batches):
        layer.submit_forward(*batch)
    for layer, batch in zip(layers, batches):
        assert np.array_equal(layer.sync_forward(batch[0]), layer.forward(*batch))
    with pytest.raises(RuntimeError, match="submit_forward before"):
        layers[0].sync_forward(batches[0][0])


def test_calls_from_many_threads(moe):
    batch = random_batch(np.random.default_rng(6), 5, TOP_K, EXPERTS, HIDDEN)
    expected = moe.forward(*batch)
    wrong = []

    def call():
        for _ in range(50):
            if not np.array_equal(moe.forward(*batch), expected):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_what_does_not_fit_is_told(moe):
    x, ids, weights = random_batch(np.random.default_rng(7), 4, TOP_K, EXPERTS, HIDDEN)
    for arguments, kind, text in [
        ((x.astype(np.float64), ids, weights), TypeError, "x has numbers"),
        ((x, ids.astype(np.float32), weights), TypeError, "topk_ids"),
        ((x, ids.astype(np.int16), weights), TypeError, "topk_ids"),
        ((x, ids, weights.astype(np.float16)), TypeError, "topk_weights"),
        ((x.astype(np.int32), ids, weights), TypeError, "float32, float16 or bfloat16"),
        ((x[:, :-1].copy(), ids, weights), ValueError, "x has shape"),
        ((x[0], ids, weights), ValueError, "x has shape"),
        ((x, ids[:-1], weights[:-1]), ValueError, "topk_ids has shape"),
        ((x, ids, weights[:, :-1].copy()), ValueError, "topk_weights has shape"),
        ((np.asfortranarray(x), ids, weights), ValueError, "x is not contiguous"),
        ((x[::2], ids[:2], weights[:2]), ValueError, "x is not contiguous"),
        ((x.tolist(), ids, weights), TypeError, "__dlpack__"),
    ]:
        with pytest.raises(kind, match=text):
            out = np.empty((4, HIDDEN), np.float32)
            moe.forward(*arguments, out=out if arguments[0] is not x else None)
    with pytest.raises(ValueError, match="out has shape"):
        moe.forward(x, ids, weights, out=np.empty((3, HIDDEN), np.float32))
    frozen = np.empty_like(x)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, TypeError), match="out"):
        moe.forward(x, ids, weights, out=frozen)
    with pytest.raises(ValueError, match="gpu_experts_mask has shape"):
        moe.gpu_experts_mask = np.zeros(3, bool)
    with pytest.raises(TypeError, match="bool"):
        moe.gpu_experts_mask = np.zeros(EXPERTS, np.int32)


def test_what_cannot_be_made_is_told(tmp_path):
    gate, up, down = WEIGHTS
    for arguments, kind, text in [
        (dict(), TypeError, "give a model or weights"),
        (dict(model="demo", weights=WEIGHTS), TypeError, "not both"),
        (dict(weights=(gate, up, up)), ValueError, "down has shape"),
        (dict(weights=(gate, up[:-1], down)), ValueError, "up has shape"),
        (dict(weights=(gate[:, :, :-1].copy(), up[:, :, :-1].copy(), down[:, :-1].copy())), ValueError, "groups of 32"),
        (dict(weights=(gate * np.nan, up, down)), ValueError, "NaN"),
        (dict(weights=WEIGHTS, precision="int3"), ValueError, "int8, int4"),
        (dict(weights=WEIGHTS, layer=1), ValueError, "layer 1 has no routed experts"),
        (dict(weights=WEIGHTS, num_gpu_experts=1, gpu_experts_mask=np.zeros(EXPERTS, bool)), TypeError, "not both"),
        (dict(model=tmp_path), (RuntimeError, ValueError), "config.json"),
    ]:
        with pytest.raises(kind, match=text):
            moebius.MoE(**arguments)


def cache_file(folder):
    """The one in there."""
    (path,) = [p for p in Path(folder).rglob("*") if p.is_file() and p.open("rb").read(8) == b"MOEBIUS\0"]
    return path


def test_a_model_and_its_cache_file(tmp_path):
    moe = moebius.MoE("demo", 0, cache_dir=tmp_path, precision="int8")
    batch = random_batch(np.random.default_rng(8), 6, 2, moe.num_experts, moe.hidden_size)
    out = moe.forward(*batch)
    assert error(out, reference(unpacked(moe), *batch)) < TOLERANCE["int8"]
    assert np.array_equal(moebius.MoE(cache_file(tmp_path), 0).forward(*batch), out)


def test_a_cache_file_without_its_biases_is_refused(tmp_path):
    folder = Path(__file__).parents[2] / "tests/fixtures/gpt_oss_mxfp4"
    moebius.MoE(folder, 0, cache_dir=tmp_path)
    with pytest.raises(ValueError, match=f"biases or an activation of their own.*{folder.name}"):
        moebius.MoE(cache_file(tmp_path), 0)


def test_10000_calls_do_not_grow(moe):
    batch = random_batch(np.random.default_rng(9), 2, TOP_K, EXPERTS, HIDDEN)

    def held():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096, len(os.listdir("/proc/self/fd"))

    for _ in range(2000):
        moe.forward(*batch)
    before = held()
    for _ in range(10_000):
        moe.forward(*batch)
    after = held()
    assert after[1] == before[1]
    assert after[0] < before[0] + (2 << 20)


def test_idle_uses_no_cpu(moe):
    batch = random_batch(np.random.default_rng(10), 2, TOP_K, EXPERTS, HIDDEN)
    for _ in range(100):
        moe.forward(*batch)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


def test_a_thread_for_each_core_does_not_collapse():
    """As many workers as cores: no thread beside them burns one. kt-kernel takes ten times as long then."""
    code = """
import numpy as np, os, time, moebius, sys
from moe_reference import random_weights, random_batch
rng = np.random.default_rng(0)
moe = moebius.MoE(weights=random_weights(rng, 16, 256, 512), precision="int4", threads=int(sys.argv[1]))
batch = random_batch(rng, 1, 8, 16, 512)
times = []
for _ in range(3000):
    start = time.perf_counter(); moe.forward(*batch); times.append(time.perf_counter() - start)
print(moe.threads, np.median(times))
"""
    medians = {}
    for threads in (1, 1000):
        run = subprocess.run(
            [sys.executable, "-c", code, str(threads)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parent,
        )
        assert run.returncode == 0, run.stderr
        count, median = run.stdout.split()
        medians[int(count)] = float(median)
    print({n: f"{1e6 * t:.0f} us" for n, t in medians.items()})
    one, all_of_them = medians[1], medians[max(medians)]
    # Other processes may have the cores; a collapse is tenfold.
    assert all_of_them < 3 * one


def test_torch_cpu_tensors(moe):
    torch = pytest.importorskip("torch", reason="torch is not installed: bf16 rows and torch's masks are not tested")
    x, ids, weights = random_batch(np.random.default_rng(11), 5, TOP_K, EXPERTS, HIDDEN)
    x, ids, weights = torch.from_numpy(x).to(torch.bfloat16), torch.from_numpy(ids), torch.from_numpy(weights)
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    moe.gpu_experts_mask = mask
    for _ in range(5):
        mask.copy_(torch.rand(EXPERTS) < 0.3)
        out = moe.forward(x, ids, weights)
        assert out.dtype == torch.bfloat16
        expected = reference(unpacked(moe), x.float().numpy(), ids.numpy(), weights.numpy(), mask.numpy())
        assert error(out.float().numpy(), expected) < tolerance(moe, "bfloat16")


def test_torch_is_not_imported():
    run = subprocess.run([sys.executable, "-c", "import sys, moebius; assert 'torch' not in sys.modules"], timeout=60)
    assert run.returncode == 0
