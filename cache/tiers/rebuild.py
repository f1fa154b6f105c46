"""Making an index from segments and journal, and cleaning up what dead writers left."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace

from .index import Change, Index, Place, SegmentInfo
from .journal import Journal, Note, What
from .lease import try_lock
from .segment import PINNED, BadRecord, RecordHeader, scan
from .segment_files import NAME, SegmentFiles

logger = logging.getLogger(__name__)

LAST_NUMBER = 1 << 31
"""No segment counts that far; the index has 32 bits for it."""


def rebuild(index: Index, files: SegmentFiles, journal: Journal, punches: bool) -> None:
    """Fill an empty index: the latest record of each key, as the journal left it. Headers are checked now,
    payloads when they are read."""
    deletes: dict[bytes, int] = {}
    latest: dict[bytes, Note] = {}
    last_seq = 0
    for note in journal.notes():
        last_seq = max(last_seq, note.seq)
        if note.what is What.DELETE:
            deletes[note.key] = note.seq
        else:
            latest[note.key] = note
    records = 0
    with index.change() as change:
        for name in sorted(files.names()):
            last_seq = max(last_seq, _add_segment(change, files, name, punches, deletes, latest))
        change.totals.next_seq = last_seq + 1
        change.totals.journal_bytes = journal.sound_end()
        records = change.totals.records
    logger.info("index rebuilt records=%d", records)


def _add_segment(
    change: Change, files: SegmentFiles, name: str, punches: bool, deletes: dict[bytes, int],
    latest: dict[bytes, Note],
) -> int:  # fmt: skip
    """Enter a segment's live records; returns the highest seq seen."""
    last_seq = 0
    named = NAME.fullmatch(name)
    number = int(named[1], 16) if named else LAST_NUMBER
    if number >= LAST_NUMBER or change.segment(number) is not None:  # renamed, or counted anew once
        number = change.totals.next_segment
    try:
        with files.reading(name) as reading:
            found = list(scan(reading.fd, os.fstat(reading.fd).st_size))
            align = reading.align
    except (OSError, BadRecord) as err:
        logger.warning("segment %s is left alone: %s", name, err)
        return last_seq
    end = max((offset + header.length(align) for offset, header in found), default=files.header_bytes)
    change.put_segment(number, SegmentInfo(end, 0, 0, 0.0, name))
    change.totals.next_segment = max(change.totals.next_segment, number + 1)
    change.totals.segment_bytes += files.header_bytes if punches else end
    for offset, header in found:
        last_seq = max(last_seq, header.seq)
        if deletes.get(header.key, -1) > header.seq:
            continue
        known = change.get(header.key)
        if known is not None:
            if known.seq > header.seq:
                continue
            change.remove(header.key, known, header.identity, None)
            if punches:
                change.totals.segment_bytes -= known.length
        place = _place(number, offset, header.length(align), header, latest.get(header.key))
        change.add(header.key, place, header.identity)
        if punches:
            change.totals.segment_bytes += place.length
    return last_seq


def _place(number: int, offset: int, length: int, header: RecordHeader, note: Note | None) -> Place:
    place = Place(
        number, header.kind, header.codec, header.flags, offset, length, header.payload_bytes,
        header.created_at, header.expires_at, header.ttl_s, header.depth, header.groups, header.seq,
    )  # fmt: skip
    if note is None or note.seq < header.seq:
        return place
    # What is pinned is never touched: the last note alone says what holds.
    flags = PINNED if note.what is What.PIN else place.flags & ~PINNED
    return replace(place, flags=flags, expires_at=note.expires_at, ttl_s=note.ttl_s)


def sweep(files: SegmentFiles, change: Change) -> None:
    """Remove segments that no index entry names and cut uncommitted tails off, where no living writer is."""
    known = {info.name: info for _, info in change.segments()}
    for name in list(files.names()):
        info = known.get(name)
        with suppress(OSError):
            fd = os.open(files.root / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not try_lock(fd):
                    continue
                if info is None:
                    os.unlink(files.root / name)
                elif os.fstat(fd).st_size > info.file_bytes:
                    os.ftruncate(fd, info.file_bytes)
            finally:
                os.close(fd)
