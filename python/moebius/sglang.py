"""Computes the CPU experts of an unmodified SGLang with Moebius.

Install it next to SGLang (``pip install ./python sglang`` in a clone), and run::

    sglang serve --model-path MODEL --kt-weight-path MODEL --kt-num-gpu-experts 16

SGLang finds :func:`plugin` by itself; its scheduler logs one line when the first layer is made. If ``SGLANG_PLUGINS``
restricts the plugins, it must name ``moebius``. KTransformers' fork of SGLang has no plugins: set
``SGLANG_EXTERNAL_MODEL_PACKAGE=moebius.sglang_fork``.

The flags and their meaning here:

``--kt-weight-path PATH``
    The model: a folder in the Hugging Face layout (BF16, FP8, INT4 or any other format that Moebius reads), a GGUF
    file, a Hugging Face id or a Moebius cache file. The first start converts it into ``~/.cache/moebius``. Usually the
    same as ``--model-path``.
``--kt-num-gpu-experts N``
    SGLang computes the first N experts of each layer on the GPU. With 0, the default, Moebius computes all of them, and
    the graph of a step has no kernels of SGLang's experts. SGLang still reads one of each layer.
``--kt-method METHOD``
    ``AMXINT4`` (SGLang's default), ``RAWINT4``, ``GPTQ_INT4``, ``FP8``, ``FP8_PERCHANNEL``, ``LLAMAFILE``, ``MXFP4``
    and ``AUTO`` all keep the precision of a quantized checkpoint, and mean INT4 for others. ``AMXINT8`` and
    ``MOE_INT8`` mean INT8, ``MOE_INT4`` INT4 and ``BF16`` BF16.
``--kt-gpu-prefill-token-threshold N``
    Batches of N tokens or more are computed on the GPU: the CPU's experts cross PCIe, layer by layer. Default: 512.
    0: never. This takes 1 GiB of each GPU's memory for experts, and more for the tokens of a chunk. It needs a model in
    bfloat16.
``--kt-gpu-pool-gib G``
    So many GiB of each GPU's memory hold experts for decode, of all layers together, and Moebius computes them there.
    Which ones follows the text: experts that are missed come in, those that were least useful go. Together with
    ``--kt-num-gpu-experts 0`` this takes the place of a fixed share of the experts on the GPU. Default: 0, none. The
    memory is taken before SGLang measures what is left for its KV cache. It needs a model in bfloat16.
``--kt-cpuinfer N``
    Threads. Maximum and default: the number of physical cores. No core needs to stay free.
``--kt-threadpool-count N``, ``--kt-numa-nodes``
    Ignored: every NUMA node that the process may use has a slice of each expert and its own workers.
``--kt-max-deferred-experts-per-token N``
    Ignored with one warning: 0 is used, because deferring experts changes the model.
``--chunked-prefill-size``
    Batches may have any size. One that is larger than 8192, or than this, crosses PCIe once for each part.
``--cuda-graph-max-bs-prefill N``, ``--cuda-graph-bs-prefill``, ``--cuda-graph-backend-prefill``
    Without any of these, no CUDA graphs of prefill are captured: the experts take most of the time, and SGLang
    captures up to 58 sizes at its start, each through all of the CPU's experts. Batches in such graphs are computed on
    the CPU.
``--numa-node``
    Binds the process and Moebius's workers. Without it, SGLang's own binding to the GPU's NUMA node is left out, so
    that all nodes compute.

With ``--tp-size N`` in one machine, every GPU computes its part of the width of Moebius's experts: those of prompts
cross N links, and the pools of N GPUs hold N times as many. The first rank's process computes the CPU's experts for
all, with all cores. ``--kt-divide-experts 0`` lets the first rank compute all, as it does where they cannot be divided:
with expert parallelism, attention that is data parallel, or several machines. Its log says what was chosen, and why.
See :func:`place`.

Draft models compute their own experts on the GPU. Rows that pad a CUDA graph are no tokens to the CPU.

SGLang 0.5.23 multiplies the GPU's experts twice by ``routed_scaling_factor`` in some models, and does not multiply the
CPU's in others. With :func:`plugin` all are multiplied once. See :func:`method_class`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from moebius._moe import MoE

log = logging.getLogger("moebius")

#: Values of ``--kt-method``, and their precision here.
METHODS = {
    **dict.fromkeys(["AUTO", "AMXINT4", "RAWINT4", "GPTQ_INT4", "FP8", "FP8_PERCHANNEL", "LLAMAFILE", "MXFP4"], "auto"),
    **dict.fromkeys(["AMXINT8", "MOE_INT8"], "int8"),
    "MOE_INT4": "int4",
    "BF16": "bf16",
}

#: Carries ``--kt-gpu-prefill-token-threshold`` to SGLang's processes.
THRESHOLD = "MOEBIUS_KT_GPU_PREFILL_TOKEN_THRESHOLD"

#: Carries ``--kt-gpu-pool-gib``.
POOL = "MOEBIUS_KT_GPU_POOL_GIB"

#: Carries ``--kt-divide-experts``.
DIVIDE = "MOEBIUS_KT_DIVIDE_EXPERTS"

#: Our flags, the type of their values, their variables, and their help.
FLAGS = {
    "--kt-gpu-prefill-token-threshold": (
        int,
        THRESHOLD,
        "[moebius] Batches of so many tokens are computed on the GPU. 0: never. Default: 512.",
    ),
    "--kt-gpu-pool-gib": (
        float,
        POOL,
        "[moebius] GiB of each GPU's memory that hold experts for decode, which follow the text. Default: 0.",
    ),
    "--kt-divide-experts": (
        int,
        DIVIDE,
        "[moebius] 1: with --tp-size, every GPU computes its part of each expert, where that is possible. "
        "0: the first one all. Default: 1.",
    ),
}

_said: set[str] = set()


def _say_once(level: int, text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.log(level, text)


def _from_tokens() -> int:
    return int(os.environ.get(THRESHOLD) or 512)


def _pool_bytes() -> int:
    return int(float(os.environ.get(POOL) or 0) * 2**30)


def _from_first(value: str | None) -> str | None:
    """What the first of SGLang's tensor parallel ranks gives. All of them call this."""
    from sglang.srt.distributed import get_tp_group  # type: ignore[import-not-found,unused-ignore]

    return get_tp_group().broadcast_object(value, src=0)  # type: ignore[no-any-return,unused-ignore]


