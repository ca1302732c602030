# mypy: ignore-errors
"""`moebius.sglang` in the place of kt_kernel: as it is made and called, and within SGLang's own, unmodified modules
where SGLang can be imported."""

import inspect
import json
import logging
import os
import sys
import types
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

import moebius.sglang
from moebius.sglang import METHODS, KTMoEWrapper
from moe_reference import TOLERANCE, error, random_batch, reference

TOP_K = 2


@pytest.fixture(autouse=True)
def at_first(monkeypatch):
    moebius.sglang._said.clear()
    monkeypatch.setattr(KTMoEWrapper, "place", (0, 1))


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


def test_the_first_layer_announces_moebius_and_each_itself(shape, caplog):
    with caplog.at_level(logging.INFO, "moebius"):
        for _ in range(2):
            upstream(shape).load_weights(np.arange(shape["num_experts"]))
    assert [r.message for r in caplog.records if "computes" in r.message] == [
        f"moebius {version('moebius')} computes the experts of demo"
    ]
    assert sum(r.message.startswith("layer 1 of ") for r in caplog.records) == 2


def test_a_bf16_checkpoint_is_converted_to_int4_once_and_the_progress_is_told(shape, caplog, tmp_path, monkeypatch):
    """SGLang gives no folder for caches: they are where our own server has them."""
    checkpoint = Path(__file__).resolve().parents[2] / "tests/fixtures/qwen3_moe"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = json.loads((checkpoint / "config.json").read_text())
    given = dict(
        num_experts=sizes["num_experts"],
        hidden_size=sizes["hidden_size"],
        moe_intermediate_size=sizes["moe_intermediate_size"],
        weight_path=str(checkpoint),
    )
    with caplog.at_level(logging.INFO, "moebius"):
        assert upstream(given).precision.startswith("int4")
        told = [r.message for r in caplog.records if "%" in r.message]
        assert told and "100%" in told[-1]
        caplog.clear()
        assert upstream(given).precision.startswith("int4")
        assert not any("%" in r.message for r in caplog.records)
    assert upstream(given, method="BF16").precision == "bf16", "a precision that is asked for is kept"


def parallel(rank=0, ranks=1, **changes):
    """What SGLang says of a process."""
    sizes = dict.fromkeys(["moe_ep_size", "moe_dp_size", "attn_dp_size", "attn_cp_size", "nnodes"], 1)
    sizes |= dict(tp_rank=rank, tp_size=ranks, moe_tp_size=ranks)
    return types.SimpleNamespace(**sizes | changes)


def fake_torch(monkeypatch, gpus):
    cuda = types.SimpleNamespace(is_available=lambda: gpus > 0, current_device=lambda: gpus - 1)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))


def test_ranks_of_one_machine_that_add_their_sums_divide_experts(monkeypatch):
    fake_torch(monkeypatch, 2)
    place = moebius.sglang.place
    monkeypatch.setattr(moebius.sglang, "_of_all", lambda value: [value, value])
    monkeypatch.setenv(moebius.sglang.THRESHOLD, "")
    monkeypatch.setenv(moebius.sglang.POOL, "")
    monkeypatch.setenv(moebius.sglang.DIVIDE, "0")
    assert [place(parallel(rank, 2)) for rank in range(2)] == [(0, 1), (0, 1)], "it is turned off"
    monkeypatch.setenv(moebius.sglang.DIVIDE, "")
    assert [place(parallel(rank, 2)) for rank in range(2)] == [(0, 2), (1, 2)] and place(parallel()) == (0, 1)
    for changes in [
        dict(moe_ep_size=2, moe_tp_size=1),
        dict(moe_dp_size=2, moe_tp_size=1),
        dict(attn_dp_size=2),
        dict(attn_cp_size=2),
        dict(nnodes=2),
    ]:
        assert place(parallel(1, 2, **changes)) == (0, 1), changes
    monkeypatch.setenv(moebius.sglang.THRESHOLD, "0")
    assert place(parallel(1, 2)) == (0, 1), "no GPU computes any of them"
    monkeypatch.setenv(moebius.sglang.POOL, "0.5")
    assert place(parallel(1, 2)) == (1, 2)
    with monkeypatch.context() as other:
        other.setattr(moebius.sglang, "_of_all", lambda value: [value, ("elsewhere", *value[1:])])
        assert place(parallel(1, 2)) == (0, 1), "ranks that cannot map each other's memory"
    assert place(parallel(1, 2)) == (1, 2)
    fake_torch(monkeypatch, 0)
    assert place(parallel(1, 2)) == (0, 1)


