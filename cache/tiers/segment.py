"""The bytes of segments and records on disk; docs/cache-format.md has them in words. No index, no policy.

A segment is a header and then records, each padded to the segment's alignment. A record's header is checked
under the segment's own random id, so that no payload can be made to look like a record.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from .base import Kind, Record

FORMAT_VERSION = 2
SEGMENT_MAGIC = b"ARTESEG\0"
RECORD_MAGIC = b"ARTR"
SEGMENT_HEADER = struct.Struct("<8sHHI16sdQ")
"""magic, version, 0, align, id, created, xxh3_64 of what is before."""
RECORD_HEADER = struct.Struct("<4sHBBIIIIQQQddd32s32s32s16sQ")
"""magic, version, kind, codec, flags, groups, depth, content bytes, payload bytes, stored bytes, seq,
created, expires, ttl, key, identity, parent, xxh3_128 of the stored payload, xxh3_64 of (segment id, header
so far, content)."""
PINNED = 1
MAX_CONTENT_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 40
SCAN_BYTES = 4096


class BadRecord(Exception):
    """Bytes that are no sound record; the message says which check failed."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A record's header and content, checked."""

    kind: Kind
    codec: int
    flags: int
    groups: int
    depth: int
    payload_bytes: int
    stored_bytes: int
    seq: int
    created_at: float
    expires_at: float
    ttl_s: float
    key: bytes
    identity: bytes
    parent: bytes
    payload_hash: bytes
    content: bytes

    def payload_offset(self, align: int) -> int:
        """Where the stored payload begins, from the record's start."""
        return padded(RECORD_HEADER.size + len(self.content), align)

    def length(self, align: int) -> int:
        """The record's length, padding included."""
        return padded(self.payload_offset(align) + self.stored_bytes, align)


