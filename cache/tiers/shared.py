"""The shared tier: one immutable file per record in a directory that several servers see (NFS, 3FS, ...).

Needs of the file system only atomic rename, exclusive create and modification times: no locks, no mmap. A
file's modification time is when its record ends. One server at a time cleans up (`sweep_lease.py`).
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import secrets
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from . import compression as codecs
from .base import Entry, Fate, Found, Kind, Record, TierFault, TierStats
from .ghosts import Ghosts
from .segment import (
    FORMAT_VERSION,
    RECORD_HEADER,
    BadRecord,
    RecordHeader,
    check_payload,
    encode_header,
    padded,
    parse_header,
    write_all,
)
from .sweep_lease import SweepLease

logger = logging.getLogger(__name__)

FILE_ID = b"artesian shared\0"
"""Stands for a segment's id in the records' checksums: a file holds one record, at its beginning."""
ALIGN = 4096
SWEEP_EVERY_S = 60.0
TOUCH_GRAIN = 1024
"""Times to live are renewed when they have shrunk by this part: each renewal is a call over the network."""
EVICT_AT_ONCE = 8192
EVICT_AHEAD = 64
"""This part of the budget is freed beyond what is needed: finding out what ends soonest reads all folders."""
FUTURE = 8
"""An end further away than this many times to live was written by a clock that ran ahead."""
CLOCK_IS_SET = 1_767_225_600.0
"""2026-01-01: a clock that shows less has not been set yet, and nothing is expired by it."""
STALE_TMP_S = 3600.0
WARN_EVERY_S = 60.0
ERASE_BYTES = 1 << 20
PIN_BIT = 0o100
"""A pinned record's file is executable for its owner: a flag that needs no second file."""


class _File(NamedTuple):
    """A record's file, as a listing shows it; sorts by its end."""

    ends_at: float
    key: bytes
    size: int


