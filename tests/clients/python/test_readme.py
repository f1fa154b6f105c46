"""The tour in the Python SDK's README, run as it stands."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_scripts import agent_engine, call
from fake_engine import disk_engine
from http_server import running_server, scripted_app
from readme import ROOT, code_blocks
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.server.app import create_app
from artesian.server.config import ServerConfig

README = ROOT / "clients" / "python" / "README.md"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="It pulls.")))
    async with running_server(app) as url:
        yield url


async def printed(title: str, url: str) -> str:
    """What the block under a heading prints."""
    out = io.StringIO()

    def run() -> None:
        with contextlib.redirect_stdout(out):
            exec(compile(code_blocks(README, "python", url)[title], title, "exec"), {"__name__": title})

    await asyncio.to_thread(run)
    return out.getvalue()


async def test_asking(url: str) -> None:
    assert await printed("Ask", url) == "It pulls.\n3 cache_hit\nIt pulls.stop\n"


async def test_calling_functions() -> None:
    engine = agent_engine(("335789", "335,789 people."), ("", call("population", '{"city":"Bonn"}')))
    app, _ = scripted_app(engine)
    async with running_server(app) as url:
        assert await printed("Let the model call functions", url) == "335,789 people. (2 rounds)\n"


async def test_using_the_prompt_cache(tmp_path: Path) -> None:
    engine = disk_engine(tmp_path, blocks=600, max_len=1000)
    async with running_server(create_app(engine, engine.codec, ServerConfig(access_log=False))) as url:
        first, second = (await printed("Use the prompt cache", url)).splitlines()
    cached, total = first.split(" of ")
    assert int(total) - 100 < int(cached) < int(total)
    assert second.startswith("teacher ") and second.endswith(" True")


async def test_remembering(url: str) -> None:
    assert await printed("Let the server remember", url) == "It pulls.completed\n"


async def test_asyncio(url: str) -> None:
    first, second = (await printed("With asyncio", url)).splitlines()
    assert first == "['It pulls.', 'It pulls.']" and second.startswith("400 temperature req_")


def test_every_block_is_tested() -> None:
    assert len(code_blocks(README, "python", "")) == 5
