"""Server-Sent Events: the reader of a response that writes to a client as the steps come.

Knows how events are framed and kept alive, and when a stream ends; not what is in them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from ..errors import as_api_error, error_body
from .events import ResponseSteps, Step

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    # no-transform: a proxy that compresses also buffers.
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}


class EventEncoder(Protocol):
    """A protocol's form of a stream."""

    def step(self, step: Step) -> list[bytes]:
        """Return the JSON of each event that a step gives; none is fine."""
        ...

    async def end(self) -> list[bytes]:
        """Return the JSON of the events after the last choice has finished."""
        ...


KEEP_ALIVE = b": keep-alive\n"
"""One comment line and no blank line after it: a blank line would make some readers dispatch an event."""


class _Ping(ServerSentEvent):
    """What is sent while there is nothing to send."""

    def __init__(self, frame: bytes) -> None:
        super().__init__()
        self._frame = frame

    def encode(self) -> bytes:
        return self._frame


class SseResponse(EventSourceResponse):
    """Writes each batch of framed events as one send; calls `close` whatever way it ends.

    The send deadline is the connection's (`connection.GuardedConnection`): it costs nothing per token.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        *,
        keep_alive_interval_s: float,
        headers: Mapping[str, str],
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        self._close = close
        super().__init__(
            frames,
            headers={**HEADERS, **headers},
            ping=keep_alive_interval_s,
            ping_message_factory=lambda: _Ping(keep_alive),
        )
        # Whether the connection stays open is the HTTP layer's to say.
        del self.headers["connection"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        finished = False

        async def send_noting_end(message: Message) -> None:
            nonlocal finished
            finished = not message.get("more_body", message["type"] == "http.response.start")
            await send(message)

        try:
            await super().__call__(scope, receive, send_noting_end)
        finally:
            # Also when the events were never begun: an async generator that was not started has no `finally`.
            await self._close()
        if not finished:
            raise ClientDisconnect

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # The library's cancel scope costs 4 us per event; without this override things are only slower.
        await send(message)


async def data_events(steps: ResponseSteps, encoder: EventEncoder, request_id: str) -> AsyncIterator[bytes]:
    """Frame a stream whose events have no names and that `[DONE]` ends."""
    try:
        async for step in steps:
            events = encoder.step(step)
            if len(events) == 1:
                yield b"data: %b\n\n" % events[0]
            elif events:
                yield b"".join([b"data: %b\n\n" % event for event in events])
        end = [b"data: %b\n\n" % event for event in await encoder.end()]
    except Exception as exc:
        error = as_api_error(exc)
        if error.code == "internal_error":
            logger.exception("internal error in a stream request_id=%s", request_id)
        end = [b"data: %b\n\n" % error_body(error)]
    yield b"".join([*end, DONE])
