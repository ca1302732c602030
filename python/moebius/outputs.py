"""What comes of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from moebius.residual import Floats


@dataclass(frozen=True)
class Chunk:
    """More of an answer. The texts of all chunks, joined, are the answer's."""

    text: str
    reasoning: str
    """What the model thinks before it answers; in chats only."""
    token_ids: list[int]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; its arguments are JSON, if the model wrote it well."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model held a token to be, and those that it held to be likeliest, best first. Natural logarithms."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Stats:
    """Where the time of an answer went."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were in the cache already."""
    completion_tokens: int
    queued_s: float
    """From submission to the first forward pass."""
    prefill_s: float
    """From there to the first token."""
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
    """Of the whole answer, thoughts and calls included."""
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    """None: it was cut off."""
    stats: Stats
    reasoning: str
    """What the model thought before it answered; in chats only."""
    tool_calls: list[ToolCall]
    """In chats with tools."""
    logprobs: list[TokenLogprob]
    """If `SamplingParams.logprobs` asked for them."""
    hidden: dict[int, Floats]
    """If captured: by layer, [positions, hidden_size]. Complete with the answer, and empty before."""
    logits: Floats | None
    """If captured: [positions, vocab_size]."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to go on with in the next `chat`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def to_output(fields: dict[str, Any], hidden: dict[int, Floats], logits: Floats | None) -> Output:
    """Makes it of what the extension module gives."""
    return Output(
        **{
            **fields,
            "hidden": hidden,
            "logits": logits,
            "stats": Stats(**fields["stats"]),
            "tool_calls": [ToolCall(*call) for call in fields["tool_calls"]],
            "logprobs": [TokenLogprob(token, logprob, dict(top)) for token, logprob, top in fields["logprobs"]],
        }
    )
