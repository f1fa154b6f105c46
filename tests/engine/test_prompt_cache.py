"""The engine's prompt cache over a self-checking device and a real disk tier."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_engine import fake_runtime, read, running_engine
from fakes import FakeClock
from tiers import START

from artesian.cache.tiers import Kind
from artesian.cache.tiers.host import HostTier
from artesian.cache.tiers.nvme import NvmeTier
from artesian.engine import CachePolicy, CacheUnavailable, GenerationRequest, SamplingParams
from artesian.engine.local import LocalEngine

PROMPT = [2 + i % 7 for i in range(42)]


@asynccontextmanager
async def engine_on(
    path: Path, clock: FakeClock | None = None, host: bool = False
) -> AsyncIterator[LocalEngine]:
    runtime = fake_runtime()
    clock = clock or FakeClock(START)
    runtime.store.clock = clock
    if host:
        runtime.tiers.append(HostTier(budget_bytes=1 << 20, default_ttl_s=3600.0, clock=clock))
    runtime.tiers.append(NvmeTier(path, budget_bytes=1 << 30, min_free_bytes=0, clock=clock, align=64))
    async with running_engine(runtime) as engine:
        yield engine
        await engine.prompt_cache.flush()  # a busy disk may take longer than a server waits at its end


async def ask(
    engine: LocalEngine, name: str, prompt: list[int] = PROMPT, **policy: object
) -> tuple[int, dict[str, int], str | None]:
    """Cached tokens, their sources, and the reason of the miss."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    request = GenerationRequest(id=name, prompt=prompt, params=params, cache=CachePolicy(**policy))  # type: ignore[arg-type]
    usage = (await read(engine, request)).usage
    assert usage is not None
    return usage.cached_tokens, usage.cache.sources, usage.cache.miss


