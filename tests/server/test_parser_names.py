"""`tool_call_parser` and `reasoning_parser`: what a template does not show is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_server import client_of, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.server.config import ConfigError

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TEXTS = {
    "llama3_json": 'So:\n{"name": "add", "parameters": {"a": 1}}',
    "mistral": 'So: [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    "mistral_args": 'So: [TOOL_CALLS]add[ARGS]{"a": 1}',
    "pythonic": "So: [add(a=1)]",
    "openai": "<|channel|>commentary<|message|>So:<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1}',
    "deepseek_v3": "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": 'So: <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
}


async def ask(name: str, text: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    app, _ = scripted_app(ScriptedEngine(toy_codec(), script=Script(text=text)), tool_call_parser=name)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [ADD], "max_tokens": 300, **fields}
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("name", TEXTS)
async def test_calls_are_read_in_the_named_dialect(name: str) -> None:
    status, answer = await ask(name, TEXTS[name])
    assert status == 200
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So:"
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("add", {"a": 1})


async def test_a_call_that_no_grammar_can_hold_cannot_be_required() -> None:
    status, answer = await ask("pythonic", "", tool_choice="required")
    assert status == 400
    assert answer["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_ends_the_start(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}='nope' is unknown; expected one of "):
        scripted_app(None, **{field: "nope"})
