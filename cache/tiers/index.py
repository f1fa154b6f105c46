"""The index of a disk tier: where each record lies and when it ends, in LMDB. It can be rebuilt.

One process writes at a time (`lease`), all may read at any time. Every value carries a checksum of its own: a
flipped bit in the index is a miss, not a read from the wrong place.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb
import xxhash

from .base import Fate, Kind

INDEX_VERSION = 1
MAP_BYTES = 16 << 30
"""Address space, not memory or disk: room for some fifty million records."""
GHOSTS = 65536
PAGE = mmap.PAGESIZE
SPARE_PAGES = 64
MAX_DEPTH = 0xFFFF_FFFF
PLACE = struct.Struct("<IBBBxQQQdddIIQ")
"""segment, kind, codec, flags, offset, length, payload bytes, created, expires, ttl, depth, groups, seq."""
SEGMENT = struct.Struct("<QQQd")
"""bytes of the file that are committed, bytes of its live records, live records, the latest expiry."""
TOTALS = struct.Struct("<IIQQQQd")
"""index version, next segment, next seq, records, segment bytes, journal bytes, the latest time seen."""


DAMAGE = (
    lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError,
    lmdb.IncompatibleError, lmdb.NotFoundError, lmdb.BadTxnError, lmdb.BadDbiError, lmdb.PanicError,
    lmdb.ProblemError, lmdb.CursorFullError, lmdb.PageFullError,
)  # fmt: skip
"""What LMDB says of files that are not as it left them. Its other errors pass: no memory, a full disk."""


class IndexDamaged(Exception):
    """The index cannot be used and must be rebuilt."""


class _Envs:
    """The environments that this process has open, by file: LMDB must not open one twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], tuple[lmdb.Environment, int]] = {}

    def open(self, directory: Path, *, read_only: bool) -> tuple[lmdb.Environment, tuple[int, int]]:
        """An environment and the identity of its file. Raises `OSError`, `lmdb.Error`."""
        with self._lock:
            env, users = None, 0
            with suppress(FileNotFoundError):
                env, users = self._open.get(_identity(directory / "data.mdb"), (None, 0))
            if env is None or (env.flags()["readonly"] and not read_only):
                env = lmdb.open(
                    str(directory), map_size=MAP_BYTES, max_dbs=8, mode=0o600, readonly=read_only,
                    create=not read_only, metasync=False, readahead=False, max_readers=512, lock=True,
                )  # fmt: skip
            identity = _identity(directory / "data.mdb")
            self._open[identity] = env, users + 1
            return env, identity

    def close(self, identity: tuple[int, int]) -> None:
        with self._lock:
            env, users = self._open.pop(identity)
            if users > 1:
                self._open[identity] = env, users - 1
            else:
                env.close()


_envs = _Envs()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies and when it ends."""

    segment: int
    kind: int
    codec: int
    flags: int
    offset: int
    length: int
    payload_bytes: int
    created_at: float
    expires_at: float
    ttl_s: float
    depth: int
    groups: int
    seq: int

    @property
    def pinned(self) -> bool:
        return bool(self.flags & 1)

    def pack(self, key: bytes) -> bytes:
        data = PLACE.pack(
            self.segment, self.kind, self.codec, self.flags, self.offset, self.length, self.payload_bytes,
            self.created_at, self.expires_at, self.ttl_s, self.depth, self.groups, self.seq,
        )  # fmt: skip
        return data + struct.pack("<I", _check(key, data))

    @classmethod
    def unpack(cls, key: bytes, data: bytes) -> Place | None:
        """None if a bit of it has changed."""
        if len(data) != PLACE.size + 4 or _check(key, data[:-4]) != int.from_bytes(data[-4:], "little"):
            return None
        return cls(*PLACE.unpack_from(data))


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment file as the index knows it. `name` is its path below `seg/`."""

    file_bytes: int
    live_bytes: int
    live_records: int
    expires_at: float
    name: str

    def pack(self) -> bytes:
        head = SEGMENT.pack(self.file_bytes, self.live_bytes, self.live_records, self.expires_at)
        return head + self.name.encode()

    @classmethod
    def unpack(cls, data: bytes) -> SegmentInfo:
        """Raises `IndexDamaged`."""
        try:
            file_bytes, live_bytes, live_records, expires_at = SEGMENT.unpack_from(data)
            return cls(file_bytes, live_bytes, live_records, expires_at, data[SEGMENT.size :].decode())
        except (struct.error, ValueError) as err:
            raise IndexDamaged("an entry of a segment") from err


