"""A model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from moebius import _moebius
from moebius.params import to_json


class Tokenizer:
    """The tokenizer of a model, as `LLM.tokenizer`. Names and defaults are those of Hugging Face's tokenizers."""

    def __init__(self, model: _moebius.Model) -> None:
        self._model = model

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer."""
        return self._model.eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: all token ids of the model are smaller."""
        return self._model.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. `add_special_tokens` adds those that the tokenizer puts around a prompt. Special tokens
        spelled out in the text are recognized in any case."""
        return self._model.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return self._model.decode(list(token_ids), skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: Literal[True] = True,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Renders a conversation with the model's chat template, as token ids or as text. `variables` are additional
        variables of the template."""
        text = self._model.render(to_json(messages), to_json(tools), to_json(variables), add_generation_prompt)
        return self._model.encode(text, False) if tokenize else text
