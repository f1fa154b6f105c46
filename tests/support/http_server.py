"""The real server on a real port: in the test's own loop, or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from openai_spec import Checked
from scripted_engine import ScriptedEngine, toy_codec
from starlette.applications import Starlette

from artesian.server.app import create_app
from artesian.server.config import ServerConfig
from artesian.server.serve import build_server

START_TIMEOUT_S = 20.0


def scripted_app(engine: ScriptedEngine | None = None, **settings: Any) -> tuple[Starlette, ScriptedEngine]:
    """An application over a scripted engine."""
    engine = engine or ScriptedEngine(toy_codec())
    return create_app(engine, engine.codec, ServerConfig(**{"access_log": False, **settings})), engine


@contextlib.asynccontextmanager
async def client_of(app: Starlette, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls the application without a port, inside its lifespan; every answer of an endpoint
    that OpenAI has is held against OpenAI's description."""
    checked = Checked(app)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(checked, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", **options) as client:
            yield client
    assert not checked.faults, checked.faults[0]


@contextlib.asynccontextmanager
async def running_server(app: Starlette, **settings: Any) -> AsyncIterator[str]:
    """Serve the app on a free port of this loop; yields the base URL. Every answer of an endpoint that OpenAI
    has is held against OpenAI's description."""
    checked = Checked(app)
    server = build_server(checked, ServerConfig(port=0, **settings))  # type: ignore[arg-type]
    task = asyncio.create_task(server._serve())
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.started:
            if task.done():
                task.result()
            assert time.monotonic() < deadline, "the server does not start"
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await task
        await server.lifespan.shutdown()
    assert not checked.faults, checked.faults[0]


@contextlib.contextmanager
def server_process(
    *,
    script: dict[str, Any],
    engine: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    wait: bool = True,
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process of its own with a scripted engine; yields it and its base URL, once it listens if `wait`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spec = {"script": script, "engine": engine or {}, "config": {**(config or {}), "port": port}}
    command = [sys.executable, "-P", str(Path(__file__)), json.dumps(spec)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    url = f"http://127.0.0.1:{port}"
    path = spec["config"].get("uds")
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while wait and not (_listens(url) if path is None else Path(path).exists()):
            assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)
        yield process, url
    finally:
        process.kill()
        process.wait()


def _listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def _main(spec: dict[str, Any]) -> None:
    from scripted_engine import Script

    from artesian.server.serve import serve

    engine = ScriptedEngine(toy_codec(), Script(**spec["script"]), **spec["engine"])
    config = msgspec.convert(spec["config"], ServerConfig)
    serve(create_app(engine, engine.codec, config), config)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