@dataclass(slots=True)
class Totals:
    """Sums that are kept so that opening never scans."""

    version: int = INDEX_VERSION
    next_segment: int = 1
    next_seq: int = 1
    records: int = 0
    segment_bytes: int = 0
    journal_bytes: int = 0
    latest_now: float = 0.0


class Index:
    """An open index.

    Raises:
        IndexDamaged: the files are of another version, truncated, or not as LMDB left them.
        lmdb.Error: it cannot be opened now.
        OSError: the file system refuses.
    """

    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        self.directory = directory
        self._file, self._lock_file = directory / "data.mdb", directory / "lock.mdb"
        for path in (self._file, self._lock_file):
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    raise IndexDamaged(f"{path.name} is not a regular file")
        _check_size(self._file, read_only)
        try:
            self._env, self._identity = _envs.open(directory, read_only=read_only)
        except DAMAGE as err:
            raise IndexDamaged(str(err)) from err
        self._letting_go = weakref.finalize(self, _envs.close, self._identity)
        try:
            names = (b"records", b"order", b"segments", b"named", b"ghosts", b"ghost_order", b"meta")
            opened = [self._env.open_db(name, create=not read_only) for name in names]
            self._records, self._order, self._segments, self._named = opened[:4]
            self._ghosts, self._ghost_order, self._meta = opened[4:]
            self._env.reader_check()
            with self._env.begin() as txn:
                data = txn.get(b"totals", db=self._meta)
                self.is_filled = data is not None
                """Whether a rebuild, if only of nothing, has ever come to its end."""
                version = _totals(data).version
            if version != INDEX_VERSION:
                raise IndexDamaged(f"index version {version}")
            self._sizes = self._seen_sizes()
        except DAMAGE as err:
            self.close()
            raise IndexDamaged(str(err)) from err
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the files. One that is only forgotten does so when its last snapshot ends."""
        self._letting_go()

    def is_current(self) -> bool:
        """Whether the file on disk is still the one that is open: another process may have rebuilt it."""
        try:
            return _identity(self._file) == self._identity
        except OSError:
            return False

    def _seen_sizes(self) -> dict[Path, int]:
        return {path: os.lstat(path).st_size for path in (self._file, self._lock_file)}

    def _check_whole(self) -> None:
        """Raise `IndexDamaged` if somebody has cut a file that is mapped into memory: touching what is not
        there would be a SIGBUS. It is filled up again, so that LMDB can let go of it."""
        try:
            if not self.is_current():
                return  # ours has no name any more
            for path, size in self._seen_sizes().items():
                if size < self._sizes.get(path, 0):
                    os.truncate(path, self._sizes[path])
                    raise IndexDamaged(f"{path.name} was cut off")
                self._sizes[path] = size
        except FileNotFoundError:
            return

    # -- reading -----------------------------------------------------------------------------------

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """A consistent view."""
        self._check_whole()
        with self._env.begin() as txn:
            yield Snapshot(self, txn)

    @contextmanager
    def change(self) -> Iterator[Change]:
        """A transaction: all or nothing. Only with the lease held."""
        self._check_whole()
        with self._env.begin(write=True) as txn:
            change = Change(self, txn)
            try:
                yield change
                change.save_totals()
            except struct.error as err:
                raise IndexDamaged("its sums do not add up") from err

    def totals(self) -> Totals:
        self._check_whole()
        with self._env.begin() as txn:
            return _totals(txn.get(b"totals", db=self._meta))

    def file_bytes(self) -> int:
        """Bytes that the index occupies."""
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(self.directory))


class Snapshot:
    """A read transaction."""

    def __init__(self, index: Index, txn: lmdb.Transaction) -> None:
        self._index, self._txn = index, txn

    def get(self, key: bytes) -> Place | None:
        data = self._txn.get(key, db=self._index._records)
        return None if data is None else Place.unpack(key, bytes(data))

    def fate(self, key: bytes) -> Fate | None:
        data = self._txn.get(key, db=self._index._ghosts)
        try:
            return None if data is None else Fate(bytes(data[8:]).decode())
        except ValueError as err:
            raise IndexDamaged("an entry of a record that is gone") from err

    def segment(self, number: int) -> SegmentInfo | None:
        data = self._txn.get(number.to_bytes(4, "big"), db=self._index._segments)
        return None if data is None else SegmentInfo.unpack(bytes(data))

    def segments(self) -> Iterator[tuple[int, SegmentInfo]]:
        for number, data in self._txn.cursor(db=self._index._segments):
            yield int.from_bytes(number, "big"), SegmentInfo.unpack(bytes(data))

    def soonest(self) -> Iterator[tuple[float, bytes]]:
        """(expires, key) of unpinned records: what ends first comes first, children before parents."""
        for data in self._txn.cursor(db=self._index._order).iternext(values=False):
            yield int.from_bytes(data[:8], "big") / 1e6, bytes(data[12:])

    def records(self) -> Iterator[tuple[bytes, Place | None]]:
        for key, data in self._txn.cursor(db=self._index._records):
            yield bytes(key), Place.unpack(bytes(key), bytes(data))

    def named(self, identity: bytes | None) -> Iterator[bytes]:
        """Keys of named records, of one identity if given."""
        cursor = self._txn.cursor(db=self._index._named)
        if cursor.set_range(identity or b""):
            for data in cursor.iternext(values=False):
                if identity is not None and bytes(data[:32]) != identity:
                    return
                yield bytes(data[32:])


class Change(Snapshot):
    """A write transaction; `totals` are saved at its end."""

    def __init__(self, index: Index, txn: lmdb.Transaction) -> None:
        super().__init__(index, txn)
        data = txn.get(b"totals", db=index._meta)
        self.totals = _totals(data)
        self._before = None if data is None else replace(self.totals)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been changed: whatever is done to a record or a segment moves a sum."""
        return self.totals == self._before

    def save_totals(self) -> None:
        if self.is_empty:
            return
        t = self.totals
        data = TOTALS.pack(
            t.version, t.next_segment, t.next_seq, t.records, t.segment_bytes, t.journal_bytes, t.latest_now
        )
        self._txn.put(b"totals", data, db=self._index._meta)

    def add(self, key: bytes, place: Place, identity: bytes) -> None:
        """Enter a record that is not there."""
        index = self._index
        self._txn.put(key, place.pack(key), db=index._records)
        if not place.pinned:
            self._txn.put(_order_key(key, place), b"", db=index._order)
        if place.kind == Kind.NAMED:
            self._txn.put(identity + key, b"", db=index._named)
        ghost = self._txn.get(key, db=index._ghosts)
        if ghost is not None:
            self._txn.delete(bytes(ghost[:8]) + key, db=index._ghost_order)
            self._txn.delete(key, db=index._ghosts)
        self._count(place, 1)

    def replace(self, key: bytes, old: Place, **fields: object) -> Place:
        """Change a record's times or flags."""
        index, new = self._index, replace(old, **fields)  # type: ignore[arg-type]
        self._txn.delete(_order_key(key, old), db=index._order)
        self._txn.put(key, new.pack(key), db=index._records)
        if not new.pinned:
            self._txn.put(_order_key(key, new), b"", db=index._order)
        info = self.segment(new.segment)
        if info is not None and new.expires_at > info.expires_at:
            self.put_segment(new.segment, replace(info, expires_at=new.expires_at))
        return new

    def remove(self, key: bytes, place: Place, identity: bytes | None, fate: Fate | None) -> None:
        """Take a record out, and remember why."""
        index = self._index
        self._txn.delete(key, db=index._records)
        self._txn.delete(_order_key(key, place), db=index._order)
        if place.kind == Kind.NAMED:
            identity = identity if identity is not None else self._identity_of(key)
            if identity is not None:
                self._txn.delete(identity + key, db=index._named)
        if fate is not None:
            self._add_ghost(key, fate)
        self._count(place, -1)

    def put_segment(self, number: int, info: SegmentInfo) -> None:
        self._txn.put(number.to_bytes(4, "big"), info.pack(), db=self._index._segments)

    def remove_segment(self, number: int) -> None:
        self._txn.delete(number.to_bytes(4, "big"), db=self._index._segments)

    def _count(self, place: Place, sign: int) -> None:
        self.totals.records += sign
        info = self.segment(place.segment)
        if info is not None:
            changed = replace(
                info,
                live_bytes=max(0, info.live_bytes + sign * place.length),
                live_records=max(0, info.live_records + sign),
                expires_at=max(info.expires_at, place.expires_at) if sign > 0 else info.expires_at,
            )
            self.put_segment(place.segment, changed)

    def _identity_of(self, key: bytes) -> bytes | None:
        for data in self._txn.cursor(db=self._index._named).iternext(values=False):
            if data[32:] == key:
                return bytes(data[:32])
        return None

    def _add_ghost(self, key: bytes, fate: Fate) -> None:
        index = self._index
        stamp = self.totals.next_seq.to_bytes(8, "big")
        self.totals.next_seq += 1
        old = self._txn.get(key, db=index._ghosts)
        if old is not None:
            self._txn.delete(bytes(old[:8]) + key, db=index._ghost_order)
        self._txn.put(key, stamp + fate.value.encode(), db=index._ghosts)
        self._txn.put(stamp + key, b"", db=index._ghost_order)
        if self._txn.stat(db=index._ghosts)["entries"] > GHOSTS:
            cursor = self._txn.cursor(db=index._ghost_order)
            if cursor.first():
                self._txn.delete(cursor.key()[8:], db=index._ghosts)
                cursor.delete()