def _of_all(value: object) -> list[object]:
    """What each of SGLang's tensor parallel ranks gives. All of them call this."""
    from sglang.srt.distributed import get_tp_group

    return get_tp_group().all_gather_object(value)  # type: ignore[no-any-return,unused-ignore]


def _where() -> str:
    """Processes of which this is the same map each other's memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def _why_not_divided(parallel: Any) -> str | None:
    """Why the first of several ranks computes all of Moebius's experts; None: their GPUs can divide them."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    asked = int(os.environ.get(DIVIDE) or 1)
    on_gpu = torch.cuda.is_available(), _from_tokens(), _pool_bytes()
    # Asked before anything else, so that all ranks ask it whatever they are given.
    ranks = _of_all((_where(), asked, on_gpu))
    has_gpu, from_tokens, pool_bytes = on_gpu
    reasons = [
        (not asked, "--kt-divide-experts 0"),
        (parallel.nnodes > 1, "there are several machines"),
        (parallel.moe_ep_size > 1, "expert parallelism is on"),
        (parallel.moe_dp_size > 1 or parallel.attn_dp_size > 1, "data parallelism is within the ranks"),
        (parallel.attn_cp_size > 1, "context parallelism is on"),
        (parallel.moe_tp_size != parallel.tp_size, "not all ranks have a part of each expert"),
        (any(rank != ranks[0] for rank in ranks), "ranks have other settings, or do not see each other's memory"),
        (not has_gpu or (from_tokens <= 0 and pool_bytes <= 0), "neither prompts nor a pool are on the GPU"),
    ]
    return next((why for is_so, why in reasons if is_so), None)


