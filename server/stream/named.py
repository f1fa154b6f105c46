"""Streams whose events have names (Responses, Messages): from steps to events, one batch a step.

A maker knows the protocol; here is only the order of its calls, which is the same for every reader.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from ..errors import ApiError, as_api_error, error_body
from .events import ResponseSteps, Step
from .sse import EventEncoder

logger = logging.getLogger(__name__)


class Event(NamedTuple):
    """One event, encoded."""

    type: str
    """Empty in a protocol without names."""
    data: bytes
    """JSON."""


class EventMaker(Protocol):
    """A protocol's form of one response."""

    def begin(self) -> list[Event]:
        """The events before anything is generated."""
        ...

    def step(self, step: Step) -> list[Event]:
        """The events that a step gives; none is fine."""
        ...

    async def end(self) -> list[Event]:
        """The events after the last choice has finished, the terminal one last."""
        ...

    async def fail(self, error: ApiError) -> list[Event]:
        """The events that end a response which failed."""
        ...


async def make_events(
    steps: ResponseSteps, maker: EventMaker, request_id: str
) -> AsyncIterator[Sequence[Event]]:
    """Give out all events of a response. A failure is told by the maker's own events."""
    try:
        yield maker.begin()
        async for step in steps:
            if events := maker.step(step):
                yield events
        last = await maker.end()
    except Exception as exc:
        error = as_api_error(exc)
        if error.code == "internal_error":
            logger.exception("internal error in a stream request_id=%s", request_id)
        last = await maker.fail(error)
    yield last


class DataEvents:
    """A protocol whose events have no names, as an `EventMaker`; `[DONE]` ends its streams."""

    def __init__(self, encoder: EventEncoder) -> None:
        self._encoder = encoder

    def begin(self) -> list[Event]:
        return []

    def step(self, step: Step) -> list[Event]:
        return [Event("", data) for data in self._encoder.step(step)]

    async def end(self) -> list[Event]:
        return [Event("", data) for data in await self._encoder.end()]

    async def fail(self, error: ApiError) -> list[Event]:
        return [Event("", error_body(error))]


def sse_frame(events: Sequence[Event]) -> bytes:
    """Return the events as they stand in a `text/event-stream`."""
    return b"".join(
        [
            b"event: %b\ndata: %b\n\n" % (event.type.encode(), event.data)
            if event.type
            else b"data: %b\n\n" % event.data
            for event in events
        ]
    )