def padded(size: int, align: int) -> int:
    return -(-size // align) * align


def record_length(content_bytes: int, stored_bytes: int, align: int) -> int:
    """The length of a record, padding included."""
    return padded(padded(RECORD_HEADER.size + content_bytes, align) + stored_bytes, align)


def segment_header(segment_id: bytes, align: int, created_at: float) -> bytes:
    """The first `padded(SEGMENT_HEADER.size, align)` bytes of a segment."""
    head = SEGMENT_HEADER.pack(SEGMENT_MAGIC, FORMAT_VERSION, 0, align, segment_id, created_at, 0)[:-8]
    head += struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
    return head.ljust(padded(len(head), align), b"\0")


def parse_segment_header(data: bytes) -> tuple[bytes, int]:
    """Return a segment's id and alignment.

    Raises:
        BadRecord: not a segment of this version.
    """
    if len(data) < SEGMENT_HEADER.size:
        raise BadRecord("short segment header")
    magic, version, _, align, segment_id, _, digest = SEGMENT_HEADER.unpack_from(data)
    if magic != SEGMENT_MAGIC or version != FORMAT_VERSION:
        raise BadRecord("not a segment of this version")
    if digest != xxhash.xxh3_64_intdigest(data[: SEGMENT_HEADER.size - 8]):
        raise BadRecord("segment header checksum")
    if align < 8 or align & (align - 1) or align > 1 << 20:
        raise BadRecord("segment alignment")
    return segment_id, align


def encode_header(
    record: Record, segment_id: bytes, align: int, *, codec: int, stored: memoryview, seq: int,
    created_at: float, expires_at: float,
) -> bytes:  # fmt: skip
    """Header, content and padding of a record: what comes before its payload."""
    head = RECORD_HEADER.pack(
        RECORD_MAGIC, FORMAT_VERSION, record.kind, codec, PINNED if record.pinned else 0, record.groups,
        record.depth, len(record.content), len(record.payload), len(stored), seq, created_at, expires_at,
        record.ttl_s, record.key, record.identity, record.parent, xxhash.xxh3_128_digest(stored), 0,
    )[:-8]  # fmt: skip
    head += struct.pack("<Q", _header_hash(segment_id, head, record.content)) + record.content
    return head.ljust(padded(len(head), align), b"\0")


def parse_header(data: bytes | memoryview, segment_id: bytes) -> RecordHeader:
    """Read a record's header and content; `data` may go on behind them.

    Raises:
        BadRecord: too short, another magic or version, absurd lengths, or a wrong checksum.
    """
    if len(data) < RECORD_HEADER.size:
        raise BadRecord("short header")
    (
        magic, version, kind, codec, flags, groups, depth, content_bytes, payload_bytes, stored_bytes, seq,
        created_at, expires_at, ttl_s, key, identity, parent, payload_hash, digest,
    ) = RECORD_HEADER.unpack_from(data)  # fmt: skip
    if magic != RECORD_MAGIC or version != FORMAT_VERSION:
        raise BadRecord("magic or version")
    if content_bytes > MAX_CONTENT_BYTES or max(payload_bytes, stored_bytes) > MAX_PAYLOAD_BYTES:
        raise BadRecord("lengths")
    end = RECORD_HEADER.size + content_bytes
    if len(data) < end:
        raise BadRecord("short content")
    content = bytes(data[RECORD_HEADER.size : end])
    if digest != _header_hash(segment_id, bytes(data[: RECORD_HEADER.size - 8]), content):
        raise BadRecord("header checksum")
    if kind not in (Kind.BLOCK, Kind.NAMED):
        raise BadRecord("kind")
    return RecordHeader(
        Kind(kind), codec, flags, groups, depth, payload_bytes, stored_bytes, seq, created_at, expires_at,
        ttl_s, key, identity, parent, payload_hash, content,
    )  # fmt: skip


def check_payload(header: RecordHeader, stored: memoryview) -> None:
    """Raises `BadRecord` if the stored payload is not what was written."""
    if len(stored) != header.stored_bytes or xxhash.xxh3_128_digest(stored) != header.payload_hash:
        raise BadRecord("payload checksum")


def scan(fd: int, end: int) -> Iterator[tuple[int, RecordHeader]]:
    """Yield (offset, header) of the sound records of a segment, up to byte `end`. Payloads are not read.

    Holes left by erased records are skipped; behind a header that fails its checks the next sound one is
    looked for. A torn tail ends the scan: its record does not lie within `end`.

    Raises:
        BadRecord: not a segment of this version.
    """
    segment_id, align = parse_segment_header(os.pread(fd, SEGMENT_HEADER.size, 0))
    offset = padded(SEGMENT_HEADER.size, align)
    while offset < end:
        head = os.pread(fd, SCAN_BYTES, offset)
        try:
            if len(head) >= RECORD_HEADER.size:
                content_bytes = RECORD_HEADER.unpack_from(head)[7]
                if head[:4] == RECORD_MAGIC and SCAN_BYTES < RECORD_HEADER.size + content_bytes:
                    head = os.pread(fd, RECORD_HEADER.size + min(content_bytes, MAX_CONTENT_BYTES), offset)
            header = parse_header(head, segment_id)
        except BadRecord:
            offset = _next_data(fd, offset + align, align)
            continue
        if offset + header.length(align) <= end:
            yield offset, header
        offset += header.length(align)


def write_all(fd: int, parts: list[bytes | memoryview], offset: int) -> int:
    """Write all parts at an offset; returns how many bytes that was.

    Raises:
        OSError: also when the device takes less than it was given (a full disk says so only the next time).
    """
    total = sum(len(part) for part in parts)
    written = os.pwritev(fd, parts, offset)
    while written < total:
        rest = b"".join(bytes(part) for part in parts)[written:]
        more = os.pwrite(fd, rest, offset + written)
        if more <= 0:
            raise OSError(errno.ENOSPC, "short write")
        written += more
    return total


def _header_hash(segment_id: bytes, head: bytes, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(segment_id + head + content)


def _next_data(fd: int, offset: int, align: int) -> int:
    """The next aligned offset that is not inside a hole."""
    try:
        return max(offset, os.lseek(fd, offset, os.SEEK_DATA) // align * align)
    except OSError as err:
        return 1 << 62 if err.errno == errno.ENXIO else offset  # nothing but a hole; or no such question here
