"""Reading from a disk tier: no lock is needed, any thread may."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import lmdb

from . import compression as codecs
from .base import Entry, Fate, Found, Kind, TierFault, TierStats
from .index import DAMAGE, Index, IndexDamaged, Place, Snapshot
from .segment import BadRecord, RecordHeader, check_payload, parse_header, record_length
from .segment_files import GONE, Reading, SegmentFiles

logger = logging.getLogger(__name__)

UNREAD = 4096
FUTURE = 2
"""An end further away than this many times to live was written by a clock that ran ahead."""


class _Where(NamedTuple):
    """A found record's place: what `read` needs."""

    place: Place
    name: str


class Reads:
    """The reading half of the tier; who makes it sets the attributes."""

    stats: TierStats
    files: SegmentFiles
    _clock: Callable[[], float]
    _index: Index | None
    _is_damaged: bool
    """The next change makes the index anew."""
    _bad: deque[tuple[bytes, int]]
    """Records that a reader found bad; taken out with the next change."""
    _unread: set[tuple[bytes, int]]
    """Records that the device has failed to give once. They may be sound; the second time they are bad."""
    _suspects: set[int]
    """Segments with a bad record. What else they have is looked at before it counts as kept."""
    _lock: threading.Condition
    _users: int
    _closed: bool

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
                found.append(found_of(key, place, name, now))
        return found

    def read(self, found: Found, kind: Kind, identity: bytes, content: bytes, out: memoryview) -> None:
        """See `Tier.read`."""
        where = found.place
        assert isinstance(where, _Where)
        place = where.place
        with self._checked(found.key, place):
            with self.files.reading(where.name) as reading:
                header, stored = self._read_record(reading, place, len(content), out)
                has = (header.kind, header.key, header.identity, header.content)
                same = has == (kind, found.key, identity, content) and header.seq == place.seq
                if not same or not header.payload_bytes == found.payload_bytes == len(out):
                    raise BadRecord("another record")
                check_payload(header, stored)
                if header.codec != codecs.NONE:
                    codecs.unpack(header.codec, stored, out)
        self.stats.hits += 1
        self.stats.read_bytes += found.payload_bytes

    def content(self, found: Found) -> bytes:
        """See `Tier.content`."""
        return self.header(found).content

    def header(self, found: Found) -> RecordHeader:
        """A record's own header, checked. Raises `TierFault`."""
        where = found.place
        assert isinstance(where, _Where)
        with self._checked(found.key, where.place):
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
                        listed.append((found_of(key, place, names[place.segment], now), place))
        return listed

    def places(self) -> Iterator[tuple[bytes, Place | None, Found | None]]:
        """Every entry of the index, expired or not: its key, what it says (None if it is damaged), and what
        `read` takes (None if the index does not know its segment)."""
        with self._snapshot() as view:
            if view is None:
                return
            now = self._clock()
            names = {number: info.name for number, info in view.segments()}
            for key, place in view.records():
                name = None if place is None else names.get(place.segment)
                yield key, place, None if place is None or name is None else found_of(key, place, name, now)

    def segment_names(self) -> set[str]:
        """The segments that the index knows."""
        with self._snapshot() as view:
            return set() if view is None else {info.name for _, info in view.segments()}

    def file_of(self, found: Found) -> Path:
        """The segment file that a record lies in."""
        assert isinstance(found.place, _Where)
        return self.files.root / found.place.name

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
    def _checked(self, key: bytes, place: Place) -> Iterator[None]:
        """Turn what can go wrong with a record into a counter and a `TierFault`."""
        try:
            with self._using():
                yield
        except (BadRecord, ValueError) as err:
            self.stats.fault("checksum" if "checksum" in str(err) else "header")
            self._note_bad(key, place)
            raise TierFault(str(err)) from err
        except OSError as err:
            gone = err.errno in GONE
            self.stats.fault("gone" if gone else "io")
            if gone or (key, place.seq) in self._unread:
                self._note_bad(key, place)
            elif len(self._unread) < UNREAD:
                self._unread.add((key, place.seq))
            raise TierFault(str(err)) from err

    def _note_bad(self, key: bytes, place: Place) -> None:
        self._bad.append((key, place.seq))
        if len(self._suspects) < UNREAD:
            self._suspects.add(place.segment)

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
        given = False
        try:
            with self._using():
                index = self._index
                if index is not None and not self._is_damaged:
                    with index.snapshot() as view:
                        given = True
                        yield view
        except TierFault:
            pass
        except (OSError, lmdb.Error, IndexDamaged) as err:
            self.stats.fault("index")
            logger.warning("the index of the disk cache failed: %s", err)
            self._is_damaged |= isinstance(err, (IndexDamaged, *DAMAGE))
        if not given:
            yield None


def ends_at(place: Place, now: float) -> float:
    """When a record ends, as far as its times can be believed (see `FUTURE`)."""
    return float("inf") if place.pinned else min(place.expires_at, now + FUTURE * place.ttl_s)


def found_of(key: bytes, place: Place, name: str, now: float) -> Found:
    return Found(
        key, place.payload_bytes, min(place.created_at, now), ends_at(place, now), place.groups, place.pinned,
        _Where(place, name),
    )  # fmt: skip
