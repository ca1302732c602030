"""The residual stream: what is added to it, and what is taken from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moebius import _moebius

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float32]
    Layers = Literal["all"] | int | Sequence[int]
    Positions = Literal["all", "prompt", "generated"] | Sequence[tuple[int, int | None]]


@dataclass(frozen=True)
class Steer:
    """Adds `coefficient * vector` to the residual stream after a layer, at some positions of a sequence: its prompt from 0 on, then what is generated."""

    layer: int
    """The first is 0."""
    vector: ArrayLike = field(repr=False)
    """Of `LLM.info["hidden_size"]` numbers."""
    coefficient: float = 1.0
    positions: Positions = "all"
    """Or 'prompt', 'generated', or ranges without their ends: [(0, 5), (9, None)]."""

    def __post_init__(self) -> None:
        vector = np.ascontiguousarray(self.vector, dtype=np.float32)
        if vector.ndim != 1:
            raise ValueError(f"a steering vector has {vector.ndim} dimensions: give one")
        # Requests that are steered by the same object share it, on a GPU too.
        object.__setattr__(self, "_vector", _moebius.Vector(vector))

    def _fields(self) -> tuple[object, ...]:
        return (self.layer, getattr(self, "_vector"), self.coefficient, _positions(self.positions))


@dataclass(frozen=True)
class Capture:
    """What a request wants to be told: the residual stream after some layers, before the final norm, at some positions.

    The last generated token is never read, and so has no row.
    """

    layers: Layers = "all"
    positions: Positions = "all"
    logits: bool = False
    """The logits at these positions, too."""

    def _fields(self) -> tuple[object, ...]:
        layers = None if self.layers == "all" else [self.layers] if isinstance(self.layers, int) else list(self.layers)
        return (layers, _positions(self.positions), self.logits)


def _positions(positions: Positions) -> str | list[tuple[int | None, ...]]:
    return positions if isinstance(positions, str) else [tuple(span) for span in positions]


def fields(steer: Sequence[Steer], capture: Capture | Layers | None) -> dict[str, Any]:
    """What the extension module takes."""
    wanted = capture if isinstance(capture, Capture) or capture is None else Capture(capture)
    return {"steer": [one._fields() for one in steer], "capture": wanted and wanted._fields()}
