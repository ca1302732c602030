"""The options of the engine: flags of `moebius serve`, as keywords."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from moebius import _moebius

if TYPE_CHECKING:
    from moebius.residual import Capture, Layers, Steer


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
