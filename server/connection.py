"""One client connection with deadlines: for a request's head, its body, and a reader that reads nothing.

uvicorn has none of them: without, a client that sends a byte a second, or reads none, keeps its connection
(and its sequence's memory) for ever. Idle connections and long streams are not touched.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import Refused, error_body

if TYPE_CHECKING:
    from array import array

logger = logging.getLogger(__name__)

_UPGRADE_FIELDS = frozenset({b"upgrade", b"http2-settings"})
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class ConnectionLimits(NamedTuple):
    """Bounds of one connection."""

    max_header_bytes: int
    header_timeout_s: float
    body_timeout_s: float
    send_timeout_s: float


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with `ConnectionLimits`."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._awaited: Literal["nothing", "head", "body"] = "nothing"
        self._deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._has_begun = False
        """Whether a request began in the packet at hand."""
        self._offers_upgrade = False
        self.becomes_websocket = False
        """Whether another protocol takes the connection over at the end of this head."""
        self.parser = _PlainParser(self)
        self._refusal = Refused("This is not a valid HTTP request.", code="invalid_http")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for("nothing")
        self._stop_send_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._awaited == "nothing":
            self._wait_for("head")
        self._has_begun = False
        super().data_received(data)
        if self._awaited == "head":
            # What came before the head in the same packet was another request's.
            self._head_bytes += 1 if self._has_begun else len(data)
            if self._head_bytes > self._limits.max_header_bytes and not self.transport.is_closing():
                self._refuse(self._head_too_large())

    # Parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        if self._awaited != "head":  # a pipelined request in the same packet
            self._wait_for("head")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaited == "head":  # later ones are trailers: nobody reads them, and nothing bounds them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head_bytes > self._limits.max_header_bytes:
            self._refusal = self._head_too_large()
            raise ValueError("request head too large")  # comes back through `send_400_response`
        self._offers_upgrade = self.parser.should_upgrade()
        if self._offers_upgrade:
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("no proxy")
            is_free = self.cycle is None or self.cycle.response_complete
            if is_free and self.parser.get_method() == b"GET" and self._should_upgrade():
                super().on_headers_complete()
                self.becomes_websocket = True
                self._wait_for("nothing")
            return  # the parser leaves the rest of the packet to `_PlainParser`
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0" and self.cycle is not None:
            self.cycle.__class__ = _UnchunkedCycle
        self._wait_for("body")

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        super().on_message_complete()
        self._wait_for("nothing")

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def plain_head(self) -> bytes:
        """Return the head of the request that offered an upgrade without that offer."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join([v for v in value.split(b",") if v.strip().lower() not in _UPGRADE_FIELDS])
            if name not in _UPGRADE_FIELDS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    # Deadlines

    def _wait_for(self, awaited: Literal["nothing", "head", "body"]) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited, self._head_bytes = awaited, 0
        if awaited != "nothing":
            limits = self._limits
            seconds = limits.header_timeout_s if awaited == "head" else limits.body_timeout_s
            self._deadline = self.loop.call_later(seconds, self._deadline_passed)

    def _deadline_passed(self) -> None:
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_held_back = bool(self.pipeline) or self.flow.read_paused
        if is_held_back or (self._awaited == "head" and is_answering):
            self._wait_for(self._awaited)  # we, not the client, are behind: a stream before it still runs
            return
        is_spare = self._awaited == "head" and not self._head_bytes  # opened ahead by a browser, not used
        is_answered = self._awaited == "body" and self.cycle is not None and self.cycle.response_complete
        if is_spare or is_answered:
            self._close()
            return
        limits = self._limits
        seconds = limits.header_timeout_s if self._awaited == "head" else limits.body_timeout_s
        message = f"The request's {self._awaited} did not arrive within {seconds:g} s."
        self._refuse(Refused(message, code="timeout", status=408))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_send_deadline()
        self._send_deadline = self.loop.call_later(self._limits.send_timeout_s, self._send_deadline_passed)

    def resume_writing(self) -> None:
        self._stop_send_deadline()
        super().resume_writing()

    def _send_deadline_passed(self) -> None:
        logger.info("client reads nothing for %g s: connection dropped", self._limits.send_timeout_s)
        self.transport.abort()

    def _stop_send_deadline(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close when what is buffered has been read, and drop the connection if that never happens."""
        if self.transport.is_closing():
            return
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._stop_send_deadline()
            self._send_deadline = self.loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    # Answers without the application

    def _head_too_large(self) -> Refused:
        return Refused(
            f"The request's head has more than {self._limits.max_header_bytes} bytes.",
            code="headers_too_large",
            status=431,
        )

    def _refuse(self, error: Refused) -> None:
        """Answer in place of the application and close; in the middle of an answer, only close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error_body(error)
            head = (
                f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(body)}\r\n"
                f"x-request-id: req_{token_hex(12)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._wait_for("nothing")
        self._close()


class _PlainParser(httptools.HttpRequestParser):
    """Reads a request that offers another upgrade than a WebSocket (Java's client offers h2c, with a body)
    as the plain request that it also is, RFC 9110 §7.8; the library's own parser loses its
    body and all that comes behind it."""

    def __init__(self, connection: GuardedConnection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        parser = self
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._connection.becomes_websocket:
                    raise
                data = self._connection.plain_head() + bytes(data)[upgrade.args[0] :]
                # The old one reads nothing more if the request also said `connection: close`.
                parser = self._connection.parser = _PlainParser(self._connection)


class _UnchunkedCycle(RequestResponseCycle):
    """An answer to an HTTP/1.0 client: a body of unknown length ends where the connection does."""

    ends_with_connection = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.ends_with_connection = b"content-length" not in names
            if self.ends_with_connection:
                self.chunked_encoding = False
        elif self.ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def guarded(limits: ConnectionLimits) -> Callable[..., asyncio.Protocol]:
    """Return the protocol factory that uvicorn calls for each connection."""

    def connect(*args: Any, **kwargs: Any) -> GuardedConnection:
        return GuardedConnection(*args, limits=limits, **kwargs)

    return connect
