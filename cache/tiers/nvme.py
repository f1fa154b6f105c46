"""The disk tier: segments for the bytes, an index to find them, a journal for what happens to them later.

Everything lies below `<directory>/v<format version>`: another version's files are neither read nor touched.
Reads need no lock and may come from any thread; changes come from one thread and hold the lease.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import lmdb

from . import compression as codecs
from .base import Entry, Fate, Found, Kind, Record, TierFault, TierStats
from .index import Change, Index, IndexDamaged, Place, SegmentInfo, Snapshot
from .journal import Journal, Note, What
from .lease import Lease, LeaseHeld
from .rebuild import rebuild, sweep
from .segment import (
    FORMAT_VERSION,
    PINNED,
    BadRecord,
    RecordHeader,
    check_payload,
    encode_header,
    parse_header,
    record_length,
    write_all,
)
from .segment_files import Reading, SegmentFiles, can_punch

logger = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 1.0
MAINTAIN_LEASE_S = 0.05
SEGMENT_BYTES = 256 << 20
BUDGET_SEGMENTS = 16
"""A small budget has at least so many segments, so that one of them is a small part of it."""
BUCKET_S = 3600
TOUCH_GRAIN = 16384
"""A touch that moves an end by less than this part of the time to live is not worth writing."""
CLOCK_SLACK_S = 1.0
FUTURE = 2
"""An end further away than this many times to live was written by a clock that ran ahead."""
CLOCK_IS_SET = 1_767_225_600.0
"""2026-01-01: a clock that shows less has not been set yet, and nothing is expired by it."""
SUSPEND_S = (1.0, 60.0)
WARN_EVERY_S = 60.0
EXPIRE_AT_ONCE = 4096
RESERVE_BYTES = 1 << 20
"""Kept free for the index on a disk that runs full."""
INDEX_SLACK_BYTES, INDEX_RECORD_BYTES = 1 << 16, 512
"""What the index may grow by with one change, and with each record."""
JOURNAL_BYTES = 1 << 20
"""A journal shorter than this is never rewritten."""


class _Where(NamedTuple):
    """A found record's place: what `read` needs."""

    place: Place
    name: str