def place(parallel: Any) -> tuple[int, int]:
    """This process's rank among those whose GPUs divide Moebius's experts, and how many there are.

    ``parallel``: SGLang's ``get_parallel()``. All its ranks call this equally often. The first one's log says what was
    chosen.

    They are the tensor parallel ranks of one machine, if all have the same settings and are given the same tokens, and
    SGLang adds what all return. Otherwise, and with ``--kt-divide-experts 0``, it is (0, 1), and only SGLang's first
    rank computes.
    """
    rank, ranks = parallel.tp_rank, parallel.tp_size
    if ranks == 1:
        return 0, 1
    why = _why_not_divided(parallel)
    if rank == 0 and why is None:
        _say_once(logging.INFO, f"each of {ranks} GPUs computes its part of every expert of Moebius's")
    elif rank == 0:
        _say_once(logging.INFO, f"the first of {ranks} ranks computes Moebius's experts: {why}")
    return (rank, ranks) if why is None else (0, 1)


class KTMoEWrapper(MoE):
    """:class:`moebius.MoE` with the interface of SGLang and of KTransformers' fork, which pass ``num_gpu_experts`` or
    ``gpu_experts_mask``.

    Ignores unknown keywords with one warning.
    """

    #: This process's rank, and how many there are: what :func:`place` says, once a method was made.
    place = (0, 1)

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        *,
        weight_path: str,
        num_gpu_experts: int | None = None,
        gpu_experts_mask: Any = None,
        cpuinfer_threads: int | None = None,
        threadpool_count: int | None = None,
        numa_nodes: list[int] | None = None,
        chunked_prefill_size: int | None = None,
        method: str = "AUTO",
        max_deferred_experts_per_token: int | None = None,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        **unknown: Any,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"--kt-method {method} is unknown: use one of {', '.join(METHODS)}")
        if max_deferred_experts_per_token:
            text = "--kt-max-deferred-experts-per-token: 0 is used, because deferring experts changes the model"
            _say_once(logging.WARNING, text)
        if unknown:
            _say_once(logging.WARNING, f"KTMoEWrapper ignores unknown arguments: {', '.join(sorted(unknown))}")
        # Now, not when the plugin is loaded: SGLang configures its log in between.
        _say_once(logging.INFO, f"moebius {version('moebius')} computes the experts of {weight_path}")
        rank, ranks = self.place
        if rank > 0:
            _from_first(None)  # which downloads and converts a model for all
        super().__init__(
            weight_path,
            layer_idx,
            precision=METHODS[method],
            threads=cpuinfer_threads,
            rank=rank,
            ranks=ranks,
            load=False,
        )
        if rank == 0 and ranks > 1:
            _from_first(None)
        for what, given, own in [
            ("hidden_size", hidden_size, self.hidden_size),
            ("moe_intermediate_size", moe_intermediate_size, self.intermediate_size),
        ]:
            if given != own:
                raise ValueError(
                    f"--kt-weight-path {weight_path} has {what} {own}, but the model has {given}: use the same model"
                )
        self._ids = num_experts
        self._prompts = dict(tokens=max(chunked_prefill_size or 0, 0) or 8192, top_k=num_experts_per_tok)
        if gpu_experts_mask is not None:
            self.gpu_experts_mask = gpu_experts_mask
        else:
            self.gpu_experts_mask = np.arange(num_experts) < (num_gpu_experts or 0)

    def load_weights(self, physical_to_logical_map: Any = None) -> None:
        """Reads the layer. ``physical_to_logical_map`` maps SGLang's ids to experts."""
        ids = self.num_experts if physical_to_logical_map is None else len(physical_to_logical_map)
        if ids != self._ids:
            raise ValueError(
                f"SGLang has {self._ids} experts in a layer, but the map has {ids}: start SGLang with "
                "--disable-shared-experts-fusion, because --kt-weight-path has no shared experts"
            )
        super().load_weights(physical_to_logical_map)
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return
        (rank, ranks), device = self.place, torch.cuda.current_device()
        gpus = f"{ranks} GPUs, a part of each expert on each" if self.is_divided else "the GPU"

        def say(level: int, text: str) -> None:
            if rank == 0:
                _say_once(level, text)

        if ranks > 1 and not self.is_divided:
            width = self.intermediate_size
            say(logging.WARNING, f"experts of width {width} cannot be divided by {ranks}: the first GPU computes them")
        # Before SGLang measures what memory is left for its KV cache.
        if (from_tokens := _from_tokens()) > 0:
            self.compute_prompts(device, from_tokens=from_tokens, **self._prompts)
            say(logging.INFO, f"prompts of {from_tokens} tokens or more are computed on {gpus}")
        if (pool_bytes := _pool_bytes()) > 0:
            sizes = dict(pool_bytes=pool_bytes, top_k=self._prompts["top_k"])
            pool = _from_first(None) if rank > 0 else None
            held = self.hold_experts(device, pool=pool, **sizes)
            if rank == 0 and ranks > 1:
                _from_first(self.pool(device))
            say(logging.INFO, f"{held} of {self.num_experts} experts of each layer are held for decode on {gpus}")


