"""Makes a server out of two configurations, for `serve` or, behind a private socket, for one other command.

Order matters: take the address, load the model, only then listen: what fails, fails before the port opens.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from ...engine.config import EngineConfig
from ...server.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ...server.serve import DrainingServer

BACKLOG = 2048
NO_TIMEOUT = httpx.Timeout(None, connect=10.0)
"""An answer may take as long as it takes; only finding nobody is an error."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A server whose engine is loaded and whose socket listens; `run` serves until it is told to stop."""

    app: Starlette
    server: DrainingServer
    listening: socket.socket

    def run(self) -> None:
        self.server.run(sockets=[self.listening])

    def stop(self) -> None:
        """As SIGTERM does: finish what runs, then return from `run`. Callable from any thread."""
        self.server.handle_exit(signal.SIGTERM, None)


@contextmanager
def hosted(server: ServerConfig, engine: EngineConfig) -> Iterator[Hosted]:
    """Load the engine and listen; connections wait in the backlog until `run`.

    Raises:
        ConfigError: the address or the certificates cannot be used.
        ModelError: the model cannot be served as configured.
    """
    with _bound(server) as bound:
        from ...engine.local import LocalEngine  # heavy: not for --help or a mistyped flag
        from ...server.app import create_app
        from ...server.serve import build_server

        local = LocalEngine.load(engine)
        app = create_app(local, local.codec, server)
        running = build_server(app, server)
        try:
            running.config.load()  # reads the certificates
        except OSError as err:
            where = f"ssl_certfile={server.ssl_certfile}, ssl_keyfile={server.ssl_keyfile}"
            raise ConfigError(f"{where}: {err.strerror or err}") from err
        bound.listen(BACKLOG)
        yield Hosted(app, running, bound)


@contextmanager
def private_server(server: ServerConfig, engine: EngineConfig) -> Iterator[Address]:
    """Serve in a thread of this process, on a Unix socket in a folder of its own, until the block ends.

    Raises:
        ModelError: the model cannot be served as configured.
    """
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="artesian-"))) / "socket"
        private = replace(server, uds=str(path), api_keys=(), ssl_certfile=None, ssl_keyfile=None)
        own = stack.enter_context(hosted(private, engine))
        thread = stack.enter_context(ThreadPoolExecutor(1, "serve"))
        # If the server ends early, a closed socket tells its clients.
        thread.submit(own.run).add_done_callback(lambda _: own.listening.close())
        stack.callback(own.stop)
        yield Address("http://artesian", path)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, ours or somebody's."""

    url: str
    socket: Path | None = None
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> Address:
        """Take a URL as users write it, with or without /v1."""
        return cls(url.rstrip("/").removesuffix("/v1"), api_key=api_key)

    def client(self) -> httpx.Client:
        """Return a client for it."""
        transport = httpx.HTTPTransport(uds=str(self.socket)) if self.socket else None
        headers = self._headers()
        return httpx.Client(base_url=self.url, transport=transport, headers=headers, timeout=NO_TIMEOUT)

    def async_client(self, connections: int) -> httpx.AsyncClient:
        """Return a client for it that may have that many connections open."""
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket) if self.socket else None, limits=limits)
        headers = self._headers()
        return httpx.AsyncClient(base_url=self.url, transport=transport, headers=headers, timeout=NO_TIMEOUT)

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@contextmanager
def _bound(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket that has the address but does not listen yet."""
    try:
        bound = _bind_path(Path(config.uds)) if config.uds else _bind_port(config.host, config.port)
    except OSError as err:
        where = config.uds or f"{config.host} port {config.port}"
        hint = "; choose another with --port" if err.errno == errno.EADDRINUSE and not config.uds else ""
        raise ConfigError(f"cannot listen on {where}: {err.strerror or err}{hint}") from err
    try:
        yield bound
    finally:
        bound.close()
        if config.uds:
            Path(config.uds).unlink(missing_ok=True)


def _bind_port(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_path(path: Path) -> socket.socket:
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()  # what an earlier server left behind
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    os.chmod(path, 0o666)  # whoever may enter the folder may ask
    return bound