def test_the_first_rank_says_who_computes_experts_and_why(monkeypatch, caplog):
    fake_torch(monkeypatch, 2)
    monkeypatch.setattr(moebius.sglang, "_of_all", lambda value: [value, value])
    monkeypatch.setenv(moebius.sglang.THRESHOLD, "")

    def said(asked, **changes):
        moebius.sglang._said.clear()
        monkeypatch.setenv(moebius.sglang.DIVIDE, asked)
        caplog.clear()
        with caplog.at_level(logging.INFO, "moebius"):
            for rank in (1, 0, 0):
                moebius.sglang.place(parallel(rank, 2, **changes))
        return [r.message for r in caplog.records]

    assert said("") == said("1") == ["each of 2 GPUs computes its part of every expert of Moebius's"]
    first = "the first of 2 ranks computes Moebius's experts: "
    assert said("0") == [first + "--kt-divide-experts 0"]
    assert said("1", moe_ep_size=2, moe_tp_size=1) == [first + "expert parallelism is on"]
    assert said("1", attn_dp_size=2) == [first + "data parallelism is within the ranks"]
    assert said("1", nnodes=2) == [first + "there are several machines"]


def test_all_ranks_hold_what_the_first_does(shape, monkeypatch, caplog):
    fake_torch(monkeypatch, 2)
    monkeypatch.setenv(moebius.sglang.THRESHOLD, "256")
    monkeypatch.setenv(moebius.sglang.POOL, "0.5")
    told = []

    def from_first(value):
        told.append(value)
        return "of device 1"

    monkeypatch.setattr(moebius.sglang, "_from_first", from_first)
    calls = []
    monkeypatch.setattr(KTMoEWrapper, "compute_prompts", lambda _, *a, **k: calls.append((a, k)))
    monkeypatch.setattr(KTMoEWrapper, "hold_experts", lambda _, *a, **k: calls.append((a, k)) or 5)
    monkeypatch.setattr(KTMoEWrapper, "pool", lambda _, device: f"of device {device}")
    with caplog.at_level(logging.INFO, "moebius"):
        for rank in range(2):
            monkeypatch.setattr(KTMoEWrapper, "place", (rank, 2))
            wrapper = upstream(shape, method="BF16")
            assert wrapper.is_divided
            wrapper.load_weights(np.arange(shape["num_experts"]))
    prompts = ((1,), dict(from_tokens=256, tokens=512, top_k=TOP_K))
    held = dict(pool_bytes=1 << 29, top_k=TOP_K)
    assert calls == [prompts, ((1,), held | dict(pool=None)), prompts, ((1,), held | dict(pool="of device 1"))]
    # Each rank once for what the first one opens before the others, and once for its pool.
    assert told == [None, "of device 1", None, None]
    said = [r.message for r in caplog.records]
    assert "prompts of 256 tokens or more are computed on 2 GPUs, a part of each expert on each" in said
    assert "5 of 8 experts of each layer are held for decode on 2 GPUs, a part of each expert on each" in said


