"""Moebius computes the CPU's experts of an unmodified SGLang.

Installed beside SGLang (``pip install ./python sglang`` in a clone), it needs no more than::

    python -m sglang.launch_server --model-path MODEL --kt-weight-path MODEL --kt-num-gpu-experts 16

SGLang finds :func:`plugin` by itself, and says so in one line of its log (``SGLANG_PLUGINS`` restricts which plugins are loaded: name ``moebius``).
For KTransformers' fork of SGLang, which has no plugins: ``SGLANG_EXTERNAL_MODEL_PACKAGE=moebius.sglang_fork``.

The flags, and what they mean here:

``--kt-weight-path PATH``
    The model: a folder in the Hugging Face layout (BF16, FP8, INT4, whatever Moebius reads), a GGUF file, a hub id or a Moebius cache
    file. Nothing needs to be converted: the first start does, into ``~/.cache/moebius``. Usually the same as ``--model-path``.
``--kt-num-gpu-experts N``
    The first N experts of each layer are computed by SGLang on the GPU.
``--kt-method METHOD``
    ``AMXINT4`` (SGLang's default), ``RAWINT4``, ``GPTQ_INT4``, ``FP8``, ``FP8_PERCHANNEL``, ``LLAMAFILE``, ``MXFP4`` and ``AUTO`` all mean what keeps
    the checkpoint as it is, or INT4 where it is not quantized; ``AMXINT8`` and ``MOE_INT8`` mean INT8, ``MOE_INT4`` INT4 and ``BF16`` BF16.
``--kt-cpuinfer N``
    Threads; at most, and by default, the physical cores. No core needs to be left free.
``--kt-threadpool-count N``, ``--kt-numa-nodes``
    Not used: every NUMA node that the process may use has a slice of each expert, and workers of its own.
``--kt-max-deferred-experts-per-token N``
    0 is used, and said once: to defer experts gives another model.
``--chunked-prefill-size``
    Batches may have any size.

SGLang 0.5.23 multiplies the GPU's experts twice by ``routed_scaling_factor`` in some models, and the CPU's not at all in others; with :func:`plugin` all
are multiplied once. See :func:`method_class`.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

from moebius._moe import MoE

log = logging.getLogger("moebius")

#: What ``--kt-method`` may be, and the precision that it is here.
METHODS = {
    **dict.fromkeys(["AUTO", "AMXINT4", "RAWINT4", "GPTQ_INT4", "FP8", "FP8_PERCHANNEL", "LLAMAFILE", "MXFP4"], "auto"),
    **dict.fromkeys(["AMXINT8", "MOE_INT8"], "int8"),
    "MOE_INT4": "int4",
    "BF16": "bf16",
}

_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning(text)


class KTMoEWrapper(MoE):
    """:class:`moebius.MoE` as SGLang, or KTransformers' fork of it, makes and calls it: with ``num_gpu_experts`` or ``gpu_experts_mask``.

    Keywords that are not known here are ignored, with one warning.
    """

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
            _say_once("--kt-max-deferred-experts-per-token: 0 is used, since to defer experts gives another model")
        if unknown:
            _say_once(f"KTMoEWrapper ignores what it does not know: {', '.join(sorted(unknown))}")
        super().__init__(weight_path, layer_idx, precision=METHODS[method], threads=cpuinfer_threads, load=False)
        for what, given, own in [
            ("hidden_size", hidden_size, self.hidden_size),
            ("moe_intermediate_size", moe_intermediate_size, self.intermediate_size),
        ]:
            if given != own:
                raise ValueError(f"--kt-weight-path {weight_path} has {what} {own} and the model {given}: give the same model's")
        self._ids = num_experts
        if gpu_experts_mask is not None:
            self.gpu_experts_mask = gpu_experts_mask
        else:
            self.gpu_experts_mask = np.arange(num_experts) < (num_gpu_experts or 0)

    def load_weights(self, physical_to_logical_map: Any = None) -> None:
        """Reads the layer; ``physical_to_logical_map`` says which expert each of SGLang's ids is."""
        ids = self.num_experts if physical_to_logical_map is None else len(physical_to_logical_map)
        if ids != self._ids:
            raise ValueError(
                f"SGLang has {self._ids} experts in a layer and the map {ids}: start it with --disable-shared-experts-fusion, "
                "since shared experts are not among those of --kt-weight-path"
            )
        super().load_weights(physical_to_logical_map)


class _OfNoMethod:
    """What a model of SGLang's is told is KTEPWrapperMethod."""


def method_class(kt_ep_wrapper: Any) -> type:
    """SGLang's own ``KTEPWrapperMethod`` with the experts' sum scaled once.

    Its GPU methods return the sum times ``routed_scaling_factor``, unless the router's weights have it already. The CPU's part lacks
    it, and so SGLang's DeepSeek multiplies the merged sum once more and the GPU's part twice, while its GLM does so on one of two paths. Here the CPU's part is
    scaled as the GPU's is, and models treat the method as they do any other.
    """

    class KTEPWrapperMethod(kt_ep_wrapper.KTEPWrapperMethod):  # type: ignore[misc]
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


def plugin() -> None:
    """SGLang calls this in each of its processes."""
    from sglang.srt.layers.moe import kt_ep_wrapper  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found,unused-ignore]

    kt_ep_wrapper.KTMoEWrapper = KTMoEWrapper
    kt_ep_wrapper.KTRANSFORMERS_AVAILABLE = True
    target = "sglang.srt.layers.moe.kt_ep_wrapper.KTEPWrapperMethod"
    HookRegistry.register(target, method_class(kt_ep_wrapper), HookType.REPLACE)
    log.info("moebius %s computes the experts of --kt-weight-path", version("moebius"))
