"""A DeepSeek vocabulary behind the protocols: its prompts, its thoughts and its calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_server import client_of, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.engine.grammar import Tags, Thoughtful

TOKENS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
HELLO = [{"role": "user", "content": "hi"}]
CALLS = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">"Köln"</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)
ANSWER = f"Hm.</think>Let me see.{CALLS}"


class Scene:
    def __init__(self, engine: ScriptedEngine, client: httpx.AsyncClient) -> None:
        self.engine, self.client = engine, client

    async def post(self, text: str, url: str = "/v1/chat/completions", **fields: Any) -> Any:
        self.engine.script = Script(text=text, tokens_per_step=5)
        answer = await self.client.post(url, json={"messages": HELLO, "max_tokens": 900, **fields})
        assert answer.status_code == 200, answer.text
        return answer.text if fields.get("stream") else answer.json()

    @property
    def prompt(self) -> str:
        return self.engine.codec.detokenize(self.engine.requests[-1].prompt)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    engine = ScriptedEngine(toy_codec(added=TOKENS), max_model_len=6000)
    app, _ = scripted_app(engine)
    async with client_of(app) as client:
        yield Scene(engine, client)


async def test_chat_tells_thought_text_and_call(scene: Scene) -> None:
    choice = (await scene.post(ANSWER, tools=[WEATHER]))["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me see.")
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city": "\\"Köln\\""}'}
    assert choice["finish_reason"] == "tool_calls"
    lines = (await scene.post(ANSWER, tools=[WEATHER], stream=True)).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    pieces = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert "".join(pieces) == made["function"]["arguments"]
    assert len(pieces) > 3


async def test_messages_tell_it_too(scene: Scene) -> None:
    tool = {"name": "weather", "input_schema": CITY}
    content = (await scene.post(ANSWER, "/v1/messages", model="scripted", tools=[tool]))["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
    assert content[2]["input"] == {"city": '"Köln"'}


async def test_the_turn_that_goes_back_is_the_turn_that_was_written(scene: Scene) -> None:
    message = (await scene.post(ANSWER, tools=[WEATHER]))["choices"][0]["message"]
    before = scene.prompt
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    await scene.post("t</think>Rain.", messages=[*HELLO, message, result], tools=[WEATHER])
    assert scene.prompt.startswith(
        f"{before}{ANSWER}<｜end▁of▁sentence｜><｜User｜><tool_result>rain</tool_result>"
    )


async def test_effort_and_thinking_are_told_to_the_model(scene: Scene) -> None:
    await scene.post("t</think>x", reasoning_effort="max")
    assert "Reasoning Effort: 100 (" in scene.prompt
    assert scene.prompt.endswith("<｜Assistant｜><think>")
    for fields in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}):
        answer = await scene.post("x", **fields)
        assert scene.prompt == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
        assert answer["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_can_be_asked_for(scene: Scene, choice: Any) -> None:
    answer = await scene.post(CALLS, tools=[WEATHER], tool_choice=choice)
    assert [made["function"]["name"] for made in answer["choices"][0]["message"]["tool_calls"]] == ["weather"]
    grammar = scene.engine.requests[-1].grammar
    assert isinstance(grammar, Thoughtful) and not grammar.open
    grammar = grammar.answer
    assert isinstance(grammar, Tags)
    assert grammar.required


async def test_a_schema_that_cannot_be_held_is_named(scene: Scene) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^K"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
    body = {"messages": HELLO, "tools": [tool]}
    answer = await scene.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "cannot be enforced" in answer.json()["error"]["message"]
