"""The stream of a response: numbered events, taken up again behind the last one after a lost connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType

import httpx
import msgspec

from .errors import APIResponseError, StreamError
from .response_types import ModelResponse, ResponseEvent
from .sse import EventParser
from .transport import connection_error

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})

_decode = msgspec.json.Decoder(ResponseEvent).decode


class ResponseReader:
    """Builds events and the response from a stream's bytes, over several connections. No input or output."""

    def __init__(self, after: int = -1) -> None:
        self.last_number = after
        self.request_id: str | None = None
        self.response_id: str | None = None
        self._final: ModelResponse | None = None
        self._parser = EventParser()

    @property
    def is_done(self) -> bool:
        return self._final is not None

    def connect(self, response: httpx.Response) -> None:
        """Begin with the bytes of another connection."""
        self.request_id = response.headers.get("x-request-id")
        self._parser = EventParser()

    def feed(self, data: bytes) -> list[ResponseEvent]:
        """Return the events that these bytes complete.

        Raises:
            StreamError: an `error` event.
            APIResponseError: not a stream of a response.
        """
        events = []
        for sent in self._parser.feed(data):
            try:
                event = _decode(sent.data)
            except msgspec.DecodeError as err:
                message = f"The stream has an event that is none of a response: {err}"
                raise APIResponseError(message, request_id=self.request_id) from err
            if event.type == "error":
                raise StreamError(event.message or "", request_id=self.request_id, code=event.code)
            self.last_number = max(self.last_number, event.sequence_number)
            if event.response is not None:
                self.response_id = event.response.id
                if event.type in TERMINAL:
                    self._final = event.response
                    self._final.request_id = self.request_id
            events.append(event)
        return events

    def result(self) -> ModelResponse:
        """Return the finished response.

        Raises:
            StreamError: the stream broke off before its end.
        """
        if self._final is None:
            raise StreamError("The stream broke off before its end.", request_id=self.request_id)
        return self._final


Open = Callable[[], httpx.Response]
Reopen = Callable[[str, int], httpx.Response]
"""Of a response's id, and the number of the last event that came."""


class ResponseStream:
    """A stream to iterate over inside `with`. Leaving it early ends the request in the server, unless it can
    be taken up again: then it goes on for the server's grace time."""

    def __init__(self, send: Open, reopen: Reopen | None, max_reconnects: int, after: int = -1) -> None:
        self._send, self._reopen, self._max_reconnects = send, reopen, max_reconnects
        self._reader = ResponseReader(after)
        self._response: httpx.Response | None = None
        self._events: Iterator[ResponseEvent] | None = None

    def __enter__(self) -> ResponseStream:
        self._connect(self._send())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[ResponseEvent]:
        """Yield the events; a lost connection is taken up again, if the request asked for it.

        Raises:
            StreamError, APIResponseError: see `ResponseReader`.
        """
        if self._events is None:
            self._events = self._read()
        return self._events

    @property
    def response_id(self) -> str | None:
        """The response's id, once its first event has come."""
        return self._reader.response_id

    @property
    def last_number(self) -> int:
        """The number of the last event: `responses.resume` goes on behind it."""
        return self._reader.last_number

    def texts(self) -> Iterator[str]:
        """Yield the pieces of the messages' text."""
        for event in self:
            if event.type == "response.output_text.delta":
                yield event.delta

    def get_response(self) -> ModelResponse:
        """Read the rest, and return the finished response."""
        for _ in self:
            pass
        return self._reader.result()

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()

    def _connect(self, response: httpx.Response) -> None:
        self._response = response
        self._reader.connect(response)

    def _read(self) -> Iterator[ResponseEvent]:
        reader, failures = self._reader, 0
        while True:
            if self._response is None:
                raise RuntimeError("a stream is read inside `with`")
            before, lost = reader.last_number, None
            try:
                for data in self._response.iter_bytes():
                    yield from reader.feed(data)
            except httpx.TransportError as err:
                lost = err
            if reader.is_done:
                return
            self.close()
            failures = 0 if reader.last_number > before else failures + 1
            if self._reopen is None or reader.response_id is None or failures > self._max_reconnects:
                raise _broken(lost, reader.request_id) from lost
            self._connect(self._reopen(reader.response_id, reader.last_number))


class AsyncResponseStream:
    """`ResponseStream` for `async with` and `async for`."""

    def __init__(
        self,
        send: Callable[[], Awaitable[httpx.Response]],
        reopen: Callable[[str, int], Awaitable[httpx.Response]] | None,
        max_reconnects: int,
        after: int = -1,
    ) -> None:
        self._send, self._reopen, self._max_reconnects = send, reopen, max_reconnects
        self._reader = ResponseReader(after)
        self._response: httpx.Response | None = None
        self._events: AsyncGenerator[ResponseEvent, None] | None = None

    async def __aenter__(self) -> AsyncResponseStream:
        self._connect(await self._send())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[ResponseEvent]:
        """See `ResponseStream.__iter__`."""
        if self._events is None:
            self._events = self._read()
        return self._events

    @property
    def response_id(self) -> str | None:
        """See `ResponseStream.response_id`."""
        return self._reader.response_id

    @property
    def last_number(self) -> int:
        """See `ResponseStream.last_number`."""
        return self._reader.last_number

    async def texts(self) -> AsyncIterator[str]:
        """Yield the pieces of the messages' text."""
        async for event in self:
            if event.type == "response.output_text.delta":
                yield event.delta

    async def get_response(self) -> ModelResponse:
        """Read the rest, and return the finished response."""
        async for _ in self:
            pass
        return self._reader.result()

    async def aclose(self) -> None:
        """Close the connection."""
        if self._events is not None:
            await self._events.aclose()
        if self._response is not None:
            await self._response.aclose()

    def _connect(self, response: httpx.Response) -> None:
        self._response = response
        self._reader.connect(response)

    async def _read(self) -> AsyncGenerator[ResponseEvent, None]:
        reader, failures = self._reader, 0
        while True:
            if self._response is None:
                raise RuntimeError("a stream is read inside `async with`")
            before, lost = reader.last_number, None
            try:
                async for data in self._response.aiter_bytes():
                    for event in reader.feed(data):
                        yield event
            except httpx.TransportError as err:
                lost = err
            if reader.is_done:
                return
            await self._response.aclose()
            failures = 0 if reader.last_number > before else failures + 1
            if self._reopen is None or reader.response_id is None or failures > self._max_reconnects:
                raise _broken(lost, reader.request_id) from lost
            self._connect(await self._reopen(reader.response_id, reader.last_number))


def _broken(err: httpx.TransportError | None, request_id: str | None) -> StreamError:
    why = "" if err is None else f" {connection_error(err).message}"
    return StreamError(f"The stream broke off before its end.{why}", request_id=request_id)