def test_a_width_that_cannot_be_divided_is_told(shape, monkeypatch, caplog):
    fake_torch(monkeypatch, 2)
    monkeypatch.setattr(KTMoEWrapper, "compute_prompts", lambda *_, **__: None)
    monkeypatch.setattr(KTMoEWrapper, "place", (0, 2))
    monkeypatch.setattr(moebius.sglang, "_from_first", lambda value: value)
    with caplog.at_level(logging.INFO, "moebius"):
        wrapper = upstream(shape)  # INT4 in groups of 128, its width
        wrapper.load_weights(np.arange(shape["num_experts"]))
    assert not wrapper.is_divided
    assert any("of width 128 cannot be divided by 2: the first GPU computes" in r.message for r in caplog.records)


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
    load_plugins()
    return types.SimpleNamespace(torch=torch, kt=kt_ep_wrapper, before=before, hooks=hook_registry.HookRegistry)


@pytest.fixture
def arguments(sglang, monkeypatch):
    """SGLang's arguments from a command line, and their resolution."""
    server_args = pytest.importorskip("sglang.srt.server_args", reason="SGLang's arguments cannot be imported")
    monkeypatch.setenv(moebius.sglang.THRESHOLD, "")
    monkeypatch.setenv(moebius.sglang.POOL, "")

    def parse(*flags):
        return server_args.prepare_server_args(["--model-path", "demo", *flags])

    return parse


def test_the_plugin_is_found_and_all_its_hooks_fit(sglang):
    assert sglang.kt.KTMoEWrapper is KTMoEWrapper and sglang.kt.KTRANSFORMERS_AVAILABLE
    assert sglang.kt.KTEPWrapperMethod is not sglang.before and issubclass(sglang.kt.KTEPWrapperMethod, sglang.before)
    assert sglang.kt.KTEPWrapperMethod.__name__ == "KTEPWrapperMethod"
    ours = {
        target
        for target, hooks in sglang.hooks._hooks.items()
        if any(source and source.plugin_name == "moebius" for *_, source in hooks)
    }
    # SGLang only logs where there is nothing to hook.
    assert len(ours) == 7 and ours <= sglang.hooks._patched


def test_flags_of_ours(arguments):
    arguments("--kt-weight-path", "demo", "--kt-gpu-prefill-token-threshold", "2048", "--kt-gpu-pool-gib", "1.5")
    assert os.environ[moebius.sglang.THRESHOLD] == "2048" and os.environ[moebius.sglang.POOL] == "1.5"


def test_the_scheduler_is_not_bound_to_a_numa_node(sglang, arguments, monkeypatch, capfd):
    from sglang.srt.managers import scheduler
    from sglang.srt.utils import numa_utils

    assert scheduler.get_numa_node_if_available is numa_utils.get_numa_node_if_available
    monkeypatch.setattr(numa_utils, "_is_numa_available", lambda: True)
    monkeypatch.setattr(numa_utils, "_query_numa_node_for_gpu", lambda gpu: [1])
    node = numa_utils.get_numa_node_if_available
    assert node(arguments(), 0) == 1, "without experts of ours, SGLang does as it would"
    assert node(arguments("--kt-weight-path", "demo"), 0) is None
    assert "NUMA node 1" in capfd.readouterr().err, "SGLang's log says so"
    assert node(arguments("--kt-weight-path", "demo", "--numa-node", "1"), 0) == 1


def test_prefill_is_captured_only_where_a_flag_asks_for_it(arguments, monkeypatch):
    from sglang.srt.arg_groups import cuda_graph_hook, overrides
    from sglang.srt.model_executor import cuda_graph_config

    # As on a GPU, where SGLang captures what is compatible.
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: "breakable")
    monkeypatch.setattr(cuda_graph_hook, "disable_breakable_cudagraph_if_incompatible", lambda _: None)

    def backend(*flags):
        args = arguments(*flags)
        cuda_graph_hook.parse_cuda_graph_config(args)
        cuda_graph_hook.apply_cuda_graph_compatibility(args)
        return overrides.resolving_view(args).cuda_graph_config.prefill.backend

    ours = ("--kt-weight-path", "demo")
    assert backend() == "breakable"
    assert backend(*ours) == "disabled"
    assert backend(*ours, "--cuda-graph-max-bs-prefill", "64") == "breakable"
    assert backend(*ours, "--cuda-graph-backend-prefill", "breakable") == "breakable"


