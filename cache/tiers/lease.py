"""Who may write: an flock, held for one change at a time. The kernel frees it when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.002


class LeaseHeld(Exception):
    """Another process kept the lease for longer than one waits."""


class Lease:
    """The right to change one directory. Several processes take turns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

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
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)


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
