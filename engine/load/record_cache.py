"""Keeps parsed records on disk, so that a model opens without parsing its vocabulary again.

An entry is used only when every file it was made from is unchanged by size, times and
inode; any doubt rebuilds. A folder that cannot be written only costs the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from .record import Record

log = logging.getLogger(__name__)

FORMAT = 2
"""Raise it with any change of `Record` or of what the parsers put into it."""


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What tells one state of a file from another, short of reading it."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """Unlike the time of modification nobody can set it: it tells of a file that was changed in place."""
    inode: int


class _Entry(msgspec.Struct, frozen=True):
    stamps: tuple[Stamp, ...]
    record: Record
    digest: str


_entries = msgspec.msgpack.Decoder(_Entry)


def stamps_of(paths: list[Path]) -> tuple[Stamp, ...]:
    """Stamp the files; one that is missing is stamped as such. Raises OSError for an unreadable folder."""
    stamps: list[Stamp] = []
    for path in paths:
        try:
            stamps.append(_stamp(path, path.stat()))
        except FileNotFoundError:
            stamps.append(Stamp(str(path), -1, 0, 0, 0))
    return tuple(stamps)


def _stamp(path: Path, status: os.stat_result) -> Stamp:
    return Stamp(str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def load_record(folder: Path, root: Path, stamps: tuple[Stamp, ...]) -> tuple[Record, str] | None:
    """Return the kept record of the model at `root` and its weights' digest, or None."""
    try:
        content = _entry_path(folder, root).read_bytes()
        if content[:32] != hashlib.sha256(content[32:]).digest():
            raise ValueError("checksum")
        entry = _entries.decode(content[32:])
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as err:  # a msgspec error is a ValueError
        log.info("kept record of %s is not usable, reading the model anew: %s", root, err)
        return None
    return (entry.record, entry.digest) if entry.stamps == stamps else None


def save_record(folder: Path, root: Path, stamps: tuple[Stamp, ...], record: Record, digest: str) -> None:
    """Keep a record, in place only when whole."""
    content = msgspec.msgpack.encode(_Entry(stamps, record, digest))
    target = _entry_path(folder, root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=target.name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as err:
        log.info("the record of %s is not kept: %s", root, err)


def _entry_path(folder: Path, root: Path) -> Path:
    key = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    return folder / f"{key}.v{FORMAT}.model"
