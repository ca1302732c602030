"""The residual stream: steering and capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moebius import _moebius

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float32]
    Ids = NDArray[np.int32]
    Layers = Literal["all"] | int | Sequence[int]
    Positions = Literal["all", "prompt", "generated"] | Sequence[tuple[int, int | None]]


@dataclass(frozen=True)
class Steer:
    """Adds `coefficient * vector` to the residual stream after a layer. Positions count from 0 through the prompt and
    the
    generated tokens."""

    layer: int
    """Number of the layer, from 0."""
    vector: ArrayLike = field(repr=False)
    """`LLM.info["hidden_size"]` elements."""
    coefficient: float = 1.0
    positions: Positions = "all"
    """'all', 'prompt', 'generated', or ranges with excluded ends: [(0, 5), (9, None)]."""

    def __post_init__(self) -> None:
        vector = np.ascontiguousarray(self.vector, dtype=np.float32)
        if vector.ndim != 1:
            raise ValueError(f"a steering vector must have one dimension, not {vector.ndim}")
        # Requests with the same object share its vector, also on a GPU.
        object.__setattr__(self, "_vector", _moebius.Vector(vector))

    def _fields(self) -> tuple[object, ...]:
        return (self.layer, getattr(self, "_vector"), self.coefficient, _positions(self.positions))


@dataclass(frozen=True)
class Capture:
    """Captures the residual stream after some layers, before the final norm, at some positions.

    The last generated token is not an input of the model, so it has no row.
    """

    layers: Layers = "all"
    positions: Positions = "all"
    logits: bool = False
    """Also capture the logits at these positions."""
    router: bool = False
    """Also capture the experts that the routers of all layers choose at these positions."""

    def _fields(self) -> tuple[object, ...]:
        layers = None if self.layers == "all" else [self.layers] if isinstance(self.layers, int) else list(self.layers)
        return (layers, _positions(self.positions), self.logits, self.router)


def _positions(positions: Positions) -> str | list[tuple[int | None, ...]]:
    return positions if isinstance(positions, str) else [tuple(span) for span in positions]


def fields(steer: Sequence[Steer], capture: Capture | Layers | None) -> dict[str, Any]:
    """The fields for the extension module."""
    wanted = capture if isinstance(capture, Capture) or capture is None else Capture(capture)
    return {"steer": [one._fields() for one in steer], "capture": wanted and wanted._fields()}
