"""The prompt cache over HTTP, on an engine whose device checks every block it reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_engine import fake_runtime
from http_server import client_of, scripted_app

from artesian.engine.config import EngineConfig
from artesian.engine.local import LocalEngine
from artesian.server.app import create_app
from artesian.server.config import ServerConfig

TEXT = "abcdefghijklmnopqrstuvwxyz0123456789"
"""One token a letter, blocks of four."""


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    runtime = fake_runtime(blocks=200, max_len=300)
    engine = LocalEngine(runtime, EngineConfig(model=runtime.info.name, step_budget_ms=4.0))  # type: ignore[arg-type]
    app = create_app(engine, engine.codec, ServerConfig(**{"access_log": False, **settings}))
    async with client_of(app) as client:
        yield client


async def complete(client: httpx.AsyncClient, prompt: str, key: str = "", **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_a_repeated_prompt_is_a_hit_and_a_new_one_never_seen() -> None:
    async with serving() as client:
        first = await complete(client, TEXT)
        assert first["prompt_cache_diagnostics"]["reason"] == "never_seen" and cached(first) == 0
        again = await complete(client, TEXT)
        assert again["prompt_cache_diagnostics"]["type"] == "cache_hit" and cached(again) == len(TEXT) - 1
        assert again["prompt_cache_diagnostics"]["sources"] == {"device": len(TEXT) - 1}


async def test_a_stream_tells_it_with_its_usage() -> None:
    async with serving() as client:
        await complete(client, TEXT)
        body = {"prompt": TEXT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post("/v1/completions", json=body)
        chunks = [line for line in answer.text.splitlines() if "prompt_cache_diagnostics" in line]
        assert len(chunks) == 1 and '"type":"cache_hit"' in chunks[0] and '"usage":{' in chunks[0]


async def test_the_token_where_prompts_part_is_named() -> None:
    async with serving() as client:
        first = await complete(client, TEXT)
        other = TEXT[:10] + "X" + TEXT[11:]
        options = {"comparison_response_id": first["id"]}
        answer = (await complete(client, other, prompt_cache_options=options))["prompt_cache_diagnostics"]
        assert (answer["type"], answer["reason"]) == ("cache_miss", "input_changed")
        assert answer["divergence"]["token_offset"] == 10
        assert answer["divergence"]["compared_with"] == first["id"]
        assert answer["comparison_reusable_tokens"] == 8 and answer["cached_tokens"] == 10
        unknown = await complete(client, other, prompt_cache_options={"comparison_response_id": "x"})
        assert unknown["prompt_cache_diagnostics"]["type"] == "comparison_response_not_found"


async def test_a_prompt_of_less_than_a_block_is_too_short() -> None:
    async with serving() as client:
        answer = await complete(client, "ab")
        assert answer["prompt_cache_diagnostics"]["reason"] == "too_short"


async def test_prewarming_computes_and_says_nothing() -> None:
    async with serving() as client:
        warmed = await complete(client, TEXT, prompt_cache_options={"prewarm": True, "ttl": "2h"})
        assert warmed["usage"]["completion_tokens"] == 0 and warmed["choices"][0]["text"] == ""
        assert cached(await complete(client, TEXT)) == len(TEXT) - 1


async def test_explicit_mode_without_breakpoints_neither_reads_nor_writes() -> None:
    async with serving() as client:
        await complete(client, TEXT, prompt_cache_options={"mode": "explicit"})
        assert cached(await complete(client, TEXT)) == 0
        third = await complete(client, TEXT, prompt_cache_options={"mode": "explicit"})
        assert cached(third) == 0 and third["prompt_cache_diagnostics"]["reason"] == "disabled"


async def test_keys_and_salts_keep_prompts_apart() -> None:
    async with serving(api_keys=("one", "two")) as client:
        await complete(client, TEXT, "one")
        assert cached(await complete(client, TEXT, "two")) == 0
        assert cached(await complete(client, TEXT, "one", cache_salt="a")) == 0
        assert cached(await complete(client, TEXT, "one", prompt_cache_key="label")) > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "0s"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": -5}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "9" * 400 + "d"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "\u0663h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": {}}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "maybe"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": []}, "prompt_cache_options"),
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        ({"prompt_cache_key": "k" * 1_000_000}, "prompt_cache_key"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_named_caches_are_made_listed_pinned_and_deleted() -> None:
    async with serving() as client:
        made = await client.post("/v1/caches", json={"name": "alphabet", "prompt": TEXT, "ttl": "2h"})
        assert made.status_code == 201 and made.json()["cached_tokens"] == len(TEXT) - len(TEXT) % 4
        assert cached(await complete(client, TEXT)) == len(TEXT) - 1
        listed = (await client.get("/v1/caches")).json()
        assert [entry["name"] for entry in listed["data"]] == ["alphabet"] and len(listed["prompts"]) == 1
        for act in ("unpin", "prewarm"):
            assert (await client.post(f"/v1/caches/alphabet/{act}")).status_code == 200
        pinned = await client.post("/v1/caches/alphabet/pin")
        assert pinned.status_code == 503 and pinned.json()["error"]["code"] == "cache_unavailable"
        assert (await client.post("/v1/caches/nobody/pin")).json()["error"]["code"] == "cache_not_found"
        gone = (await client.delete("/v1/caches/alphabet")).json()
        assert gone["deleted"] and gone["deleted_tokens"] == len(TEXT)
        assert (await client.get("/v1/caches/alphabet")).status_code == 404
        assert cached(await complete(client, TEXT)) == 0


async def test_prompts_are_deleted_by_key() -> None:
    async with serving() as client:
        await complete(client, TEXT, prompt_cache_key="job")
        gone = (await client.delete("/v1/caches", params={"prompt_cache_key": "job"})).json()
        assert gone["deleted_prompts"] == 1
        assert cached(await complete(client, TEXT)) == 0
        assert (await client.delete("/v1/caches")).status_code == 400


async def test_names_are_a_tenants_own() -> None:
    async with serving(api_keys=("one", "two")) as client:
        ours, theirs = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        made = await client.post("/v1/caches", json={"name": "n", "prompt": TEXT}, headers=ours)
        assert made.status_code == 201
        assert (await client.get("/v1/caches/n", headers=theirs)).status_code == 404
        assert (await client.get("/v1/caches", headers=theirs)).json()["data"] == []
        assert (await client.delete("/v1/caches/n", headers=theirs)).status_code == 404
        assert (await client.get("/v1/caches")).status_code == 401


async def test_a_prompt_is_explained_without_being_run() -> None:
    async with serving() as client:
        await complete(client, TEXT)
        body = {"prompt": TEXT[:20] + "X" * 10}
        answer = (await client.post("/v1/caches/explain", json=body)).json()
        assert (answer["prompt"]["cached_tokens"], answer["prompt"]["ends_with"]) == (20, "never_seen")
        assert cached(await complete(client, body["prompt"])) == 20


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "..", "prompt": "x"}, "name"),
        ({"name": "a/b", "prompt": "x"}, "name"),
        ({"name": "", "prompt": "x"}, "name"),
        ({"name": "n" * 129, "prompt": "x"}, "name"),
        ({"name": "n"}, "messages"),
        ({"name": "n", "prompt": []}, "prompt"),
        ({"name": "n", "prompt": [2**31]}, "prompt"),
        ({"name": "n", "prompt": "x", "ttl": "never"}, "ttl"),
    ],
)
async def test_a_cache_that_cannot_be_is_refused(body: dict[str, Any], param: str) -> None:
    async with serving() as client:
        answer = await client.post("/v1/caches", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_acts_on_a_name_keep_the_body_limit() -> None:
    async with serving(max_body_bytes=1000) as client:
        answer = await client.post("/v1/caches/n/pin", json={"cache_salt": "x" * 100_000})
        assert answer.status_code == 413
