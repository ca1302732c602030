# mypy: ignore-errors
"""`moebius.sglang` in the place of kt_kernel: as it is made and called, and within SGLang's own, unmodified modules
where SGLang can be imported."""

import logging
import os
import types

import numpy as np
import pytest

import moebius.sglang
from moebius.sglang import METHODS, KTMoEWrapper
from moe_reference import TOLERANCE, error, random_batch, reference

TOP_K = 2


@pytest.fixture(autouse=True)
def nothing_said():
    moebius.sglang._warned.clear()


@pytest.fixture(scope="module")
def shape():
    moe = moebius.MoE("demo", 0, load=False)
    return dict(num_experts=moe.num_experts, hidden_size=moe.hidden_size, moe_intermediate_size=moe.intermediate_size)


def upstream(shape, **changes):
    """The keywords of SGLang 0.5.23."""
    return KTMoEWrapper(
        **dict(
            layer_idx=0,
            num_experts_per_tok=TOP_K,
            num_gpu_experts=3,
            cpuinfer_threads=None,
            threadpool_count=2,
            weight_path="demo",
            chunked_prefill_size=512,
            method="AMXINT4",
            max_deferred_experts_per_token=0,
        )
        | shape
        | changes
    )


def fork(shape, mask, **changes):
    """The keywords of sglang-kt 0.7.2."""
    given = dict(gpu_experts_mask=mask, num_gpu_experts=None, numa_nodes=None, swiglu_limit=0.0, swiglu_alpha=0.0)
    return upstream(shape, **given | changes)


def check(moe, x, ids, weights, mask):
    out = moe.forward(x, ids, weights)
    expected = reference([moe.expert_weights(e) for e in range(moe.num_experts)], x, ids, weights, mask)
    assert error(out, expected) < TOLERANCE["int8"]


def test_both_forms_of_the_constructor(shape):
    experts = shape["num_experts"]
    batch = random_batch(np.random.default_rng(0), 5, TOP_K, experts, shape["hidden_size"])
    first = upstream(shape)
    mask = np.arange(experts) < 3
    first.load_weights(np.arange(experts))
    check(first, *batch, mask)
    mask = np.arange(experts) % 2 == 0
    second = fork(shape, mask)
    second.load_weights(np.arange(experts))
    check(second, *batch, mask)
    # As the fork changes who is where.
    second.gpu_experts_mask[:] = ~mask
    check(second, *batch, mask)
    second.submit_forward(*batch, 0)
    assert np.array_equal(second.sync_forward(batch[0], 0), second.forward(*batch))
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])


