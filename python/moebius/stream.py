"""An answer as a stream."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from moebius import _moebius
from moebius.outputs import Chunk, Output, to_output

if TYPE_CHECKING:
    from moebius.residual import Floats, Ids


class Stream:
    """One answer as a stream: iterate over it with `for` or `async for`. Leaving `with`, `close()` or dropping it
    cancels
    the request."""

    def __init__(self, answer: _moebius.Stream) -> None:
        self._answer = answer
        self._captured: (
            tuple[dict[int, Floats], Floats | None, dict[int, tuple[Ids, Floats]]] | None
        ) = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        chunk = self._answer.next()
        if chunk is None:
            raise StopIteration
        return Chunk(*chunk)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        loop = asyncio.get_running_loop()
        while not self._answer.ready():
            readable: asyncio.Future[None] = loop.create_future()
            file = self._answer.fileno()
            loop.add_reader(file, _set, readable)
            try:
                await readable
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                loop.remove_reader(file)
        try:
            return self.__next__()
        except StopIteration:
            raise StopAsyncIteration from None

    @property
    def output(self) -> Output:
        """The answer so far; complete after the last chunk."""
        fields = self._answer.output()
        if fields["finish_reason"] is None:
            return to_output(fields, {}, None, {})
        self._captured = self._captured or self._answer.captured()
        return to_output(fields, *self._captured)

    def finish(self) -> Output:
        """Waits for the end and returns the whole answer."""
        self._answer.finish()
        return self.output

    async def afinish(self) -> Output:
        """`finish` for async code."""
        async for _ in self:
            pass
        return self.output

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self._answer.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
