"""`LLM`: a model that runs in this process."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

from moebius import _moebius, options, residual
from moebius._engine_options import EngineOptions
from moebius.outputs import Output
from moebius.params import SamplingParams, to_json
from moebius.stream import Stream
from moebius.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moebius.residual import Capture, Floats, Layers, Positions, Steer

    Prompt = str | Sequence[int]
    Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | list[str | list[int]]
    Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that runs in this process. Many threads and tasks can use it at the same time: their requests share each
    step of the model.

    `model` is `demo`, a directory, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-30B-A3B. The keywords are the
    flags of `moebius serve`. Loading progress is printed to stderr unless `quiet=True`. Leaving `with`, `close()` or
    dropping the object frees all memory.

    All methods raise ValueError for invalid arguments, `moebius.Error` when the engine fails, and `moebius.Busy`, a
    kind of `moebius.Error`, when too many requests wait.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, quiet: bool = False, **engine: Unpack[EngineOptions]
    ) -> None:
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._model = _moebius.Model(os.fspath(model), options.flags(engine), quiet)
        self.tokenizer = Tokenizer(self._model)

    @property
    def info(self) -> dict[str, Any]:
        """The running model: name, precisions, context, threads, device."""
        return cast("dict[str, Any]", json.loads(self._model.info()))

    # Streams of one answer.

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        steer: Sequence[Steer] = (),
        capture: Capture | Layers | None = None,
    ) -> Stream:
        """Continues a prompt, which is text or token ids, as a stream for `for` and `async for`."""
        params = sampling_params or SamplingParams()
        fields = params._fields() | residual.fields(steer, capture)
        form = params._form()
        tokens = prompt if isinstance(prompt, str) else list(prompt)
        return self._keep(self._model.generate(tokens, fields, to_json(form) if form else None))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        steer: Sequence[Steer] = (),
        capture: Capture | Layers | None = None,
    ) -> Stream:
        """Answers a conversation as a stream. Messages and tools have the format of OpenAI's chat completions."""
        params = sampling_params or SamplingParams()
        fields = {
            "messages": messages,
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            **params._form(),
        }
        return self._keep(self._model.chat(to_json(fields), params._fields() | residual.fields(steer, capture)))

    # Whole answers.

    @overload
    def generate(
        self,
        prompts: str | Sequence[int],
        sampling_params: Params = None,
        *,
        steer: Sequence[Steer] = (),
        capture: Capture | Layers | None = None,
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        steer: Sequence[Steer] = (),
        capture: Capture | Layers | None = None,
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: Prompt | Prompts,
        sampling_params: Params = None,
        *,
        steer: Sequence[Steer] = (),
        capture: Capture | Layers | None = None,
    ) -> Output | list[Output]:
        """Continues a prompt, which is text or token ids, or a list of prompts. The prompts of a list run together,
        as many
        as the engine admits."""
        starts, one = self._starts(prompts, sampling_params, steer, capture)
        streams: list[Stream] = []
        try:
            for first in self._fill(streams, starts):
                first.finish()
            outputs = [stream.finish() for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        return outputs[0] if one else outputs

    @overload
    async def agenerate(
        self,
        prompts: str | Sequence[int],
        sampling_params: Params = None,
        *,
        steer: Sequence[Steer] = (),
        capture: Capture | Layers | None = None,
    ) -> Output: ...

    @overload
    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        steer: Sequence[Steer] = (),
        capture: Capture | Layers | None = None,
    ) -> list[Output]: ...

    async def agenerate(
        self,
        prompts: Prompt | Prompts,
        sampling_params: Params = None,
        *,
        steer: Sequence[Steer] = (),
        capture: Capture | Layers | None = None,
    ) -> Output | list[Output]:
        """`generate` for async code. Cancelling the task cancels the requests."""
        starts, one = self._starts(prompts, sampling_params, steer, capture)
        streams: list[Stream] = []
        try:
            for first in self._fill(streams, starts):
                await first.afinish()
            outputs = [await stream.afinish() for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        return outputs[0] if one else outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **how: Unpack[options.ChatOptions],
    ) -> Output:
        """Answers a conversation. The keywords are those of `stream_chat`."""
        with self.stream_chat(messages, sampling_params, **how) as stream:
            return stream.finish()

    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **how: Unpack[options.ChatOptions],
    ) -> Output:
        """`chat` for async code. Cancelling the task cancels the request."""
        with self.stream_chat(messages, sampling_params, **how) as stream:
            return await stream.afinish()

    # Hidden states and logits.

    @overload
    def capture(
        self,
        prompts: str | Sequence[int],
        layers: Layers = "all",
        *,
        positions: Positions = "all",
        steer: Sequence[Steer] = (),
    ) -> dict[int, Floats]: ...

    @overload
    def capture(
        self, prompts: Prompts, layers: Layers = "all", *, positions: Positions = "all", steer: Sequence[Steer] = ()
    ) -> list[dict[int, Floats]]: ...

    def capture(
        self,
        prompts: Prompt | Prompts,
        layers: Layers = "all",
        *,
        positions: Positions = "all",
        steer: Sequence[Steer] = (),
    ) -> dict[int, Floats] | list[dict[int, Floats]]:
        """The residual stream of a prompt, or of each prompt of a list, after each of `layers`: [positions,
        hidden_size].
        Generates nothing."""
        read = self._read(prompts, residual.Capture(layers, positions), steer)
        return [output.hidden for output in read] if isinstance(read, list) else read.hidden

    @overload
    def logits(
        self, prompts: str | Sequence[int], *, positions: Positions = "all", steer: Sequence[Steer] = ()
    ) -> Floats: ...

    @overload
    def logits(
        self, prompts: Prompts, *, positions: Positions = "all", steer: Sequence[Steer] = ()
    ) -> list[Floats]: ...

    def logits(
        self, prompts: Prompt | Prompts, *, positions: Positions = "all", steer: Sequence[Steer] = ()
    ) -> Floats | list[Floats]:
        """The logits of a prompt, or of each prompt of a list: [positions, vocab_size]. Each row is for the next
        token."""
        read = self._read(prompts, residual.Capture([], positions, logits=True), steer)
        rows = [output.logits for output in (read if isinstance(read, list) else [read]) if output.logits is not None]
        return rows if isinstance(read, list) else rows[0]

    def close(self) -> None:
        """Cancels running requests, stops the engine and frees its memory."""
        for stream in list(self._streams):
            stream.close()
        self._model.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, prompts: Prompt | Prompts, capture: Capture, steer: Sequence[Steer]) -> Output | list[Output]:
        """Outputs of a prefill without an answer."""
        read = cast("Callable[..., Output | list[Output]]", self.generate)
        return read(prompts, SamplingParams(max_tokens=0), steer=steer, capture=capture)

    def _keep(self, answer: _moebius.Stream) -> Stream:
        stream = Stream(answer)
        self._streams.add(stream)
        return stream

    def _starts(
        self, prompts: Prompt | Prompts, params: Params, steer: Sequence[Steer], capture: Capture | Layers | None
    ) -> tuple[Iterator[Callable[[], Stream]], bool]:
        """Functions that start each answer, and whether `prompts` is a single prompt."""
        one = isinstance(prompts, str) or len(prompts) > 0 and not isinstance(prompts[0], (str, Sequence))
        batch = cast("Sequence[Prompt]", [prompts] if one else prompts)
        each: Iterable[SamplingParams | None] = params if isinstance(params, Sequence) else [params] * len(batch)
        if isinstance(params, Sequence) and len(params) != len(batch):
            raise ValueError(
                f"{len(batch)} prompts but {len(params)} sampling_params: give one for all, or one per prompt"
            )
        return (
            partial(self.stream, prompt, one_params, steer=steer, capture=capture)
            for prompt, one_params in zip(batch, each)
        ), one

    @staticmethod
    def _fill(streams: list[Stream], starts: Iterable[Callable[[], Stream]]) -> Iterator[Stream]:
        """Starts answers and appends them to `streams`. When the engine admits no more, yields the first unfinished
        one for
        the caller to finish."""
        finished = 0
        for start in starts:
            while True:
                try:
                    streams.append(start())
                    break
                except _moebius.Busy:
                    if finished == len(streams):
                        raise
                yield streams[finished]
                finished += 1
