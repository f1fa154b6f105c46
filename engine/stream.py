"""The reader's end of one request: deltas by step, merged while the reader is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .api import Delta


class DeltaStream:
    """Async iterator of tuples of deltas. Not bounded here: a request's own token limit bounds it.

    Written on the loop's thread by the engine, read by one task.
    """

    __slots__ = ("_abort", "_ended", "_pending", "_waiter")

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._pending: list[Delta] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, deltas: list[Delta], *, last: bool) -> None:
        """Add what one step brought; with `last` the stream ends behind it."""
        self._pending += deltas
        self._ended = self._ended or last
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> tuple[Delta, ...]:
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas = tuple(self._pending)
        self._pending.clear()
        return deltas

    async def aclose(self) -> None:
        """Stop reading: aborts the request if it is not at its end."""
        if not self._ended:
            self._ended = True
            self._abort()
        self._pending.clear()
