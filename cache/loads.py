"""Promotion: brings a prompt's blocks up from the tiers, before its sequence is admitted.

A sequence waits on its `Load`; several loads that lack the same block wait on one `Fetch`. A fetch that takes
longer than computing would is cut short: what is there by then is used, the rest is computed. Everything here
runs on the loop's thread except what is handed to the workers.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..kernels.kv import KVKind
from .blocks import NO_BLOCK, BlockId
from .store import Hold, KVStore, Prompt
from .tiers import Fate, Found, Kind, Tier, TierFault
from .tree import Node
from .workers import Timer, Workers

Miss = Literal["never_seen", "expired", "evicted", "deleted", "corrupt", "slow", "fault", "disabled"]
"""Why a block was not reused. `slow`: loading it would have taken, or took, longer than computing it;
`fault`: it was there and could not be read; `disabled`: the request or the configuration said so."""

MIN_DEADLINE_S = 0.05
DEADLINE_SHARE = 0.5
"""A fetch may take this share of the time that computing its blocks would: a miss then costs 1.5 times a cold
prompt, at worst."""
BREAKER_AFTER = 3
BREAKER_S = (5.0, 60.0)
"""After so many fetches in a row that were too slow, none is tried for so long; doubled each time."""
RATE_WEIGHT = 0.2
AHEAD_SHARE = 2
"""Loads hold at most this part of the device's blocks for sequences that wait; others look again later."""
FATES: dict[Fate, Miss] = {
    Fate.EXPIRED: "expired",
    Fate.EVICTED: "evicted",
    Fate.DELETED: "deleted",
    Fate.CORRUPT: "corrupt",
}


class BlockBytes(Protocol):
    """The device's side: see `kernels.backend.Executor`."""

    def export_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None: ...

    def import_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None: ...


@dataclass(slots=True, eq=False)
class Load:
    """One sequence's wait for its prompt's blocks."""

    prompt: Prompt
    sources: dict[bytes, str] = field(default_factory=dict)
    """Tier of each block that was brought up while this load waited, by key."""
    miss: Miss | None = None
    """Why the block behind the last one found was not had."""
    done: bool = False
    started_s: float = 0.0
    seconds: float = 0.0
    hold: Hold | None = None
    fetch: Fetch | None = None
    yielded: bool = False
    """What it found may have been evicted since: look again before the sequence is admitted."""


class _State(IntEnum):
    LOCATING = 0
    WAITING = 1
    """Found; no room on the device yet."""
    READING = 2
    ENDED = 3


