"""Records to put into tiers, and a clock that shows this century."""

from __future__ import annotations

import hashlib

from artesian.cache.tiers import NO_KEY, Found, Kind, Record, Tier

START = 1_800_000_000.0
"""A time at which clocks are set."""
IDENTITY = hashlib.sha256(b"layout").digest()
TENANT = hashlib.sha256(b"tenant").digest()


def key_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def payload_of(name: object, size: int) -> bytes:
    """Bytes that differ from record to record and do not compress."""
    return hashlib.shake_128(repr(name).encode()).digest(size)


def block_record(
    name: object, *, parent: bytes = NO_KEY, depth: int = 1, size: int = 8192, ttl_s: float = 3600.0,
    pinned: bool = False, identity: bytes = IDENTITY,
) -> Record:  # fmt: skip
    """A block; its content follows from its name."""
    return Record(
        Kind.BLOCK, key_of(name), identity, f"tokens of {name!r}".encode(),
        memoryview(payload_of(name, size)), ttl_s, parent, depth, 1, pinned,
    )  # fmt: skip


def chain(name: str, count: int, *, size: int = 8192, ttl_s: float = 3600.0) -> list[Record]:
    """Blocks that follow each other."""
    records: list[Record] = []
    parent = NO_KEY
    for depth in range(1, count + 1):
        records.append(block_record((name, depth), parent=parent, depth=depth, size=size, ttl_s=ttl_s))
        parent = records[-1].key
    return records


def named_record(name: str, value: bytes, *, tenant: bytes = TENANT, ttl_s: float = 3600.0) -> Record:
    content = b"test\0" + name.encode()
    return Record(Kind.NAMED, key_of((tenant, name)), tenant, content, memoryview(value), ttl_s)


def read(tier: Tier, found: Found, record: Record) -> bytes:
    """A found record's payload, checked against what it should be. Raises `TierFault`."""
    out = bytearray(found.payload_bytes)
    tier.read(found, record.kind, record.identity, record.content, memoryview(out))
    return bytes(out)


def value_of(record: Record) -> bytes:
    return bytes(record.payload)


def stored(tier: Tier, record: Record) -> bytes | None:
    """A record's payload; None if it is not here."""
    found = tier.find([record.key])
    return read(tier, found[0], record) if found else None
