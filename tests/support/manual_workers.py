"""Workers of the cache that do nothing until told: any order of reads, writes, results and timers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Task = tuple[Callable[[], Any], Callable[[Any], None]]


@dataclass(eq=False)
class ManualTimer:
    """A timer that goes off when `fire` is called."""

    workers: ManualWorkers
    call: Callable[[], None]

    def cancel(self) -> None:
        if self in self.workers.timers:
            self.workers.timers.remove(self)

    def fire(self) -> None:
        self.workers.timers.remove(self)
        self.call()


@dataclass(eq=False)
class ManualWorkers:
    """See `artesian.cache.workers.Workers`."""

    readers: int = 2
    reads: list[Task] = field(default_factory=list)
    writes: deque[Task] = field(default_factory=deque)
    results: list[tuple[Callable[[Any], None], Any]] = field(default_factory=list)
    """Work that has run, whose result nobody has heard of yet."""
    timers: list[ManualTimer] = field(default_factory=list)

    def read(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        self.reads.append((work, done))

    def write(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        self.writes.append((work, done))

    def later(self, delay_s: float, call: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(self, call)
        self.timers.append(timer)
        return timer

    def close(self) -> None:
        pass

    def run_read(self, pick: int = 0) -> None:
        work, done = self.reads.pop(pick % len(self.reads))
        self.results.append((done, work()))

    def run_write(self) -> None:
        work, done = self.writes.popleft()
        self.results.append((done, work()))

    def deliver(self, pick: int = 0) -> None:
        done, result = self.results.pop(pick % len(self.results))
        done(result)

    def run_all(self) -> None:
        """Run and deliver until nothing is left; timers stay as they are."""
        while self.reads or self.writes or self.results:
            if self.reads:
                self.run_read()
            if self.writes:
                self.run_write()
            while self.results:
                self.deliver()
