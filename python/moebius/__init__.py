"""A CPU/GPU hybrid inference engine for mixture-of-experts models larger than your GPU."""

from moebius import _moebius, _templates
from moebius._engine_options import EngineOptions
from moebius._moe import MoE
from moebius._moebius import Busy, Error
from moebius.llm import LLM
from moebius.outputs import Chunk, Output, Stats, TokenLogprob, ToolCall
from moebius.params import SamplingParams
from moebius.residual import Capture, Steer
from moebius.stream import Stream
from moebius.tokenizer import Tokenizer

_moebius.render_templates_in(_templates.command(_moebius.__file__))

__all__ = [
    "LLM",
    "MoE",
    "Busy",
    "Capture",
    "Chunk",
    "EngineOptions",
    "Error",
    "Output",
    "SamplingParams",
    "Stats",
    "Steer",
    "Stream",
    "TokenLogprob",
    "Tokenizer",
    "ToolCall",
]