def _totals(data: bytes | memoryview | None) -> Totals:
    try:
        return Totals() if data is None else Totals(*TOTALS.unpack(data))
    except struct.error as err:
        raise IndexDamaged("its sums") from err


def _order_key(key: bytes, place: Place) -> bytes:
    stamp = min(max(int(place.expires_at * 1e6), 0), (1 << 63) - 1)
    return struct.pack(">QI", stamp, MAX_DEPTH - place.depth) + key


def _check(key: bytes, data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key + data) & 0xFFFF_FFFF


def _identity(path: Path) -> tuple[int, int]:
    state = os.stat(path, follow_symlinks=False)
    return state.st_dev, state.st_ino


def _check_size(path: Path, read_only: bool) -> None:
    """Refuse a file that ends well before its last page, and fill up one that lacks a few: touching what is
    not there would be a SIGBUS, not an error. (LMDB may leave out pages at the end that it never used.)"""
    try:
        access = os.O_RDONLY if read_only else os.O_RDWR
        fd = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return
        pages = [os.pread(fd, PAGE, at) for at in (0, PAGE)]
        needed = (max(map(_last_page, pages)) + 1) * PAGE
        if needed <= 0 or size < needed - SPARE_PAGES * PAGE or size < 2 * PAGE:
            raise IndexDamaged("the index file is cut off")
        if size < needed and not read_only:
            os.ftruncate(fd, needed)
    finally:
        os.close(fd)


def _last_page(page: bytes) -> int:
    """The last used page by one of LMDB's two meta pages (lmdb.h 0.9: MDB_meta behind a 16-byte page header:
    magic, version, address, map size, two MDB_db of 48 bytes, last page, transaction); -1 if it is none."""
    if len(page) < 144 or struct.unpack_from("<II", page, 16) != (0xBEEFC0DE, 1):
        return -1
    (last,) = struct.unpack_from("<Q", page, 16 + 24 + 2 * 48)
    return int(last)
