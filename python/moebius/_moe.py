"""The routed experts of one layer, computed on the CPU for another engine, which runs the rest of the model."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from moebius import _moebius

log = logging.getLogger("moebius")


def _empty_like(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.empty(x.shape, x.dtype)
    if hasattr(x, "new_empty"):  # torch
        return x.new_empty(tuple(x.shape))
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__().empty_like(x)
    raise TypeError("cannot make an array like x: give out=")


def _on_cpu(x: Any) -> bool:
    try:
        return x.__dlpack_device__()[0] in (1, 3)
    except AttributeError:
        raise TypeError("x is not an array: expected one with __dlpack__, such as numpy's and torch's") from None


class MoE:
    """The routed experts of one layer: ``out[t] = sum over k of topk_weights[t, k] * expert[topk_ids[t, k]](x[t])``.

    An expert is ``down @ (silu(gate @ x) * (up @ x))``, or the model's own function. The caller computes shared experts
    and applies ``routed_scaling_factor``. All layers of a process share one copy of a model's experts (in the page
    cache, if they are mapped from a file) and one team of threads.

    Arrays are contiguous, from numpy, torch or any library with ``__dlpack__``: ``x`` ``[tokens, hidden]`` in float32,
    float16 or bfloat16, ``topk_ids`` ``[tokens, top_k]`` in int32 or int64, ``topk_weights`` ``[tokens, top_k]`` in
    float32. Ids that are negative, out of range or masked are skipped. torch is never imported.

    On CUDA, :meth:`submit_forward` and :meth:`sync_forward` only enqueue work on the given stream. Both can be recorded
    into a CUDA graph. Later work on that stream may overwrite the arrays given to ``submit_forward``. Graphs that were
    recorded on the same stream must not run at the same time.

    An engine with several GPUs may give all of them the same batches and add what they return. Then each is a rank,
    with a :class:`MoE` of its own, usually in a process of its own. With :meth:`compute_prompts` and
    :meth:`hold_experts` every GPU computes its part of the experts' width. All cores of the processor compute the other
    experts, once, for the first rank. What a rank does not compute is zeros. All ranks map one copy of the experts.

    Args:
        model: a folder in the Hugging Face layout, a GGUF file, a Hugging Face id, or a Moebius cache file. Its experts
            must have no biases. The first use converts the experts.
        layer: the layer's number in the model.
        weights: instead of a model, ``(gate, up, down)``: ``[experts, intermediate, hidden]`` twice and ``[experts,
            hidden, intermediate]``, of any float type, on the CPU; ``layer`` is 0.
        num_gpu_experts: the caller computes this many first experts, and they are skipped here.
        gpu_experts_mask: the same as a bool array of all experts on the CPU. Every call reads it again: write it in
            place.
        precision: ``auto`` (the precision of a quantized checkpoint, int4 for others), ``bf16``, ``int8`` or ``int4``.
        group_size: number of weights that share a scale.
        cache_dir: directory of converted experts; ``~/.cache/moebius`` by default.
        threads: workers of the whole process; the first caller decides. Maximum and default: the physical cores. Ranks
            other than the first have one.
        rank: this one's number among the ranks.
        ranks: how many there are.
        load: read the layer and verify its checksums now. Otherwise :meth:`load_weights` does, or each expert's first
            use.

    Raises:
        ValueError: an argument does not fit; the message says what would.
        RuntimeError: a file is damaged or missing, or memory is short.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        layer: int = 0,
        *,
        weights: tuple[Any, Any, Any] | None = None,
        num_gpu_experts: int | None = None,
        gpu_experts_mask: Any = None,
        precision: str | None = None,
        group_size: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        load: bool = True,
    ) -> None:
        if num_gpu_experts is not None and gpu_experts_mask is not None:
            raise TypeError("give num_gpu_experts or gpu_experts_mask, not both")
        self._layer = _moebius.ExpertLayer(
            None if model is None else os.fspath(model),
            layer,
            weights=weights,
            precision=precision,
            group_size=group_size,
            cache_dir=None if cache_dir is None else os.fspath(cache_dir),
            threads=threads,
            rank=rank,
            ranks=ranks,
            report=log.info,
        )
        self.layer = layer
        self._computed: list[Any] = []
        self._ids = self.num_experts
        if gpu_experts_mask is None:
            gpu_experts_mask = np.zeros(self.num_experts, dtype=bool)
            gpu_experts_mask[: num_gpu_experts or 0] = True
        self.gpu_experts_mask = gpu_experts_mask
        if load:
            self.load_weights()

    @property
    def gpu_experts_mask(self) -> Any:
        """The mask of experts that the caller computes. Writing into it takes effect at the next call."""
        return self._mask

    @gpu_experts_mask.setter
    def gpu_experts_mask(self, mask: Any) -> None:
        if tuple(mask.shape) != (self._ids,):
            raise ValueError(f"gpu_experts_mask has shape {tuple(mask.shape)}: expected ({self._ids},)")
        self._layer.set_mask(mask)
        self._mask = mask

    @property
    def num_experts(self) -> int:
        """Number of experts in the layer."""
        return self._layer.num_experts

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._layer.hidden_size

    @property
    def intermediate_size(self) -> int:
        """Width of an expert."""
        return self._layer.intermediate_size

    @property
    def precision(self) -> str:
        """Storage of the weights, such as ``int4-g32``."""
        return self._layer.precision

    @property
    def is_divided(self) -> bool:
        """Whether GPUs compute parts of an expert. Where there are more ranks than its width can be cut into, the first
        one's GPU computes whole experts, and the others none."""
        return self._layer.is_divided

    @property
    def threads(self) -> int:
        """Number of workers."""
        return self._layer.threads

    def load_weights(self, physical_to_logical_map: Any = None) -> None:
        """Reads the layer and verifies its checksums, which the first rank does for all.

        ``physical_to_logical_map``: integers ``[ids]`` on the CPU, the expert of each id; by default the id itself.
        """
        self._layer.load(physical_to_logical_map)
        at, layers = self._layer.place
        log.info("layer %d of %d (%s, %d threads)", at + 1, layers, self.precision, self.threads)

    def forward(self, x: Any, topk_ids: Any, topk_weights: Any, *, out: Any = None) -> Any:
        """Computes arrays on the CPU, into ``out`` or a new array like ``x``."""
        if out is None:
            out = _empty_like(x)
        self._layer.forward(x, topk_ids, topk_weights, out)
        return out

    def submit_forward(self, x: Any, topk_ids: Any, topk_weights: Any, stream: int = 0) -> None:
        """Starts a batch. On CUDA, enqueues it on ``stream``, the integer handle of a CUDA stream. Arrays on the CPU
        are computed at once."""
        if _on_cpu(x):
            self._computed.append(self.forward(x, topk_ids, topk_weights))
        else:
            self._layer.submit(x, topk_ids, topk_weights, stream)

    def sync_forward(self, x: Any, stream: int = 0, *, out: Any = None) -> Any:
        """Returns the sum of the oldest batch submitted on ``stream``. On CUDA the result is ready in stream order.

        ``x`` gives shape, type and device. Returns ``out`` or a new array like ``x``.
        """
        if _on_cpu(x):
            if not self._computed:
                raise RuntimeError("nothing was submitted: call submit_forward before sync_forward")
            result = self._computed.pop(0)
            if out is None:
                return result
            out[...] = result
            return out
        if out is None:
            out = _empty_like(x)
        self._layer.sync(out, stream)
        return out

    def compute_prompts(
        self, device: int, *, from_tokens: int, tokens: int, top_k: int, ring_bytes: int = 1 << 30
    ) -> None:
        """Lets CUDA device ``device`` compute batches of at least ``from_tokens`` tokens in bfloat16, for all layers of
        the model that are loaded. Experts cross PCIe from pinned memory, those of a layer while others are multiplied.
        Graphs do not record this: while one is recorded, the CPU computes.

        Memory of the device is taken now: for ``tokens`` tokens of ``top_k`` experts at once, and ``ring_bytes`` that
        experts pass through. Calls after the first do nothing.

        Of several ranks, all must be given the same numbers. Each brings its part of every expert over its own link.
        """
        self._layer.compute_prompts(device, from_tokens, tokens, top_k, ring_bytes)

    def hold_experts(
        self,
        device: int,
        *,
        pool_bytes: int,
        tokens: int = 512,
        top_k: int,
        pool: str | os.PathLike[str] | None = None,
    ) -> int:
        """Lets CUDA device ``device`` hold experts of the model in ``pool_bytes`` of its memory, and compute them there
        while the CPU computes the others, in this layer's batches of up to ``tokens`` tokens in bfloat16, recorded into
        graphs or not. What it holds follows the text: experts that are missed come in for the steps that follow, those
        that were least useful go.

        Call it for each layer, after :meth:`load_weights` and before anything is recorded. The first call for a model
        takes the memory, and some more for the batches. From then on the layer's ``gpu_experts_mask`` must not change,
        and batches of the model must not run at the same time on two streams. Returns how many experts of each layer
        have room.

        Of several ranks, all must be given the same numbers, and run the same batches in the same order. Each holds its
        part of the same experts. The first one is called first, and its :meth:`pool` is given to the others.
        """
        self._layer.hold_experts(device, pool_bytes, tokens, top_k, pool)
        held = self._layer.held(device)
        return held[0] if held else 0

    def pool(self, device: int) -> str | None:
        """What the first rank's :meth:`hold_experts` has made for those of the others. None: there are no others, or
        experts are not divided."""
        pool = self._layer.pool(device)
        return None if pool is None else str(pool)

    def held_experts(self, device: int) -> tuple[int, int, int] | None:
        """How many experts of each layer ``device`` has room for; and how often one that it held was chosen since, and
        another, as the first rank counts. None: it holds none."""
        return self._layer.held(device)

    def expert_weights(
        self, expert: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """``gate``, ``up`` and ``down`` of an expert with the values used in the computation, in float32."""
        return self._layer.expert_weights(expert)

    @staticmethod
    def set_capture_batch_sizes(sizes: list[int]) -> None:
        """Does nothing: buffers are allocated at the first use of a size and never move."""
