"""A CPU/GPU hybrid inference engine for mixture-of-experts models larger than your GPU."""

from moebius._moe import MoE

__all__ = ["MoE"]
