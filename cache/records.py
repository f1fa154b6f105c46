"""Small named values beside the blocks: a stored response, a named prompt. Same tiers, same times to live,
same checks; a tenant sees its own names only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from .spec import named_key, tenant_digest
from .tiers import Entry, Kind, Record, Tier, TierFault, erase_all
from .workers import Workers
from .writes import GATHER_S, Writer

MAX_VALUE_BYTES = 16 << 20
MAX_PENDING_BYTES = 64 << 20
"""Of values that wait to be written; more are dropped."""


class RecordBook:
    """Named values in the first tier that keeps them. Called on the loop's thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        writer: Writer,
        workers: Workers,
        default_ttl_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tiers, self._writer, self._workers, self._clock = tuple(tiers), writer, workers, clock
        self._default_ttl_s = default_ttl_s
        self._waiting: list[Record] = []
        """Gathered, not handed to the writer yet."""
        self._pending: dict[bytes, Record] = {}
        """Not written yet, by key: readable at once."""
        self._pending_bytes = 0
        self._lock = threading.Lock()

    async def put(
        self, namespace: str, salt: str, name: str, value: bytes, ttl_s: float | None, pinned: bool = False
    ) -> float | None:
        """Keep a value; returns when it expires, None if it could not be kept."""
        record = self._take(namespace, salt, name, value, ttl_s, pinned)
        if record is None or not await self._writer.perform(lambda: self._write([record])):
            return None
        return self._clock() + record.ttl_s

    def put_soon(self, namespace: str, salt: str, name: str, value: bytes, ttl_s: float | None) -> None:
        """Keep a value some time soon; it can be read at once."""
        record = self._take(namespace, salt, name, value, ttl_s)
        if record is not None:
            if not self._waiting:
                self._workers.later(GATHER_S, self.flush)
            self._waiting.append(record)

    def flush(self) -> None:
        """Hand what was gathered to the writer."""
        records, self._waiting = self._waiting, []
        if records:
            self._writer.run(lambda: self._write(records), lambda _: None)

    async def get(self, namespace: str, salt: str, name: str) -> bytes | None:
        tenant, content = tenant_digest(salt), _content(namespace, name)
        key = named_key(tenant, content)
        waiting = self._pending.get(key)
        if waiting is not None:
            return bytes(waiting.payload)
        return await asyncio.to_thread(_read, self._tiers, key, tenant, content)

    async def delete(self, namespace: str, salt: str, name: str) -> bool | None:
        """Whether there was one; None if a tier would not delete it."""
        key = named_key(tenant_digest(salt), _content(namespace, name))
        self.flush()
        count = await self._writer.perform(lambda: erase_all(self._tiers, [key]))
        return None if count is None else count > 0

    async def names(self, namespace: str, salt: str) -> list[tuple[str, Entry]]:
        """A tenant's names in a namespace, the latest first."""
        tenant, prefix = tenant_digest(salt), _content(namespace, "")
        self.flush()
        return await self._writer.perform(lambda: _names(self._tiers, tenant, prefix)) or []

    def _take(
        self, namespace: str, salt: str, name: str, value: bytes, ttl_s: float | None, pinned: bool = False
    ) -> Record | None:
        """The record of a value that can be read from now on; None if it is too much."""
        with self._lock:
            if len(value) > MAX_VALUE_BYTES or self._pending_bytes + len(value) > MAX_PENDING_BYTES:
                self._tiers[0].stats.dropped += 1
                return None
            self._pending_bytes += len(value)
        tenant, content = tenant_digest(salt), _content(namespace, name)
        key = named_key(tenant, content)
        ttl_s = ttl_s or self._default_ttl_s
        record = Record(Kind.NAMED, key, tenant, content, memoryview(value), ttl_s, pinned=pinned)
        self._pending[key] = record
        return record

    def _write(self, records: Sequence[Record]) -> bool:
        """On the writer's thread; whether all were kept. Of one key's values the last is written."""
        latest = list({record.key: record for record in records}.values())
        try:
            kept = {key for tier in self._tiers for key in tier.put(latest)}
            return len(kept) == len(latest)
        finally:
            with self._lock:
                for record in records:
                    self._pending_bytes -= len(record.payload)
                    if self._pending.get(record.key) is record:
                        del self._pending[record.key]


def _content(namespace: str, name: str) -> bytes:
    return namespace.encode() + b"\0" + name.encode("utf-8", "surrogatepass")


def _read(tiers: Sequence[Tier], key: bytes, tenant: bytes, content: bytes) -> bytes | None:
    for tier in tiers:
        for found in tier.find([key]):
            value = bytearray(found.payload_bytes)
            try:
                tier.read(found, Kind.NAMED, tenant, content, memoryview(value))
                return bytes(value)
            except TierFault:
                pass
    return None


def _names(tiers: Sequence[Tier], tenant: bytes, prefix: bytes) -> list[tuple[str, Entry]]:
    found: dict[bytes, Entry] = {}
    for tier in tiers:
        for entry in tier.entries(Kind.NAMED, tenant):
            if entry.content.startswith(prefix):
                found.setdefault(entry.found.key, entry)
    latest = sorted(found.values(), key=lambda entry: entry.found.created_at, reverse=True)
    return [(entry.content[len(prefix) :].decode("utf-8", "replace"), entry) for entry in latest]
