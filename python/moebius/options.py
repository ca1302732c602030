"""The options of the engine: flags of `moebius serve`, as keywords."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from moebius import _moebius

if TYPE_CHECKING:
    from moebius.residual import Capture, Layers, Steer


class EngineOptions(TypedDict, total=False):
    """Keywords of `moebius.LLM`. `moebius serve --help` describes them. A missing keyword, or None, means the
    default."""

    experts: Literal["auto", "bf16", "int8", "int4"] | None
    group_size: Literal[32, 64, 128] | None
    cache_dir: str | None
    dense: Literal["bf16", "int8", "int4"] | None
    kv: Literal["bf16", "bf16x2", "fp8"] | None
    max_context: int | None
    max_batch_tokens: int | None
    threads: int | None
    simd: str | None
    lock: bool | None
    numa: Literal["auto", "off", "interleave"] | None
    experts_memory: Literal["auto", "map", "copy"] | None
    device: str | None
    vram: str | int | None
    resident_experts: int | Literal["auto"] | None
    prefill: Literal["auto", "cpu", "gpu"] | None
    max_sequences: int | None
    max_queue: int | None
    max_gap: int | None
    no_prefix_cache: bool | None
    trust_content: bool | None


class ChatOptions(TypedDict, total=False):
    """Keywords of `LLM.stream_chat`, and of `chat` and `achat`."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None
    steer: Sequence[Steer]
    capture: Capture | Layers | None


def flags(options: Mapping[str, object]) -> list[str]:
    """The options as flags of the command. Errors: TypeError for an unknown option, with the nearest known one."""
    takes_value = {name: takes_value for name, takes_value, _ in _moebius.engine_options()}
    out = []
    for name, value in options.items():
        if name not in takes_value:
            nearest = difflib.get_close_matches(name, takes_value, 1, 0.0)[0]
            raise TypeError(f"LLM has no option {name!r}: did you mean {nearest!r}?")
        flag = "--" + name.replace("_", "-")
        if value is None or value is False and not takes_value[name]:
            continue
        if not takes_value[name] and value is not True:
            raise TypeError(f"{name} must be True or False, not {value!r}")
        out.append(f"{flag}={value}" if takes_value[name] else flag)
    return out
