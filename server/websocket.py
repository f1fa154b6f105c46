"""One WebSocket connection with deadlines: uvicorn's protocol, bounded where a client reads nothing.

Also who may open one: a web page only from an allowed origin, because browsers send no preflight for these.
"""

from __future__ import annotations

import logging
from asyncio import TimerHandle
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from .errors import Refused

GOING_AWAY = 1001
PING_INTERVAL_S = 20.0
"""Proxies cut what is silent for 30 to 60 s."""
PING_TIMEOUT_S = 20.0

_quiet = logging.getLogger("artesian.websocket")
_quiet.setLevel(logging.WARNING)  # the library logs each URL with its query; the access line has what matters


class GuardedSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol; who reads nothing loses the connection, and is not read either."""

    def __init__(self, *args: Any, send_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _quiet
        self._send_timeout_s = send_timeout_s
        self._send_deadline: TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_deadline()
        self._send_deadline = self.loop.call_later(self._send_timeout_s, self.transport.abort)
        if not self.read_paused:
            self.transport.pause_reading()  # or its pings would be answered into a buffer without end

    def resume_writing(self) -> None:
        self._stop_deadline()
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """The server ends."""
        if self.handshake_complete and not self.close_sent:
            self.stop_keepalive()
            self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY})
            self.conn.send_close(GOING_AWAY, "the server is shutting down")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        super().shutdown()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._stop_deadline()
        self._send_deadline = self.loop.call_later(self._send_timeout_s, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None


def guarded_socket(send_timeout_s: float) -> Callable[..., GuardedSocket]:
    """Return the protocol factory that uvicorn calls for each WebSocket."""

    def connect(*args: Any, **kwargs: Any) -> GuardedSocket:
        return GuardedSocket(*args, send_timeout_s=send_timeout_s, **kwargs)

    return connect


def check_origin(scope: Scope, allowed: Collection[str]) -> None:
    """Let in what is no web page, pages of this server, and those of allowed origins.

    Raises:
        Refused: 403.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc != headers.get("host"):
        raise Refused("Pages of this origin may not connect here.", code="origin_not_allowed", status=403)
