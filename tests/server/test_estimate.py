"""What a chat request would take, and where a request stands in the queue."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import disk_engine
from http_server import client_of, running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.server.api.estimate import Estimate
from artesian.server.app import create_app
from artesian.server.config import ServerConfig

PATH = "/v1/chat/completions"
LONG = [{"role": "user", "content": "abcdefghijkl" * 8}]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    engine = disk_engine(tmp_path)
    async with client_of(create_app(engine, engine.codec, ServerConfig(access_log=False))) as client:
        yield client


async def estimate(client: httpx.AsyncClient, **fields: Any) -> Estimate:
    answer = await client.post(f"{PATH}/estimate", json={"messages": LONG, **fields})
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Estimate)


async def test_an_estimate_counts_what_the_answer_will_count(client: httpx.AsyncClient) -> None:
    before = await estimate(client)
    assert (before.cached_tokens, before.prompt_cache_diagnostics.type) == (0, "cache_miss")
    answer = (await client.post(PATH, json={"messages": LONG, "max_tokens": 1})).json()
    assert answer["usage"]["prompt_tokens"] == before.prompt_tokens
    after = await estimate(client, stream=True, stream_options={"include_usage": True})
    again = (await client.post(PATH, json={"messages": LONG, "max_tokens": 1})).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == after.cached_tokens > 90
    assert sum(after.sources.values()) == after.cached_tokens
    assert after.prompt_cache_diagnostics.type == "cache_hit"
    assert 0 < after.compute_s < before.compute_s
    assert before.time_to_first_token_s == pytest.approx(before.queue_s + before.compute_s)


async def test_an_estimate_keeps_tenants_apart_and_runs_nothing(client: httpx.AsyncClient) -> None:
    await client.post(PATH, json={"messages": LONG, "max_tokens": 1, "cache_salt": "a"})
    assert (await estimate(client, cache_salt="b")).cached_tokens == 0
    assert (await estimate(client, cache_salt="a")).cached_tokens > 90
    explicit = {"mode": "explicit"}
    assert (await estimate(client, cache_salt="a", prompt_cache_options=explicit)).cached_tokens == 0
    assert (await client.get("/v1/caches?cache_salt=b")).json()["prompts"] == []


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages", "context_length_exceeded"),
        ({"max_tokens": 290}, "messages", "context_length_exceeded"),
        ({"model": "nope"}, "model", "model_not_found"),
    ],
)
async def test_an_estimate_refuses_what_the_request_would_be_refused_for(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str
) -> None:
    body = {"messages": LONG, **fields}
    estimated, real = [await client.post(path, json=body) for path in (f"{PATH}/estimate", PATH)]
    assert estimated.json() == real.json() and estimated.status_code == real.status_code
    assert (real.json()["error"]["param"], real.json()["error"]["code"]) == (param, code)


async def test_a_waiting_request_is_told_its_place() -> None:
    engine = ScriptedEngine(toy_codec(), Script(text="x", endless=True, step_s=0.005), slots=1)
    app, _ = scripted_app(engine)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with running_server(app) as url, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        places = []
        for _ in range(3):
            stream = await stack.enter_async_context(client.stream("POST", PATH, json=body))
            places.append(stream.headers.get("x-queue-position"))
    assert places == [None, "1", "2"]
