"""The shared tier: one immutable file per record in a directory that several servers see (NFS, 3FS, ...).

Needs of the file system only atomic rename, exclusive create and modification times: no locks, no mmap. A
file's modification time is when its record ends. One server at a time cleans up, elected by a file with a
deadline.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from . import compression as codecs
from .base import Entry, Fate, Found, Kind, Record, TierFault, TierStats
from .segment import (
    FORMAT_VERSION,
    RECORD_HEADER,
    BadRecord,
    RecordHeader,
    check_payload,
    encode_header,
    parse_header,
)

logger = logging.getLogger(__name__)

FILE_ID = b"artesian shared\0"
"""Stands for a segment's id in the records' checksums: a file holds one record, at its beginning."""
ALIGN = 4096
SWEEP_EVERY_S = 60.0
SWEEP_LEASE_S = 300.0
TOUCH_GRAIN = 64
"""Times to live are renewed when they have shrunk by this part: each renewal is a call over the network."""
STALE_TMP_S = 3600.0
PIN_BIT = 0o100
"""A pinned record's file is executable for its owner: a flag that needs no second file."""


class SharedTier:
    """Records in a shared directory."""

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
        self._codec = codecs.SPLIT_ZSTD if compression == "zstd" else codecs.NONE
        self._item_bytes = item_bytes
        self._who = secrets.token_hex(8)
        self._swept_at = -float("inf")
        self._closed = False
        with self._counted():
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            mode = stat.S_IMODE(directory.stat().st_mode)
            self._file_mode = mode & 0o660 | 0o600  # a directory for a group holds files for the group
            self._folder_mode = mode & 0o770 | 0o700
            self._make_folder(self.root)

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
            with self._open(found.key) as fd:
                header = self._header(fd)
                same = (header.kind, header.key, header.identity, header.content)
                if same != (kind, found.key, identity, content) or header.payload_bytes != len(out):
                    raise BadRecord("another record")
                whole = header.codec == codecs.NONE
                stored = out if whole else memoryview(bytearray(header.stored_bytes))
                got = os.preadv(fd, [stored], header.payload_offset(ALIGN))
                if got != header.stored_bytes:
                    raise BadRecord("cut off")
                check_payload(header, stored)
                if not whole:
                    codecs.unpack(header.codec, self._item_bytes, stored, out)
        except (BadRecord, ValueError) as err:
            self.stats.fault("checksum" if "checksum" in str(err) else "header")
            with suppress(OSError):
                self._path(found.key).unlink()
            raise TierFault(str(err)) from err
        except OSError as err:
            self.stats.fault("gone" if isinstance(err, FileNotFoundError) else "io")
            raise TierFault(str(err)) from err
        self.stats.hits += 1
        self.stats.read_bytes += len(out)

    def content(self, found: Found) -> bytes:
        """See `Tier.content`."""
        try:
            with self._open(found.key) as fd:
                return self._header(fd).content
        except (OSError, BadRecord) as err:
            raise TierFault(str(err)) from err

    def fate(self, key: bytes) -> Fate | None:
        """Expired records are known as long as their file is there; nothing else is remembered."""
        with suppress(OSError):
            state = os.stat(self._path(key), follow_symlinks=False)
            if stat.S_ISREG(state.st_mode) and not state.st_mode & PIN_BIT:
                return Fate.EXPIRED if state.st_mtime <= self._clock() else None
        return None

    def entries(self, kind: Kind, identity: bytes | None = None) -> Iterator[Entry]:
        """See `Tier.entries`."""
        for path, state in self._files():
            key = bytes.fromhex(path.name)
            found = self._found(key, state)
            if found is None:
                continue
            try:
                with self._open(key) as fd:
                    header = self._header(fd)
            except (OSError, BadRecord):
                continue
            if header.kind == kind and identity in (None, header.identity) and header.key == key:
                yield Entry(
                    kind, self._with_header(found, header), header.identity, header.content, header.parent,
                    header.depth, state.st_blocks * 512, header.ttl_s,
                )  # fmt: skip

    def _find(self, key: bytes) -> Found | None:
        try:
            with self._open(key) as fd:
                found = self._found(key, os.fstat(fd))
                return None if found is None else self._with_header(found, self._header(fd))
        except FileNotFoundError:
            return None
        except OSError:
            self.stats.fault("io")
        except BadRecord:
            self.stats.fault("header")
            with suppress(OSError):
                self._path(key).unlink()
        return None

    def _found(self, key: bytes, state: os.stat_result) -> Found | None:
        now, pinned = self._clock(), bool(state.st_mode & PIN_BIT)
        if not stat.S_ISREG(state.st_mode) or not pinned and state.st_mtime <= now:
            return None
        return Found(key, 0, now, float("inf") if pinned else state.st_mtime, 0, pinned, None)

    def _with_header(self, found: Found, header: RecordHeader) -> Found:
        now = self._clock()
        latest = max(header.ttl_s, header.expires_at - header.created_at)
        return found._replace(
            payload_bytes=header.payload_bytes,
            created_at=min(header.created_at, now),
            expires_at=found.expires_at if found.pinned else min(found.expires_at, now + 8 * latest),
            groups=header.groups,
        )

    @contextmanager
    def _open(self, key: bytes) -> Iterator[int]:
        if self._closed:
            raise OSError("the tier is closed")
        fd = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BadRecord("not a regular file")
            yield fd
        finally:
            os.close(fd)

    def _header(self, fd: int) -> RecordHeader:
        head = os.pread(fd, ALIGN, 0)
        if len(head) >= RECORD_HEADER.size:
            content_bytes = min(RECORD_HEADER.unpack_from(head)[7], 1 << 20)
            if RECORD_HEADER.size + content_bytes > ALIGN:
                head = os.pread(fd, RECORD_HEADER.size + content_bytes, 0)
        return parse_header(head, FILE_ID)

    # -- changing ----------------------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> list[bytes]:
        """See `Tier.put`."""
        here: list[bytes] = []
        for record in records:
            found = self._find(record.key)
            if found is not None and (record.kind is Kind.BLOCK or self._has(found, record)):
                self.touch({record.key: record.ttl_s})
                here.append(record.key)
                continue
            with self._counted():
                if self._write(record):
                    here.append(record.key)
        self.stats.dropped += len(records) - len(here)
        return here

    def touch(self, ttls: Mapping[bytes, float]) -> list[bytes]:
        """See `Tier.touch`."""
        missing: list[bytes] = []
        for key, ttl_s in ttls.items():
            path, now = self._path(key), self._clock()
            try:
                state = os.stat(path, follow_symlinks=False)
                found = None if self._closed else self._found(key, state)
                if found is None:
                    missing.append(key)
                elif now + ttl_s > state.st_mtime + ttl_s / TOUCH_GRAIN:
                    os.utime(path, (now, now + ttl_s), follow_symlinks=False)
            except FileNotFoundError:
                missing.append(key)
            except OSError:
                self.stats.fault("io")
        return missing

    def pin(self, keys: Sequence[bytes], pinned: bool) -> int:
        """See `Tier.pin`."""
        count = 0
        for key in keys:
            with suppress(FileNotFoundError), self._counted():
                path = self._path(key)
                state = os.stat(path, follow_symlinks=False)
                if self._closed or self._found(key, state) is None:
                    continue
                count += 1
                if bool(state.st_mode & PIN_BIT) != pinned:
                    mode = stat.S_IMODE(state.st_mode)
                    os.chmod(path, mode | PIN_BIT if pinned else mode & ~PIN_BIT)
                    with self._open(key) as fd:
                        ends = self._clock() + self._header(fd).ttl_s
                    os.utime(path, (ends, ends), follow_symlinks=False)
        return count

    def erase(self, keys: Sequence[bytes]) -> int:
        """See `Tier.erase`. The bytes are overwritten where the file system writes in place."""
        count = 0
        for key in keys:
            with suppress(FileNotFoundError), self._counted():
                path = self._path(key)
                fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    size = os.fstat(fd).st_size
                    os.pwrite(fd, bytes(size), 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                path.unlink()
                count += 1
                self._count(-1, -size)
        self.stats.deleted += count
        return count

    def maintain(self) -> None:
        """See `Tier.maintain`."""
        now = self._clock()
        if self._closed or 0 <= now - self._swept_at < SWEEP_EVERY_S:
            return
        self._swept_at = now
        with self._counted():
            if self._elected(now):
                self._sweep(now)

    def close(self) -> None:
        """See `Tier.close`."""
        self._closed = True

    def _has(self, found: Found, record: Record) -> bool:
        value = bytearray(found.payload_bytes)
        try:
            self.read(found, record.kind, record.identity, record.content, memoryview(value))
        except TierFault:
            return False
        return bytes(value) == bytes(record.payload)

    def _write(self, record: Record) -> bool:
        if self._closed:
            return False
        now = self._clock()
        codec, packed = codecs.pack(self._codec, self._item_bytes, record.payload)
        stored = memoryview(packed)
        head = encode_header(
            record, FILE_ID, ALIGN, codec=codec, stored=stored, seq=0, created_at=now,
            expires_at=now + record.ttl_s,
        )  # fmt: skip
        size = len(head) + len(stored)
        disk = os.statvfs(self.root)
        too_much = self.stats.bytes + size > self._budget
        if too_much or disk.f_bavail * disk.f_frsize < self._min_free + size:
            if not self._give_way(size):
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
                if os.pwritev(fd, [head, stored], 0) != size:
                    raise OSError(28, "short write")
                os.fsync(fd)
                os.utime(fd, (now, now + record.ttl_s))
            finally:
                os.close(fd)
            with suppress(OSError):
                self._count(-1, -os.stat(path, follow_symlinks=False).st_size)
            os.rename(fresh, path)
        except BaseException:
            with suppress(OSError):
                fresh.unlink()
            raise
        self._count(1, size)
        self.stats.written_records += 1
        self.stats.written_bytes += size
        return True

    def _count(self, records: int, size: int) -> None:
        """Between two sweeps, which count anew: other servers' writes are not seen before."""
        self.stats.records = max(0, self.stats.records + records)
        self.stats.bytes = max(0, self.stats.bytes + size)

    # -- the sweeper -------------------------------------------------------------------------------

    def _elected(self, now: float) -> bool:
        """Whether this server cleans up: it holds the lease file, or took it over from one whose deadline has
        passed."""
        path = self.root / "sweeper"
        mine = f"{self._who} {now + SWEEP_LEASE_S}".encode()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, mine)
            finally:
                os.close(fd)
            return True
        except FileExistsError:
            pass
        who, _, deadline = path.read_text().partition(" ")
        is_stale = not deadline or float(deadline) < now or float(deadline) > now + 2 * SWEEP_LEASE_S
        if who != self._who and not is_stale:
            return False
        fresh = self.root / f".sweeper-{self._who}"
        fresh.write_bytes(mine)
        os.rename(fresh, path)
        return path.read_bytes() == mine

    def _sweep(self, now: float) -> None:
        """Remove what has expired and what is too much, and count what is left."""
        kept: list[tuple[float, Path, int]] = []
        records = total = 0
        for path, state in self._files():
            size, pinned = state.st_blocks * 512, bool(state.st_mode & PIN_BIT)
            if not pinned and state.st_mtime <= now:
                with suppress(OSError):
                    path.unlink()
                    self.stats.expired += 1
                continue
            records, total = records + 1, total + size
            if not pinned:
                kept.append((state.st_mtime, path, size))
        kept.sort()
        for _, path, size in kept:
            if total <= self._budget:
                break
            with suppress(OSError):
                path.unlink()
                records, total = records - 1, total - size
                self.stats.evicted += 1
        self.stats.records, self.stats.bytes = records, total

    def _give_way(self, size: int) -> bool:
        """Make room for a record now: the soonest to end go first."""
        files = [
            (s.st_mtime, path, s.st_blocks * 512) for path, s in self._files() if not s.st_mode & PIN_BIT
        ]
        total = sum(s.st_blocks * 512 for _, s in self._files())
        disk = os.statvfs(self.root)
        free = disk.f_bavail * disk.f_frsize
        excess = max(total + size + ALIGN - self._budget, self._min_free + size - free)
        now = self._clock()
        for ends_at, path, occupied in sorted(files):
            if excess <= 0:
                break
            with suppress(OSError):
                path.unlink()
                excess -= occupied
                total -= occupied
                if ends_at > now:
                    self.stats.evicted += 1
                else:
                    self.stats.expired += 1
        self.stats.bytes = total
        return excess <= 0

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Files that are named like records; old leftovers of writers that died are removed."""
        found: list[tuple[Path, os.stat_result]] = []
        with suppress(OSError):
            for folder in sorted(os.listdir(self.root)):
                if len(folder) == 2 and stat.S_ISDIR(os.lstat(self.root / folder).st_mode):
                    found += self._files_in(self.root / folder)
        return found

    def _files_in(self, folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
        for name in os.listdir(folder):
            with suppress(OSError):
                path = folder / name
                state = os.lstat(path)
                if not stat.S_ISREG(state.st_mode):
                    continue
                if name.endswith(".tmp") and state.st_ctime < self._clock() - STALE_TMP_S:
                    path.unlink()
                elif len(name) == 64:
                    yield path, state

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.root / name[:2] / name

    def _make_folder(self, path: Path) -> None:
        with suppress(FileExistsError):
            path.mkdir(self._folder_mode)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What the file system refuses is a counter; missing files are the caller's."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, ValueError, BadRecord) as err:
            full = isinstance(err, OSError) and err.errno in (28, 122)
            self.stats.fault("full" if full else "io")
            logger.warning("the shared cache: %s", err)
