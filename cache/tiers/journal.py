"""What happened to records after they were written, in order: so that a rebuilt index resurrects nothing.

A fixed-size entry per touch, pin, unpin and delete, each with a checksum and the sequence number that orders
it among records. Entries are written at the journal's committed end: a torn one is overwritten by the next.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import xxhash

from .lease import is_at, open_own
from .segment import write_all

ENTRY = struct.Struct("<4sB3xQdd32s")
"""magic, what, seq, expires, ttl, key; then a checksum: the low 32 bits of their xxh3_64."""
ENTRY_BYTES = ENTRY.size + 4
MAGIC = b"ARTJ"
READ_ENTRIES = 4096


class What(IntEnum):
    TOUCH = 1
    PIN = 2
    UNPIN = 3
    DELETE = 4


@dataclass(frozen=True, slots=True)
class Note:
    """One entry. TOUCH and UNPIN say when the record ends from then on."""

    what: What
    seq: int
    key: bytes
    expires_at: float = 0.0
    ttl_s: float = 0.0

    def pack(self) -> bytes:
        data = ENTRY.pack(MAGIC, self.what, self.seq, self.expires_at, self.ttl_s, self.key)
        return data + struct.pack("<I", _check(data))


class Journal:
    """The journal file. Written with the lease held only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_own(path)

    def append(self, notes: Sequence[Note], end: int, *, durable: bool) -> int:
        """Write notes at the committed end; returns the new end. Raises `OSError`."""
        self._follow()
        size = os.fstat(self._fd).st_size
        if size > end:  # of a change that was not committed: it must not be believed behind a shorter one
            os.ftruncate(self._fd, end)
        end = min(end, size)
        end += write_all(self._fd, [b"".join(note.pack() for note in notes)], end)
        if durable:
            os.fdatasync(self._fd)
        return end

    def rewrite(self, notes: Iterator[Note]) -> int:
        """Replace the journal by these notes; returns its length. Raises `OSError`."""
        fresh = self.path.with_suffix(".tmp")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        end = 0
        try:
            for note in notes:
                end += write_all(fd, [note.pack()], end)
            os.fsync(fd)
            os.rename(fresh, self.path)
        except BaseException:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = fd
        return end

    def notes(self) -> Iterator[Note]:
        """All sound entries, up to the first that is not."""
        offset = 0
        while data := os.pread(self._fd, READ_ENTRIES * ENTRY_BYTES, offset):
            for start in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
                note = _parse(data[start : start + ENTRY_BYTES])
                if note is None:
                    return
                yield note
            if len(data) < READ_ENTRIES * ENTRY_BYTES:
                return
            offset += len(data)

    def sound_end(self) -> int:
        """Where the sound entries end."""
        return sum(ENTRY_BYTES for _ in self.notes())

    def file_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        os.close(self._fd)

    def _follow(self) -> None:
        """Another process may have replaced the file."""
        if not is_at(self._fd, self.path):
            fd = open_own(self.path)
            os.close(self._fd)
            self._fd = fd


def _parse(data: bytes) -> Note | None:
    magic, what, seq, expires_at, ttl_s, key = ENTRY.unpack_from(data)
    if magic != MAGIC or int.from_bytes(data[ENTRY.size :], "little") != _check(data[: ENTRY.size]):
        return None
    return Note(What(what), seq, key, expires_at, ttl_s) if what in What._value2member_map_ else None


def _check(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFF_FFFF
