"""Sampling parameters and limits of an answer."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, and when an answer ends. None means the model's own default.

    At most one of `json`, `json_object`, `regex`, `choice` and `grammar` constrains the text of the answer.
    """

    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probabilities sum to this."""
    top_k: int | None = None
    """Sample from this many of the likeliest tokens; 0 means all."""
    min_p: float | None = None
    """Drop tokens less likely than this times the likeliest token."""
    repetition_penalty: float | None = None
    """Divides positive logits of tokens in prompt and answer, and multiplies negative ones."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float | None = None
    """Subtracted from the logits of tokens in the answer for each occurrence."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Random seed; the same seed gives the same text."""
    max_tokens: int | None = 256
    """Maximum tokens to generate; None: up to the end of the context."""
    stop: str | Sequence[str] | None = None
    """Texts that end the answer. They are not part of it."""
    ignore_eos: bool = False
    """Continue after an end token."""
    logprobs: int | None = None
    """Return the logprob of each token, and of this many of the likeliest tokens."""
    json: Mapping[str, Any] | str | None = None
    """JSON that this schema validates."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches whole."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text that this grammar derives, in llguidance's variant of Lark."""

    def __post_init__(self) -> None:
        for name in ("top_k", "max_tokens", "logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}: it must not be negative")

    def _fields(self) -> dict[str, object]:
        """The fields for the extension module."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "max_tokens",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "logit_bias": list((self.logit_bias or {}).items()),
            "seed": None if self.seed is None else self.seed % 2**64,
            "stop": [self.stop] if isinstance(self.stop, str) else list(self.stop or ()),
            "ignore_eos": self.ignore_eos,
            "logprobs": self.logprobs,
        }

    def _form(self) -> dict[str, object]:
        """The format of the answer, as fields of the server's API."""
        guides = {"json": self.json, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given: dict[str, object] = {name: guide for name, guide in guides.items() if guide is not None}
        if len(given) + self.json_object > 1:
            raise ValueError("an answer has only one format: give one of json, json_object, regex, choice and grammar")
        if self.json_object:
            return {"response_format": {"type": "json_object"}}
        return {"structured_outputs": given} if given else {}


def to_json(value: object) -> str:
    """JSON of a value, its mappings and sequences. Errors: TypeError for other types."""
    return _json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{value!r} cannot be written as JSON")
