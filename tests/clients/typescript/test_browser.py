"""The TypeScript SDK in a browser, from a page of another origin than the servers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from answer_server import AnswerServer, call_deltas, delta, events
from http_server import running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec
from typescript_sdk import PACKAGE, compiled, needs_compiler

HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FINAL = events(delta("stop", content="Five."))
__all__ = ["compiled"]
pytestmark = [needs_compiler, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


@contextlib.contextmanager
def page_server(folder: Path) -> Iterator[tuple[str, Future[Any]]]:
    """Serve the page and the SDK; yields the address, and what the page will post."""
    for name, target in (("page.html", HERE), ("page.mjs", HERE), ("dist", PACKAGE)):
        (folder / name).symlink_to(target / name)
    seen: Future[Any] = Future()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            seen.set_result(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


@contextlib.asynccontextmanager
async def browser(url: str, profile: Path) -> AsyncIterator[None]:
    """A Chromium on that page; it and all its processes are gone afterwards."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.slow
async def test_a_page_asks_streams_leaves_and_runs_tools(tmp_path: Path) -> None:
    (site := tmp_path / "site").mkdir()
    called = events(*call_deltas(("c1", "add", '{"a":2,"b":3}')))
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!", step_s=0.002))
    with page_server(site) as (origin, posted), AnswerServer(called, FINAL) as answers:
        app, _ = scripted_app(engine, api_keys=("one",), allowed_origins=(origin,))
        async with running_server(app) as ours:
            query = urlencode({"ours": ours, "answers": answers.url})
            async with browser(f"{origin}/page.html?{query}", tmp_path / "profile"):
                seen = await asyncio.wait_for(asyncio.wrap_future(posted), 60)
    assert "error" not in seen, seen["error"]
    assert seen["whole"] == seen["text"] == "Hé 😊!"
    assert seen["request_id"].startswith("req_")  # CORS lets the page read it
    assert seen["missing"][:2] == [True, "cache_not_found"] and seen["missing"][2].startswith("req_")
    assert seen["tools"] == ["Five.", "5"]
    assert engine.aborted == [engine.requests[2].id]
