"""The events of one response, numbered from 0, for readers that come, leave and come back.

Bounded in bytes: what is too old for the bound is dropped, and a reader that still needed it is told so.
It knows nothing of protocols and of who generates.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from ..errors import BadRequest
from .named import Event

EVENT_BYTES = 200
"""What an event takes besides its text, by estimate."""


class EventLog:
    """One response's events. Appended to by one task, read by any number."""

    def __init__(self, max_bytes: int) -> None:
        self.first = 0
        """Number of the oldest event that is kept."""
        self.bytes = 0
        self.is_closed = False
        self._max_bytes = max_bytes
        self._events: list[Event] = []
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        """The number that the next event will have."""
        return self.first + len(self._events)

    def append(self, events: Sequence[Event]) -> None:
        self._events += events
        self.bytes += sum(_bytes_of(event) for event in events)
        if self.bytes > self._max_bytes:
            self.trim(self._max_bytes // 2)
        self._wake()

    def trim(self, max_bytes: int) -> None:
        """Drop the oldest events until no more than that is left."""
        count = 0
        while self.bytes > max_bytes and count < len(self._events):
            self.bytes -= _bytes_of(self._events[count])
            count += 1
        del self._events[:count]
        self.first += count

    def drop_before(self, number: int) -> None:
        """Drop the events below a number: nobody will ask for them again."""
        count = min(max(0, number - self.first), len(self._events))
        self.bytes -= sum(_bytes_of(event) for event in self._events[:count])
        del self._events[:count]
        self.first += count

    def close(self) -> None:
        """Nothing comes any more."""
        self.is_closed = True
        self._wake()

    def check(self, after: int) -> None:
        """Raises: BadRequest: the events behind number `after` cannot be given out."""
        if self.is_closed and after >= self.end:
            raise BadRequest(
                f"There is no event {after} in this stream; the last is {self.end - 1}.",
                code="invalid_value",
                param="starting_after",
            )
        if after + 1 < self.first:
            raise BadRequest(
                f"Event {after + 1} is no longer kept; the oldest is {self.first}.",
                code="events_expired",
                param="starting_after",
            )

    async def read(self, after: int = -1) -> AsyncIterator[Sequence[Event]]:
        """Give out the events behind number `after` as they come, until the log is closed.

        Raises:
            BadRequest: an event that was to come has been dropped, or there is none of that number.
        """
        at = after + 1
        while True:
            self.check(at - 1)
            if at < self.end:
                batch = self._events[at - self.first :]
                at += len(batch)
                yield batch
            elif self.is_closed:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _bytes_of(event: Event) -> int:
    return len(event.data) + EVENT_BYTES