class NvmeTier:
    """Records on a local disk, for several processes at once.

    `align`: records begin at multiples of it; 4096 lets an erased record's pages be given back.
    `read_only`: never writes and never takes the lease, for tools beside a running server.
    """

    name = "disk"

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int,
        min_free_bytes: int,
        default_ttl_s: float,
        clock: Callable[[], float],
        compression: Literal["none", "zstd"] = "none",
        item_bytes: int = 2,
        align: int = 4096,
        read_only: bool = False,
    ) -> None:
        self.stats = TierStats(budget_bytes=budget_bytes)
        self.directory = directory
        self.root = directory / f"v{FORMAT_VERSION}"
        self._budget, self._min_free, self._default_ttl_s = budget_bytes, min_free_bytes, default_ttl_s
        self._clock, self._read_only, self._item_bytes = clock, read_only, item_bytes
        self._codec = codecs.SPLIT_ZSTD if compression == "zstd" else codecs.NONE
        self._segment_bytes = max(min(SEGMENT_BYTES, budget_bytes // BUDGET_SEGMENTS), 1)
        self.files = SegmentFiles(self.root / "seg", align)
        self._bad: deque[tuple[bytes, int]] = deque()
        """Records that a reader found bad; taken out with the next change."""
        self._suspended_until = 0.0
        self._suspend_s = SUSPEND_S[0]
        self._warned_at = -WARN_EVERY_S
        self.problem = ""
        """What went wrong last."""
        self._swept = False
        self._punches = False
        self._users = 0
        self._closed = False
        self._lock = threading.Condition()
        self._index: Index | None = None
        self._lease: Lease | None = None
        self._journal: Journal | None = None
        try:
            self._open()
        except (OSError, lmdb.Error, LeaseHeld, IndexDamaged) as err:
            self._failed(err, "the disk cache cannot be opened and is off for now")

    @property
    def is_open(self) -> bool:
        """Whether there is an index to read."""
        return self._index is not None

    # -- reading -----------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Found]:
        """See `Tier.find`."""
        found: list[Found] = []
        with self._snapshot() as view:
            if view is None:
                return found
            now = self._clock()
            names: dict[int, str] = {}
            for key in keys:
                place = view.get(key)
                if place is None or ends_at(place, now) <= now:
                    break
                name = names.get(place.segment)
                if name is None:
                    info = view.segment(place.segment)
                    if info is None:
                        break
                    name = names[place.segment] = info.name
                found.append(_found(key, place, name, now))
        return found

    def read(self, found: Found, kind: Kind, identity: bytes, content: bytes, out: memoryview) -> None:
        """See `Tier.read`."""
        where = found.place
        assert isinstance(where, _Where)
        place = where.place
        with self._checked(found.key, place.seq):
            with self.files.reading(where.name) as reading:
                header, stored = self._read_record(reading, place, len(content), out)
                has = (header.kind, header.key, header.identity, header.content)
                same = has == (kind, found.key, identity, content) and header.seq == place.seq
                if not same or not header.payload_bytes == found.payload_bytes == len(out):
                    raise BadRecord("another record")
                check_payload(header, stored)
                if header.codec != codecs.NONE:
                    codecs.unpack(header.codec, self._item_bytes, stored, out)
        self.stats.hits += 1
        self.stats.read_bytes += found.payload_bytes

    def content(self, found: Found) -> bytes:
        """See `Tier.content`."""
        return self.header(found).content

    def header(self, found: Found) -> RecordHeader:
        """A record's own header, checked. Raises `TierFault`."""
        where = found.place
        assert isinstance(where, _Where)
        with self._checked(found.key, where.place.seq):
            with self.files.reading(where.name) as reading:
                data = os.pread(reading.fd, min(where.place.length, 1 << 16), where.place.offset)
                header = parse_header(data, reading.segment_id)
                if header.key != found.key or header.seq != where.place.seq:
                    raise BadRecord("another record")
                return header
        raise AssertionError

    def fate(self, key: bytes) -> Fate | None:
        """See `Tier.fate`."""
        with self._snapshot() as view:
            if view is None:
                return None
            place = view.get(key)
            if place is None:
                return view.fate(key)
            now = self._clock()
            return Fate.EXPIRED if ends_at(place, now) <= now else None

    def entries(self, kind: Kind, identity: bytes | None = None) -> Iterator[Entry]:
        """See `Tier.entries`."""
        for found, place in self.listed(kind, identity):
            try:
                header = self.header(found)
            except TierFault:
                continue
            if identity is None or header.identity == identity:
                yield Entry(
                    kind, found, header.identity, header.content, header.parent, header.depth, place.length,
                    place.ttl_s,
                )  # fmt: skip

    def listed(self, kind: Kind, identity: bytes | None = None) -> list[tuple[Found, Place]]:
        """What `entries` would list, by the index alone."""
        listed: list[tuple[Found, Place]] = []
        with self._snapshot() as view:
            if view is None:
                return listed
            now = self._clock()
            names = {number: info.name for number, info in view.segments()}
            if kind is Kind.NAMED:
                pairs = ((key, view.get(key)) for key in view.named(identity))
            else:
                pairs = ((key, place) for key, place in view.records())
            for key, place in pairs:
                if place is not None and place.kind == kind and ends_at(place, now) > now:
                    if place.segment in names:
                        listed.append((_found(key, place, names[place.segment], now), place))
        return listed

    def _read_record(
        self, reading: Reading, place: Place, content_bytes: int, out: memoryview
    ) -> tuple[RecordHeader, memoryview]:
        """Header and stored payload, in one read where the payload is stored as it is."""
        before = record_length(content_bytes, 0, reading.align)
        if place.length < before:
            raise BadRecord("length")
        head = memoryview(bytearray(before))
        if place.codec == codecs.NONE:
            stored = out
        else:
            stored = memoryview(bytearray(place.length - before))
        got = os.preadv(reading.fd, [head, stored], place.offset)
        header = parse_header(head, reading.segment_id)
        if header.codec != place.codec or header.payload_offset(reading.align) != before:
            raise BadRecord("another record")
        if got < before + header.stored_bytes or header.stored_bytes > len(stored):
            raise BadRecord("cut off")
        return header, stored[: header.stored_bytes]

    @contextmanager
    def _checked(self, key: bytes, seq: int) -> Iterator[None]:
        """Turn what can go wrong with a record into a counter and a `TierFault`."""
        try:
            with self._using():
                yield
        except (BadRecord, ValueError) as err:
            self.stats.fault("checksum" if "checksum" in str(err) else "header")
            self._bad.append((key, seq))
            raise TierFault(str(err)) from err
        except OSError as err:
            gone = err.errno in (errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO)
            self.stats.fault("gone" if gone else "io")
            if gone:
                self._bad.append((key, seq))
            raise TierFault(str(err)) from err

    @contextmanager
    def _using(self) -> Iterator[None]:
        """`close` waits for this."""
        with self._lock:
            if self._closed:
                raise TierFault("the tier is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._lock.notify_all()

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot | None]:
        """A view of the index; None if there is none to be had."""
        try:
            with self._using():
                index = self._index
                if index is None:
                    yield None
                    return
                with index.snapshot() as view:
                    yield view
        except TierFault:
            yield None
        except lmdb.Error as err:
            self.stats.fault("index")
            logger.warning("the index of the disk cache failed: %s", err)
            self._index = None  # the next change opens or rebuilds it

    # -- changing ----------------------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> list[bytes]:
        """See `Tier.put`."""
        kept: list[bytes] = []
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                kept = self._put(index, records)
        self.stats.dropped += len(records) - len(kept)
        return kept

    def touch(self, ttls: Mapping[bytes, float]) -> list[bytes]:
        """See `Tier.touch`."""
        missing: list[bytes] = []
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                with self._change(index) as change:
                    now, notes = self._clock(), []
                    for key, ttl_s in ttls.items():
                        place = change.get(key)
                        if place is None or ends_at(place, now) <= now:
                            missing.append(key)
                        elif (note := self._extend(change, key, place, ttl_s, now)) is not None:
                            notes.append(note)
                    self._write_notes(change, notes, durable=False)
        return missing

    def pin(self, keys: Sequence[bytes], pinned: bool) -> int:
        """See `Tier.pin`."""
        count = 0
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                with self._change(index) as change:
                    now, notes = self._clock(), []
                    for key in keys:
                        place = change.get(key)
                        if place is None or ends_at(place, now) <= now:
                            continue
                        count += 1
                        if place.pinned != pinned:
                            flags = place.flags | PINNED if pinned else place.flags & ~PINNED
                            ends = now + place.ttl_s
                            change.replace(key, place, flags=flags, expires_at=ends)
                            notes.append(
                                self._note(change, What.PIN if pinned else What.UNPIN, key, ends, place)
                            )
                    self._write_notes(change, notes, durable=True)
        return count

    def erase(self, keys: Sequence[bytes]) -> int:
        """See `Tier.erase`."""
        count = 0
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                with self._change(index) as change:
                    there = [(key, place) for key in keys if (place := change.get(key)) is not None]
                    self._kill(change, there, Fate.DELETED)
                    count = len(there)
        self.stats.deleted += count
        return count

    def maintain(self) -> None:
        """See `Tier.maintain`."""
        with self._changing(MAINTAIN_LEASE_S, quietly=True) as index:
            if index is None:
                return
            if not self._swept:
                self._swept = True
                with self._change(index) as change:
                    sweep(self.files, change)
            with self._change(index) as change:
                now = self._clock()
                self._clamp(change, now)
                expired = self._expired(change, now)
                if expired or change.totals.segment_bytes > self._budget:
                    self._kill(change, expired, Fate.EXPIRED)
                    self.stats.expired += len(expired)
                    self._make_room(change, 0)
                self._remove_dead_segments(change)
            self._compact_journal(index)
            self._make_reserve()

    def close(self) -> None:
        """See `Tier.close`. Waits a moment for readers; what still hangs then keeps its files open."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._users, timeout=2.0)
            idle = not self._users
        if idle:
            self.files.close()
            for part in (self._index, self._journal, self._lease):
                if part is not None:
                    part.close()
        self._index = self._journal = self._lease = None

    def rebuild_index(self) -> None:
        """Make the index anew from segments and journal."""
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                index.close()
                self._rebuild()

    # -- pieces of a change ------------------------------------------------------------------------

    def _put(self, index: Index, records: Sequence[Record]) -> list[bytes]:
        now, kept = self._clock(), []
        fresh: dict[bytes, tuple[Record, int, memoryview]] = {}
        with self._change(index) as change:
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
                if writing is None or ends.get(bucket, writing.end) >= self._segment_bytes:
                    if writing is not None and bucket in ends:
                        os.fdatasync(writing.fd)
                        writing.end = ends.pop(bucket)
                    writing = self.files.create(bucket, change.totals.next_segment, now)
                    change.totals.next_segment += 1
                    change.totals.segment_bytes += self.files.header_bytes
                    change.put_segment(writing.number, SegmentInfo(writing.end, 0, 0, 0.0, writing.name))
                offset = ends.get(bucket, writing.end)
                seq = change.totals.next_seq
                change.totals.next_seq += 1
                expires_at = now + record.ttl_s
                head = encode_header(
                    record, writing.segment_id, self.files.align, codec=codec, stored=stored, seq=seq,
                    created_at=now, expires_at=expires_at,
                )  # fmt: skip
                tail = bytes(length - len(head) - len(stored))
                write_all(writing.fd, [head, stored, tail], offset)
                ends[bucket] = offset + length
                flags = PINNED if record.pinned else 0
                place = Place(
                    writing.number, record.kind, codec, flags, offset, length, len(record.payload), now,
                    expires_at, record.ttl_s, record.depth, record.groups, seq,
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

    def _differs(self, change: Change, record: Record, place: Place) -> bool:
        """Whether a named record's value is another than the one that is stored."""
        if record.kind is not Kind.NAMED:
            return False
        info = change.segment(place.segment)
        value = bytearray(place.payload_bytes)
        if info is None or place.payload_bytes != len(record.payload):
            return True
        found = _found(record.key, place, info.name, self._clock())
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
        """Let records give way, the soonest to end first, until `need` more bytes fit; whether they do."""
        others = change.totals.journal_bytes + self._side_bytes()
        free = self._free_bytes()
        excess = max(change.totals.segment_bytes + others + need - self._budget, self._min_free + need - free)
        if excess <= 0:
            return True
        now, doomed, gained = self._clock(), [], 0
        for _, key in change.soonest():
            if gained >= excess:
                break
            place = change.get(key)
            if place is not None:
                doomed.append((key, place))
                gained += place.length
        early = sum(ends_at(place, now) > now for _, place in doomed)
        self._kill(change, doomed, Fate.EVICTED)
        self.stats.evicted += early
        self.stats.expired += len(doomed) - early
        if not self._punches:
            return change.totals.segment_bytes + others + need <= self._budget
        return gained >= excess

    def _clamp(self, change: Change, now: float) -> None:
        """When the clock has gone back far, records of its future end like those of now."""
        went_back = now + CLOCK_SLACK_S < change.totals.latest_now
        if now >= CLOCK_IS_SET:
            change.totals.latest_now = now
            if went_back:
                future = [
                    (key, place)
                    for key, place in change.records()
                    if place is not None
                    and not place.pinned
                    and place.expires_at > now + FUTURE * place.ttl_s
                ]
                notes = []
                for key, place in future:
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

    # -- opening, failing --------------------------------------------------------------------------

    def _open(self) -> None:
        """Open or make the directory. Raises what cannot be helped."""
        if not self._read_only:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.directory, self.root, self.root / "seg", self.root / "index"):
            if not self._read_only:
                with suppress(FileExistsError):
                    folder.mkdir(0o700)
            state = os.stat(folder, follow_symlinks=folder == self.directory)
            if not stat.S_ISDIR(state.st_mode) or state.st_uid not in (os.geteuid(), 0):
                raise OSError(errno.EACCES, f"{folder} is no directory of ours")
            if folder != self.directory and stat.S_IMODE(state.st_mode) != 0o700 and not self._read_only:
                os.chmod(folder, 0o700)
        if self._read_only:
            self._index = Index(self.root / "index", read_only=True)
        else:
            self._punches = can_punch(self.root)
            self._lease = Lease(self.root / "lease")
            self._journal = Journal(self.root / "journal")
            with self._lease.hold(LEASE_TIMEOUT_S):
                self._open_index()
        self._refresh()

    def _open_index(self) -> Index:
        try:
            data = self.root / "index" / "data.mdb"
            if (not data.exists() or not data.stat().st_size) and any(self.files.names()):
                raise IndexDamaged("there are segments but no index")
            self._index = Index(self.root / "index")
            return self._index
        except IndexDamaged as err:
            self.stats.fault("index")
            logger.warning("the index of the disk cache is made anew: %s", err)
            return self._rebuild()

    def _rebuild(self) -> Index:
        assert self._journal is not None
        self._index = None
        for path in (self.root / "index").iterdir():
            path.unlink()
        index = Index(self.root / "index")
        rebuild(index, self.files, self._journal, self._punches)
        self._index = index
        self._swept = False
        return index

    @contextmanager
    def _changing(self, timeout_s: float, *, quietly: bool = False) -> Iterator[Index | None]:
        """Hold the lease; None if nothing can be changed now. Whatever goes wrong in the block is counted and
        ends it."""
        if self._closed or self._read_only or time.monotonic() < self._suspended_until:
            yield None
            return
        entered = False
        try:
            if self._lease is None or self._journal is None:
                self._open()
            assert self._lease is not None
            with self._lease.hold(timeout_s):
                index = self._index
                if index is None or not index.is_current():
                    index = self._open_index()
                self._drop_bad(index)
                entered = True
                yield index
                self._refresh()
                self.stats.suspended = False
        except LeaseHeld:
            if not quietly:
                self.stats.fault("lease")
            if not entered:
                yield None
        except (OSError, lmdb.Error, IndexDamaged) as err:
            self._failed(err, "the disk cache could not be written")
            if not entered:
                yield None

    @contextmanager
    def _change(self, index: Index) -> Iterator[Change]:
        with index.change() as change:
            change.totals.latest_now = max(change.totals.latest_now, self._clock())
            yield change

    def _drop_bad(self, index: Index) -> None:
        """Take out what readers have found bad, so that it is written anew."""
        bad = [self._bad.popleft() for _ in range(len(self._bad))]
        if bad:
            with self._change(index) as change:
                there = [(key, place, seq) for key, seq in bad if (place := change.get(key)) is not None]
                doomed = {key: place for key, place, seq in there if place.seq == seq}
                self._kill(change, list(doomed.items()), Fate.CORRUPT)

    def _failed(self, err: Exception, what: str) -> None:
        """Count a failure, undo what is half written, and write nothing for a while."""
        code = err.errno if isinstance(err, OSError) else None
        full = code in (errno.ENOSPC, errno.EDQUOT) or isinstance(err, lmdb.MapFullError | lmdb.DiskError)
        kinds = {errno.EROFS: "read_only", errno.EACCES: "denied", errno.EPERM: "denied"}
        index = isinstance(err, lmdb.Error | IndexDamaged)
        self.stats.fault("full" if full else "index" if index else kinds.get(code or 0, "io"))
        self.stats.suspended, self.problem = True, str(err)
        self._suspended_until = time.monotonic() + self._suspend_s
        self._suspend_s = min(2 * self._suspend_s, SUSPEND_S[1])
        self.files.roll_back()
        if full:
            with suppress(OSError):
                (self.root / "reserve").unlink()
        if isinstance(err, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError | IndexDamaged):
            self._index = None
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            logger.warning("%s: %s", what, err)

    def _make_reserve(self) -> None:
        path = self.root / "reserve"
        with suppress(OSError):
            if not path.exists() and self._free_bytes() > self._min_free + RESERVE_BYTES:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(path, flags, 0o600)
                try:
                    os.posix_fallocate(fd, 0, min(RESERVE_BYTES, self._budget // 64))
                finally:
                    os.close(fd)

    def _free_bytes(self) -> int:
        state = os.statvfs(self.root)
        return state.f_bavail * state.f_frsize

    def _side_bytes(self) -> int:
        """Bytes besides segments and journal: the index, and what is kept free for it."""
        size = self._index.file_bytes() if self._index is not None else 0
        with suppress(OSError):
            size += os.stat(self.root / "reserve", follow_symlinks=False).st_blocks * 512
        return size

    def _refresh(self) -> None:
        if self._index is not None:
            totals = self._index.totals()
            self.stats.records = totals.records
            self.stats.bytes = totals.segment_bytes + totals.journal_bytes + self._side_bytes()


def ends_at(place: Place, now: float) -> float:
    """When a record ends, as far as its times can be believed (see `FUTURE`)."""
    return float("inf") if place.pinned else min(place.expires_at, now + FUTURE * place.ttl_s)


def _found(key: bytes, place: Place, name: str, now: float) -> Found:
    return Found(
        key, place.payload_bytes, min(place.created_at, now), ends_at(place, now), place.groups, place.pinned,
        _Where(place, name),
    )  # fmt: skip
