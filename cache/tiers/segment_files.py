"""Segment files as files: where records are appended, read and erased. Knows no index.

Files are created 0600 and opened without following links. A segment that is being written is locked by its
writer, so that what a dead writer left can be told from what a living one has not committed yet.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .lease import try_lock
from .segment import SEGMENT_HEADER, padded, parse_segment_header, segment_header

OPEN_FILES = 64
OPEN_WRITERS = 8
NAME = re.compile(r"[0-9]{1,9}/([0-9a-f]{8})\.seg", re.ASCII)
PUNCH = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of fallocate(2)."""
ZEROS = 1 << 20
GONE = frozenset({errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO})
"""What opening a file says that is not there, or is something else by now."""


@dataclass(slots=True, eq=False)
class Reading:
    """A segment that is open for reading."""

    fd: int
    segment_id: bytes
    align: int
    users: int = 0
    evicted: bool = False


@dataclass(slots=True, eq=False)
class Writing:
    """A segment of this process that takes more records. `end` is its committed end."""

    number: int
    name: str
    fd: int
    segment_id: bytes
    end: int


class SegmentFiles:
    """All segments below one folder."""

    def __init__(self, root: Path, align: int) -> None:
        self.root, self.align = root, align
        self.header_bytes = padded(SEGMENT_HEADER.size, align)
        self._readings: OrderedDict[str, Reading] = OrderedDict()
        self._lock = threading.Lock()
        self._writings: OrderedDict[int, Writing] = OrderedDict()
        """By expiry bucket."""

    # -- writing, with the lease held --------------------------------------------------------------

    def writing(self, bucket: int) -> Writing | None:
        """The segment that takes records of an expiry bucket, if one is open."""
        return self._writings.get(bucket)

    def open_writings(self) -> list[Writing]:
        """The segments of this process that take more records."""
        return list(self._writings.values())

    def create(self, bucket: int, number: int, created_at: float) -> Writing:
        """Begin a segment, with the first number from `number` on that no dead writer's left-over has.
        Raises `OSError`."""
        folder = self.root / str(bucket)
        for each in (self.root, folder):
            with suppress(FileExistsError):
                each.mkdir(0o700)
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise OSError(errno.ENOTDIR, f"{folder} is no directory of ours")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            name = f"{bucket}/{number:08x}.seg"
            try:
                fd = os.open(self.root / name, flags, 0o600)
                break
            except FileExistsError:
                number += 1
        try:
            os.fchmod(fd, 0o600)
            try_lock(fd)
            segment_id = secrets.token_bytes(16)
            head = segment_header(segment_id, self.align, created_at)
            if os.pwrite(fd, head, 0) != len(head):
                raise OSError(errno.ENOSPC, "short write")
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(self.root / name)
            raise
        writing = Writing(number, name, fd, segment_id, len(head))
        self.finish(bucket)
        self._writings[bucket] = writing
        if len(self._writings) > OPEN_WRITERS:
            self.finish(next(iter(self._writings)))
        return writing

    def finish(self, bucket: int) -> None:
        """Append nothing more to a bucket's segment."""
        writing = self._writings.pop(bucket, None)
        if writing is not None:
            os.close(writing.fd)

    def roll_back(self) -> None:
        """Cut uncommitted bytes off, unlink what was never committed; the segments take nothing more."""
        for bucket, writing in list(self._writings.items()):
            with suppress(OSError):
                if writing.end == self.header_bytes:
                    os.unlink(self.root / writing.name)
                else:
                    os.ftruncate(writing.fd, writing.end)
            self.finish(bucket)

    def erase(self, name: str, offset: int, length: int, *, durable: bool) -> None:
        """Make a record unreadable and give its pages back where the file system can. Raises `OSError`."""
        fd = self._open(name, os.O_RDWR)
        try:
            if not punch(fd, offset, length):
                for at in range(offset, offset + length, ZEROS):
                    os.pwrite(fd, bytes(min(ZEROS, offset + length - at)), at)
            if durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)

    def remove(self, number: int, name: str) -> bool:
        """Unlink a segment unless a living writer has it open; whether it is gone."""
        for bucket, writing in list(self._writings.items()):
            if writing.number == number:
                self.finish(bucket)
        try:
            fd = self._open(name, os.O_RDONLY)
        except OSError as err:
            return err.errno in GONE
        try:
            if not try_lock(fd):
                return False
            os.unlink(self.root / name)
            with suppress(OSError):
                (self.root / name).parent.rmdir()
        finally:
            os.close(fd)
        self._forget(name)
        return True

    def names(self) -> list[str]:
        """The regular files that are named like segments; no link is followed."""
        found: list[str] = []
        with suppress(OSError):
            with os.scandir(self.root) as folders:
                for folder in [f for f in folders if f.is_dir(follow_symlinks=False) and f.name.isdecimal()]:
                    with os.scandir(folder.path) as entries:
                        found += [
                            f"{folder.name}/{entry.name}"
                            for entry in entries
                            if NAME.fullmatch(f"{folder.name}/{entry.name}")
                            and entry.is_file(follow_symlinks=False)
                        ]
        return found

    # -- reading, from any thread ------------------------------------------------------------------

    @contextmanager
    def reading(self, name: str) -> Iterator[Reading]:
        """A segment open for reading.

        Raises:
            OSError: it is not there, or no regular file.
            BadRecord: it is no segment of this version.
        """
        with self._lock:
            reading = self._readings.get(name)
            if reading is None:
                fd = self._open(name, os.O_RDONLY)
                try:
                    head = os.pread(fd, SEGMENT_HEADER.size, 0)
                    reading = Reading(fd, *parse_segment_header(head))
                except BaseException:
                    os.close(fd)
                    raise
                self._readings[name] = reading
                if len(self._readings) > OPEN_FILES:
                    self._evict(next(iter(self._readings)))
            self._readings.move_to_end(name)
            reading.users += 1
        try:
            yield reading
        finally:
            with self._lock:
                reading.users -= 1
                if reading.evicted and not reading.users:
                    os.close(reading.fd)

    def drop_deleted(self) -> None:
        """Close what another process has unlinked: an open file keeps its bytes on the disk."""
        with self._lock:
            for name, reading in list(self._readings.items()):
                if not os.fstat(reading.fd).st_nlink:
                    self._evict(name)

    def close(self) -> None:
        for bucket in list(self._writings):
            self.finish(bucket)
        with self._lock:
            for name in list(self._readings):
                self._evict(name)

    def _open(self, name: str, access: int) -> int:
        """Open a regular file in a folder of ours; a link, a pipe or a folder is an error."""
        folder, _, file = name.partition("/")
        at = os.open(self.root / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fd = os.open(file, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        return fd

    def _forget(self, name: str) -> None:
        with self._lock:
            if name in self._readings:
                self._evict(name)

    def _evict(self, name: str) -> None:
        reading = self._readings.pop(name)
        reading.evicted = True
        if not reading.users:
            os.close(reading.fd)


def punch(fd: int, offset: int, length: int) -> bool:
    """Free the pages of a range, which then reads as zeros; False where the file system cannot."""
    return bool(_libc.fallocate(fd, PUNCH, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0)


def can_punch(folder: Path) -> bool:
    """Whether the file system of a folder gives pages of a file back."""
    path = folder / f".punch-{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        os.pwrite(fd, b"\1" * 8192, 0)
        return punch(fd, 0, 4096) and os.pread(fd, 1, 0) == b"\0"
    except OSError:
        return False
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(path)


_libc = ctypes.CDLL(None, use_errno=True)
