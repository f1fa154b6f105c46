"""Structured output of the real model over HTTP, read by the real SDK, hot enough to go wrong."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from real_server import MODEL_NAME, RealServer

from artesian.engine.grammar.check import MAX_WHITESPACE

pytestmark = pytest.mark.model

ASK: Any = [{"role": "user", "content": "Tell me about Zürich as JSON."}]
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "array", "items": {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": -1}, "maxItems": 4},
    {"type": "object", "properties": {"名前": {"type": "string", "maxLength": 8}}, "required": ["名前"]},
    {"enum": ["sì", 1.5, None, {"a": [1]}]},
    {"type": ["string", "null"], "maxLength": 12},
    {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    {"type": "string", "format": "date-time"},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "maxLength": 6},
    {
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "type": "object",
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "additionalProperties": False,
    },
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
]


async def test_every_answer_that_ends_by_itself_validates(server: RealServer) -> None:
    jobs = [(schema, seed) for schema in SCHEMAS for seed in range(2)]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20) as client:

        async def ask(schema: dict[str, Any], seed: int) -> tuple[str, str]:
            wanted: Any = {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": schema, "strict": True},
            }
            answer = await client.chat.completions.create(
                model=MODEL_NAME,
                messages=ASK,
                response_format=wanted,
                temperature=1.5,
                seed=seed,
                max_tokens=120,
            )
            return answer.choices[0].finish_reason, answer.choices[0].message.content or ""

        answers = await asyncio.gather(*[ask(*job) for job in jobs])
    for (schema, _), (finish, text) in zip(jobs, answers, strict=True):
        assert not re.search(rf"\s{{{MAX_WHITESPACE + 1}}}", text)
        if finish == "stop":
            jsonschema.validate(json.loads(text), schema)
    assert sum(finish == "stop" for finish, _ in answers) >= 0.95 * len(jobs)


class Step(pydantic.BaseModel):
    explanation: str = pydantic.Field(max_length=40)
    kind: Literal["sum", "product"]


class Solution(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(max_length=2)
    answer: int | None


def test_the_sdk_parses_into_a_pydantic_model_whole_and_streamed(server: RealServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {"model": MODEL_NAME, "messages": ASK, "seed": 3, "response_format": Solution}
        whole = client.chat.completions.parse(**asked).choices[0].message
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0].message
    assert isinstance(whole.parsed, Solution)
    assert streamed.parsed == whole.parsed


def test_completions_and_chat_follow_a_regex_and_a_choice(server: RealServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        digits = client.completions.create(
            model=MODEL_NAME,
            prompt="Call me:",
            max_tokens=40,
            extra_body={"guided_regex": "[0-9]{3}-[0-9]{4}"},
        )
        emoji = client.chat.completions.create(
            model=MODEL_NAME,
            messages=ASK,
            logprobs=True,
            extra_body={"structured_outputs": {"choice": ["😊"]}},
        ).choices[0]
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", digits.choices[0].text)
    assert digits.choices[0].finish_reason == "stop"
    assert emoji.message.content == "😊"
    assert emoji.logprobs is not None and emoji.logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in emoji.logprobs.content).decode() == "😊"
