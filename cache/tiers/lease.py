"""Who may write: an flock, held for one change at a time. The kernel frees it when its holder dies.

The lease file's first byte is 1 while it is held, its second counts the holders that died holding it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 0.002


class LeaseHeld(Exception):
    """Another process kept the lease for longer than one waits."""


class Lease:
    """The right to change one directory. Several processes take turns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = open_own(path)
        self.deaths = 0
        """Holders that died holding it, as of the last `hold`. May be set while holding it."""

    def is_current(self) -> bool:
        """Whether the path still leads to the file that is open."""
        return is_at(self._fd, self._path)

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        """Hold the lease for the block.

        Raises:
            LeaseHeld: it was not free in time.
        """
        deadline = time.monotonic() + timeout_s
        while not try_lock(self._fd):
            if time.monotonic() >= deadline:
                raise LeaseHeld
            time.sleep(POLL_S)
        try:
            died, deaths = (os.pread(self._fd, 2, 0) + bytes(2))[:2]
            self.deaths = min(deaths + died, 255)
            os.pwrite(self._fd, bytes([1, self.deaths]), 0)
            yield
        finally:
            with suppress(OSError):
                os.pwrite(self._fd, bytes([0, self.deaths]), 0)
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)


def open_own(path: Path) -> int:
    """Open or make a regular file of ours for reading and writing. What else has its name is moved aside.
    Raises `OSError`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        displace(path)
    fd = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    return fd


def displace(path: Path) -> None:
    """Move what is not a regular file out of the way. Raises `OSError`."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.foreign"))


def is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def try_lock(fd: int) -> bool:
    """Lock an open file for this process, if nobody else has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
