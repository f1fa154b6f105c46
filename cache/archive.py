"""Prompts in one portable file: records in the format of segments, each checked when it is read back."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from .tiers import Entry, Record, Tier, TierFault
from .tiers.segment import (
    RECORD_HEADER,
    SEGMENT_HEADER,
    BadRecord,
    RecordHeader,
    check_payload,
    encode_header,
    padded,
    parse_header,
    parse_segment_header,
    segment_header,
)

ALIGN = 64
BATCH_BYTES = 32 << 20
MAX_CONTENT = 1 << 20
MAX_PAYLOAD = 1 << 32


class ArchiveError(ValueError):
    """The file is no archive of this version."""


def export_records(tier: Tier, entries: Sequence[Entry], file: BinaryIO, now: float) -> tuple[int, int]:
    """Write records, parents first; returns how many were written and how many could not be read."""
    archive_id = secrets.token_bytes(16)
    file.write(segment_header(archive_id, ALIGN, now))
    written = failed = 0
    for entry in sorted(entries, key=lambda entry: entry.depth):
        payload = bytearray(entry.found.payload_bytes)
        try:
            tier.read(entry.found, entry.kind, entry.identity, entry.content, memoryview(payload))
        except TierFault:
            failed += 1
            continue
        record = Record(
            entry.kind, entry.found.key, entry.identity, entry.content, memoryview(payload), entry.ttl_s,
            entry.parent, entry.depth, entry.found.groups, entry.found.pinned,
        )  # fmt: skip
        ends = now + entry.ttl_s if entry.found.pinned else entry.found.expires_at
        head = encode_header(
            record, archive_id, ALIGN, codec=0, stored=record.payload, seq=written,
            created_at=entry.found.created_at, expires_at=ends,
        )  # fmt: skip
        file.write(head)
        file.write(payload)
        file.write(bytes(padded(len(payload), ALIGN) - len(payload)))
        written += 1
    return written, failed


def import_records(tier: Tier, file: BinaryIO, clock: Callable[[], float]) -> tuple[int, int, int]:
    """Read an archive into a tier; returns how many records are there now, how many had expired and how many
    were bad or found no room. A record keeps what was left of its time to live.

    Raises:
        ArchiveError: not an archive, or of another version.
    """
    there = expired = bad = size = 0
    batch: list[Record] = []

    def flush() -> int:
        kept = len(tier.put(batch))
        batch.clear()
        return kept

    offered = 0
    for header, payload in _records(file):
        if header is None:
            bad += 1
            continue
        ttl_s = min(header.expires_at - clock(), header.ttl_s)
        if ttl_s <= 0:
            expired += 1
            continue
        batch.append(
            Record(
                header.kind,
                header.key,
                header.identity,
                header.content,
                memoryview(payload),
                ttl_s,
                header.parent,
                header.depth,
                header.groups,
                bool(header.flags & 1),
            )  # fmt: skip
        )
        offered += 1
        size += len(payload)
        if size >= BATCH_BYTES:
            there += flush()
            size = 0
    there += flush() if batch else 0
    return there, expired, bad + offered - there


def _records(file: BinaryIO) -> Iterator[tuple[RecordHeader | None, bytes]]:
    """The records of an archive; None for one whose payload is not what was written. A bad header ends it."""
    head = file.read(padded(SEGMENT_HEADER.size, ALIGN))
    try:
        archive_id, align = parse_segment_header(head)
    except BadRecord as err:
        raise ArchiveError(f"not an archive of prompts of this version: {err}") from err
    if align != ALIGN:
        raise ArchiveError(f"not an archive of prompts: alignment {align}")
    while start := file.read(RECORD_HEADER.size):
        try:
            content_bytes, payload_bytes, stored_bytes = RECORD_HEADER.unpack(start)[7:10]
            if content_bytes > MAX_CONTENT or stored_bytes > MAX_PAYLOAD or payload_bytes != stored_bytes:
                raise BadRecord("lengths")
            rest = file.read(padded(len(start) + content_bytes, ALIGN) - len(start))
            header = parse_header(start + rest, archive_id)
        except (BadRecord, struct.error):
            yield None, b""
            return
        payload = file.read(padded(stored_bytes, ALIGN))[:stored_bytes]
        try:
            check_payload(header, memoryview(payload))
        except BadRecord:
            yield None, b""
            continue
        yield header, payload
