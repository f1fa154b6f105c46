"""A server for one command: somebody's by URL, or our own in a thread, behind a private Unix socket.

Either way a command speaks HTTP, so there is one code path; nothing here looks into the engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ...engine.config import EngineConfig
from ...server.config import ServerConfig
from .settings import on_socket

NO_TIMEOUT = httpx.Timeout(None, connect=10.0)
"""An answer may take as long as it takes; only finding nobody is an error."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    url: str
    socket: Path | None = None
    api_key: str | None = None

    def client(self) -> httpx.Client:
        """Return a client for it."""
        transport = httpx.HTTPTransport(uds=str(self.socket)) if self.socket else None
        return httpx.Client(
            base_url=self.url, transport=transport, headers=self._headers(), timeout=NO_TIMEOUT
        )

    def async_client(self, connections: int) -> httpx.AsyncClient:
        """Return a client for it that may have that many connections open."""
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        uds = str(self.socket) if self.socket else None
        transport = httpx.AsyncHTTPTransport(uds=uds, limits=limits)
        return httpx.AsyncClient(
            base_url=self.url, transport=transport, headers=self._headers(), timeout=NO_TIMEOUT
        )

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@contextmanager
def own_server(server: ServerConfig, engine: EngineConfig) -> Iterator[Address]:
    """Serve in a thread of this process until the block ends.

    Raises:
        EngineError: the engine cannot start.
    """
    from ...server.launch import build_app  # heavy: only those pay who serve
    from ...server.serve import serve

    with tempfile.TemporaryDirectory(prefix="artesian-") as folder, ThreadPoolExecutor(1, "serve") as thread:
        socket = Path(folder) / "socket"
        app = build_app(server, engine)
        ready: Future[None] = Future()
        running = thread.submit(
            serve, app, on_socket(server, socket), on_ready=lambda address: ready.set_result(None)
        )
        wait((ready, running), return_when=FIRST_COMPLETED)
        if running.done():
            running.result()
        try:
            yield Address("http://artesian", socket)
        finally:
            app.state.service.draining = True