async def test_a_prompt_comes_back_from_disk_after_a_restart(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as engine:
        assert await ask(engine, "a") == (0, {}, "never_seen")
        assert await ask(engine, "b") == (41, {"device": 41}, None)
    async with engine_on(tmp_path) as engine:
        assert await ask(engine, "c") == (40, {"disk": 40}, None)
        assert await ask(engine, "d") == (41, {"device": 41}, None)


async def test_policies_say_what_is_read_and_kept(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as engine:
        assert (await ask(engine, "a", durable=False))[0] == 0
        assert (await ask(engine, "b", read=False))[2] == "disabled"
    async with engine_on(tmp_path) as engine:
        # The second request's path was stored, since it was allowed to be.
        assert (await ask(engine, "c"))[1] == {"disk": 40}
    async with engine_on(tmp_path / "other") as engine:
        await ask(engine, "a", durable=False)
    async with engine_on(tmp_path / "other") as engine:
        assert (await ask(engine, "b"))[0] == 0
        await ask(engine, "c", write_tokens=20)


async def test_expired_and_deleted_prompts_are_told_apart(tmp_path: Path) -> None:
    clock = FakeClock(START)
    async with engine_on(tmp_path, clock) as engine:
        await ask(engine, "a")
    clock.advance(72 * 3600 + 1)
    async with engine_on(tmp_path, clock) as engine:
        assert await ask(engine, "b") == (0, {}, "expired")
        await engine.prompt_cache.flush()
        assert await engine.prompt_cache.erase(PROMPT, "") == 40
        found = await engine.prompt_cache.explain(PROMPT, "")
        assert (found.cached_tokens, found.ends_with) == (0, "deleted")
        assert await ask(engine, "c") == (0, {}, "deleted")


async def test_deleting_a_prompt_erases_its_answer_too(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as engine:
        await ask(engine, "a")
        await engine.prompt_cache.flush()
        await engine.prompt_cache.erase(PROMPT, "")
        (tier,) = engine.runtime.tiers
        assert tier.stats.records == 0
        assert (await engine.prompt_cache.explain(PROMPT, "")).sources == {}


async def test_pinned_prompts_are_not_erased_until_unpinned(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as engine:
        await ask(engine, "a")
        assert await engine.prompt_cache.pin(PROMPT, "", True) == 40
        await engine.prompt_cache.erase(PROMPT, "")
        found = await engine.prompt_cache.explain(PROMPT, "")
        assert found.pinned and found.cached_tokens == 40
        await engine.prompt_cache.pin(PROMPT, "", False)
        assert await engine.prompt_cache.erase(PROMPT, "") == 40


async def test_names_belong_to_a_tenant_and_outlive_a_restart(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as engine:
        cache = engine.prompt_cache
        assert await cache.put("n", "one", "x", b"1", 600.0) == START + 600
        cache.put_soon("n", "one", "y", b"2")
        assert await cache.get("n", "one", "y") == b"2"
        assert await cache.get("n", "two", "x") is None and await cache.get("m", "one", "x") is None
    async with engine_on(tmp_path) as engine:
        cache = engine.prompt_cache
        assert {name.name for name in await cache.names("n", "one")} == {"x", "y"}
        assert await cache.names("n", "two") == []
        assert await cache.delete("n", "one", "x") and await cache.get("n", "one", "x") is None
        assert not await cache.delete("n", "one", "x")


async def test_one_load_serves_all_who_wait_for_it(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as engine:
        await ask(engine, "a")
    async with engine_on(tmp_path) as engine:
        answers = await asyncio.gather(*[ask(engine, str(i)) for i in range(6)])
        assert {cached for cached, _, _ in answers} <= {40, 41}
        (tier,) = engine.runtime.tiers
        assert tier.stats.hits == 10


async def test_what_the_disk_lost_is_written_again_though_memory_has_it(tmp_path: Path) -> None:
    async with engine_on(tmp_path, host=True) as engine:
        await ask(engine, "a")
        await engine.prompt_cache.flush()
        _, disk = engine.runtime.tiers
        assert isinstance(disk, NvmeTier) and len(disk.listed(Kind.BLOCK)) >= 10
        shutil.rmtree(tmp_path / "v2" / "seg")
        disk.rebuild_index()
        assert not disk.listed(Kind.BLOCK)
        await ask(engine, "b")
        await engine.prompt_cache.flush()  # renews, and finds out
    async with engine_on(tmp_path) as engine:
        assert (await ask(engine, "c"))[1] == {"disk": 40}


async def test_what_another_process_deleted_is_forgotten_after_its_next_use(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as one, engine_on(tmp_path) as other:
        await ask(one, "a")
        await one.prompt_cache.flush()
        assert (await ask(other, "b"))[1] == {"disk": 40}
        assert await one.prompt_cache.erase(PROMPT, "") == 40
        assert (await ask(other, "c"))[0] == 41  # it has not heard of it
        await other.prompt_cache.flush()  # renews, and finds out
        await other.prompt_cache.flush()
        assert (await ask(other, "d"))[0] == 0


async def test_a_prompt_that_cannot_be_deleted_is_not_called_deleted(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as engine:
        await ask(engine, "a")
        await engine.prompt_cache.put("names", "", "one", b"value")
        await engine.prompt_cache.flush()
        neighbour = os.open(tmp_path / "v2" / "lease", os.O_RDWR)
        try:
            fcntl.flock(neighbour, fcntl.LOCK_EX)
            with pytest.raises(CacheUnavailable):
                await engine.prompt_cache.erase(PROMPT, "")
            with pytest.raises(CacheUnavailable):
                await engine.prompt_cache.delete("names", "", "one")
        finally:
            os.close(neighbour)
        assert await engine.prompt_cache.delete("names", "", "one")
        await engine.prompt_cache.erase(PROMPT, "")
    async with engine_on(tmp_path) as engine:
        assert (await ask(engine, "b"))[0] == 0


async def test_a_read_that_hangs_costs_a_deadline_and_not_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    async with engine_on(tmp_path) as engine:
        await ask(engine, "a")
    release = threading.Event()

    def hangs(*_: object) -> None:
        release.wait(20)

    async with engine_on(tmp_path) as engine:
        monkeypatch.setattr(NvmeTier, "read", hangs)
        cached, _, miss = await asyncio.wait_for(ask(engine, "b"), 10)
        assert (cached, miss) == (0, "slow")
        release.set()
