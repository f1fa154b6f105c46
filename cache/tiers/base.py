"""What every tier can do, and what it stores. A tier knows bytes, keys and time; no tokens, no models.

A tier is used from threads of the mover: `find`, `read`, `fate` and `entries` from any of them at once,
everything that changes the tier from one thread at a time. Nothing here blocks on another tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol

NO_KEY = bytes(32)


class Kind(IntEnum):
    """What a record holds."""

    BLOCK = 1
    """One KV block; `content` = its tokens as int32, `identity` = the layout digest."""
    NAMED = 2
    """A small named value; `content` = its namespace and name, `identity` = the tenant's digest."""


class Fate(StrEnum):
    """Why a key is not here (any more). Remembered for a while, within a bound."""

    EXPIRED = "expired"
    EVICTED = "evicted"
    """Gave way before its time: the byte budget or the disk was full."""
    DELETED = "deleted"
    CORRUPT = "corrupt"
    """Failed a check when it was read."""


class TierFault(Exception):
    """A record cannot be had although it was found: checks failed, the file is gone, the device said no.
    Always a miss for the caller; the tier has counted it and dropped what is provably bad."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Something to be stored. Times are wall clock, seconds since the epoch."""

    kind: Kind
    key: bytes
    """32 bytes, a collision-resistant digest of all that follows from `identity` and `content`."""
    identity: bytes
    """32 bytes."""
    content: bytes
    payload: memoryview
    """Contiguous bytes, format "B"; borrowed until `put` returns."""
    ttl_s: float
    """Kept at least this long after its last use, as far as the budget allows."""
    parent: bytes = NO_KEY
    """BLOCK: key of the block before it (the root key for the first)."""
    depth: int = 0
    """BLOCK: its place in the chain, from 1."""
    groups: int = 1
    """BLOCK: bit g is set if the payload has the bytes of KV group g; they follow each other ascending."""
    pinned: bool = False
    created_at: float | None = None
    """When the payload was computed, if it is known; else, and in tiers that do not keep it, now."""


class Found(NamedTuple):
    """A record that is here and has not expired."""

    key: bytes
    payload_bytes: int
    created_at: float
    expires_at: float
    """Infinite while pinned."""
    groups: int
    pinned: bool
    place: object
    """The tier's own."""


class Entry(NamedTuple):
    """A record as listings see it."""

    kind: Kind
    found: Found
    identity: bytes
    content: bytes
    parent: bytes
    depth: int
    stored_bytes: int
    """Bytes it occupies, header and padding included."""
    ttl_s: float


@dataclass(slots=True)
class TierStats:
    """Gauges and totals since start. Written by the tier's threads (single stores, so never torn)."""

    records: int = 0
    bytes: int = 0
    """What the budget is compared with."""
    budget_bytes: int = 0
    hits: int = 0
    """Records read and found sound."""
    read_bytes: int = 0
    written_records: int = 0
    written_bytes: int = 0
    expired: int = 0
    evicted: int = 0
    """Gave way before `expires_at`."""
    deleted: int = 0
    dropped: int = 0
    """Records that were to be stored and were not (disk full, lease held elsewhere, errors)."""
    faults: dict[str, int] = field(default_factory=dict)
    """By kind: "checksum", "header", "short", "io", "full", "index", ..."""
    suspended: bool = False
    """Writing is switched off for now, after errors."""

    def fault(self, kind: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1


class Tier(Protocol):
    """One place where records are kept. Methods never raise for what a disk or a stranger's file can do,
    except `read` and `erase`, which raise `TierFault`."""

    name: str
    """"host", "disk" or "shared": a label in metrics and answers."""
    stats: TierStats

    def find(self, keys: Sequence[bytes]) -> list[Found]:
        """The leading run of `keys` that are here: the result may be shorter than `keys`, never has holes."""
        ...

    def read(self, found: Found, kind: Kind, identity: bytes, content: bytes, out: memoryview) -> None:
        """Fill `out` (exactly `found.payload_bytes` long, page-aligned where the mover made it) with the
        payload, after comparing kind, full key, identity, content, lengths and checksum.

        Raises:
            TierFault: any doubt; `out` then holds anything.
        """
        ...

    def content(self, found: Found) -> bytes:
        """The stored content of a record (a NAMED record's namespace and name). Raises `TierFault`."""
        ...

    def put(self, records: Sequence[Record]) -> list[bytes]:
        """Store records, making room within the budget; a key that is already here is touched instead.
        Returns the keys that are here afterwards. Durable when it returns, if the tier is durable at all.
        A NAMED record with a key that is here replaces it if its payload differs."""
        ...

    def touch(self, ttls: Mapping[bytes, float]) -> list[bytes]:
        """Records were used now: each expires no earlier than now + ttl (never sooner than it would have).
        Give a chain's blocks in any order; keys that are not here are returned."""
        ...

    def pin(self, keys: Sequence[bytes], pinned: bool) -> int:
        """Pinned records neither expire nor give way. Unpinned ones have their TTL from now. Returns how many
        of the keys are here."""
        ...

    def erase(self, keys: Sequence[bytes]) -> int:
        """Delete records, pinned or not, and make their bytes unreadable. Returns how many were here.

        Raises:
            TierFault: it cannot be done now; some may be gone.
        """
        ...

    def fate(self, key: bytes) -> Fate | None:
        """Why a key is not here; None if it is here or nothing is known of it."""
        ...

    def entries(self, kind: Kind, identity: bytes | None = None) -> Iterator[Entry]:
        """All records of a kind that have not expired, in no particular order; of one identity if given."""
        ...

    def maintain(self) -> None:
        """Expire, give way to the budget, reclaim space. Cheap when there is nothing to do; the mover calls
        it every few seconds."""
        ...

    def close(self) -> None:
        """Flush and let go of files and locks."""
        ...


def lasting(tiers: Sequence[Tier]) -> list[Tier]:
    """Those that outlive the process."""
    return [tier for tier in tiers if tier.name != "host"]


def erase_all(tiers: Sequence[Tier], keys: Sequence[bytes]) -> int | None:
    """Erase records everywhere; returns how many were there, None if a tier would not. All are tried."""
    counts: list[int | None] = []
    for tier in tiers:
        try:
            counts.append(tier.erase(keys))
        except TierFault:
            counts.append(None)
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
