"""How an answer is asked for."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when an answer ends. What is None is the model's own default.

    At most one of `json`, `json_object`, `regex`, `choice` and `grammar` says what the answer must look like.
    """

    temperature: float | None = None
    """Randomness; 0 is greedy."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose probabilities sum to this."""
    top_k: int | None = None
    """Keep this many tokens; 0 keeps all."""
    min_p: float | None = None
    """Drop tokens below this share of the best one's probability."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens in prompt and answer."""
    presence_penalty: float | None = None
    """Taken off the logits of tokens that the answer has."""
    frequency_penalty: float | None = None
    """The same for each time that it has them."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of single tokens."""
    seed: int | None = None
    """Same seed, same text."""
    max_tokens: int | None = 256
    """Tokens to generate at most; None: up to the end of the context."""
    stop: str | Sequence[str] | None = None
    """Texts that end the answer and are not part of it."""
    ignore_eos: bool = False
    """Go on after an end token."""
    logprobs: int | None = None
    """Tell how likely each token was, beside this many of the likeliest."""
    json: Mapping[str, Any] | str | None = None
    """JSON that this schema validates."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches as a whole."""
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
        """What the extension module takes."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens")
        return {
            **{name: getattr(self, name) for name in names},
            "logit_bias": list((self.logit_bias or {}).items()),
            "seed": None if self.seed is None else self.seed % 2**64,
            "stop": [self.stop] if isinstance(self.stop, str) else list(self.stop or ()),
            "ignore_eos": self.ignore_eos,
            "logprobs": self.logprobs,
        }

    def _form(self) -> dict[str, object]:
        """What the answer must look like, as the server's fields have it."""
        guides = {"json": self.json, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given: dict[str, object] = {name: guide for name, guide in guides.items() if guide is not None}
        if len(given) + self.json_object > 1:
            raise ValueError("an answer has one form: give one of json, json_object, regex, choice and grammar")
        if self.json_object:
            return {"response_format": {"type": "json_object"}}
        return {"structured_outputs": given} if given else {}


def to_json(value: object) -> str:
    """JSON of what people give. Errors: TypeError for what has none."""
    return _json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{value!r} cannot be written as JSON")
