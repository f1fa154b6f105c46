"""Archives of prompts: what comes back is what went in, or it is counted and left out."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from tiers import IDENTITY, START, TENANT, payload_of, stored

from artesian.cache.archive import ALIGN, ArchiveError, Imported, export_records, import_records
from artesian.cache.spec import block_keys, named_key
from artesian.cache.tiers import Kind, Record
from artesian.cache.tiers.host import HostTier
from artesian.cache.tiers.nvme import NvmeTier
from artesian.cache.tiers.segment import encode_header, padded, segment_header

ROOT = bytes(32)


def prompt(count: int = 3, ttl_s: float = 3600.0, pinned: bool = False) -> list[Record]:
    """A chain of blocks with the keys that their tokens give, and a named value."""
    keys, contents = block_keys(ROOT, range(8 * count), 8)
    parents = [ROOT, *keys]
    blocks = [
        Record(
            Kind.BLOCK, key, IDENTITY, content, memoryview(payload_of(key, 500 + i)), ttl_s, parents[i],
            i + 1, pinned=pinned,
        )
        for i, (key, content) in enumerate(zip(keys, contents, strict=True))
    ]  # fmt: skip
    content = b"responses\0chatcmpl-1"
    return [*blocks, Record(Kind.NAMED, named_key(TENANT, content), TENANT, content, memoryview(b"v"), ttl_s)]


@contextmanager
def tier_in(path: Path, clock: FakeClock) -> Iterator[NvmeTier]:
    tier = NvmeTier(path, budget_bytes=1 << 26, min_free_bytes=0, clock=clock)
    yield tier
    tier.close()


def memory(clock: FakeClock) -> HostTier:
    return HostTier(budget_bytes=1 << 26, default_ttl_s=3600.0, clock=clock)


def exported(records: list[Record], clock: FakeClock) -> bytes:
    tier = memory(clock)
    tier.put(records)
    entries = [*tier.entries(Kind.BLOCK), *tier.entries(Kind.NAMED)]
    file = io.BytesIO()
    assert export_records(tier, entries, file, clock()) == (len(records), 0)
    return file.getvalue()


def imported(tier: NvmeTier | HostTier, archive: bytes, clock: FakeClock) -> Imported:
    return import_records(tier, io.BytesIO(archive), clock)


def crafted(record: Record, created_at: float = START, expires_at: float = START + 60.0) -> bytes:
    """An archive without end of one record whose checksums are right, whatever it says."""
    head = encode_header(
        record, b"i" * 16, ALIGN, codec=0, stored=record.payload, seq=0, created_at=created_at,
        expires_at=expires_at,
    )  # fmt: skip
    body = bytes(record.payload).ljust(padded(len(record.payload), ALIGN), b"\0")
    return segment_header(b"i" * 16, ALIGN, START) + head + body


WHOLE = exported(prompt(), FakeClock(START))


def test_records_come_back_with_their_bytes_and_times(tmp_path: Path) -> None:
    clock, records = FakeClock(START), prompt()
    archive = exported(records, clock)
    clock.now += 600
    with tier_in(tmp_path, clock) as tier:
        assert imported(tier, archive, clock) == Imported(stored=4, is_complete=True)
        assert [stored(tier, record) for record in records] == [bytes(record.payload) for record in records]
        (found,) = tier.find([records[0].key])
        assert (found.created_at, found.expires_at) == (START, START + 3600)


def test_what_is_here_is_left_as_it_is(tmp_path: Path) -> None:
    clock = FakeClock(START)
    with tier_in(tmp_path, clock) as tier:
        newer = [replace(record, ttl_s=60.0) for record in prompt()]
        newer[-1] = replace(newer[-1], payload=memoryview(b"newer"))
        tier.put(newer)
        assert imported(tier, WHOLE, clock) == Imported(present=4, is_complete=True)
        assert stored(tier, newer[-1]) == b"newer"
        assert tier.find([newer[0].key])[0].expires_at == START + 60


def test_what_has_expired_is_not_taken_and_what_is_pinned_stays_pinned() -> None:
    clock = FakeClock(START + 4000)
    assert imported(memory(clock), WHOLE, clock) == Imported(expired=4, is_complete=True)
    tier = memory(clock)
    imported(tier, exported(prompt(pinned=True), FakeClock(START)), clock)
    assert [entry.found.pinned for entry in tier.entries(Kind.BLOCK)] == [True] * 3


@given(length=st.integers(0, len(WHOLE) - 1))
def test_an_archive_that_is_cut_off_is_never_taken_for_whole(length: int) -> None:
    clock = FakeClock(START)
    tier = memory(clock)
    try:
        counts = imported(tier, WHOLE[:length], clock)
    except ArchiveError:
        return
    assert not counts.is_complete


@given(at=st.integers(0, len(WHOLE) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_never_becomes_another_record(at: int, bit: int) -> None:
    clock, damaged = FakeClock(START), bytearray(WHOLE)
    damaged[at] ^= 1 << bit
    tier = memory(clock)
    try:
        imported(tier, bytes(damaged), clock)
    except ArchiveError:
        return
    known = {record.key: bytes(record.payload) for record in prompt()}
    entries = [*tier.entries(Kind.BLOCK), *tier.entries(Kind.NAMED)]
    for entry in entries:
        out = bytearray(entry.found.payload_bytes)
        tier.read(entry.found, entry.kind, entry.identity, entry.content, memoryview(out))
        assert known[entry.found.key] == bytes(out)


@pytest.mark.parametrize(
    ("change", "times"),
    [
        ({"key": bytes(32)}, {}),
        ({"content": b"other tokens...."}, {}),
        ({"parent": b"p" * 32}, {}),
        ({"depth": 0}, {}),
        ({"groups": 0}, {}),
        ({"ttl_s": math.nan}, {}),
        ({}, {"expires_at": math.inf}),
        ({}, {"created_at": math.nan}),
    ],
    ids=str,
)
def test_what_no_tier_writes_is_refused(change: dict[str, object], times: dict[str, float]) -> None:
    clock = FakeClock(START)
    tier = memory(clock)
    counts = imported(tier, crafted(replace(prompt()[0], **change), **times), clock)  # type: ignore[arg-type]
    assert (counts.stored, counts.failed) == (0, 1) and not list(tier.entries(Kind.BLOCK))
    assert imported(tier, crafted(prompt()[0]), clock).stored == 1  # the same, unchanged


def test_an_end_far_away_is_brought_near() -> None:
    clock = FakeClock(START)
    tier = memory(clock)
    imported(tier, crafted(replace(prompt()[0], ttl_s=1e12), expires_at=START + 1e12), clock)
    (entry,) = tier.entries(Kind.BLOCK)
    assert entry.found.expires_at <= START + 366 * 86400


def test_what_is_no_archive_is_said(tmp_path: Path) -> None:
    clock = FakeClock(START)
    segment = segment_header(b"i" * 16, 4096, START)
    for strange in (b"", b"not an archive" * 100, segment, WHOLE[:8] + b"\x09" + WHOLE[9:]):
        with pytest.raises(ArchiveError, match="not an archive"):
            imported(memory(clock), strange, clock)