def test_draft_models_keep_their_experts_and_the_gpu_has_one_at_least(sglang, monkeypatch):
    from sglang.srt import runtime_context

    kt, moe = sglang.kt, types.SimpleNamespace(in_speculative_scope=False)
    exec_ = types.SimpleNamespace(
        kt_weight_path="demo",
        kt_num_gpu_experts=None,
        kt_cpuinfer=None,
        kt_threadpool_count=2,
        kt_method="AMXINT4",
        kt_max_deferred_experts_per_token=None,
    )
    monkeypatch.setattr(runtime_context, "get_flags", lambda: types.SimpleNamespace(moe=moe))
    monkeypatch.setattr(kt, "get_exec", lambda: types.SimpleNamespace(moe=exec_))
    monkeypatch.setattr(kt, "get_schedule", lambda: types.SimpleNamespace(chunked_prefill_size=512))
    monkeypatch.setattr(kt, "model_config_of", lambda _: types.SimpleNamespace(hf_config=types.SimpleNamespace()))
    for given, used in [(None, 1), (0, 1), (16, 16)]:
        exec_.kt_num_gpu_experts = given
        config = kt.create_kt_config_from_server_args(None, 3)
        assert config.num_gpu_experts == used and config.moebius_computes_all == (not given)
    moe.in_speculative_scope = True
    assert kt.create_kt_config_from_server_args(None, 3) is None
    from sglang.srt.layers.moe.fused_moe_triton import layer

    assert layer.create_kt_config_from_server_args is kt.create_kt_config_from_server_args


def test_rows_that_pad_a_graph_have_no_experts(sglang, monkeypatch):
    torch = sglang.torch
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe import topk
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    path = types.SimpleNamespace(kt_weight_path=None)
    parallel = types.SimpleNamespace(moe_ep_size=1, attn_dp_size=1)
    monkeypatch.setattr(forward_batch_info, "get_parallel", lambda: parallel)
    monkeypatch.setattr(forward_batch_info, "world_dp_gather_enabled", lambda: False)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: types.SimpleNamespace(moe=path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    counted = decode_cuda_graph_runner.enable_num_token_non_padded
    assert not counted()
    path.kt_weight_path = "demo"
    assert counted(), "the runner of decode graphs counts the tokens that are none"
    # What SGLang's router does with that count.
    ids = torch.arange(8, dtype=torch.int32).reshape(4, 2)
    topk._mask_topk_ids_padded_region(ids, torch.tensor(3))
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]


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
@pytest.mark.parametrize("gpu_experts", [0, 3])
def test_a_layer_through_sglangs_own_wrapper(sglang, shape, monkeypatch, gpu_experts, factor, fused, device):
    torch, kt = sglang.torch, sglang.kt
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU: SGLang's calls of it are stood in for")
    experts = shape["num_experts"]
    monkeypatch.setattr(kt, "get_parallel", parallel)
    stand_in(sglang, monkeypatch, experts, device)
    config = kt.KTConfig(0, gpu_experts or 1, None, 2, "demo", 512, None, "BF16", num_layers=2)
    config.moebius_computes_all = gpu_experts == 0
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
        assert (chosen < gpu_experts).all() or gpu_experts == 0, "SGLang overwrites the ids that it gave"


def stand_in(sglang, monkeypatch, experts, device):
    """For what SGLang's wrapper asks of the rest of it."""
    torch = sglang.torch
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0))
    from sglang.srt.eplb import expert_location_dispatch

    identity = torch.arange(experts).repeat(2, 1)
    metadata = types.SimpleNamespace(physical_to_logical_map_cpu=identity)
    monkeypatch.setattr(
        expert_location_dispatch, "get_global_expert_location_metadata", lambda: metadata, raising=False
    )