class _OfNoMethod:
    """Stands in for KTEPWrapperMethod in SGLang's models, so that they treat the method like any other."""


def method_class(kt_ep_wrapper: Any) -> type:
    """SGLang's own ``KTEPWrapperMethod`` with the experts' sum scaled once, on all ranks that :func:`place` counts, and
    without kernels of SGLang's experts where Moebius computes all.

    SGLang's GPU methods return the sum times ``routed_scaling_factor``, unless the router's weights already include it.
    The CPU's part lacks the factor. So SGLang's DeepSeek multiplies the merged sum once more, and thus the GPU's part
    twice; its GLM does so on one of two paths. This class scales the CPU's part like the GPU's, and models treat the
    method like any other.
    """

    class KTEPWrapperMethod(kt_ep_wrapper.KTEPWrapperMethod):  # type: ignore[misc]
        def __init__(self, gpu_method: Any, kt_config: Any) -> None:
            super().__init__(gpu_method, kt_config)
            self._is_alone = getattr(kt_config, "moebius_computes_all", False)
            KTMoEWrapper.place = place(kt_ep_wrapper.get_parallel())
            if KTMoEWrapper.place[1] > 1:
                self.tp_rank = 0  # SGLang's method makes and asks a wrapper of the first rank alone

        def create_weights(self, *args: Any, **kwargs: Any) -> None:
            super().create_weights(*args, **kwargs)
            if self._is_alone and self.wrapper is not None:
                self.wrapper.gpu_experts_mask[:] = False

        def apply(self, layer: Any, dispatch_output: Any) -> Any:
            if not self._is_alone:
                return super().apply(layer, dispatch_output)
            # As SGLang's own, without its experts.
            from sglang.srt.layers.moe.token_dispatcher import (  # type: ignore[import-not-found,unused-ignore]
                StandardCombineInput,
            )
            from sglang.srt.layers.moe.topk import TopKOutputChecker  # type: ignore[import-not-found,unused-ignore]

            if TopKOutputChecker.format_is_bypassed(dispatch_output.topk_output):
                standard = dispatch_output.topk_output.to_standard()
                dispatch_output = dispatch_output._replace(topk_output=standard)
            self.submit(layer, dispatch_output)
            return StandardCombineInput(hidden_states=self.sync(dispatch_output.hidden_states))

        def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
            super().create_moe_runner(layer, moe_runner_config)
            self._scaled_layer = layer
            for name, module in list(sys.modules.items()):
                if name.startswith("sglang.srt.models.") and "KTEPWrapperMethod" in vars(module):
                    setattr(module, "KTEPWrapperMethod", _OfNoMethod)

        def sync(self, x: Any) -> Any:
            out = super().sync(x)
            factor = self.moe_runner_config.routed_scaling_factor
            in_weights = getattr(self._scaled_layer, "should_fuse_routed_scaling_factor_in_topk", False)
            return out if factor in (None, 1) or in_weights else out * factor

    return KTEPWrapperMethod


