"""Calls of the real model: every one parses and validates, and a stream tells what the whole answer tells.

The functions are the Berkeley Function-Calling Leaderboard's where they lie beside the repository.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from real_server import MODEL_NAME, RealServer, real_server

pytestmark = pytest.mark.model

BFCL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "tools"
SLICE = {"simple_python": 2, "multiple": 2, "parallel": 2, "parallel_multiple": 1, "live_simple": 2}
"""Questions of each part."""
MAX_CHARS = 1800
"""Of a question with its functions; longer ones only take longer."""
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
OWN = [
    {
        "question": [[{"role": "user", "content": "Is it raining in Köln? And what is 3 times 4?"}]],
        "function": [
            {
                "name": "weather.now",
                "description": "The weather in a city.",
                "parameters": {
                    "type": "dict",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                },
            },
            {
                "name": "multiply",
                "description": "The product of two numbers.",
                "parameters": {
                    "type": "dict",
                    "properties": {"a": {"type": "float"}, "b": {"type": "float"}},
                    "required": ["a", "b"],
                },
            },
        ],
    }
]


def schema_of(given: Any) -> Any:
    """A schema with JSON's names of the types."""
    if isinstance(given, list):
        return [schema_of(one) for one in given]
    if not isinstance(given, dict):
        return given
    shown = {name: schema_of(value) for name, value in given.items()}
    if isinstance(given.get("type"), str):
        kind = TYPES.get(given["type"], given["type"])
        shown = {**shown, "type": kind} if kind else {n: v for n, v in shown.items() if n != "type"}
    return shown


def questions() -> list[dict[str, Any]]:
    if not BFCL.exists():
        return OWN
    found: list[dict[str, Any]] = []
    for part, count in SLICE.items():
        lines = (BFCL / f"BFCL_v4_{part}.json").read_text().splitlines()
        found += [json.loads(line) for line in lines if len(line) < MAX_CHARS][:count]
    return found


def tools_of(question: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": function["name"].replace(".", "_"),
                "description": function["description"],
                "parameters": schema_of(function["parameters"]),
            },
        }
        for function in question["function"]
    ]


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--max-num-seqs", "8", "--max-model-len", "2048")
    with real_server(smollm2_path, tmp_path_factory.mktemp("tools"), *flags) as server:
        yield server


async def test_demanded_calls_validate_and_stream_as_they_are_told_whole(server: RealServer) -> None:
    asked = questions()
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def ask(number: int, question: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
            fields: Any = {
                "model": MODEL_NAME,
                "messages": question["question"][0],
                "tools": tools_of(question),
                "tool_choice": "required",
                "seed": number,
                "temperature": 0.8,
                "max_completion_tokens": 120,
            }
            whole = (await client.chat.completions.create(**fields)).choices[0]
            async with client.chat.completions.stream(**fields) as stream:
                await stream.until_done()
                streamed = stream.current_completion_snapshot.choices[0]
            told = [
                [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
                for choice in (whole, streamed)
            ]
            assert told[0] == told[1] and whole.finish_reason == streamed.finish_reason
            assert whole.message.content is None and streamed.message.content is None
            return whole.finish_reason, told[0]

        answers = await asyncio.gather(*[ask(*job) for job in enumerate(asked)])
    for question, (finish, calls) in zip(asked, answers, strict=True):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools_of(question)}
        assert calls and finish in ("tool_calls", "length")
        for name, arguments in calls if finish == "tool_calls" else calls[:-1]:
            jsonschema.validate(json.loads(arguments), schemas[name])
    assert sum(finish == "tool_calls" for finish, _ in answers) >= 0.9 * len(answers)
