"""The host tier: records in this process's memory, for blocks that leave a device and for names."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .base import Entry, Fate, Found, Kind, Record, TierFault, TierStats
from .ghosts import Ghosts

NOTHING = memoryview(b"")
CLOCK_SLACK_S = 1.0
ENTRY_BYTES = 256
"""Counted for each record besides its payload and content."""


@dataclass(slots=True, eq=False)
class _Kept:
    record: Record
    """Without its payload, which was borrowed."""
    payload: bytes
    created_at: float
    expires_at: float
    ttl_s: float
    pinned: bool

    @property
    def size(self) -> int:
        return len(self.payload) + len(self.record.content) + ENTRY_BYTES

    def ends_at(self, now: float) -> float:
        """No later than its time to live from now: the clock may have gone back."""
        return float("inf") if self.pinned else min(self.expires_at, now + self.ttl_s)


class HostTier:
    """Records in memory. Guarded by one lock: nothing here waits."""

    name = "host"

    def __init__(self, *, budget_bytes: int, default_ttl_s: float, clock: Callable[[], float]) -> None:
        self.stats = TierStats(budget_bytes=budget_bytes)
        self._budget, self._clock = budget_bytes, clock
        self._kept: dict[bytes, _Kept] = {}
        self._order: list[tuple[float, int, bytes]] = []
        """(expires, -depth, key) of unpinned records, sorted: what ends first gives way first."""
        self._pinned_bytes = 0
        self._latest_now = 0.0
        self._ghosts = Ghosts()
        self._closed = False
        self._lock = threading.Lock()

    def find(self, keys: Sequence[bytes]) -> list[Found]:
        """See `Tier.find`."""
        found: list[Found] = []
        with self._lock:
            now = self._clock()
            for key in keys:
                kept = self._kept.get(key)
                if kept is None or kept.ends_at(now) <= now:
                    break
                found.append(self._found(kept, now))
        return found

    def read(self, found: Found, kind: Kind, identity: bytes, content: bytes, out: memoryview) -> None:
        """See `Tier.read`."""
        kept = found.place
        assert isinstance(kept, _Kept)
        record = kept.record
        if (record.kind, record.key, record.identity, record.content) != (kind, found.key, identity, content):
            self.stats.fault("header")
            raise TierFault("another record")
        if len(out) != len(kept.payload):
            self.stats.fault("short")
            raise TierFault("another length")
        out[:] = kept.payload
        self.stats.hits += 1
        self.stats.read_bytes += len(out)

    def content(self, found: Found) -> bytes:
        """See `Tier.content`."""
        assert isinstance(found.place, _Kept)
        return found.place.record.content

    def put(self, records: Sequence[Record]) -> list[bytes]:
        """See `Tier.put`."""
        here: list[bytes] = []
        with self._lock:
            now = self._clock()
            for record in () if self._closed else records:
                old = self._kept.get(record.key)
                if old is not None:
                    same = record.kind is Kind.BLOCK or old.payload == record.payload
                    if same and old.ends_at(now) > now:
                        self._extend(old, record.ttl_s, now)
                        here.append(record.key)
                        continue
                    self._remove(old, None)
                kept = _Kept(
                    replace(record, payload=NOTHING), bytes(record.payload), now, now + record.ttl_s,
                    record.ttl_s, record.pinned,
                )  # fmt: skip
                if self._make_room(kept.size, now):
                    self._add(kept)
                    self.stats.written_records += 1
                    self.stats.written_bytes += len(kept.payload)
                    here.append(record.key)
        self.stats.dropped += len(records) - len(here)
        return here

    def touch(self, ttls: Mapping[bytes, float]) -> list[bytes]:
        """See `Tier.touch`."""
        missing: list[bytes] = []
        with self._lock:
            now = self._clock()
            for key, ttl_s in ttls.items():
                kept = self._kept.get(key)
                if kept is None or kept.ends_at(now) <= now:
                    missing.append(key)
                else:
                    self._extend(kept, ttl_s, now)
        return missing

    def pin(self, keys: Sequence[bytes], pinned: bool) -> int:
        """See `Tier.pin`."""
        count = 0
        with self._lock:
            now = self._clock()
            for key in keys:
                kept = self._kept.get(key)
                if kept is not None and kept.ends_at(now) > now:
                    count += 1
                    if kept.pinned != pinned:
                        self._take_from_order(kept)
                        kept.pinned, kept.expires_at = pinned, now + kept.ttl_s
                        self._put_in_order(kept)
        return count

    def erase(self, keys: Sequence[bytes]) -> int:
        """See `Tier.erase`."""
        with self._lock:
            there = [kept for key in keys if (kept := self._kept.get(key)) is not None]
            for kept in there:
                self._remove(kept, Fate.DELETED)
            self.stats.deleted += len(there)
        return len(there)

    def fate(self, key: bytes) -> Fate | None:
        """See `Tier.fate`."""
        with self._lock:
            kept, now = self._kept.get(key), self._clock()
            if kept is None:
                return None if self._closed else self._ghosts.get(key)
            return Fate.EXPIRED if kept.ends_at(now) <= now else None

    def entries(self, kind: Kind, identity: bytes | None = None) -> Iterator[Entry]:
        """See `Tier.entries`."""
        with self._lock:
            now = self._clock()
            listed = [
                (kept, self._found(kept, now))
                for kept in self._kept.values()
                if kept.record.kind == kind and kept.ends_at(now) > now
                and identity in (None, kept.record.identity)
            ]  # fmt: skip
        for kept, found in listed:
            record = kept.record
            yield Entry(
                kind,
                found,
                record.identity,
                record.content,
                record.parent,
                record.depth,
                kept.size,
                kept.ttl_s,
            )

    def maintain(self) -> None:
        """See `Tier.maintain`."""
        with self._lock:
            now = self._clock()
            if now + CLOCK_SLACK_S < self._latest_now:
                self._clamp(now)
            self._latest_now = now
            while self._order and self._order[0][0] <= now:
                self._remove(self._kept[self._order[0][2]], Fate.EXPIRED)
                self.stats.expired += 1

    def close(self) -> None:
        """See `Tier.close`."""
        with self._lock:
            self._closed = True
            self._kept.clear()
            self._order.clear()
            self._pinned_bytes = 0
            self.stats.records = self.stats.bytes = 0

    def _found(self, kept: _Kept, now: float) -> Found:
        return Found(
            kept.record.key, len(kept.payload), min(kept.created_at, now), kept.ends_at(now),
            kept.record.groups, kept.pinned, kept,
        )  # fmt: skip

    def _extend(self, kept: _Kept, ttl_s: float, now: float) -> None:
        self._take_from_order(kept)
        kept.expires_at = max(min(kept.expires_at, now + kept.ttl_s), now + ttl_s)
        kept.ttl_s = max(kept.expires_at - now, ttl_s)
        self._put_in_order(kept)

    def _clamp(self, now: float) -> None:
        """The clock has gone back: records of its future end like those of now."""
        for kept in [kept for kept in self._kept.values() if kept.expires_at > now + kept.ttl_s]:
            self._take_from_order(kept)
            kept.expires_at = now + kept.ttl_s
            self._put_in_order(kept)

    def _make_room(self, size: int, now: float) -> bool:
        """Let records give way until `size` more bytes fit; none, if they never can."""
        if self._pinned_bytes + size > self._budget:
            return False
        while self.stats.bytes + size > self._budget:
            kept = self._kept[self._order[0][2]]
            early = kept.ends_at(now) > now
            self._remove(kept, Fate.EVICTED if early else Fate.EXPIRED)
            if early:
                self.stats.evicted += 1
            else:
                self.stats.expired += 1
        return True

    def _add(self, kept: _Kept) -> None:
        self._kept[kept.record.key] = kept
        self._ghosts.forget(kept.record.key)
        self._put_in_order(kept)
        self.stats.records += 1
        self.stats.bytes += kept.size

    def _remove(self, kept: _Kept, fate: Fate | None) -> None:
        self._take_from_order(kept)
        del self._kept[kept.record.key]
        self.stats.records -= 1
        self.stats.bytes -= kept.size
        if fate is not None:
            self._ghosts.add(kept.record.key, fate)

    def _put_in_order(self, kept: _Kept) -> None:
        if kept.pinned:
            self._pinned_bytes += kept.size
        else:
            bisect.insort(self._order, (kept.expires_at, -kept.record.depth, kept.record.key))

    def _take_from_order(self, kept: _Kept) -> None:
        if kept.pinned:
            self._pinned_bytes -= kept.size
        else:
            entry = (kept.expires_at, -kept.record.depth, kept.record.key)
            del self._order[bisect.bisect_left(self._order, entry)]
