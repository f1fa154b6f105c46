"""Named caches over HTTP, on an engine with a real disk tier and a device that checks every block."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import disk_engine, fake_runtime
from http_server import client_of, running_server, scripted_app
from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.cache.tiers.nvme import NvmeTier
from artesian.engine.config import EngineConfig
from artesian.engine.local import LocalEngine
from artesian.server.app import create_app
from artesian.server.config import ServerConfig

SHARED = "abcdefghijkl"
"""One token a letter, three blocks of four."""
ONE, TWO = SHARED + "1" * 8, SHARED + "2" * 8


@asynccontextmanager
async def serving(path: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    engine = disk_engine(path)
    config = ServerConfig(access_log=False, **settings)
    async with client_of(create_app(engine, engine.codec, config)) as client:
        yield client
        await engine.prompt_cache.flush()


async def make(client: httpx.AsyncClient, name: str, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/caches", json={"name": name, "prompt": prompt, **fields})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def complete(client: httpx.AsyncClient, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    answer: dict[str, Any] = (await client.post("/v1/completions", json=body)).json()
    return answer


async def state(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/caches/{name}")).json()
    return found


async def test_a_cache_tells_all_of_its_state(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        made = await make(client, "one", ONE, ttl="2h", prompt_cache_key="job")
        assert made["object"] == "cache" and made["usage"]["prompt_tokens"] == len(ONE)
        assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 20}
        assert made["expires_at"] == pytest.approx(made["created_at"] + 7200, abs=5)
        found = await state(client, "one")
        assert (found["tokens"], found["cached_tokens"], found["sources"]) == (20, 20, {"device": 20})
        assert found["prompt_cache_key"] == "job" and not found["pinned"] and found["bytes"] > 0
        listed = (await client.get("/v1/caches")).json()
        assert listed["object"] == "list" and listed["data"] == [found]


async def test_names_and_prompts_are_listed_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await make(client, "one", ONE)
        first = await complete(client, TWO, prompt_cache_key="job")
    async with serving(tmp_path) as client:
        listed = (await client.get("/v1/caches")).json()
        assert [entry["name"] for entry in listed["data"]] == ["one"]
        assert listed["data"][0]["sources"] == {"disk": 20}
        (prompt,) = listed["prompts"]
        assert (prompt["id"], prompt["tokens"], prompt["prompt_cache_key"]) == (first["id"], 20, "job")
        other = TWO[:14] + "X" * 6
        said = (await client.post("/v1/caches/explain", json={"prompt": other})).json()
        assert said["prompt"]["sources"] == {"disk": 12} and said["object"] == "cache.explanation"
        assert said["prompt_cache_diagnostics"]["divergence"]["compared_with"] == first["id"]
        assert said["prompt_cache_diagnostics"]["divergence"]["token_offset"] == 14


async def test_unpinning_keeps_what_other_pinned_names_share(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await make(client, "one", ONE, pinned=True)
        await make(client, "two", TWO, pinned=True)
        assert (await state(client, "one"))["pinned"] and (await state(client, "one"))["expires_at"] is None
        await client.post("/v1/caches/one/unpin")
        assert not (await state(client, "one"))["pinned"] and (await state(client, "two"))["pinned"]
        await client.delete("/v1/caches/one")
        two = await state(client, "two")
        assert two["pinned"] and two["cached_tokens"] == 20


async def test_a_name_that_is_made_again_leaves_no_pin_behind(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await make(client, "one", ONE, pinned=True)
        await make(client, "one", TWO)
        await make(client, "old", ONE)
        assert not (await state(client, "old"))["pinned"] and not (await state(client, "one"))["pinned"]


async def test_deleting_a_name_deletes_the_answers_to_its_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await make(client, "shared", SHARED)
        await complete(client, ONE)
        await complete(client, "xyz" * 8)
        gone = (await client.delete("/v1/caches/shared")).json()
        assert (gone["object"], gone["deleted_prompts"]) == ("cache.deleted", 2)
        assert [prompt["tokens"] for prompt in (await client.get("/v1/caches")).json()["prompts"]] == [24]
        assert (await complete(client, ONE))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_deleting_a_key_deletes_its_prompts_and_its_pinned_names(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await complete(client, ONE, prompt_cache_key="job")
        await complete(client, "xyz" * 8, prompt_cache_key="other")
        await make(client, "two", TWO, prompt_cache_key="job", pinned=True)
    async with serving(tmp_path) as client:
        gone = (await client.delete("/v1/caches", params={"prompt_cache_key": "job"})).json()
        assert gone["deleted_prompts"] == 2 and "name" not in gone
        listed = (await client.get("/v1/caches")).json()
        assert listed["data"] == []
        assert [prompt["prompt_cache_key"] for prompt in listed["prompts"]] == ["other"]
        for prompt in (ONE, TWO):
            said = (await client.post("/v1/caches/explain", json={"prompt": prompt})).json()
            assert (said["prompt"]["cached_tokens"], said["prompt"]["ends_with"]) == (0, "deleted")


async def test_what_a_request_may_keep_holds_for_names_too() -> None:
    app, engine = scripted_app()
    marked = {"type": "text", "text": "Be kind.", "prompt_cache_breakpoint": {"mode": "explicit"}}
    body = {"name": "n", "messages": [{"role": "user", "content": [marked, {"type": "text", "text": "Hi"}]}]}
    async with client_of(app) as client:
        fields = {"prompt_cache_retention": "in_memory", "prompt_cache_options": {"mode": "explicit"}}
        assert (await client.post("/v1/caches", json={**body, **fields})).status_code == 201
        policy = engine.requests[-1].cache
        assert not policy.durable and policy.write_tokens == len("iuser\nBe kind.")
        await client.post("/v1/caches/n/prewarm")
        assert engine.requests[-1].cache == policy and engine.requests[-1].params.max_tokens == 0
        nothing = {"name": "n", "prompt": "x", "prompt_cache_options": {"mode": "explicit"}}
        refused = await client.post("/v1/caches", json=nothing)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_cache_options.mode"


async def test_making_caches_counts_against_a_keys_limits_and_looking_does_not() -> None:
    app, _ = scripted_app(api_keys=("k",), key_requests_per_minute=2)
    async with client_of(app, headers={"authorization": "Bearer k"}) as client:
        await make(client, "n", "hello")
        assert (await client.post("/v1/caches/n/prewarm")).status_code == 200
        assert (await client.post("/v1/caches", json={"name": "m", "prompt": "x"})).status_code == 429
        assert (await client.post("/v1/caches/n/prewarm")).status_code == 429
        assert (await client.get("/v1/caches/n")).status_code == 200
        assert (await client.post("/v1/caches/n/pin")).status_code == 200


async def test_a_client_that_leaves_ends_its_prewarming() -> None:
    app, engine = scripted_app(ScriptedEngine(toy_codec(), Script(prefill_s=30.0)))
    async with running_server(app) as url, httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/caches", json={"name": "n", "prompt": "x"}, timeout=0.2)
        for _ in range(500):
            if engine.aborted:
                break
            await asyncio.sleep(0.01)
        assert engine.aborted


async def test_fields_without_effect_are_named_back() -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        for path in ("/v1/caches", "/v1/caches/explain"):
            answer = await client.post(path, json={"name": "n", "prompt": "x" * 80, "colour": "red"})
            assert "colour" in answer.headers["x-ignored-fields"]


@pytest.mark.parametrize("query", ["cache_salt=", "cache_salt=" + "x" * 300])
async def test_a_salt_in_a_query_is_checked_like_one_in_a_body(query: str) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        for method, path in (("GET", "/v1/caches"), ("GET", "/v1/caches/n"), ("DELETE", "/v1/caches/n")):
            answer = await client.request(method, f"{path}?{query}")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize("name", ["%2e%2e%2fetc", "a%00b", "%D9%A3", "n" * 129, "a%0Ab"])
async def test_odd_names_are_refused_or_nowhere(name: str) -> None:
    app, _ = scripted_app()
    async with client_of(app) as client:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pin"), ("POST", "/prewarm")):
            answer = await client.request(method, f"/v1/caches/{name}{path}")
            assert answer.status_code in (400, 404) and "error" in answer.json()


async def test_the_name_of_a_pinned_prompt_does_not_give_way_before_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await make(client, "one", ONE, pinned=True)
    tier = NvmeTier(tmp_path, budget_bytes=1000, min_free_bytes=0, clock=time.time, align=64)
    tier.maintain()
    tier.close()
    async with serving(tmp_path) as client:
        found = await state(client, "one")
        assert found["pinned"] and found["cached_tokens"] == 20
        assert (await client.post("/v1/caches/one/unpin")).json()["pinned"] is False
        assert (await client.delete("/v1/caches/one")).json()["deleted"]


async def test_a_name_is_as_pinned_as_it_was_asked_to_be(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await make(client, "pinned", ONE, pinned=True)
        assert not (await make(client, "other", ONE))["pinned"]
        assert (await state(client, "pinned"))["pinned"]


async def test_a_pin_that_cannot_be_kept_is_refused() -> None:
    engine = LocalEngine(fake_runtime(), EngineConfig(model=Path("fake")))
    async with client_of(create_app(engine, engine.codec, ServerConfig(access_log=False))) as client:
        body = {"name": "one", "prompt": ONE, "pinned": True}
        refused = await client.post("/v1/caches", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "cache_unavailable")
        assert (await client.get("/v1/caches/one")).status_code == 404
        await make(client, "one", ONE)


async def test_what_cannot_be_deleted_now_is_not_called_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await make(client, "one", ONE)
        neighbour = os.open(tmp_path / "v2" / "lease", os.O_RDWR)
        try:
            fcntl.flock(neighbour, fcntl.LOCK_EX)
            refused = await client.delete("/v1/caches/one")
        finally:
            os.close(neighbour)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "cache_unavailable")
        assert refused.headers["retry-after"] == "5"
        assert (await client.delete("/v1/caches/one")).json()["deleted"]
