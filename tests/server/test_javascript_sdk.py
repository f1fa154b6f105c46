"""OpenAI's JavaScript client against a real port; `make dev` installs it where there is npm."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_scripts import agent_engine, call
from http_server import running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

NODE = Path(__file__).resolve().parents[1] / "support" / "node"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(),
    reason="needs node and the openai package: make dev",
)


class Scene:
    """A server, and the script that speaks to it."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url, self.engine = url, engine

    async def play(self, scenario: str) -> Any:
        node = await asyncio.create_subprocess_exec(
            "node", str(NODE / "chat.mjs"), self.url, scenario,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(node.communicate(), 60)
        assert node.returncode == 0, err.decode()
        return json.loads(out)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(), Script(text="Hé 😊!", prefill_s=0.1, step_s=0.01))
    app, _ = scripted_app(engine, api_keys=("one",), keep_alive_interval_s=0.02)
    async with running_server(app) as url:
        yield Scene(url, engine)


@pytest.mark.parametrize("scenario", ["whole", "stream"])
async def test_an_answer_arrives_with_its_end_and_usage(scene: Scene, scenario: str) -> None:
    seen = await scene.play(scenario)
    assert (seen["text"], seen["finish"]) == ("Hé 😊!", "stop")
    assert (
        seen["usage"]["total_tokens"] == seen["usage"]["prompt_tokens"] + seen["usage"]["completion_tokens"]
    )


async def test_leaving_a_stream_aborts_the_request(scene: Scene) -> None:
    scene.engine.script = Script(text="on and " * 1000, step_s=0.01)
    assert await scene.play("cancel") == {"pieces": 2}
    assert await scene.play("models")  # a round trip later
    assert scene.engine.aborted == [scene.engine.requests[0].id]


async def test_a_refusal_has_the_sdks_type_and_names_the_field(scene: Scene) -> None:
    assert await scene.play("refused") == {
        "kind": "BadRequestError", "status": 400, "param": "temperature", "code": "invalid_value",
    }  # fmt: skip


async def test_plain_completions_and_models_are_read(scene: Scene) -> None:
    assert await scene.play("completion") == {"text": "Hé 😊!"}
    assert await scene.play("models") == {"ids": ["scripted"]}


@pytest.mark.parametrize("scenario", ["tools", "toolsInParts"])
async def test_the_sdks_own_loop_of_tools_runs(scene: Scene, scenario: str) -> None:
    steps = ("sum is 42", "It is 42."), ("", "I add.\n" + call("add", '{"a": 40, "b": 2}'))
    scene.engine.script = agent_engine(*steps).script
    assert await scene.play(scenario) == {
        "text": "It is 42.", "told": ["add"], "roles": ["user", "assistant", "tool", "assistant"],
    }  # fmt: skip
