"""The same load over a WebSocket: one answer a connection.

While an answer streams only bytes and times are noted, as over HTTP; the frames are taken apart afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from .load import READ_TIMEOUT_S, LoadError, Streamed, Target, read_events

TAIL_BYTES = 64
"""Of what came before: where the mark of the end may have begun."""


async def stream_over_socket(
    target: Target, path: str, message: Mapping[str, Any], end: bytes, max_tokens: int
) -> Streamed:
    """Send one message, on a connection that is opened before the clock starts; read until `end` has come.

    An answer must be over before the server gives up on a ping: none is answered meanwhile.

    Raises:
        LoadError: the handshake or the request was refused, an error in the stream, no text.
    """
    url = target.url.replace("http", "ws", 1) + path
    parts = parse_uri(url)
    loop = asyncio.get_running_loop()
    transport, exchange = await loop.create_connection(
        lambda: _SocketExchange(ClientProtocol(parts, max_size=None), end),
        parts.host,
        parts.port,
        ssl=True if parts.secure else None,
    )
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            await exchange.opened
            sent = time.perf_counter()
            exchange.send(msgspec.json.encode(message))
            await exchange.complete
    finally:
        transport.abort()
    frames = list(exchange.frames())
    return read_events(sent, frames, max_tokens, len(frames))


class _SocketExchange(asyncio.Protocol):
    """One answer on one connection, and the pieces of it as they come."""

    def __init__(self, socket: ClientProtocol, end: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.complete: asyncio.Future[None] = loop.create_future()
        self._pieces: list[tuple[float, bytes]] = []
        self._socket, self._end = socket, end
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._socket.send_request(self._socket.connect())
        self._flush()

    def send(self, message: bytes) -> None:
        self._socket.send_text(message)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if not self.opened.done():
            self._open(data)
            return
        self._pieces.append((time.perf_counter(), data))
        end, self._tail = self._tail + data, data[-TAIL_BYTES:]
        if self._end in end and not self.complete.done():
            self.complete.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.opened, self.complete):
            if not future.done():
                future.set_exception(exc or LoadError("the server closed the connection early"))
                future.exception()  # only one of the two is awaited

    def frames(self) -> Iterator[tuple[float, bytes]]:
        """The texts that came, each with the time of its last byte."""
        for arrived, data in self._pieces:
            self._socket.receive_data(data)
            for event in self._socket.events_received():
                if isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                    yield arrived, bytes(event.data)

    def _open(self, data: bytes) -> None:
        self._socket.receive_data(data)
        for event in self._socket.events_received():
            if isinstance(event, Response) and self._socket.state is not OPEN:
                self.opened.set_exception(LoadError(f"the handshake was answered {event.status_code}"))
            elif isinstance(event, Response):
                self.opened.set_result(None)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._socket.data_to_send()))