class SharedTier:
    """Records in a shared directory. Files belong to the servers' user; in a directory that its group may
    write to, to any member of the group."""

    name = "shared"

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
    ) -> None:
        self.stats = TierStats(budget_bytes=budget_bytes)
        self.root = directory / f"v{FORMAT_VERSION}"
        self._budget, self._min_free, self._clock = budget_bytes, min_free_bytes, clock
        self._default_ttl_s = default_ttl_s
        self._codec = codecs.SPLIT_ZSTD if compression == "zstd" else codecs.NONE
        self._item_bytes = item_bytes
        self._swept_at = self._full_at = self._warned_at = -float("inf")
        self._ghosts = Ghosts()
        self._closed = False
        self._file_mode, self._folder_mode = 0o600, 0o700
        self._owners, self._group = {os.geteuid()}, -1
        with self._counted():
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            mode = stat.S_IMODE(directory.stat().st_mode)
            self._file_mode |= mode & 0o060  # a directory for a group holds files for the group
            self._folder_mode |= mode & 0o070
            self._make_folder(self.root)
            state = os.lstat(self.root)
            self._owners.add(state.st_uid)  # on some mounts everybody's files are one user's
            self._group = state.st_gid if mode & stat.S_IWGRP else -1
        self._lease = SweepLease(self.root / "sweeper", self._file_mode)

    # -- reading -----------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Found]:
        """See `Tier.find`."""
        found: list[Found] = []
        for key in keys:
            one = self._find(key)
            if one is None:
                break
            found.append(one)
        return found

    def read(self, found: Found, kind: Kind, identity: bytes, content: bytes, out: memoryview) -> None:
        """See `Tier.read`."""
        try:
            with self._open(found.key) as (fd, _):
                header = self._header(fd, found.key)
                if (header.kind, header.identity, header.content) != (kind, identity, content):
                    self.stats.fault("header")
                    raise TierFault("another record")
                if header.payload_bytes != len(out):  # replaced since it was found
                    self.stats.fault("short")
                    raise TierFault("another length")
                whole = header.codec == codecs.NONE
                stored = out if whole else memoryview(bytearray(header.stored_bytes))
                _read_all(fd, stored, header.payload_offset(ALIGN))
                check_payload(header, stored)
                if not whole:
                    codecs.unpack(header.codec, stored, out)
        except (BadRecord, ValueError) as err:
            self._discard(found.key, err)
            raise TierFault(str(err)) from err
        except OSError as err:
            self.stats.fault(_fault(err))
            raise TierFault(str(err)) from err
        self.stats.hits += 1
        self.stats.read_bytes += len(out)

    def content(self, found: Found) -> bytes:
        """See `Tier.content`."""
        try:
            with self._open(found.key) as (fd, _):
                return self._header(fd, found.key).content
        except (OSError, BadRecord) as err:
            raise TierFault(str(err)) from err

    def fate(self, key: bytes) -> Fate | None:
        """See `Tier.fate`. What other servers did is not known, but for files that have expired."""
        if self._closed:
            return None
        with suppress(OSError):
            state = os.stat(self._path(key), follow_symlinks=False)
            if self._is_ours(state):
                return None if self._is_live(state) else Fate.EXPIRED
        return self._ghosts.get(key)

    def entries(self, kind: Kind, identity: bytes | None = None) -> Iterator[Entry]:
        """See `Tier.entries`."""
        for file, state in self._files():
            if self._closed:
                return
            if not self._is_live(state):
                continue
            try:
                with self._open(file.key) as (fd, state):
                    header = self._header(fd, file.key)
            except (OSError, BadRecord):
                continue
            if header.kind == kind and identity in (None, header.identity) and self._is_live(state):
                yield Entry(
                    kind, self._found(header, state), header.identity, header.content, header.parent,
                    header.depth, file.size, header.ttl_s,
                )  # fmt: skip

    def _find(self, key: bytes) -> Found | None:
        if self._closed:
            return None
        try:
            with self._open(key) as (fd, state):
                return self._found(self._header(fd, key), state) if self._is_live(state) else None
        except FileNotFoundError:
            return None
        except OSError as err:
            self.stats.fault(_fault(err))
        except BadRecord as err:
            self._discard(key, err)
        return None

    def _is_ours(self, state: os.stat_result) -> bool:
        is_trusted = state.st_uid in self._owners or state.st_gid == self._group
        return stat.S_ISREG(state.st_mode) and is_trusted

    def _is_live(self, state: os.stat_result) -> bool:
        return bool(state.st_mode & PIN_BIT) or state.st_mtime > self._clock()

    def _found(self, header: RecordHeader, state: os.stat_result) -> Found:
        now, pinned = self._clock(), bool(state.st_mode & PIN_BIT)
        ends_at = min(state.st_mtime, now + FUTURE * _ttl_of(header))
        return Found(
            header.key, header.payload_bytes, min(header.created_at, now),
            float("inf") if pinned else ends_at, header.groups, pinned, None,
        )  # fmt: skip

    @contextmanager
    def _open(self, key: bytes) -> Iterator[tuple[int, os.stat_result]]:
        """Open a record's file. Raises `OSError`, also for what other users left there, or links."""
        fd = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            state = os.fstat(fd)
            if not self._is_ours(state):
                raise PermissionError(errno.EPERM, "not a file of ours")
            yield fd, state
        finally:
            os.close(fd)

    def _header(self, fd: int, key: bytes) -> RecordHeader:
        """Raises `BadRecord`: not the record that the file's name says, or cut off."""
        head = os.pread(fd, ALIGN, 0)
        if len(head) >= RECORD_HEADER.size:
            content_bytes = min(RECORD_HEADER.unpack_from(head)[7], 1 << 20)
            if RECORD_HEADER.size + content_bytes > ALIGN:
                head = os.pread(fd, RECORD_HEADER.size + content_bytes, 0)
        header = parse_header(head, FILE_ID)
        if header.key != key:
            raise BadRecord("another key")
        if header.stored_bytes > header.payload_bytes:
            raise BadRecord("lengths")
        if header.payload_offset(ALIGN) + header.stored_bytes > os.fstat(fd).st_size:
            raise BadRecord("cut off")
        return header

    def _discard(self, key: bytes, err: Exception) -> None:
        """A file of ours that is provably bad goes."""
        self.stats.fault("checksum" if "checksum" in str(err) else "header")
        self._ghosts.add(key, Fate.CORRUPT)
        with suppress(OSError):
            self._path(key).unlink()

    # -- changing ----------------------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> list[bytes]:
        """See `Tier.put`."""
        here: list[bytes] = []
        if not self._closed:
            now, folders = self._clock(), set[Path]()
            for record in records:
                found = self._find(record.key)
                if found is not None and (record.kind is Kind.BLOCK or self._has(found, record)):
                    self.touch({record.key: record.ttl_s})
                    here.append(record.key)
                    continue
                with self._counted():
                    if self._write(record, now):
                        folders.add(self._path(record.key).parent)
                        here.append(record.key)
            for folder in folders:
                with self._counted():
                    _sync_folder(folder)
        self.stats.dropped += len(records) - len(here)
        return here

    def touch(self, ttls: Mapping[bytes, float]) -> list[bytes]:
        """See `Tier.touch`."""
        missing: list[bytes] = []
        now = self._clock()  # one for all: a chain's blocks end together, see `_let_go`
        for key, ttl_s in () if self._closed else ttls.items():
            path = self._path(key)
            try:
                state = os.stat(path, follow_symlinks=False)
                if not self._is_ours(state) or not self._is_live(state):
                    missing.append(key)
                elif now + ttl_s > state.st_mtime + ttl_s / TOUCH_GRAIN:
                    os.utime(path, (now, now + ttl_s), follow_symlinks=False)
            except FileNotFoundError:
                missing.append(key)
            except OSError as err:
                self.stats.fault(_fault(err))
        return list(ttls) if self._closed else missing

    def pin(self, keys: Sequence[bytes], pinned: bool) -> int:
        """See `Tier.pin`."""
        count = 0
        for key in () if self._closed else keys:
            with self._counted(), suppress(FileNotFoundError), self._open(key) as (fd, state):
                if not self._is_live(state):
                    continue
                count += 1
                if bool(state.st_mode & PIN_BIT) != pinned:
                    ends_at = self._clock() + _ttl_of(self._header(fd, key))
                    os.utime(fd, (ends_at, ends_at))
                    mode = stat.S_IMODE(state.st_mode)
                    os.fchmod(fd, mode | PIN_BIT if pinned else mode & ~PIN_BIT)
                    os.fsync(fd)
        self._full_at = -float("inf")
        return count

    def erase(self, keys: Sequence[bytes]) -> int:
        """See `Tier.erase`. The bytes are overwritten where the file system writes in place."""
        count = 0
        for key in () if self._closed else keys:
            path = self._path(key)
            with self._counted(), suppress(FileNotFoundError):
                state = os.lstat(path)
                if not self._is_ours(state):
                    continue
                with self._counted():
                    _overwrite(path, state.st_size)
                path.unlink()
                count += 1
                self._ghosts.add(key, Fate.DELETED)
                self._count(-1, -_occupied(state))
        self._full_at = -float("inf")
        self.stats.deleted += count
        if any(self.find([key]) for key in keys):
            raise TierFault("the shared cache cannot be changed now")
        return count

    def maintain(self) -> None:
        """See `Tier.maintain`."""
        now = self._clock()
        if self._closed or 0 <= now - self._swept_at < SWEEP_EVERY_S:
            return
        self._swept_at = now
        with self._counted():
            if self._lease.elect(now):
                self._sweep(0)
                self._lease.publish(now, self.stats.records, self.stats.bytes)
            else:
                self.stats.records, self.stats.bytes = self._lease.records, self._lease.bytes

    def close(self) -> None:
        """See `Tier.close`."""
        self._closed = True

    def _has(self, found: Found, record: Record) -> bool:
        """Whether a named record's value is there already."""
        if found.payload_bytes != len(record.payload):
            return False
        value = bytearray(found.payload_bytes)
        try:
            self.read(found, record.kind, record.identity, record.content, memoryview(value))
        except TierFault:
            return False
        return value == record.payload

    def _write(self, record: Record, now: float) -> bool:
        """Whether there was room. Raises `OSError`."""
        codec, packed = codecs.pack(self._codec, self._item_bytes, record.payload)
        stored = memoryview(packed)
        head = encode_header(
            record, FILE_ID, ALIGN, codec=codec, stored=stored, seq=0, created_at=now,
            expires_at=now + record.ttl_s,
        )  # fmt: skip
        size = padded(len(head) + len(stored), ALIGN)
        if not self._make_room(size, now):
            self.stats.fault("full")
            return False
        path = self._path(record.key)
        self._make_folder(path.parent)
        fresh = path.with_name(f".{record.key.hex()}-{secrets.token_hex(4)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(fresh, flags, self._file_mode)
        try:
            try:
                os.fchmod(fd, self._file_mode | (PIN_BIT if record.pinned else 0))
                write_all(fd, [head, stored], 0)
                os.utime(fd, (now, now + record.ttl_s))
                os.fsync(fd)
            finally:
                os.close(fd)
            with suppress(OSError):
                self._count(-1, -_occupied(os.lstat(path)))
            os.rename(fresh, path)
        except BaseException:
            with suppress(OSError):
                fresh.unlink()
            raise
        self._ghosts.forget(record.key)
        self._count(1, size)
        self.stats.written_records += 1
        self.stats.written_bytes += size
        return True

    def _count(self, records: int, size: int) -> None:
        """Between two sweeps, which count anew: other servers' writes are not seen before."""
        self.stats.records = max(0, self.stats.records + records)
        self.stats.bytes = max(0, self.stats.bytes + size)

    # -- making room -------------------------------------------------------------------------------

    def _make_room(self, size: int, now: float) -> bool:
        """Let records give way until `size` more bytes fit; none, if they never can."""
        if size > self._budget:
            return False
        if self.stats.bytes + size <= self._budget and self._free_bytes() >= self._min_free + size:
            return True
        if 0 <= now - self._full_at < SWEEP_EVERY_S:
            return False  # was looked for in vain
        if self._sweep(size):
            return True
        self._full_at = now
        return False

    def _sweep(self, need: int) -> bool:
        """Remove what has expired, count what is left, and let records give way until `need` more bytes fit;
        whether they do. If they never can, nothing gives way for them."""
        records, total, soonest = self._survey(self._clock())
        excess = max(total + need - self._budget, self._min_free + need - self._free_bytes() if need else 0)
        fits = excess <= 0
        if not fits:
            fits = excess <= sum(file.size for file in soonest)
            if fits or not need:
                gone = self._let_go(soonest, excess + self._budget // EVICT_AHEAD)
                records, total = records - len(gone), total - sum(file.size for file in gone)
        self.stats.records, self.stats.bytes = records, total
        return fits

    def _survey(self, now: float) -> tuple[int, int, list[_File]]:
        """Remove expired files; the number and bytes of the others, and those that end soonest."""
        records = total = 0

        def unpinned() -> Iterator[_File]:
            nonlocal records, total
            for file, state in self._files():
                if not self._is_live(state) and now >= CLOCK_IS_SET:
                    if self._remove(file.key, Fate.EXPIRED):
                        self.stats.expired += 1
                    continue
                if file.ends_at > now + FUTURE * self._default_ttl_s and now >= CLOCK_IS_SET:
                    file = file._replace(ends_at=self._clamp(file, now))
                records, total = records + 1, total + file.size
                if not state.st_mode & PIN_BIT:
                    yield file

        soonest = heapq.nsmallest(EVICT_AT_ONCE, unpinned())
        return records, total, soonest

    def _clamp(self, file: _File, now: float) -> float:
        """The end of a file that seems to end far away; if a clock ran ahead, it is set anew."""
        header = self._peek(file.key)
        if header is None or file.ends_at <= now + FUTURE * _ttl_of(header):
            return file.ends_at
        ends_at = now + _ttl_of(header)
        with self._counted():
            os.utime(self._path(file.key), (now, ends_at), follow_symlinks=False)
        return ends_at

    def _let_go(self, soonest: list[_File], excess: int) -> list[_File]:
        """Remove `excess` bytes of files, the soonest to end first, but the blocks after a block before it.
        Those end with it or, since not each touch is written, a little later."""
        count = covered = 0
        while count < len(soonest) and covered < excess:
            covered += soonest[count].size
            count += 1
        latest = soonest[count - 1].ends_at + self._default_ttl_s / TOUCH_GRAIN if count else 0.0
        candidates = {f.key: f for f in soonest[: bisect_right(soonest, latest, key=lambda f: f.ends_at)]}
        children: dict[bytes, list[bytes]] = {}
        for key in candidates:
            if (header := self._peek(key)) is not None and header.kind is Kind.BLOCK:
                children.setdefault(header.parent, []).append(key)
        gone: list[_File] = []
        freed, now = 0, self._clock()
        for first in soonest[:count]:
            path = [first.key]
            while path and freed < excess:
                if after := children.pop(path[-1], None):
                    path += after
                    continue
                file = candidates.pop(path.pop(), None)
                if file is not None and self._remove(file.key, Fate.EVICTED):
                    gone.append(file)
                    freed += file.size
                    if file.ends_at > now:
                        self.stats.evicted += 1
                    else:
                        self.stats.expired += 1
        return gone

    def _peek(self, key: bytes) -> RecordHeader | None:
        with suppress(OSError, BadRecord), self._open(key) as (fd, _):
            return self._header(fd, key)
        return None

    def _remove(self, key: bytes, fate: Fate) -> bool:
        try:
            self._path(key).unlink()
        except OSError:
            return False
        self._ghosts.add(key, fate)
        return True

    # -- files -------------------------------------------------------------------------------------

    def _files(self) -> Iterator[tuple[_File, os.stat_result]]:
        """Files of ours that are named like records; leftovers of writers that died are removed."""
        for folder in _listed(self.root):
            if len(folder) != 2 or not stat.S_ISDIR(os.lstat(self.root / folder).st_mode):
                continue
            for name in _listed(self.root / folder):
                path = self.root / folder / name
                with suppress(OSError, ValueError):
                    state = os.lstat(path)
                    if not self._is_ours(state):
                        continue
                    if name.endswith(".tmp") and state.st_ctime < self._clock() - STALE_TMP_S:
                        path.unlink()
                    key = bytes.fromhex(name)
                    if self._path(key) == path:
                        yield _File(state.st_mtime, key, _occupied(state)), state

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.root / name[:2] / name

    def _make_folder(self, path: Path) -> None:
        with suppress(FileExistsError):
            path.mkdir(self._folder_mode)
            inherited = path.stat().st_mode & stat.S_ISGID
            path.chmod(self._folder_mode | inherited)  # whatever the umask is

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What the file system refuses is a counter, and a warning now and then."""
        try:
            yield
        except (OSError, BadRecord) as err:
            self.stats.fault(_fault(err) if isinstance(err, OSError) else "header")
            now = self._clock()
            if not 0 <= now - self._warned_at < WARN_EVERY_S:
                self._warned_at = now
                logger.warning("the shared cache: %s", err)


def _fault(err: OSError) -> str:
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    return "gone" if err.errno in (errno.ENOENT, errno.ESTALE) else "io"


def _ttl_of(header: RecordHeader) -> float:
    return max(header.ttl_s, header.expires_at - header.created_at)


def _occupied(state: os.stat_result) -> int:
    """Bytes that a file takes, as budgets count them: not all file systems know their blocks at once."""
    return padded(state.st_size, ALIGN)


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_all(fd: int, out: memoryview, offset: int) -> None:
    """Fill `out`. Raises `BadRecord` if the file ends before."""
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], offset + done)
        if got == 0:
            raise BadRecord("cut off")
        done += got


def _overwrite(path: Path, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        for offset in range(0, size, ERASE_BYTES):
            os.pwrite(fd, bytes(min(ERASE_BYTES, size - offset)), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    """Make names durable, where the file system lets folders be synced."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)
