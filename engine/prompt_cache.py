"""The prompt cache as the engine shows it at its door: tokens and tenants in, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cache import CacheConfig, KVStore
from ..cache.loads import FATES, locate
from ..cache.mover import Mover
from ..cache.tiers import Kind, Tier, erase_all
from ..cache.workers import InlineWorkers
from ..kernels.kv import KVKind, KVSpec
from .api import CachedPrompt, CacheMiss, CachePolicy, StoredName, TierStatus
from .errors import CacheUnavailable


class LocalPromptCache:
    """`PromptCache` over the mover of an engine in this process."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._store = mover.store

    @property
    def default_ttl_s(self) -> float:
        return self._mover.default_ttl_s

    @property
    def block_tokens(self) -> int:
        return self._store.block_tokens

    def kept_s(self, policy: CachePolicy) -> float | None:
        """How long a request of this policy is kept below the device; None if it is not."""
        if not (self._mover.tiers and self._store.is_usable and policy.durable and policy.write):
            return None
        return policy.ttl_s or self.default_ttl_s

    async def explain(self, tokens: list[int], salt: str) -> CachedPrompt:
        """See `PromptCache.explain`."""
        prompt = self._store.prompt(tokens, salt)
        nodes = self._store.full_match(prompt).nodes if self._store.is_usable else ()
        depth, tiers = len(nodes), self._mover.tiers
        below, _ = await asyncio.to_thread(locate, tiers, prompt.keys)
        rest, fate = await asyncio.to_thread(locate, tiers, prompt.keys[depth:])
        block_tokens = self.block_tokens
        sources = {"device": depth * block_tokens} if depth else {}
        for tier, _ in rest:
            sources[tier.name] = sources.get(tier.name, 0) + block_tokens
        cached = depth + len(rest)
        ends: CacheMiss | None = None
        if cached < len(prompt.keys):
            lost = self._store.tree.has_lost(prompt.keys[cached])
            ends = FATES[fate] if fate is not None else "evicted" if lost else "never_seen"
            if not self._store.is_usable:
                ends = "disabled"
        reached = below[:cached]
        created = reached[-1][1].created_at if len(reached) == cached and reached else None
        return CachedPrompt(
            tokens=len(tokens),
            block_tokens=block_tokens,
            cached_tokens=cached * block_tokens,
            sources=sources,
            bytes=cached * sum(spec.block_bytes for spec in self._store.groups),
            created_at=nodes[-1].created_at if created is None and nodes else created,
            expires_at=reached[-1][1].expires_at if reached else None,
            pinned=bool(reached) and len(reached) == cached and all(found.pinned for _, found in reached),
            ends_with=ends,
        )

    async def pin(self, tokens: list[int], salt: str, pinned: bool) -> int:
        """See `PromptCache.pin`."""
        await self.flush()  # what is not stored yet cannot be pinned
        keys = self._store.prompt(tokens, salt).keys
        counts = await self._mover.writer.perform(
            lambda: [tier.pin(keys, pinned) for tier in self._mover.tiers]
        )
        return max(counts or [0], default=0) * self.block_tokens

    async def erase(self, tokens: list[int], salt: str) -> int:
        """See `PromptCache.erase`."""
        await self.flush()  # blocks that are being stored are held, and would stay
        keys = self._store.prompt(tokens, salt).keys
        tree, tiers = self._store.tree, self._mover.tiers
        was_here = {key for key in keys if tree.get(key) is not None}
        below = tree.forget(keys)
        self._mover.writer.forget([*keys, *below])
        erased = await self._mover.writer.perform(lambda: _erase(tiers, keys, below))
        if erased is None:
            raise CacheUnavailable("The prompt could not be deleted from every tier of the cache; try again.")
        left = {key for key in was_here if tree.get(key) is not None}
        return len((was_here - left) | erased & set(keys)) * self.block_tokens

    async def flush(self) -> None:
        """See `PromptCache.flush`."""
        done = asyncio.Event()
        self._mover.flush(done.set)
        await done.wait()

    async def put(
        self,
        namespace: str,
        salt: str,
        name: str,
        value: bytes,
        ttl_s: float | None = None,
        *,
        pinned: bool = False,
    ) -> float | None:
        """See `PromptCache.put`."""
        return await self._mover.records.put(namespace, salt, name, value, ttl_s, pinned)

    def put_soon(
        self, namespace: str, salt: str, name: str, value: bytes, ttl_s: float | None = None
    ) -> None:
        """See `PromptCache.put_soon`."""
        self._mover.records.put_soon(namespace, salt, name, value, ttl_s)

    async def get(self, namespace: str, salt: str, name: str) -> bytes | None:
        """See `PromptCache.get`."""
        return await self._mover.records.get(namespace, salt, name)

    async def delete(self, namespace: str, salt: str, name: str) -> bool:
        """See `PromptCache.delete`."""
        deleted = await self._mover.records.delete(namespace, salt, name)
        if deleted is None:
            raise CacheUnavailable(f"{name!r} could not be deleted from every tier of the cache; try again.")
        return deleted

    async def names(self, namespace: str, salt: str) -> list[StoredName]:
        """See `PromptCache.names`."""
        return [
            StoredName(
                name=name,
                bytes=entry.found.payload_bytes,
                created_at=entry.found.created_at,
                expires_at=entry.found.expires_at,
                pinned=entry.found.pinned,
            )
            for name, entry in await self._mover.records.names(namespace, salt)
        ]

    def status(self) -> tuple[TierStatus, ...]:
        """See `PromptCache.status`."""
        return tuple(_status(tier) for tier in self._mover.tiers)

    async def close(self, timeout_s: float) -> None:
        """Store what waits to be stored, within the time; then end threads and tiers."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.flush()
        except TimeoutError:
            pass
        await asyncio.to_thread(self._mover.close)


def names_only() -> LocalPromptCache:
    """The cache of an engine without KV: it keeps names in memory and finds no prompt."""
    groups = [KVSpec("none", KVKind.FULL, (0,), 1, 8, "f32", block_tokens=64)]
    store = KVStore(groups, [1], "", CacheConfig(enable_prefix_caching=False))
    mover = Mover(
        store, [], _NoDevice(), InlineWorkers(), default_ttl_s=CacheConfig().cache_ttl,
        compute_s=lambda start, count: 0.0, reserved_blocks=lambda: 0, on_ready=lambda: None,
    )  # fmt: skip
    return LocalPromptCache(mover)


class _NoDevice:
    """Has no blocks, and is never asked for one."""

    def export_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        raise AssertionError("there is no device")

    def import_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        raise AssertionError("there is no device")


def _erase(tiers: Sequence[Tier], keys: Sequence[bytes], below: Sequence[bytes]) -> set[bytes] | None:
    """Erase a chain and what continues it (the answers to that prompt), except what is pinned; returns the
    keys that were somewhere, None if a tier would not."""
    ends = {*keys[-1:], *below}
    for tier in tiers:
        children: dict[bytes, list[bytes]] = {}
        for entry in tier.entries(Kind.BLOCK):
            children.setdefault(entry.parent, []).append(entry.found.key)
        stack = list(ends)
        while stack:
            found = children.pop(stack.pop(), [])
            ends.update(found)
            stack += found
    wanted = dict.fromkeys([*keys, *ends])
    found_here = {key: found for key in wanted for tier in tiers for found in tier.find([key])}
    doomed = [key for key, found in found_here.items() if not found.pinned]
    return None if erase_all(tiers, doomed) is None else set(doomed)


def _status(tier: Tier) -> TierStatus:
    stats = tier.stats
    return TierStatus(
        name=tier.name,
        records=stats.records,
        bytes=stats.bytes,
        budget_bytes=stats.budget_bytes,
        hits=stats.hits,
        read_bytes=stats.read_bytes,
        written_records=stats.written_records,
        written_bytes=stats.written_bytes,
        expired=stats.expired,
        evicted=stats.evicted,
        deleted=stats.deleted,
        dropped=stats.dropped,
        faults=dict(stats.faults),
        suspended=stats.suspended,
    )