class _Copy(IntEnum):
    """Where one block of a fetch is."""

    NOT_READ = 0
    IMPORTING = 1
    DONE = 2


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks [first, first + len(run)) of a prompt on their way up."""

    prompt: Prompt
    first: int
    deadline_s: float
    loads: list[Load] = field(default_factory=list)
    state: _State = _State.LOCATING
    run: list[tuple[Tier, Found]] = field(default_factory=list)
    miss: Miss | None = None
    """What ends the run, if it is shorter than the prompt."""
    blocks: list[list[BlockId]] = field(default_factory=list)
    """Per block of the run, per group."""
    late: list[list[BlockId]] = field(default_factory=list)
    """Blocks that a reader was filling when the fetch was cut; given back when the readers are through."""
    timer: Timer | None = None
    jobs: int = 0
    started_s: float = 0.0
    # Guarded by the lock: shared with the readers.
    lock: threading.Lock = field(default_factory=threading.Lock)
    cancelled: bool = False
    next: int = 0
    end: int = 0
    """Blocks from here on are not worth reading: one before them failed."""
    copies: bytearray = field(default_factory=bytearray)

    @property
    def key(self) -> bytes:
        return self.prompt.keys[self.first]


class Loader:
    """All loads of one engine."""

    def __init__(
        self,
        store: KVStore,
        tiers: Sequence[Tier],
        device: BlockBytes,
        workers: Workers,
        *,
        compute_s: Callable[[int, int], float],
        reserved_blocks: Callable[[], int],
        on_ready: Callable[[], None],
        on_adopted: Callable[[Node, Tier], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compute_s(start, count)`: estimated seconds to compute rows; `reserved_blocks()`: blocks promised
        to running sequences; `on_ready()`: a load is done; `on_adopted(node, tier)`: a block came up."""
        self._store, self._tiers, self._device, self._workers = store, tuple(tiers), device, workers
        self._compute_s, self._reserved = compute_s, reserved_blocks
        self._on_ready, self._on_adopted = on_ready, on_adopted
        self._monotonic = monotonic
        self._fetches: dict[bytes, Fetch] = {}
        self._loads: set[Load] = set()
        self._late: set[Fetch] = set()
        """Fetches that were cut while a reader filled a block."""
        size = sum(spec.block_bytes for spec in store.groups)
        self._buffers = deque(_buffer(size) for _ in range(workers.readers if self._tiers else 0))
        self._bytes_per_s = 0.0
        self._slow_in_row = 0
        self._breaker_s = BREAKER_S[0]
        self._closed_until = 0.0

    # -- for the scheduler -------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> Load | None:
        """Look for the blocks that the device lacks; None if there is nothing to wait for."""
        if not self._tiers or not self._store.is_usable or not prompt.keys:
            return None
        load = Load(prompt, started_s=self._monotonic())
        if load.started_s < self._closed_until:
            load.miss = "slow"
            load.done = True
            return load
        self._loads.add(load)
        self._advance(load, None)
        return load

    def end(self, load: Load) -> None:
        """The sequence was admitted or has ended: let go of everything."""
        self._loads.discard(load)
        self._release(load)
        fetch, load.fetch = load.fetch, None
        load.done = True
        if fetch is not None:
            fetch.loads.remove(load)
            if not fetch.loads:
                self._cut(fetch, None)

    def start_waiting(self, load: Load) -> bool:
        """Try again to find room for a load's blocks, now that it is its turn; whether it goes on without."""
        fetch = load.fetch
        return fetch is None or fetch.state is not _State.WAITING or self._try_read(fetch, is_next=True)

    def yield_holds(self, besides: Sequence[Load] = ()) -> bool:
        """Blocks are needed now: what was loaded ahead may be evicted. Whether anything was held."""
        held = [load for load in self._loads if load.hold is not None and load not in besides]
        for load in held:
            self._release(load)
            load.yielded = True
        return bool(held)

    def _has_room_ahead(self, blocks: int) -> bool:
        """Whether blocks may be held for one more sequence that is not next in the queue."""
        held = sum(len(load.hold.blocks) for load in self._loads if load.hold is not None)
        return held + blocks <= sum(pool.total for pool in self._store.pools) // AHEAD_SHARE

    def taken(self) -> list[tuple[int, BlockId]]:
        """Blocks of fetches that are being read, as (group, block)."""
        return [
            (group, block)
            for fetch in [*self._fetches.values(), *self._late]
            for blocks in (fetch.late if fetch.state is _State.ENDED else fetch.blocks)
            for group, block in enumerate(blocks)
            if block != NO_BLOCK
        ]

    # -- loads -------------------------------------------------------------------------------------

    def _advance(self, load: Load, ended: Fetch | None) -> None:
        """Wait for the next block that is not on the device, or be done."""
        match = self._store.full_match(load.prompt)
        self._release(load)
        load.yielded = not self._has_room_ahead(len(match.nodes))
        if not load.yielded:
            load.hold = self._store.hold(match.nodes)
        depth, keys = len(match.nodes), load.prompt.keys
        if depth == len(keys):
            self._finish(load, None)
            return
        if ended is not None and ended.first <= depth and self._is_where(ended, keys, depth):
            self._finish(load, ended.miss)
            return
        fetch = self._fetches.get(keys[depth])
        if fetch is None:
            block_tokens = self._store.block_tokens
            compute_s = self._compute_s(depth * block_tokens, (len(keys) - depth) * block_tokens)
            fetch = Fetch(load.prompt, depth, max(MIN_DEADLINE_S, DEADLINE_SHARE * compute_s))
            self._fetches[fetch.key] = fetch
            load.fetch = fetch
            fetch.loads.append(load)
            self._locate(fetch)
        else:
            load.fetch = fetch
            fetch.loads.append(load)

    @staticmethod
    def _is_where(ended: Fetch, keys: Sequence[bytes], depth: int) -> bool:
        """Whether a fetch ended at the very block that is wanted: asking again would answer the same."""
        known = ended.prompt.keys
        return depth < len(known) and known[depth] == keys[depth]

    def _finish(self, load: Load, miss: Miss | None) -> None:
        load.fetch, load.miss, load.done = None, miss, True
        load.seconds = self._monotonic() - load.started_s
        self._on_ready()

    def _release(self, load: Load) -> None:
        if load.hold is not None:
            self._store.unhold(load.hold)
            load.hold = None

    # -- fetches -----------------------------------------------------------------------------------

    def _locate(self, fetch: Fetch) -> None:
        tiers, keys = self._tiers, fetch.prompt.keys[fetch.first :]
        fetch.timer = self._workers.later(fetch.deadline_s, lambda: self._cut(fetch, "slow"))
        self._workers.read(lambda: locate(tiers, keys), lambda found: self._located(fetch, found))

    def _located(self, fetch: Fetch, found: tuple[list[tuple[Tier, Found]], Fate | None] | None) -> None:
        if fetch.state is _State.ENDED:
            return
        self._stop_timer(fetch)
        run, fate = found or ([], None)
        missing = fetch.prompt.keys[fetch.first :][len(run) :]
        if missing:
            lost: Miss = "evicted" if self._store.tree.has_lost(missing[0]) else "never_seen"
            fetch.miss = FATES[fate] if fate else ("fault" if found is None else lost)
        fetch.run = run[: self._usable(fetch, run)]
        if not fetch.run:
            self._end(fetch, 0)
        elif self._is_dearer_than_computing(fetch):
            fetch.miss = "slow"
            self._end(fetch, 0)
        else:
            self._try_read(fetch)

    def _usable(self, fetch: Fetch, run: Sequence[tuple[Tier, Found]]) -> int:
        """The longest part of the run that a sequence could go on from: every group has all that a position
        behind it can still read."""
        groups = self._store.groups
        for count in range(len(run), 0, -1):
            position = (fetch.first + count) * self._store.block_tokens
            if all(
                run[i][1].groups >> g & 1
                for g, spec in enumerate(groups)
                for i in range(max(0, self._store.first_needed(spec, position) - fetch.first), count)
            ):
                return count
        return 0

    def _is_dearer_than_computing(self, fetch: Fetch) -> bool:
        """By the rate of earlier fetches; without one, loading is believed to be cheaper."""
        if not self._bytes_per_s:
            return False
        size = sum(found.payload_bytes for _, found in fetch.run)
        block_tokens = self._store.block_tokens
        compute_s = self._compute_s(fetch.first * block_tokens, len(fetch.run) * block_tokens)
        if size / self._bytes_per_s <= compute_s:
            return False
        self._bytes_per_s *= 1 + RATE_WEIGHT  # so that a disk that was slow once is tried again
        return True

    def _try_read(self, fetch: Fetch, *, is_next: bool = False) -> bool:
        """Take device blocks for the run and read it; without room, wait. Only who is next in the queue may
        take the room of loads that are done, or make do with less."""
        store, count = self._store, len(fetch.run)
        reserved = self._reserved()
        counts = self._blocks_needed(fetch, count)
        if not is_next and not self._has_room_ahead(count):
            fetch.state = _State.WAITING
            return False
        while count and any(n > p.available - reserved for n, p in zip(counts, store.pools, strict=True)):
            if (
                not is_next
                or reserved
                or any(other.state is _State.READING for other in self._fetches.values())
            ):
                fetch.state = _State.WAITING
                return False
            if not self.yield_holds(fetch.loads):
                count -= 1
            counts = self._blocks_needed(fetch, count)
        if count < len(fetch.run):
            fetch.run, fetch.miss = fetch.run[:count], "evicted"
        taken = store.take(counts)
        if not count or taken is None:
            self._end(fetch, 0)
            return True
        end = (fetch.first + count) * store.block_tokens
        for index in range(count):
            fetch.blocks.append(
                [
                    taken[g].pop() if fetch.first + index >= self._first_loaded(g, end, fetch) else NO_BLOCK
                    for g in range(len(store.groups))
                ]
            )
        fetch.state, fetch.end, fetch.copies = _State.READING, count, bytearray(count)
        fetch.started_s = self._monotonic()
        fetch.timer = self._workers.later(fetch.deadline_s, lambda: self._cut(fetch, "slow"))
        fetch.jobs = min(self._workers.readers, count)
        for _ in range(fetch.jobs):
            self._workers.read(lambda: self._read_some(fetch), lambda _: self._job_ended(fetch))
        return True

    def _first_loaded(self, group: int, end: int, fetch: Fetch) -> int:
        spec = self._store.groups[group]
        return self._store.first_needed(spec, end) if spec.kind is KVKind.WINDOW else fetch.first

    def _blocks_needed(self, fetch: Fetch, count: int) -> list[int]:
        end = (fetch.first + count) * self._store.block_tokens
        return [
            fetch.first + count - max(fetch.first, self._first_loaded(g, end, fetch)) if count else 0
            for g in range(len(self._store.groups))
        ]

    def _job_ended(self, fetch: Fetch) -> None:
        fetch.jobs -= 1
        if fetch.state is _State.ENDED:
            if not fetch.jobs:
                self._give_back(fetch.late)
                self._late.discard(fetch)
            return
        if fetch.jobs:
            return
        done = _leading(fetch.copies)
        if done < len(fetch.run):
            fetch.miss = "fault"
        self._slow_in_row, self._breaker_s = 0, BREAKER_S[0]
        seconds = max(self._monotonic() - fetch.started_s, 1e-6)
        rate = sum(found.payload_bytes for _, found in fetch.run[:done]) / seconds
        if done:
            known = self._bytes_per_s or rate
            self._bytes_per_s = known + RATE_WEIGHT * (rate - known)
        self._end(fetch, done)

    def _cut(self, fetch: Fetch, why: Miss | None) -> None:
        """End a fetch now: the deadline has passed, or nobody waits any more."""
        if fetch.state is _State.ENDED:
            return
        if why is not None:
            fetch.miss = why
            self._slow_in_row += 1
            if self._slow_in_row >= BREAKER_AFTER:
                self._closed_until = self._monotonic() + self._breaker_s
                self._breaker_s = min(2 * self._breaker_s, BREAKER_S[1])
                self._slow_in_row = 0
        with fetch.lock:
            fetch.cancelled = True
        self._end(fetch, _leading(fetch.copies))

    def _end(self, fetch: Fetch, done: int) -> None:
        """Publish the first `done` blocks, give the others back, tell who waits."""
        fetch.state = _State.ENDED
        self._stop_timer(fetch)
        del self._fetches[fetch.key]
        keys, contents = fetch.prompt.keys, fetch.prompt.contents
        store = self._store
        match = store.full_match(fetch.prompt)
        sources: dict[bytes, str] = {}
        if done and len(match.nodes) >= fetch.first:
            node = match.nodes[fetch.first - 1] if fetch.first else match.root
            for index in range(done):
                tier, found = fetch.run[index]
                at = fetch.first + index
                node = store.adopt(node, keys[at], contents[at], fetch.blocks[index], found.created_at)
                sources[keys[at]] = tier.name
                self._on_adopted(node, tier)
            store.tree.touch(node)
        else:
            done = 0
        for blocks, copy in zip(fetch.blocks[done:], fetch.copies[done:], strict=True):
            if copy == _Copy.IMPORTING:
                fetch.late.append(blocks)
                self._late.add(fetch)
            else:
                self._give_back([blocks])
        for load in fetch.loads:
            load.sources |= sources
            load.fetch = None
        for load in fetch.loads:
            self._advance(load, fetch)

    def _give_back(self, rows: Sequence[Sequence[BlockId]]) -> None:
        for blocks in rows:
            for pool, block in zip(self._store.pools, blocks, strict=True):
                if block != NO_BLOCK:
                    pool.drop(block)

    @staticmethod
    def _stop_timer(fetch: Fetch) -> None:
        if fetch.timer is not None:
            fetch.timer.cancel()
            fetch.timer = None

    # -- on the workers ----------------------------------------------------------------------------

    def _read_some(self, fetch: Fetch) -> None:
        """Read blocks in order, beside other readers, until none is left, one fails or the fetch is cut."""
        largest = max(found.payload_bytes for _, found in fetch.run)
        buffer = self._buffers.pop() if self._buffers else None
        if buffer is None or buffer.nbytes < largest:
            buffer = _buffer(largest)
        while True:
            with fetch.lock:
                index = fetch.next
                if fetch.cancelled or index >= fetch.end:
                    break
                fetch.next += 1
            if not self._read_block(fetch, index, buffer):
                with fetch.lock:
                    fetch.end = min(fetch.end, index)
        self._buffers.append(buffer)

    def _read_block(self, fetch: Fetch, index: int, buffer: NDArray[np.uint8]) -> bool:
        tier, found = fetch.run[index]
        at = fetch.first + index
        payload = buffer[: found.payload_bytes]
        specs = [(g, spec) for g, spec in enumerate(self._store.groups) if found.groups >> g & 1]
        if found.payload_bytes != sum(spec.block_bytes for _, spec in specs):
            return False
        content = fetch.prompt.contents[at]
        try:
            tier.read(found, Kind.BLOCK, self._store.layout, content, payload.data)
        except TierFault:
            return False
        with fetch.lock:
            if fetch.cancelled:
                return False
            fetch.copies[index] = _Copy.IMPORTING
            blocks = fetch.blocks[index]
        offset = 0
        for group, spec in specs:
            block = blocks[group]
            if block != NO_BLOCK:
                self._device.import_block(group, block, payload[offset : offset + spec.block_bytes])
            offset += spec.block_bytes
        fetch.copies[index] = _Copy.DONE
        return True


def locate(tiers: Sequence[Tier], keys: Sequence[bytes]) -> tuple[list[tuple[Tier, Found]], Fate | None]:
    """The leading run of `keys` over all tiers, each block from the first tier that has it, and the fate of
    the block behind it."""
    run: list[tuple[Tier, Found]] = []
    while len(run) < len(keys):
        before = len(run)
        for tier in tiers:
            run += [(tier, found) for found in tier.find(keys[len(run) :])]
            if len(run) > before:
                break
        else:
            break
    fates = [tier.fate(keys[len(run)]) for tier in tiers] if len(run) < len(keys) else []
    return run, next((fate for fate in fates if fate is not None), None)


def _buffer(size: int) -> NDArray[np.uint8]:
    """Memory to read into, touched: the first load must not wait for its pages."""
    buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    buffer[:: mmap.PAGESIZE] = 0
    return buffer


def _leading(copies: bytearray) -> int:
    """How many blocks from the front are done."""
    for index, copy in enumerate(copies):
        if copy != _Copy.DONE:
            return index
    return len(copies)