@pytest.mark.parametrize("factor", [None, 2.5])
def test_what_sglangs_own_wrapper_returns_on_two_ranks_adds_up(sglang, shape, monkeypatch, factor):
    torch, kt, experts = sglang.torch, sglang.kt, shape["num_experts"]
    stand_in(sglang, monkeypatch, experts, "cpu")
    monkeypatch.setattr(moebius.sglang, "place", lambda of: (of.tp_rank, of.tp_size))
    monkeypatch.setattr(moebius.sglang, "_from_first", lambda value: value)
    x, ids, weights = random_batch(np.random.default_rng(1), 7, TOP_K, experts, shape["hidden_size"])
    x, outs = torch.from_numpy(x).to(torch.bfloat16), []
    for rank in range(2):
        monkeypatch.setattr(kt, "get_parallel", lambda: parallel(rank, 2))
        method = kt.KTEPWrapperMethod(GpuMethod(), kt.KTConfig(0, 3, None, 2, "demo", 512, None, "BF16", num_layers=2))
        width = shape["moe_intermediate_size"] // 2
        layer = types.SimpleNamespace(
            torch=torch,
            top_k=TOP_K,
            intermediate_size_per_partition=width,
            moe_tp_size=2,
            should_fuse_routed_scaling_factor_in_topk=False,
        )
        method.create_weights(layer, experts, shape["hidden_size"], width, torch.bfloat16)
        runner = types.SimpleNamespace(activation="silu", routed_scaling_factor=factor, num_local_experts=experts)
        method.create_moe_runner(layer, runner)
        method.process_weights_after_loading(layer)
        numbers = [method.wrapper.expert_weights(e) for e in range(experts)]
        # This rank's half of the width of SGLang's own experts.
        half = slice(rank * width, (rank + 1) * width)
        layer.experts = [
            tuple(torch.from_numpy(np.array(part)) for part in (gate[half], up[half], down[:, half]))
            for gate, up, down in numbers
        ]
        topk = topk_output(torch.from_numpy(weights), torch.from_numpy(ids.copy()))
        outs.append(method.apply(layer, dispatch_output(x, topk)).hidden_states.float().numpy())
    expected = reference(numbers, x.float().numpy(), ids, weights) * (factor or 1)
    assert error(sum(outs), expected) < 0.01


def test_sglang_says_what_ranks_there_are(sglang, monkeypatch):
    from sglang.srt import distributed, runtime_context

    monkeypatch.setattr(sglang.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(moebius.sglang.THRESHOLD, "")
    monkeypatch.setenv(moebius.sglang.DIVIDE, "1")
    context = runtime_context.get_parallel()
    group = types.SimpleNamespace(all_gather_object=lambda value: [value] * 2)
    monkeypatch.setattr(distributed, "get_tp_group", lambda: group)
    with context.override(**vars(parallel(1, 2))):
        assert moebius.sglang.place(context) == (1, 2)
    with context.override(**vars(parallel(1, 2, moe_ep_size=2, moe_tp_size=1))):
        assert moebius.sglang.place(context) == (0, 1)
    asked = []
    group = types.SimpleNamespace(broadcast_object=lambda value, src: asked.append((value, src)))
    monkeypatch.setattr(distributed, "get_tp_group", lambda: group)
    moebius.sglang._from_first("a path")
    assert asked == [("a path", 0)]
    own = distributed.parallel_state.GroupCoordinator.broadcast_object
    assert list(inspect.signature(own).parameters) == ["self", "obj", "src"]
    own = distributed.parallel_state.GroupCoordinator.all_gather_object
    assert list(inspect.signature(own).parameters) == ["self", "obj"]


def topk_output(weights, ids):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(weights, ids, None)


def dispatch_output(x, topk):
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    fields = dict.fromkeys(StandardDispatchOutput._fields) | dict(hidden_states=x, topk_output=topk)
    return StandardDispatchOutput(**fields)
