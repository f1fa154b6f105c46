"""The cache's files as the disk sees them: out of the page cache, and how fast they read from end to end."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READ_BYTES = 4 << 20


def drop_page_cache(folder: Path) -> None:
    """Make all files below a folder cold."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        with _opened(path) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(folder: Path) -> float:
    """Bytes per second of reading the segments below a folder from end to end, cold, as one would with dd."""
    drop_page_cache(folder)
    buffer = memoryview(mmap.mmap(-1, READ_BYTES))
    buffer[:: mmap.PAGESIZE] = bytes(len(buffer) // mmap.PAGESIZE)
    size = 0
    began = time.perf_counter()
    for path in folder.rglob("*.seg"):
        with _opened(path) as fd:
            offset = 0
            while got := os.preadv(fd, [buffer], offset):
                offset += got
            size += offset
    return size / (time.perf_counter() - began)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
