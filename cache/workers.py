"""Where blocking work of the cache runs, and how its results come back to the loop's thread.

Everything in the cache that decides runs on one thread; what reads, writes and copies runs here. Tests and
simulations bring workers of their own, which run the same work at once or in any order they like.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

READERS = 4
"""Threads that read: with queue depth 4 a local NVMe disk is near its sequential rate in blocks of 1 MiB."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Workers(Protocol):
    """Runs `work` elsewhere and then `done(result)` on the loop's thread. Work must not raise: an exception
    is a defect, is logged, and `done` gets None."""

    readers: int

    def read(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """Run beside other reads."""
        ...

    def write(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """Run after all earlier writes."""
        ...

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call on the loop's thread after a delay."""
        ...

    def close(self) -> None:
        """Wait for the writes; nothing calls `done` any more."""
        ...


class ThreadWorkers:
    """Threads beside an event loop. To be made on the loop."""

    def __init__(self) -> None:
        self.readers = READERS
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(READERS, "cache-read")
        self._writer = ThreadPoolExecutor(1, "cache-write")
        self._closed = False

    def read(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        self._run(self._readers, work, done)

    def write(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        self._run(self._writer, work, done)

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return self._loop.call_later(delay_s, call)

    def close(self) -> None:
        self._closed = True
        self._readers.shutdown(wait=False, cancel_futures=True)  # a hung disk must not hang the exit
        self._writer.shutdown(wait=True)

    def _run(self, pool: Executor, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        def run() -> None:
            result = guarded(work)
            if not self._closed:
                self._loop.call_soon_threadsafe(self._finish, done, result)

        pool.submit(run)

    def _finish(self, done: Callable[[T | None], None], result: T | None) -> None:
        if not self._closed:
            done(result)


class InlineWorkers:
    """Runs everything at once, on the caller's thread: for simulations, where time is not real."""

    readers = 1

    def read(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        done(guarded(work))

    def write(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        done(guarded(work))

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return _Never()

    def close(self) -> None:
        pass


class _Never:
    def cancel(self) -> None:
        pass


def guarded(work: Callable[[], T]) -> T | None:
    """Run work that must not raise; a defect costs a miss, not the server."""
    try:
        return work()
    except Exception:
        logger.exception("a cache worker failed")
        return None