def test_unknown_keywords_are_told_once(shape, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            upstream(shape, group_size=128, zero_point=True, max_deferred_experts_per_token=2)
    assert sum("group_size, zero_point" in r.message for r in caplog.records) == 1
    assert sum("0 is used" in r.message for r in caplog.records) == 1


def test_what_does_not_fit_is_told(shape):
    for changes, text in [
        (dict(method="AMXINT3"), "AMXINT3 is unknown: use one of AUTO, AMXINT4"),
        (dict(hidden_size=64), "has hidden_size"),
        (dict(moe_intermediate_size=96), "moe_intermediate_size"),
        (dict(layer_idx=99), "layer 99 has no routed experts"),
        (dict(gpu_experts_mask=np.zeros(3, bool), num_gpu_experts=None), "gpu_experts_mask has shape"),
    ]:
        with pytest.raises(ValueError, match=text):
            upstream(shape, **changes)
    fused = upstream(shape, num_experts=shape["num_experts"] + 1)
    with pytest.raises(ValueError, match="--disable-shared-experts-fusion"):
        fused.load_weights(np.arange(shape["num_experts"]))


def test_methods_are_precisions(shape):
    assert upstream(shape, method="BF16").precision == "bf16"
    assert upstream(shape, method="AMXINT8").precision.startswith("int8")
    assert set(METHODS.values()) == {"auto", "bf16", "int8", "int4"}


def test_a_layer_is_announced(shape, caplog):
    with caplog.at_level(logging.INFO, "moebius"):
        upstream(shape).load_weights(np.arange(shape["num_experts"]))
    assert any(r.message.startswith("layer 1 of ") for r in caplog.records)


# --- within SGLang --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sglang():
    """SGLang's own modules, its plugins loaded."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch = pytest.importorskip("torch", reason="torch is not installed: the seam with SGLang is not tested")
    try:
        from sglang.srt.layers.moe import kt_ep_wrapper
        from sglang.srt.plugins import hook_registry, load_plugins
    except Exception as error:  # whatever it lacks
        pytest.skip(f"SGLang cannot be imported ({error}): the seam with it is not tested")
    before = kt_ep_wrapper.KTEPWrapperMethod
    logger, lines = logging.getLogger("moebius"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    load_plugins()
    logger.removeHandler(handler)
    return types.SimpleNamespace(torch=torch, kt=kt_ep_wrapper, before=before, lines=lines, hooks=hook_registry)


def test_the_plugin_is_found_and_announced_in_one_line(sglang):
    assert sglang.kt.KTMoEWrapper is KTMoEWrapper and sglang.kt.KTRANSFORMERS_AVAILABLE
    assert sglang.kt.KTEPWrapperMethod is not sglang.before and issubclass(sglang.kt.KTEPWrapperMethod, sglang.before)
    assert sglang.kt.KTEPWrapperMethod.__name__ == "KTEPWrapperMethod"
    (line,) = [line for line in sglang.lines if "--kt-weight-path" in line]
    assert line.startswith("moebius ")


class GpuMethod:
    """What SGLang's methods for the GPU do: experts that are not masked, times `routed_scaling_factor` unless the
    weights have it."""

    def create_weights(self, layer, num_experts, **_):
        layer.gpu_experts = num_experts

    def process_weights_after_loading(self, layer):
        pass

    def create_moe_runner(self, layer, config):
        self.config = config

    def apply(self, layer, dispatch):
        weights, ids, _ = dispatch.topk_output
        x = dispatch.hidden_states.float()
        out = 0 * x
        for e, (gate, up, down) in enumerate(layer.experts[: layer.gpu_experts]):
            h = layer.torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
            out += (weights * (ids == e)).sum(-1, keepdim=True) * (h @ down.T)
        factor = 1 if layer.should_fuse_routed_scaling_factor_in_topk else self.config.routed_scaling_factor or 1
        return types.SimpleNamespace(hidden_states=(factor * out).to(dispatch.hidden_states.dtype))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda graph"])
@pytest.mark.parametrize("fused", [False, True], ids=["factor on the sum", "factor in the weights"])
@pytest.mark.parametrize("factor", [None, 2.5])
def test_a_layer_through_sglangs_own_wrapper(sglang, shape, monkeypatch, factor, fused, device):
    torch, kt = sglang.torch, sglang.kt
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU: SGLang's calls of it are stood in for")
    experts, gpu_experts = shape["num_experts"], 3
    monkeypatch.setattr(kt, "get_parallel", lambda: types.SimpleNamespace(tp_rank=0))
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0))
    from sglang.srt.eplb import expert_location_dispatch

    identity = torch.arange(experts).repeat(2, 1)
    metadata = types.SimpleNamespace(physical_to_logical_map_cpu=identity)
    monkeypatch.setattr(
        expert_location_dispatch, "get_global_expert_location_metadata", lambda: metadata, raising=False
    )
    config = kt.KTConfig(0, gpu_experts, None, 2, "demo", 512, None, "BF16", num_layers=2)
    method = kt.KTEPWrapperMethod(GpuMethod(), config)
    layer = types.SimpleNamespace(
        torch=torch,
        top_k=TOP_K,
        intermediate_size_per_partition=shape["moe_intermediate_size"],
        moe_tp_size=1,
        should_fuse_routed_scaling_factor_in_topk=fused,
    )
    # A model that multiplies the sum itself when the method is KT's, as SGLang's DeepSeek does.
    model = types.ModuleType("sglang.srt.models.of_a_test")
    model.KTEPWrapperMethod = kt.KTEPWrapperMethod
    monkeypatch.setitem(__import__("sys").modules, model.__name__, model)
    method.create_weights(layer, experts, shape["hidden_size"], shape["moe_intermediate_size"], torch.bfloat16)
    runner = types.SimpleNamespace(activation="silu", routed_scaling_factor=factor, num_local_experts=experts)
    method.create_moe_runner(layer, runner)
    method.process_weights_after_loading(layer)
    numbers = [method.wrapper.expert_weights(e) for e in range(experts)]
    on = device.split()[0]
    layer.experts = [tuple(torch.from_numpy(np.array(w)).to(on) for w in expert) for expert in numbers]
    rng = np.random.default_rng(1)
    for tokens in (1, 7):
        x, ids, weights = random_batch(rng, tokens, TOP_K, experts, shape["hidden_size"])
        x, given, weights = (
            torch.from_numpy(x).to(on, torch.bfloat16),
            torch.from_numpy(ids.copy()).to(on),
            torch.from_numpy(weights).to(on),
        )
        if fused:
            weights = weights * (factor or 1)

        def run():
            chosen = given.clone()
            out = method.apply(layer, dispatch_output(x, topk_output(weights, chosen))).hidden_states
            return chosen, out * factor if isinstance(method, model.KTEPWrapperMethod) else out

        chosen, out = run()
        if device == "cuda graph":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chosen, out = run()
            x.copy_(torch.randn_like(x))
            graph.replay()
        expected = reference(numbers, x.float().cpu().numpy(), ids, weights.cpu().numpy()) * (
            1 if fused else factor or 1
        )
        assert error(out.float().cpu().numpy(), expected) < 0.01
        assert (chosen < gpu_experts).all(), "SGLang overwrites the ids that it gave"


def topk_output(weights, ids):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(weights, ids, None)


def dispatch_output(x, topk):
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    fields = dict.fromkeys(StandardDispatchOutput._fields) | dict(hidden_states=x, topk_output=topk)
    return StandardDispatchOutput(**fields)
