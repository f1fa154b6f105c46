"""Responses that outlive their reader: background ones, and streams that were asked to be resumable.

Owns the task that generates each into its log, and the bounds: bytes of all logs, how long and how many
streams may run with nobody reading. A stream that nobody asked to keep is none of this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from ..errors import Unavailable
from .events import ResponseSteps
from .log import EventLog
from .named import Event, EventMaker, make_events

MAX_LOG_BYTES = 8 << 20
"""Of one response: about 30,000 tokens, each an event."""
MAX_TOTAL_BYTES = 64 << 20
MAX_RUNS = 4096
"""Running or still readable at once."""
MAX_ORPHANS = 16
"""Resumable streams that run with nobody reading; the one left longest ago is ended for one more."""
CLOSE_TIMEOUT_S = 2.0


@dataclass(eq=False)
class Run:
    """One response being generated, or just finished."""

    id: str
    """The response's."""
    request_id: str
    """The HTTP request's."""
    salt: str
    """Whose it is: only requests of the same isolation may read it."""
    steps: ResponseSteps
    maker: EventMaker
    grace_s: float
    """How long it goes on with nobody reading; how long its events can be read after its end."""
    is_background: bool
    log: EventLog = field(default_factory=lambda: EventLog(MAX_LOG_BYTES))
    readers: int = 0
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_orphan(self) -> bool:
        return not self.readers and not self.log.is_closed and not self.is_background

    def abort(self) -> None:
        """End the generation now; its events say so."""
        self.steps.abort()


class Runs:
    """The runs of one server. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        """By response id, the oldest first; the order of orphans is the order in which they were left."""
        self._names: dict[str, str] = {}
        """Response ids by the id of the HTTP request that began them."""
        self._tasks: asyncio.TaskGroup | None = None
        self._bytes = 0
        """Of all logs."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Own the tasks; ends them."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None
                for run in list(self._runs.values()):
                    self.forget(run)
                    run.abort()
                    if run.task is not None:
                        asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, run.task.cancel)

    def check_room(self) -> None:
        """Raises: Unavailable: no further run can be kept now."""
        if len(self._runs) >= MAX_RUNS and not any(run.log.is_closed for run in self._runs.values()):
            raise Unavailable(
                "Too many responses run in the background.", code="server_overloaded", retry_after_s=5.0
            )

    def start(self, run: Run) -> None:
        """Generate in a task of its own."""
        assert self._tasks is not None, "the server is not open"
        if len(self._runs) >= MAX_RUNS:
            self.forget(next(run for run in self._runs.values() if run.log.is_closed))
        self._runs[run.id] = run
        self._names[run.request_id] = run.id
        run.task = self._tasks.create_task(self._generate(run))
        if not run.is_background:
            self._later(run)  # its reader may never begin

    def find(self, name: str, salt: str) -> Run | None:
        """The run of a response id or of the id of the HTTP request that began it."""
        run = self._runs.get(name) or self._runs.get(self._names.get(name, ""))
        return run if run is not None and run.salt == salt else None

    async def read(self, run: Run, after: int = -1) -> AsyncGenerator[Sequence[Event], None]:
        """Give out a run's events (see `EventLog.read`); while this is open the run has a reader."""
        run.readers += 1
        self._stop_timer(run)
        try:
            async for events in run.log.read(after):
                yield events
        finally:
            run.readers -= 1
            if not run.readers and run.id in self._runs:
                self._left(run)

    async def _generate(self, run: Run) -> None:
        try:
            async for events in make_events(run.steps, run.maker, run.request_id):
                before = run.log.bytes
                run.log.append(events)
                if run.id in self._runs:
                    self._bytes += run.log.bytes - before
                    if self._bytes > MAX_TOTAL_BYTES:
                        self._make_room()
        finally:
            run.log.close()
            run.ended.set()
            if run.id in self._runs:
                self._later(run)
            await run.steps.aclose()

    def _left(self, run: Run) -> None:
        if run.is_orphan:
            self._runs[run.id] = self._runs.pop(run.id)
            orphans = [one for one in self._runs.values() if one.is_orphan]
            for one in orphans[: max(0, len(orphans) - MAX_ORPHANS)]:
                one.abort()
        if run.log.is_closed or not run.is_background:
            self._later(run)

    def _later(self, run: Run) -> None:
        self._stop_timer(run)
        run.timer = asyncio.get_running_loop().call_later(run.grace_s, self._expire, run)

    def _expire(self, run: Run) -> None:
        if run.log.is_closed:
            self.forget(run)
        else:
            run.abort()

    def _stop_timer(self, run: Run) -> None:
        if run.timer is not None:
            run.timer.cancel()
            run.timer = None

    def forget(self, run: Run) -> None:
        """Keep nothing of it any more."""
        self._stop_timer(run)
        if self._runs.pop(run.id, None) is None:
            return
        self._bytes -= run.log.bytes
        if self._names.get(run.request_id) == run.id:
            del self._names[run.request_id]

    def _make_room(self) -> None:
        """Keep all logs together within bounds: finished ones go first, then the oldest events of each."""
        self._bytes = sum(run.log.bytes for run in self._runs.values())  # readers dropped some
        for run in [run for run in self._runs.values() if run.log.is_closed and not run.readers]:
            if self._bytes <= MAX_TOTAL_BYTES:
                return
            self.forget(run)
        if self._bytes <= MAX_TOTAL_BYTES:
            return
        for run in self._runs.values():
            run.log.trim(MAX_TOTAL_BYTES // (2 * len(self._runs)))
        self._bytes = sum(run.log.bytes for run in self._runs.values())
