"""The disk tier: segments for the bytes, an index to find them, a journal for what happens to them later.

Everything lies below `<directory>/v<format version>`: another version's files are neither read nor touched.
Reads need no lock and may come from any thread; changes come from one thread and hold the lease.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import lmdb

from . import compression as codecs
from .base import Fate, Record, TierFault, TierStats
from .index import DAMAGE, Index, IndexDamaged
from .journal import Journal, What
from .lease import Lease, LeaseHeld, displace
from .nvme_changes import RESERVE_BYTES, SUSPEND_S, Changes
from .nvme_reads import ends_at
from .rebuild import rebuild, sweep
from .segment import FORMAT_VERSION, PINNED
from .segment_files import SegmentFiles, can_punch

logger = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 1.0
MAINTAIN_LEASE_S = 0.05
SEGMENT_BYTES = 256 << 20
BUDGET_SEGMENTS = 16
"""A small budget has at least so many segments, so that one of them is a small part of it."""
WARN_EVERY_S = 60.0
DEATHS, FORGIVE_S = 2, 600.0
"""So many writers that died within a change are put down to the index (LMDB ends the process where it finds a
page that cannot be), unless one has lived that long since."""


class NvmeTier(Changes):
    """Records on a local disk, for several processes at once.

    `align`: records begin at multiples of it; 4096 lets an erased record's pages be given back.
    `read_only`: never writes and never takes the lease, for tools beside a running server.
    """

    name = "disk"

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int,
        min_free_bytes: int,
        clock: Callable[[], float],
        compression: Literal["none", "zstd"] = "none",
        item_bytes: int = 2,
        align: int = 4096,
        read_only: bool = False,
    ) -> None:
        self.stats = TierStats(budget_bytes=budget_bytes)
        self.directory = directory
        self.root = directory / f"v{FORMAT_VERSION}"
        self._budget, self._min_free = budget_bytes, min_free_bytes
        self._clock, self._read_only, self._item_bytes = clock, read_only, item_bytes
        self._codec = codecs.SPLIT_ZSTD if compression == "zstd" else codecs.NONE
        self._segment_bytes = max(min(SEGMENT_BYTES, budget_bytes // BUDGET_SEGMENTS), 1)
        self.files = SegmentFiles(self.root / "seg", align)
        self._bad: deque[tuple[bytes, int]] = deque()
        """Records that a reader found bad; taken out with the next change."""
        self._unread: set[tuple[bytes, int]] = set()
        self._suspects: set[int] = set()
        self._suspended_until = 0.0
        self._suspend_s = SUSPEND_S[0]
        self._warned_at = -WARN_EVERY_S
        self.problem = ""
        """What went wrong last."""
        self._opened_at = time.monotonic()
        self._swept = False
        self._punches = False
        self._users = 0
        self._closed = False
        self._lock = threading.Condition()
        self._is_full = False
        self._is_damaged = False
        self._index: Index | None = None
        self._lease: Lease | None = None
        self._journal: Journal | None = None
        try:
            self._open()
        except (OSError, lmdb.Error, LeaseHeld, IndexDamaged) as err:
            self._failed(err, "the disk cache cannot be opened and is off for now")

    @property
    def is_open(self) -> bool:
        """Whether there is an index to read."""
        return self._index is not None

    # -- changing ----------------------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> list[bytes]:
        """See `Tier.put`."""
        kept: list[bytes] = []
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                kept = self._put(index, records)
        self.stats.dropped += len(records) - len(kept)
        return kept

    def touch(self, ttls: Mapping[bytes, float]) -> list[bytes]:
        """See `Tier.touch`."""
        missing: list[bytes] = []
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                with self._change(index) as change:
                    now, notes = self._now(change), []
                    for key, ttl_s in ttls.items():
                        place = change.get(key)
                        if place is None or ends_at(place, now) <= now:
                            missing.append(key)
                        elif (note := self._extend(change, key, place, ttl_s, now)) is not None:
                            notes.append(note)
                    self._write_notes(change, notes, durable=False)
        return missing

    def pin(self, keys: Sequence[bytes], pinned: bool) -> int:
        """See `Tier.pin`."""
        count = 0
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                with self._change(index) as change:
                    now, notes = self._now(change), []
                    for key in keys:
                        place = change.get(key)
                        if place is None or ends_at(place, now) <= now:
                            continue
                        count += 1
                        if place.pinned != pinned:
                            flags = place.flags | PINNED if pinned else place.flags & ~PINNED
                            ends = now + place.ttl_s
                            change.replace(key, place, flags=flags, expires_at=ends)
                            notes.append(
                                self._note(change, What.PIN if pinned else What.UNPIN, key, ends, place)
                            )
                    self._write_notes(change, notes, durable=True)
        return count

    def erase(self, keys: Sequence[bytes]) -> int:
        """See `Tier.erase`."""
        count = None
        with self._changing(LEASE_TIMEOUT_S, urgent=True) as index:
            if index is not None:
                with self._change(index) as change:
                    there = [(key, place) for key in keys if (place := change.get(key)) is not None]
                    self._kill(change, there, Fate.DELETED)
                count = len(there)
        if count is None:
            raise TierFault("the disk cache cannot be changed now")
        self.stats.deleted += count
        return count

    def maintain(self) -> None:
        """See `Tier.maintain`."""
        with self._changing(MAINTAIN_LEASE_S, quietly=True) as index:
            if index is None:
                return
            if time.monotonic() - self._opened_at > FORGIVE_S and self._lease is not None:
                self._lease.deaths = 0
            self._make_reserve()
            self.files.drop_deleted()
            if not self._swept:
                self._swept = True
                with self._change(index) as change:
                    sweep(self.files, change)
            with self._change(index) as change:
                now = self._clock()
                self._clamp(change, now)
                expired = self._expired(change, now)
                self._kill(change, expired, Fate.EXPIRED)
                self.stats.expired += len(expired)
                self._make_room(change, 0)
                self._remove_dead_segments(change)
            self._compact_journal(index)

    def close(self) -> None:
        """See `Tier.close`. Waits a moment for readers; what still hangs then keeps its files open."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._users, timeout=2.0)
            idle = not self._users
        if idle:
            self._forget()
        self._index = self._journal = self._lease = None

    def rebuild_index(self) -> None:
        """Make the index anew from segments and journal."""
        with self._changing(LEASE_TIMEOUT_S) as index:
            if index is not None:
                self._rebuild()

    # -- opening, failing --------------------------------------------------------------------------

    def _open(self) -> None:
        """Open or make the directory. Raises what cannot be helped."""
        if not self._read_only:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.directory, self.root, self.root / "seg", self.root / "index"):
            if not self._read_only:
                with suppress(FileExistsError):
                    folder.mkdir(0o700)
            state = os.stat(folder, follow_symlinks=folder == self.directory)
            if not stat.S_ISDIR(state.st_mode) or state.st_uid not in (os.geteuid(), 0):
                raise OSError(errno.EACCES, f"{folder} is no directory of ours")
            if folder != self.directory and stat.S_IMODE(state.st_mode) != 0o700 and not self._read_only:
                os.chmod(folder, 0o700)
        if self._read_only:
            self._index = Index(self.root / "index", read_only=True)
        else:
            self._punches = can_punch(self.root)
            self._lease = Lease(self.root / "lease")
            self._journal = Journal(self.root / "journal")
            with self._lease.hold(LEASE_TIMEOUT_S):
                self._is_damaged |= self._lease.deaths >= DEATHS
                self._open_index()
        self._refresh()

    def _forget(self) -> None:
        """Close everything: at the end, or because somebody moved the directory away."""
        self.files.close()
        for part in (self._journal, self._lease):
            if part is not None:
                part.close()
        self._index = self._journal = self._lease = None

    def _open_index(self) -> Index:
        """Open the index, with the lease held; one that is damaged, or was never filled, is made anew."""
        assert self._journal is not None
        try:
            if self._is_damaged:
                raise IndexDamaged("reading or changing it failed")
            index = Index(self.root / "index")
            if not index.is_filled:
                if any(self.files.names()):
                    raise IndexDamaged("it is not there, or not whole")
                rebuild(index, self.files, self._journal, self._punches)
            self._index = index
            return index
        except IndexDamaged as err:
            self._made_anew(str(err))
            return self._rebuild()

    def _made_anew(self, why: str) -> None:
        self.stats.fault("index")
        logger.warning("the index of the disk cache is made anew: %s", why)

    def _rebuild(self) -> Index:
        """Unlink the index and make another. Who still reads the old one goes on until it is done."""
        assert self._journal is not None
        self._index = None
        for path in (self.root / "index").iterdir():
            displace(path)
            with suppress(FileNotFoundError):
                path.unlink()
        index = Index(self.root / "index")
        rebuild(index, self.files, self._journal, self._punches)
        self._index, self._swept, self._is_damaged = index, False, False
        if self._lease is not None:
            self._lease.deaths = 0
        return index

    @contextmanager
    def _changing(
        self, timeout_s: float, *, quietly: bool = False, urgent: bool = False
    ) -> Iterator[Index | None]:
        """Hold the lease; None if nothing can be changed now. Whatever goes wrong in the block is counted and
        ends it. `urgent`: try it though it failed just now."""
        suspended = time.monotonic() < self._suspended_until and not urgent
        if self._closed or self._read_only or suspended:
            yield None
            return
        entered = False
        try:
            if self._lease is None or self._journal is None or not self._lease.is_current():
                self._forget()
                self._open()
            assert self._lease is not None
            with self._lease.hold(timeout_s):
                index = self._index
                self._is_damaged |= self._lease.deaths >= DEATHS
                if index is None or self._is_damaged or not index.is_current():
                    index = self._open_index()
                self._drop_bad(index)
                entered = True
                yield index
                self._refresh()
                self.stats.suspended = False
        except LeaseHeld:
            if not quietly:
                self.stats.fault("lease")
            if not entered:
                yield None
        except (OSError, lmdb.Error, IndexDamaged) as err:
            self._failed(err, "the disk cache could not be written")
            if not entered:
                yield None

    def _failed(self, err: Exception, what: str) -> None:
        """Count a failure, undo what is half written, and write nothing for a while."""
        code = err.errno if isinstance(err, OSError) else None
        full = code in (errno.ENOSPC, errno.EDQUOT) or isinstance(err, lmdb.MapFullError | lmdb.DiskError)
        kinds = {errno.EROFS: "read_only", errno.EACCES: "denied", errno.EPERM: "denied"}
        index = isinstance(err, lmdb.Error | IndexDamaged)
        self.stats.fault("full" if full else "index" if index else kinds.get(code or 0, "io"))
        self.stats.suspended, self.problem = True, str(err)
        self._suspended_until = time.monotonic() + self._suspend_s
        self._suspend_s = min(2 * self._suspend_s, SUSPEND_S[1])
        self.files.roll_back()
        if full:
            with suppress(OSError):
                (self.root / "reserve").unlink()
        self._is_full = full
        self._is_damaged |= isinstance(err, (IndexDamaged, *DAMAGE))
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            logger.warning("%s: %s", what, err)

    def _make_reserve(self) -> None:
        path = self.root / "reserve"
        with suppress(OSError):
            if not path.exists() and self._free_bytes() > self._min_free + RESERVE_BYTES:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(path, flags, 0o600)
                try:
                    os.posix_fallocate(fd, 0, min(RESERVE_BYTES, self._budget // 64))
                finally:
                    os.close(fd)

    def _refresh(self) -> None:
        if self._index is not None:
            totals = self._index.totals()
            self.stats.records = totals.records
            self.stats.bytes = totals.segment_bytes + totals.journal_bytes + self._side_bytes()
