"""What a change to a disk tier is made of, with the lease held; the order of the steps is a promise."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from . import compression as codecs
from .base import Fate, Kind, Record, TierFault
from .index import Change, Index, Place, SegmentInfo
from .journal import Journal, Note, What
from .nvme_reads import FUTURE, Reads, ends_at, found_of
from .segment import PINNED, encode_header, record_length, write_all

BUCKET_S = 3600
TOUCH_GRAIN = 16384
"""A touch that moves an end by less than this part of the time to live is not worth writing."""
CLOCK_SLACK_S = 1.0
CLOCK_IS_SET = 1_767_225_600.0
"""2026-01-01: a clock that shows less has not been set yet, and nothing is expired by it."""
SUSPEND_S = (1.0, 60.0)
EXPIRE_AT_ONCE = 4096
RESERVE_BYTES = 1 << 20
"""Kept free for the index on a disk that runs full."""
INDEX_SLACK_BYTES, INDEX_RECORD_BYTES = 1 << 16, 512
"""What the index may grow by with one change, and with each record."""
JOURNAL_BYTES = 1 << 20
"""A journal shorter than this is never rewritten."""


class Changes(Reads):
    """The writing half of the tier, step by step."""

    root: Path
    _budget: int
    _min_free: int
    _segment_bytes: int
    _codec: int
    _item_bytes: int
    _punches: bool
    """Whether the file system gives the pages of erased records back."""
    _suspend_s: float
    _is_full: bool
    """The device has just refused a write for want of space."""
    _journal: Journal | None

    def _put(self, index: Index, records: Sequence[Record]) -> list[bytes]:
        kept: list[bytes] = []
        fresh: dict[bytes, tuple[Record, int, memoryview]] = {}
        with self._change(index) as change:
            now = self._now(change)
            notes: list[Note] = []
            stale: list[tuple[bytes, Place]] = []
            for record in records:
                place = change.get(record.key)
                live = place is not None and ends_at(place, now) > now
                if place is not None and live and not self._differs(change, record, place):
                    kept.append(record.key)
                    note = self._extend(change, record.key, place, record.ttl_s, now)
                    notes += [] if note is None else [note]
                    continue
                if place is not None:
                    stale.append((record.key, place))
                codec, stored = codecs.pack(self._codec, self._item_bytes, record.payload)
                fresh[record.key] = (record, codec, memoryview(stored))
            self._write_notes(change, notes, durable=False)
            if stale:
                self._kill(change, stale, None)
            lengths = [
                record_length(len(record.content), len(stored), self.files.align)
                for record, _, stored in fresh.values()
            ]
            overhead = INDEX_SLACK_BYTES + len(fresh) * (self.files.header_bytes + INDEX_RECORD_BYTES)
            room = not fresh or self._make_room(change, sum(lengths) + overhead)
        if not room:
            self.stats.fault("full")
            return kept
        if fresh:
            kept += self._append(index, list(fresh.values()), now)
        return kept

    def _append(
        self, index: Index, fresh: Sequence[tuple[Record, int, memoryview]], now: float
    ) -> list[bytes]:
        """Write records to segments, make them durable, then enter them."""
        added: list[tuple[Record, Place]] = []
        ends: dict[int, int] = {}
        with self._change(index) as change:
            for record, codec, stored in fresh:
                length = record_length(len(record.content), len(stored), self.files.align)
                bucket = int(now + record.ttl_s) // BUCKET_S
                writing = self.files.writing(bucket)
                if writing is not None and bucket not in ends:
                    info = change.segment(writing.number)
                    if info is None or info.name != writing.name:  # the index was made anew
                        self.files.finish(bucket)
                        writing = None
                if writing is None or ends.get(bucket, writing.end) >= self._segment_bytes:
                    if writing is not None and bucket in ends:
                        os.fdatasync(writing.fd)
                        writing.end = ends.pop(bucket)
                    writing = self.files.create(bucket, change.totals.next_segment, now)
                    change.totals.next_segment = writing.number + 1
                    change.totals.segment_bytes += self.files.header_bytes
                    change.put_segment(writing.number, SegmentInfo(writing.end, 0, 0, 0.0, writing.name))
                offset = ends.get(bucket, writing.end)
                seq = change.totals.next_seq
                change.totals.next_seq += 1
                expires_at = now + record.ttl_s
                created_at = now if record.created_at is None else min(record.created_at, now)
                head = encode_header(
                    record, writing.segment_id, self.files.align, codec=codec, stored=stored, seq=seq,
                    created_at=created_at, expires_at=expires_at,
                )  # fmt: skip
                tail = bytes(length - len(head) - len(stored))
                write_all(writing.fd, [head, stored, tail], offset)
                ends[bucket] = offset + length
                flags = PINNED if record.pinned else 0
                place = Place(
                    writing.number, record.kind, codec, flags, offset, length, len(record.payload),
                    created_at, expires_at, record.ttl_s, record.depth, record.groups, seq,
                )  # fmt: skip
                added.append((record, place))
            for bucket, end in ends.items():
                writing = self.files.writing(bucket)
                assert writing is not None
                os.fdatasync(writing.fd)
                writing.end = end
            for record, place in added:
                info = change.segment(place.segment)
                assert info is not None
                info = SegmentInfo(
                    max(info.file_bytes, place.offset + place.length), info.live_bytes, info.live_records,
                    info.expires_at, info.name,
                )  # fmt: skip
                change.put_segment(place.segment, info)
                change.totals.segment_bytes += place.length
                change.add(record.key, place, record.identity)
        self.stats.written_records += len(added)
        self.stats.written_bytes += sum(place.length for _, place in added)
        self._suspend_s = SUSPEND_S[0]
        return [record.key for record, _ in added]

    def _now(self, change: Change) -> float:
        """What new ends are counted from: the latest time seen, while the clock has not been set."""
        now = self._clock()
        return now if now >= CLOCK_IS_SET else max(now, change.totals.latest_now)

    def _differs(self, change: Change, record: Record, place: Place) -> bool:
        """Whether what is stored is something else. Blocks of one key are equal, unless they are damaged."""
        if record.kind is not Kind.NAMED and place.segment not in self._suspects:
            return False
        info = change.segment(place.segment)
        value = bytearray(place.payload_bytes)
        if info is None or place.payload_bytes != len(record.payload):
            return True
        found = found_of(record.key, place, info.name, self._clock())
        try:
            self.read(found, record.kind, record.identity, record.content, memoryview(value))
        except TierFault:
            return True
        return bytes(value) != bytes(record.payload)

    def _extend(self, change: Change, key: bytes, place: Place, ttl_s: float, now: float) -> Note | None:
        """Let a record live at least `ttl_s` from now, never shorter than it would have."""
        if place.pinned:
            return None
        ends = max(ends_at(place, now), now + ttl_s)
        if 0 <= ends - place.expires_at < ttl_s / TOUCH_GRAIN:
            return None
        changed = change.replace(key, place, expires_at=ends, ttl_s=max(ends - now, ttl_s))
        return self._note(change, What.TOUCH, key, ends, changed)

    @staticmethod
    def _note(change: Change, what: What, key: bytes, ends: float = 0.0, place: Place | None = None) -> Note:
        seq = change.totals.next_seq
        change.totals.next_seq += 1
        return Note(what, seq, key, ends, place.ttl_s if place is not None else 0.0)

    def _write_notes(self, change: Change, notes: Sequence[Note], *, durable: bool) -> None:
        if notes and self._journal is not None:
            end = change.totals.journal_bytes
            change.totals.journal_bytes = self._journal.append(notes, end, durable=durable)

    def _kill(self, change: Change, doomed: Sequence[tuple[bytes, Place]], fate: Fate | None) -> None:
        """Take records out: first the journal says so, then their bytes go, then their index entries."""
        if not doomed:
            return
        durable = fate is Fate.DELETED
        notes = [self._note(change, What.DELETE, key) for key, _ in doomed]
        self._write_notes(change, notes, durable=durable)
        emptied = self._remove_emptied(change, Counter(place.segment for _, place in doomed))
        for key, place in doomed:
            info = change.segment(place.segment)
            if info is not None and place.segment not in emptied:
                with suppress(OSError):
                    self.files.erase(info.name, place.offset, place.length, durable=durable)
            if self._punches:
                change.totals.segment_bytes -= place.length
            change.remove(key, place, None, fate)
        for number in emptied:
            change.remove_segment(number)

    def _remove_emptied(self, change: Change, dying: Mapping[int, int]) -> set[int]:
        """Remove the files of segments all of whose live records are dying; returns which are gone."""
        emptied: set[int] = set()
        for number, count in dying.items():
            info = change.segment(number)
            if info is not None and count >= info.live_records and self.files.remove(number, info.name):
                emptied.add(number)
                change.totals.segment_bytes -= self.files.header_bytes if self._punches else info.file_bytes
        return emptied

    def _remove_dead_segments(self, change: Change) -> None:
        """Remove what a living writer still had open when its last record died."""
        dead = {number: 0 for number, info in change.segments() if not info.live_records}
        ours = {writing.number for writing in self.files.open_writings()}
        for number in self._remove_emptied(change, {n: c for n, c in dead.items() if n not in ours}):
            change.remove_segment(number)

    def _expired(self, change: Change, now: float) -> list[tuple[bytes, Place]]:
        if now < CLOCK_IS_SET:
            return []
        expired: list[tuple[bytes, Place]] = []
        for expires_at, key in change.soonest():
            if expires_at > now or len(expired) == EXPIRE_AT_ONCE:
                break
            place = change.get(key)
            if place is not None and ends_at(place, now) <= now:
                expired.append((key, place))
        return expired

    def _make_room(self, change: Change, need: int) -> bool:
        """Let records give way, the soonest to end first, until `need` more bytes fit; whether they do. None
        is given up for bytes that cannot fit even so."""
        others = change.totals.journal_bytes + self._side_bytes()
        free = self._free_bytes()
        excess = max(change.totals.segment_bytes + others + need - self._budget, self._min_free + need - free)
        fits = excess <= 0
        if self._is_full:  # said the device itself, for a reason that `statvfs` does not know: a quota
            excess, self._is_full = max(excess, need), False
        if excess <= 0:
            return True
        now, doomed, gained = self._clock(), [], 0
        lasting = {number: info.live_records for number, info in change.segments()}
        for _, key in change.soonest():
            if gained >= excess:
                break
            place = change.get(key)
            if place is None:
                continue
            doomed.append((key, place))
            lasting[place.segment] -= 1
            if self._punches:
                gained += place.length
            elif not lasting[place.segment]:
                gained += self._whole(change, place.segment)
        if need and gained < excess:
            return fits
        early = sum(ends_at(place, now) > now for _, place in doomed)
        before = change.totals.segment_bytes
        self._kill(change, doomed, Fate.EVICTED)
        self.stats.evicted += early
        self.stats.expired += len(doomed) - early
        return before - change.totals.segment_bytes >= excess

    @staticmethod
    def _whole(change: Change, number: int) -> int:
        info = change.segment(number)
        return 0 if info is None else info.file_bytes

    def _clamp(self, change: Change, now: float) -> None:
        """When the clock has gone back far, records of its future end like those of now."""
        if now < CLOCK_IS_SET or now + CLOCK_SLACK_S >= change.totals.latest_now:
            return
        change.totals.latest_now = now
        notes = []
        for key, place in list(change.records()):
            if place is not None and not place.pinned and place.expires_at > now + FUTURE * place.ttl_s:
                changed = change.replace(key, place, expires_at=now + place.ttl_s)
                notes.append(self._note(change, What.TOUCH, key, changed.expires_at, changed))
        self._write_notes(change, notes, durable=False)

    def _compact_journal(self, index: Index) -> None:
        """Rewrite the journal from the index when most of it is history."""
        journal = self._journal
        totals = index.totals()
        if journal is None or totals.journal_bytes < max(JOURNAL_BYTES, 256 * totals.records):
            return
        with self._change(index) as change:

            def notes() -> Iterator[Note]:
                for key, place in list(change.records()):
                    if place is not None:
                        what = What.PIN if place.pinned else What.TOUCH
                        yield self._note(change, what, key, place.expires_at, place)

            change.totals.journal_bytes = journal.rewrite(notes())

    @contextmanager
    def _change(self, index: Index) -> Iterator[Change]:
        with index.change() as change:
            yield change
            if not change.is_empty:
                change.totals.latest_now = max(change.totals.latest_now, self._clock())

    def _drop_bad(self, index: Index) -> None:
        """Take out what readers have found bad, so that it is written anew."""
        bad = [self._bad.popleft() for _ in range(len(self._bad))]
        if bad:
            with self._change(index) as change:
                there = [(key, place, seq) for key, seq in bad if (place := change.get(key)) is not None]
                doomed = {key: place for key, place, seq in there if place.seq == seq}
                self._kill(change, list(doomed.items()), Fate.CORRUPT)

    def _free_bytes(self) -> int:
        state = os.statvfs(self.root)
        return state.f_bavail * state.f_frsize

    def _side_bytes(self) -> int:
        """Bytes besides segments and journal: the index, and what is kept free for it."""
        size = self._index.file_bytes() if self._index is not None else 0
        with suppress(OSError):
            size += os.stat(self.root / "reserve", follow_symlinks=False).st_blocks * 512
        return size
