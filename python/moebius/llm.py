"""`LLM`: a model that runs in this process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

from moebius import _moebius, options
from moebius.outputs import Output
from moebius.params import SamplingParams, to_json
from moebius.stream import Stream
from moebius.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    Prompt = str | Sequence[int]
    Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | list[str | list[int]]
    Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that runs in this process. It may be used by many threads and tasks at the same time, whose requests share each step.

    `model` is `demo`, a directory, a GGUF file, or a hub id such as Qwen/Qwen3-30B-A3B; the keywords are the flags of `moebius serve`.
    How far loading is is said on stderr, unless `quiet`. Leaving `with`, `close()` or dropping it gives back all memory.

    Everything raises ValueError for what is asked wrongly, `moebius.Error` for what the engine cannot do, and `moebius.Busy`, one of
    these, when too many requests wait.
    """

    def __init__(self, model: str | os.PathLike[str], *, quiet: bool = False, **engine: Unpack[options.EngineOptions]) -> None:
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._model = _moebius.Model(os.fspath(model), options.flags(engine), quiet)
        self.tokenizer = Tokenizer(self._model)

    @property
    def info(self) -> dict[str, Any]:
        """What runs: model, precisions, context, threads, device."""
        return self._model.info()

    # One prompt to its answer, as a stream.

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Continues a prompt, text or token ids, as it comes. For `for` and for `async for`."""
        params = sampling_params or SamplingParams()
        form = params._form()
        tokens = prompt if isinstance(prompt, str) else list(prompt)
        return self._keep(self._model.generate(tokens, params._fields(), to_json(form) if form else None))

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
    ) -> Stream:
        """Answers a conversation as it comes. Messages and tools are those of OpenAI's chat completions."""
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
        return self._keep(self._model.chat(to_json(fields), params._fields()))

    # Whole answers.

    @overload
    def generate(self, prompts: str | Sequence[int], sampling_params: Params = None) -> Output: ...

    @overload
    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[Output]: ...

    def generate(self, prompts: Prompt | Prompts, sampling_params: Params = None) -> Output | list[Output]:
        """Continues a prompt, text or token ids, or a list of them, which share each step of the model. As many run at once as the engine takes."""
        starts, one = self._starts(prompts, sampling_params)
        streams: list[Stream] = []
        done = 0
        try:
            for start in starts:
                while (stream := self._try(start, done < len(streams))) is None:
                    streams[done].finish()
                    done += 1
                streams.append(stream)
            outputs = [stream.finish() for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        return outputs[0] if one else outputs

    @overload
    async def agenerate(self, prompts: str | Sequence[int], sampling_params: Params = None) -> Output: ...

    @overload
    async def agenerate(self, prompts: Prompts, sampling_params: Params = None) -> list[Output]: ...

    async def agenerate(self, prompts: Prompt | Prompts, sampling_params: Params = None) -> Output | list[Output]:
        """`generate` for async code. Cancelling the task cancels the requests."""
        starts, one = self._starts(prompts, sampling_params)
        streams: list[Stream] = []
        done = 0
        try:
            for start in starts:
                while (stream := self._try(start, done < len(streams))) is None:
                    await streams[done].afinish()
                    done += 1
                streams.append(stream)
            outputs = [await stream.afinish() for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        return outputs[0] if one else outputs

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, **how: Any) -> Output:
        """Answers a conversation; the keywords are those of `stream_chat`."""
        with self.stream_chat(messages, sampling_params, **how) as stream:
            return stream.finish()

    async def achat(self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, **how: Any) -> Output:
        """`chat` for async code. Cancelling the task cancels the request."""
        with self.stream_chat(messages, sampling_params, **how) as stream:
            return await stream.afinish()

    def close(self) -> None:
        """Cancels what runs, stops the engine and gives back its memory."""
        for stream in list(self._streams):
            stream.close()
        self._model.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _keep(self, answer: _moebius.Stream) -> Stream:
        stream = Stream(answer)
        self._streams.add(stream)
        return stream

    def _starts(self, prompts: Prompt | Prompts, params: Params) -> tuple[Iterator[Callable[[], Stream]], bool]:
        """What starts each answer, and whether it is one that was asked for rather than a list."""
        one = isinstance(prompts, str) or len(prompts) > 0 and not isinstance(prompts[0], (str, Sequence))
        batch = cast("Sequence[Prompt]", [prompts] if one else prompts)
        each: Iterable[SamplingParams | None] = params if isinstance(params, Sequence) else [params] * len(batch)
        if isinstance(params, Sequence) and len(params) != len(batch):
            raise ValueError(f"there are {len(batch)} prompts and {len(params)} sampling_params: give one for all, or one for each")
        return (lambda p=prompt, s=sampling: self.stream(p, s) for prompt, sampling in zip(batch, each)), one

    @staticmethod
    def _try(start: Callable[[], Stream], others: bool) -> Stream | None:
        """A started answer; None: the engine takes no more, and others of ours run that can be waited for."""
        try:
            return start()
        except _moebius.Busy:
            if not others:
                raise
            return None
