"""The TypeScript SDK in Node: compiled, then tested by node's own test runner against scripted servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_scripts import agent_engine, call
from answer_server import AnswerServer
from fake_engine import disk_engine
from http_server import running_server, scripted_app
from readme import code_blocks
from scripted_engine import Script, ScriptedEngine, toy_codec
from typescript_sdk import PACKAGE, compile_typescript, compiled, needs_compiler

from artesian.server.app import create_app
from artesian.server.config import ServerConfig

HERE = Path(__file__).parent
README = PACKAGE / "README.md"
__all__ = ["compiled"]
pytestmark = needs_compiler


@pytest.fixture
async def environment(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """The addresses of a server that answers as it is told, of ours with a script, of ours with a disk."""
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!", step_s=0.002))
    app, _ = scripted_app(engine, api_keys=("one",), keep_alive_interval_s=0.02)
    disk = disk_engine(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        answers = stack.enter_context(AnswerServer())
        ours = await stack.enter_async_context(running_server(app))
        cached = create_app(disk, disk.codec, ServerConfig(access_log=False))
        disk_url = await stack.enter_async_context(running_server(cached))
        yield {"ARTESIAN_ANSWERS": answers.url, "ARTESIAN_URL": ours, "ARTESIAN_DISK_URL": disk_url}


@pytest.mark.parametrize("file", sorted(HERE.glob("*.test.mjs")), ids=lambda file: file.stem)
async def test_in_node(file: Path, environment: dict[str, str]) -> None:
    await node(
        "--experimental-websocket", "--test", "--test-reporter=spec", str(file), environment=environment
    )


async def node(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run node; returns what it printed, which is the failure if it fails."""
    process = await asyncio.create_subprocess_exec(
        "node", *arguments, env={**os.environ, **(environment or {})},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, out.decode()
    return out.decode()


async def printed(title: str, url: str, folder: Path) -> list[str]:
    """The lines that the README's block under a heading prints, once the compiler has accepted its types."""
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "artesian").symlink_to(PACKAGE)
    (folder / "tour.mts").write_text(code_blocks(README, "ts", url)[title])
    options = "--strict --noUncheckedIndexedAccess --target es2022 --module nodenext --lib es2022,dom"
    compile_typescript(folder, *options.split(), "tour.mts")
    return (await node(str(folder / "tour.mjs"))).splitlines()


async def test_the_tour_asks(environment: dict[str, str], tmp_path: Path) -> None:
    engine = ScriptedEngine(toy_codec(), Script(text="It pulls.", tokens_per_step=9))
    app, _ = scripted_app(engine)
    async with running_server(app) as url:
        assert await printed("Ask", url, tmp_path) == ["It pulls.", "3 cache_hit", "It pulls.", "stop"]


async def test_the_tour_lets_the_model_call_functions(tmp_path: Path) -> None:
    engine = agent_engine(("335789", "335,789 people."), ("", call("population", '{"city":"Bonn"}')))
    app, _ = scripted_app(engine)
    async with running_server(app) as url:
        said = await printed("Let the model call functions", url, tmp_path)
    assert said == ["335,789 people. (2 rounds)"]


async def test_the_tour_lets_the_server_remember(tmp_path: Path) -> None:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), Script(text="It pulls.", tokens_per_step=9)))
    async with running_server(app) as url:
        said = await printed("Let the server remember", url, tmp_path)
    assert said == ["It pulls.", "completed It pulls."]


async def test_the_tour_uses_the_prompt_cache(tmp_path: Path) -> None:
    engine = disk_engine(tmp_path / "cache", blocks=600, max_len=1000)
    async with running_server(create_app(engine, engine.codec, ServerConfig(access_log=False))) as url:
        explained, listed, missing = await printed("Use the prompt cache", url, tmp_path)
    cached, total = explained.split(" of ")
    assert int(total) - 100 < int(cached) < int(total)
    assert listed.startswith("teacher ") and listed.endswith(" true")
    assert missing.startswith("404 cache_not_found req_")


def test_every_block_of_the_readme_is_tested() -> None:
    assert len(code_blocks(README, "ts", "")) == 4
