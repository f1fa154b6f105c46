"""The prompt cache through the Python SDK, on an engine with a real disk tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_engine import disk_engine
from http_server import running_server

from artesian.clients.python import AsyncClient, BadRequestError, Client, NotFoundError
from artesian.server.app import create_app
from artesian.server.config import ServerConfig

PROMPT = "abcdefghijkl" + "1" * 8
"""One token a letter, five blocks of four."""


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    engine = disk_engine(tmp_path)
    async with running_server(create_app(engine, engine.codec, ServerConfig(access_log=False))) as url:
        yield url


async def test_a_prompt_is_kept_pinned_listed_and_deleted(url: str) -> None:
    async with AsyncClient(url) as client:
        caches = client.caches
        made = await caches.create("a.b", prompt=PROMPT, ttl="7d", prompt_cache_key="k", cache_salt="s")
        assert (made.tokens, made.cached_tokens, made.pinned) == (20, 20, False)
        assert made.usage is not None and made.request_id
        assert (await caches.pin("a.b", cache_salt="s")).pinned
        assert not (await caches.unpin("a.b", cache_salt="s")).pinned
        again = await caches.prewarm("a.b", cache_salt="s")
        assert again.usage is not None and again.usage.cached_tokens == 19
        assert [cache.name for cache in (await caches.list(cache_salt="s")).data] == ["a.b"]
        assert (await caches.list()).data == []  # another tenant
        deleted = await caches.delete("a.b", cache_salt="s")
        assert (deleted.name, deleted.deleted_tokens) == ("a.b", 20)
        with pytest.raises(NotFoundError) as raised:
            await caches.get("a.b", cache_salt="s")
        assert raised.value.code == "cache_not_found"


async def test_a_prompt_is_explained_and_deleted_by_its_key(url: str) -> None:
    def work() -> None:
        with Client(url) as client:
            assert client.caches.explain(prompt=PROMPT).prompt.cached_tokens == 0
            client.caches.create("one", prompt=PROMPT, prompt_cache_key="k")
            found = client.caches.explain(prompt=PROMPT[:12] + "2" * 8)
            assert found.prompt.cached_tokens == 12 and found.prompt.ends_with == "never_seen"
            assert client.caches.delete_by_key("k").deleted_prompts == 1
            assert client.caches.list().data == []

    await asyncio.to_thread(work)


async def test_a_chats_prompt_is_computed_ahead(url: str) -> None:
    messages = [{"role": "user", "content": PROMPT * 3}]
    async with AsyncClient(url) as client:
        warm = await client.chat.prewarm(messages, prompt_cache_options={"ttl": "1h"})
        assert warm.usage is not None and warm.usage.completion_tokens == 0
        ahead = await client.chat.estimate(messages)
        answer = await client.chat.create(messages, max_tokens=1)
        assert answer.usage is not None and answer.usage.cached_tokens == ahead.cached_tokens >= 60
        assert ahead.time_to_first_token_s > 0
        assert answer.prompt_cache_diagnostics is not None and answer.prompt_cache_diagnostics.is_hit


async def test_a_wrong_lifetime_is_refused_by_its_name(url: str) -> None:
    async with AsyncClient(url) as client:
        with pytest.raises(BadRequestError) as raised:
            await client.caches.create("one", prompt=PROMPT, ttl="soon")
    assert raised.value.param == "ttl"
