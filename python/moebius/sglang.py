"""Computes the CPU experts of an unmodified SGLang with Moebius.

Install it next to SGLang (``pip install ./python sglang`` in a clone), and run::

    python -m sglang.launch_server --model-path MODEL --kt-weight-path MODEL --kt-num-gpu-experts 16

SGLang finds :func:`plugin` by itself and logs it in one line. If ``SGLANG_PLUGINS`` restricts the plugins, it must name
``moebius``. KTransformers' fork of SGLang has no plugins: set ``SGLANG_EXTERNAL_MODEL_PACKAGE=moebius.sglang_fork``.

The flags and their meaning here:

``--kt-weight-path PATH``
    The model: a folder in the Hugging Face layout (BF16, FP8, INT4 or any other format that Moebius reads), a GGUF
    file, a Hugging Face id or a Moebius cache file. The first start converts it into ``~/.cache/moebius``. Usually the
    same as ``--model-path``.
``--kt-num-gpu-experts N``
    SGLang computes the first N experts of each layer on the GPU.
``--kt-method METHOD``
    ``AMXINT4`` (SGLang's default), ``RAWINT4``, ``GPTQ_INT4``, ``FP8``, ``FP8_PERCHANNEL``, ``LLAMAFILE``, ``MXFP4``
    and
    ``AUTO`` all keep the precision of a quantized checkpoint, and mean INT4 for others. ``AMXINT8`` and ``MOE_INT8``
    mean INT8, ``MOE_INT4`` INT4 and ``BF16`` BF16.
``--kt-cpuinfer N``
    Threads. Maximum and default: the number of physical cores. No core needs to stay free.
``--kt-threadpool-count N``, ``--kt-numa-nodes``
    Ignored: every NUMA node that the process may use has a slice of each expert and its own workers.
``--kt-max-deferred-experts-per-token N``
    Ignored with one warning: 0 is used, because deferring experts changes the model.
``--chunked-prefill-size``
    Batches may have any size.

SGLang 0.5.23 multiplies the GPU's experts twice by ``routed_scaling_factor`` in some models, and does not multiply the
CPU's in others. With :func:`plugin` all are multiplied once. See :func:`method_class`.
"""

from __future__ import annotations

import logging
import sys
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

_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning(text)


class KTMoEWrapper(MoE):
    """:class:`moebius.MoE` with the interface of SGLang and of KTransformers' fork, which pass ``num_gpu_experts`` or
    ``gpu_experts_mask``.

    Ignores unknown keywords with one warning.
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
            _warn_once("--kt-max-deferred-experts-per-token: 0 is used, because deferring experts changes the model")
        if unknown:
            _warn_once(f"KTMoEWrapper ignores unknown arguments: {', '.join(sorted(unknown))}")
        super().__init__(weight_path, layer_idx, precision=METHODS[method], threads=cpuinfer_threads, load=False)
        for what, given, own in [
            ("hidden_size", hidden_size, self.hidden_size),
            ("moe_intermediate_size", moe_intermediate_size, self.intermediate_size),
        ]:
            if given != own:
                raise ValueError(
                    f"--kt-weight-path {weight_path} has {what} {own}, but the model has {given}: use the same model"
                )
        self._ids = num_experts
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


class _OfNoMethod:
    """Stands in for KTEPWrapperMethod in SGLang's models, so that they treat the method like any other."""


def method_class(kt_ep_wrapper: Any) -> type:
    """SGLang's own ``KTEPWrapperMethod`` with the experts' sum scaled once.

    SGLang's GPU methods return the sum times ``routed_scaling_factor``, unless the router's weights already include it.
    The CPU's part lacks the factor. So SGLang's DeepSeek multiplies the merged sum once more, and thus the GPU's part
    twice; its GLM does so on one of two paths. This class scales the CPU's part like the GPU's, and models treat the
    method like any other.
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
    """Installs Moebius. SGLang calls this in each of its processes."""
    from sglang.srt.layers.moe import kt_ep_wrapper  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found,unused-ignore]

    kt_ep_wrapper.KTMoEWrapper = KTMoEWrapper
    kt_ep_wrapper.KTRANSFORMERS_AVAILABLE = True
    target = "sglang.srt.layers.moe.kt_ep_wrapper.KTEPWrapperMethod"
    HookRegistry.register(target, method_class(kt_ep_wrapper), HookType.REPLACE)
    log.info("moebius %s computes the experts of --kt-weight-path", version("moebius"))
