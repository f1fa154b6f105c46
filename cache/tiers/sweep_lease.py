"""Who cleans up a shared directory: a file with a deadline, for file systems without locks.

Two servers may rarely both believe that they hold it; what it guards, removing files, bears that.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LEASE_S = 300.0
MAX_BYTES = 256


class _Held(NamedTuple):
    raw: bytes
    who: str
    deadline: float
    records: int
    bytes: int

    def is_stale(self, now: float) -> bool:
        """Its deadline has passed, or is further away than any holder sets it: that clock ran ahead."""
        return not now <= self.deadline <= now + 2 * LEASE_S


class SweepLease:
    """The right to clean up, and what its holder counted: `records` and `bytes` of the whole directory."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path, self._mode = path, mode
        self._who = secrets.token_hex(8)
        self.records = self.bytes = 0

    def elect(self, now: float) -> bool:
        """Whether this server cleans up: nobody else holds the lease, or its holder's deadline has passed.

        Raises:
            OSError: what the file system says, such as of a directory in the lease's place.
        """
        held = self._read()
        if held is None:
            return self._create(now)
        if held.who == self._who:
            self.publish(now, self.records, self.bytes)
            return True
        if not held.is_stale(now):
            self.records, self.bytes = held.records, held.bytes
            return False
        return self._take_over(held, now)

    def publish(self, now: float, records: int, size: int) -> None:
        """Renew the lease, with what was counted. Raises `OSError`."""
        self.records, self.bytes = records, size
        fresh = self._aside()
        self._write(fresh, now)
        os.rename(fresh, self._path)

    def _read(self) -> _Held | None:
        """The lease as it lies there. What cannot be read as one counts from its modification time: somebody
        may just be writing it."""
        try:
            state = os.lstat(self._path)
            if not stat.S_ISREG(state.st_mode):
                return _Held(b"", "", state.st_mtime + LEASE_S, 0, 0)
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            raw = os.read(fd, MAX_BYTES)
        finally:
            os.close(fd)
        try:
            who, deadline, records, size = raw.decode("ascii").split()
            return _Held(raw, who, float(deadline), max(0, int(records)), max(0, int(size)))
        except ValueError:
            return _Held(raw, "", state.st_mtime + LEASE_S, 0, 0)

    def _take_over(self, held: _Held, now: float) -> bool:
        """Move the dead server's lease away: of several that try, the rename lets one win."""
        aside = self._aside()
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return False
        moved = SweepLease(aside, self._mode)._read()
        if moved is None or moved.raw != held.raw:  # another server was faster, and this is its lease
            with suppress(OSError):
                os.link(aside, self._path)
        with suppress(OSError):
            os.unlink(aside)
        return moved is not None and moved.raw == held.raw and self._create(now)

    def _create(self, now: float) -> bool:
        try:
            self._write(self._path, now)
        except FileExistsError:
            return False
        return True

    def _write(self, path: Path, now: float) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, self._mode)
        try:
            os.write(fd, f"{self._who} {now + LEASE_S} {self.records} {self.bytes}\n".encode())
            os.fchmod(fd, self._mode)
        finally:
            os.close(fd)

    def _aside(self) -> Path:
        return self._path.with_name(f".{self._path.name}-{secrets.token_hex(4)}")
