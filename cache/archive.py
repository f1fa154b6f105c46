"""Prompts in one portable file: records in the format of segments, each checked when it is read back.

docs/cache-format.md has the bytes. Reads and writes in one pass, so that either end may be a pipe.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from .audit import is_own_key
from .config import MAX_TTL_S
from .tiers import Entry, Kind, Record, Tier, TierFault
from .tiers.segment import (
    MAX_CONTENT_BYTES,
    PINNED,
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
MAX_PAYLOAD_BYTES = 1 << 30
END_MAGIC = b"ARTEEND\0"
END = struct.Struct("<8sQ")
"""magic, records; then the xxh3_64 of (archive id, these bytes)."""
END_BYTES = padded(END.size + 8, ALIGN)


class ArchiveError(ValueError):
    """The file is no archive of this version."""


@dataclass(slots=True)
class Imported:
    """What became of an archive's records."""

    stored: int = 0
    present: int = 0
    """Were here already, and were left as they are."""
    expired: int = 0
    failed: int = 0
    """Damaged, or not taken: no room, or the directory cannot be written now."""
    is_complete: bool = False
    """Whether the archive was read to its end."""


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
    file.write(_end(archive_id, written))
    return written, failed


def import_records(tier: Tier, file: BinaryIO, clock: Callable[[], float]) -> Imported:
    """Read an archive into a tier. A record that is not here keeps when it was made and what is left of its
    time to live; one that is here already is left alone.

    Raises:
        ArchiveError: not an archive, or of another version.
    """
    counts = Imported()
    batch: list[Record] = []
    size = 0

    def flush() -> None:
        kept = len(tier.put(batch))
        counts.stored += kept
        counts.failed += len(batch) - kept
        batch.clear()

    for item in _items(file):
        if item is None:
            counts.failed += 1
        elif isinstance(item, int):
            counts.is_complete = True
        elif tier.find([item[0].key]):
            counts.present += 1
        elif (record := _record(*item, clock())) is None:
            counts.expired += 1
        else:
            batch.append(record)
            size += len(record.payload)
            if size >= BATCH_BYTES:
                flush()
                size = 0
    if batch:
        flush()
    return counts


def _record(header: RecordHeader, payload: bytes, now: float) -> Record | None:
    """What is to be stored; None if its time is over."""
    ttl_s = min(header.ttl_s, MAX_TTL_S)
    if not header.flags & PINNED:
        ttl_s = min(ttl_s, header.expires_at - now)
    if ttl_s <= 0:
        return None
    return Record(
        header.kind, header.key, header.identity, header.content, memoryview(payload), ttl_s, header.parent,
        header.depth, header.groups, bool(header.flags & PINNED), header.created_at,
    )  # fmt: skip


def _items(file: BinaryIO) -> Iterator[tuple[RecordHeader, bytes] | int | None]:
    """The records of an archive; None for one that is damaged; at last, if the archive is whole, how many
    records there were. Behind a damaged header nothing can be found."""
    head = file.read(padded(SEGMENT_HEADER.size, ALIGN))
    try:
        archive_id, align = parse_segment_header(head)
    except BadRecord as err:
        raise ArchiveError(f"not an archive of prompts of this version: {err}") from err
    if align != ALIGN:
        raise ArchiveError(f"not an archive of prompts: alignment {align}")
    count = 0
    while True:
        start = file.read(END_BYTES)
        if start == _end(archive_id, count):
            yield count
            return
        if not start:
            return
        count += 1
        try:
            start += file.read(RECORD_HEADER.size - len(start))
            header, payload = _read_record(file, start, archive_id)
        except (BadRecord, struct.error):
            yield None
            return
        try:
            check_payload(header, memoryview(payload))
            _check_meaning(header)
        except BadRecord:
            yield None
            continue
        yield header, payload


def _read_record(file: BinaryIO, start: bytes, archive_id: bytes) -> tuple[RecordHeader, bytes]:
    """Raises `BadRecord` or `struct.error`: it cannot be told where the next record begins."""
    content_bytes, payload_bytes, stored_bytes = RECORD_HEADER.unpack(start)[7:10]
    if content_bytes > MAX_CONTENT_BYTES or stored_bytes > MAX_PAYLOAD_BYTES or payload_bytes != stored_bytes:
        raise BadRecord("lengths")
    rest = file.read(padded(len(start) + content_bytes, ALIGN) - len(start))
    header = parse_header(start + rest, archive_id)
    return header, file.read(padded(stored_bytes, ALIGN))[:stored_bytes]


def _check_meaning(header: RecordHeader) -> None:
    """Raises `BadRecord` for what no tier writes, however sound its checksums are."""
    if not all(map(math.isfinite, (header.created_at, header.expires_at, header.ttl_s))):
        raise BadRecord("times")
    if header.codec or not header.groups or (header.kind is Kind.BLOCK) != bool(header.depth):
        raise BadRecord("fields")
    if not is_own_key(header):
        raise BadRecord("key")


def _end(archive_id: bytes, records: int) -> bytes:
    data = END.pack(END_MAGIC, records)
    return (data + struct.pack("<Q", xxhash.xxh3_64_intdigest(archive_id + data))).ljust(END_BYTES, b"\0")
