"""The results of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from moebius.residual import Floats, Ids


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer. The texts of all chunks join to the answer's text."""

    text: str
    reasoning: str
    """Reasoning of the model; in chats only."""
    token_ids: list[int]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. Its arguments are JSON, unless the model made a mistake."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TokenLogprob:
    """The logprob of a token, and of the likeliest tokens, best first. Natural logarithms."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Stats:
    """Tokens and times of an answer."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were in the prefix cache."""
    completion_tokens: int
    queued_s: float
    """From submission to the first forward pass."""
    prefill_s: float
    """From the first forward pass to the first token."""
    decode_s: float
    """From the first token to the last."""
    decode_bytes: int
    """Weight bytes read while decoding."""


@dataclass(frozen=True, eq=False)
class Output:
    """An answer."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    """Tokens of the whole answer, reasoning and calls included."""
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    """None: the answer was cancelled."""
    stats: Stats
    reasoning: str
    """Reasoning of the model; in chats only."""
    tool_calls: list[ToolCall]
    """Calls of tools; in chats with tools."""
    logprobs: list[TokenLogprob]
    """One per token, if `SamplingParams.logprobs` is set."""
    hidden: dict[int, Floats]
    """If captured: by layer, [positions, hidden_size], or [positions, residual streams,
    hidden_size] where a model has several. Empty until the answer is complete."""
    logits: Floats | None
    """If captured: [positions, vocab_size]."""
    router: dict[int, tuple[Ids, Floats]]
    """If captured: by layer, chosen experts and their weights, [positions, experts per token] each."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message for the next `chat`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def to_output(
    fields: dict[str, Any],
    hidden: dict[int, Floats],
    logits: Floats | None,
    router: dict[int, tuple[Ids, Floats]],
) -> Output:
    """Makes an Output of the extension module's fields."""
    return Output(
        **{
            **fields,
            "hidden": hidden,
            "logits": logits,
            "router": router,
            "stats": Stats(**fields["stats"]),
            "tool_calls": [ToolCall(*call) for call in fields["tool_calls"]],
            "logprobs": [TokenLogprob(token, logprob, dict(top)) for token, logprob, top in fields["logprobs"]],
        }
    )
