"""Run the application in this process until a signal: uvicorn with our limits, and a drain before the end."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .config import ServerConfig
from .connection import ConnectionLimits, guarded
from .service import Service
from .websocket import PING_INTERVAL_S, PING_TIMEOUT_S, guarded_socket

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0
"""After the drain only bytes that clients still read are left; a client that reads none must not hold us."""


class DrainingServer(uvicorn.Server):
    """uvicorn's server that finishes what it has before it stops listening.

    The first SIGTERM or SIGINT: /ready and new requests answer 503 at once, running ones may finish. The
    second one ends everything now. The exit code is 0 both times: the end was asked for.
    """

    def __init__(self, config: uvicorn.Config, service: Service, shutdown_timeout_s: float) -> None:
        super().__init__(config)
        self._service, self._shutdown_timeout_s = service, shutdown_timeout_s
        self._drain: asyncio.Task[bool] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._serving = asyncio.current_task()
        try:
            await super().serve(sockets)
            if self.force_exit:  # uvicorn leaves the lifespan to be cancelled, and logs a traceback
                await self.lifespan.shutdown()
        except asyncio.CancelledError:
            logger.info("stopped before the model was loaded")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._service.draining = True
        if not self.started and self._serving is not None:
            # There is nothing to finish, and loading a large model can take minutes.
            self._serving.get_loop().call_soon_threadsafe(self._serving.cancel)

    async def on_tick(self, counter: int) -> bool:
        if self._service.draining and self._drain is None:
            logger.info("draining: running requests have %g s", self._shutdown_timeout_s)
            self._drain = asyncio.create_task(self._service.engine.drain(self._shutdown_timeout_s))
        if self._drain is not None and self._drain.done():
            self.should_exit = True
            if self._drain.exception() is not None:
                logger.error("drain failed", exc_info=self._drain.exception())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: object = None) -> None:
        if self._drain is not None:
            self._drain.cancel()
        await super().shutdown()


def serve(app: Starlette, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; returns after the drain.

    Raises:
        SystemExit: the address cannot be used or the engine cannot start (code 3, uvicorn's).
    """
    build_server(app, config).run()


def build_server(app: Starlette, config: ServerConfig) -> DrainingServer:
    """Return the server of an app that `create_app` built, ready to run."""
    limits = ConnectionLimits(
        max_header_bytes=config.max_header_bytes,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        send_timeout_s=config.send_timeout_s,
    )
    uvicorn_config = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        uds=config.uds,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        root_path=config.root_path,
        loop="uvloop",
        http=guarded(limits),  # type: ignore[arg-type]  # any factory of the protocol will do
        ws=guarded_socket(config.send_timeout_s),  # type: ignore[arg-type]
        ws_max_size=config.max_body_bytes,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        ws_per_message_deflate=False,  # streams are many small messages; a bomb would be one
        lifespan="on",
        access_log=False,  # the middleware writes its own line
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(config.idle_timeout_s)),
        timeout_graceful_shutdown=round(FLUSH_TIMEOUT_S),
        backlog=2048,
    )
    return DrainingServer(uvicorn_config, app.state.service, config.shutdown_timeout_s)