def gpu_experts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``create_kt_config_from_server_args``: draft models stay on the GPU; SGLang reads one expert at least. It
    does not compute it where none was asked for."""
    from sglang.srt.runtime_context import get_flags  # type: ignore[import-not-found,unused-ignore]

    config = original(*args, **kwargs)
    if config is None or get_flags().moe.in_speculative_scope:
        return None
    config.moebius_computes_all = not config.num_gpu_experts
    config.num_gpu_experts = config.num_gpu_experts or 1
    return config


def no_numa_node(original: Callable[..., Any], server_args: Any, gpu_id: int) -> Any:
    """Around ``get_numa_node_if_available``: a process whose experts use all NUMA nodes is bound to none."""
    node = original(server_args, gpu_id)
    if node is None or server_args.kt_weight_path is None or server_args.numa_node is not None:
        return node
    log.info("the scheduler is not bound to NUMA node %s, so that the experts use all: --numa-node binds it", node)
    return None


def no_prefill_graphs(server_args: Any) -> None:
    """Before ``apply_cuda_graph_compatibility``: prefill is not captured, unless a flag asks for it."""
    from sglang.srt.arg_groups import overrides  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.model_executor.cuda_graph_config import (  # type: ignore[import-not-found,unused-ignore]
        Backend,
        Phase,
        with_phase,
    )

    asked = any(phase == Phase.PREFILL for phase, _ in server_args._cuda_graph_config_locked)
    if server_args.kt_weight_path is not None and not asked:
        config = overrides.resolving_view(server_args).cuda_graph_config
        config = with_phase(config, Phase.PREFILL, backend=Backend.DISABLED)
        overrides.declare_resolution(server_args, "moebius", cuda_graph_config=config)


def masks_padding(original: Callable[[], bool]) -> bool:
    """Around ``enable_num_token_non_padded``: the router gives no experts to rows that pad a graph."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.runtime_context import get_exec

    # The CPU's router of SGLang does not mask, and has no graphs.
    return original() or (get_exec().moe.kt_weight_path is not None and torch.cuda.is_available())


def add_flags(_: None, parser: Any) -> None:
    """After ``ServerArgs.add_cli_args``: the first flag is KTransformers' fork's, too."""
    for flag, (kind, _variable, text) in FLAGS.items():
        parser.add_argument(flag, type=kind, help=text)


def take_flags(_: type, args: Any) -> None:
    """Before ``ServerArgs.from_cli_args``."""
    for flag, (_kind, variable, _text) in FLAGS.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            os.environ[variable] = str(value)


def plugin() -> None:
    """Installs Moebius. SGLang calls this in each of its processes."""
    from sglang.srt.layers.moe import kt_ep_wrapper  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found,unused-ignore]

    kt_ep_wrapper.KTMoEWrapper = KTMoEWrapper
    kt_ep_wrapper.KTRANSFORMERS_AVAILABLE = True
    for target, hook, kind in [
        ("layers.moe.kt_ep_wrapper.KTEPWrapperMethod", method_class(kt_ep_wrapper), HookType.REPLACE),
        ("layers.moe.kt_ep_wrapper.create_kt_config_from_server_args", gpu_experts, HookType.AROUND),
        ("utils.numa_utils.get_numa_node_if_available", no_numa_node, HookType.AROUND),
        ("arg_groups.cuda_graph_hook.apply_cuda_graph_compatibility", no_prefill_graphs, HookType.BEFORE),
        ("model_executor.forward_batch_info.enable_num_token_non_padded", masks_padding, HookType.AROUND),
        ("server_args.ServerArgs.add_cli_args", add_flags, HookType.AFTER),
        ("server_args.ServerArgs.from_cli_args", take_flags, HookType.BEFORE),
    ]:
        HookRegistry.register(f"sglang.srt.{target}", hook, kind)
