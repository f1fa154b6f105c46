"""Demotion: brings computed blocks down to the tiers, behind everybody's back.

What is to be written stays where it is, in the prefix tree, and nothing is held for it: only the batch being
written is. So writing never delays a token, and under pressure blocks are evicted unwritten and counted, not
queued. Runs on the loop's thread except what is handed to the workers.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .blocks import NO_BLOCK, BlockId
from .loads import BlockBytes
from .store import KVStore
from .tiers import Fate, Kind, Record, Tier, lasting
from .tree import Node
from .workers import Timer, Workers, guarded

T = TypeVar("T")

BATCH_BYTES = 32 << 20
BATCH_SHARE = 8
"""A batch holds at most this part of the device's blocks."""
GATHER_S = 0.25
"""How long blocks are gathered into one batch while requests run: a batch is one fdatasync."""
SOON_S = 0.01
"""The same when a request has ended: nothing more is coming of it."""
TOUCH_S = 1.0
MAINTAIN_S = 5.0


@dataclass(slots=True)
class _Dirty:
    """A block that tiers lack."""

    node: Node
    ttl_s: float
    tiers: tuple[Tier, ...]


class Writer:
    """Writes blocks, renews their times to live, keeps the tiers tidy; everything in order, one at a time."""

    def __init__(self, store: KVStore, tiers: Sequence[Tier], device: BlockBytes, workers: Workers) -> None:
        self.dropped_blocks = 0
        """Blocks that were evicted, or whose forerunner was, before they could be written."""
        self._store, self._tiers, self._device, self._workers = store, tuple(tiers), device, workers
        self._dirty: OrderedDict[bytes, _Dirty] = OrderedDict()
        self._touched: dict[bytes, float] = {}
        self._block_bytes = sum(spec.block_bytes for spec in store.groups)
        self._batch_blocks = max(
            1, min(BATCH_BYTES // self._block_bytes, min(p.total for p in store.pools) // BATCH_SHARE)
        )
        self._buffer: NDArray[np.uint8] | None = None
        self._is_writing = False
        self._timer: Timer | None = None
        self._timer_s = 0.0
        self._flushed: list[Callable[[], None]] = []
        self._closed = False
        self._ticks = [
            workers.later(TOUCH_S, self._touch_tick),
            workers.later(MAINTAIN_S, self._maintain_tick),
        ]

    # -- from the scheduler ------------------------------------------------------------------------

    def save(self, node: Node, ttl_s: float) -> None:
        """Write a node and what its path still lacks below the device."""
        if not self._tiers:
            return
        missing = [n for n in node.path() if not n.saved and n.key not in self._dirty]
        for each in reversed(missing):
            self._dirty[each.key] = _Dirty(each, ttl_s, self._tiers)
        if len(self._dirty) > 2 * self._store.pools[0].total:
            self._drop_dead()
        if missing:
            self._start_within(GATHER_S)

    def touch(self, node: Node, ttl_s: float) -> None:
        """A path was used now: all of it lives at least that long from now."""
        if self._tiers:
            touched = self._touched
            for each in node.path():
                touched[each.key] = max(ttl_s, touched.get(each.key, 0.0))

    def request_ended(self) -> None:
        """Do not wait for more."""
        if self._dirty:
            self._start_within(SOON_S)

    def promote(self, node: Node, tier: Tier, ttl_s: float) -> None:
        """A block came from `tier`: bring it to the faster ones too."""
        above = self._tiers[: self._tiers.index(tier)]
        if above and node.key not in self._dirty:
            self._dirty[node.key] = _Dirty(node, ttl_s, above)
            self._start_within(GATHER_S)

    # -- for everybody who changes tiers -----------------------------------------------------------

    def run(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """Run work on the tiers, after all earlier writes."""
        self._workers.write(work, done)

    async def perform(self, work: Callable[[], T]) -> T | None:
        """The same, waiting for its result; None if it failed. A caller that leaves does not stop it."""
        result: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()

        def done(value: T | None) -> None:
            if not result.done():
                result.set_result(value)

        self._workers.write(work, done)
        return await result

    def forget(self, keys: Sequence[bytes]) -> None:
        """Blocks are being erased: neither write nor renew them."""
        for key in keys:
            self._dirty.pop(key, None)
            self._touched.pop(key, None)

    def flush(self, done: Callable[[], None]) -> None:
        """Write all that waits now; `done` when it is durable or dropped."""
        self._flushed.append(done)
        self._flush_touches()
        self._next_batch()

    def maintain(self) -> None:
        """Expire, give way, reclaim."""
        for tier in self._tiers:
            guarded(tier.maintain)

    def tick(self) -> None:
        """What the timers do, for simulations that have none."""
        self._flush_touches()
        self._next_batch()
        self._workers.write(self.maintain, _nothing)

    def close(self) -> None:
        """Take nothing more and write nothing more; `flush` first."""
        self._closed = True
        for timer in [*self._ticks, *([self._timer] if self._timer else [])]:
            timer.cancel()

    # -- batches -----------------------------------------------------------------------------------

    def _start_within(self, delay_s: float) -> None:
        if self._closed or self._is_writing:
            return
        if self._timer is not None:
            if delay_s >= self._timer_s:
                return
            self._timer.cancel()
        self._timer_s = delay_s
        self._timer = self._workers.later(delay_s, self._next_batch)

    def _next_batch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_writing or self._closed:
            return
        batch = self._take_batch()
        if not batch:
            flushed, self._flushed = self._flushed, []
            for done in flushed:
                self._workers.write(_nothing, lambda _, done=done: done())  # type: ignore[misc]
            return
        self._is_writing = True
        nodes = [dirty.node for dirty in batch]
        hold = self._store.hold(nodes)
        # Copied here: a node's list may gain blocks while the writer reads it.
        blocks = [list(node.blocks) for node in nodes]

        def written(kept: set[bytes] | None) -> None:
            self._is_writing = False
            self._store.unhold(hold)
            for dirty in batch:
                if kept is not None and dirty.node.key in kept:
                    dirty.node.saved = True
                else:
                    self.dropped_blocks += 1
            if self._dirty and not self._flushed:
                self._start_within(GATHER_S if len(self._dirty) < self._batch_blocks else 0.0)
            else:
                self._next_batch()

        self._workers.write(lambda: self._write(batch, blocks), written)

    def _take_batch(self) -> list[_Dirty]:
        batch: list[_Dirty] = []
        keys: set[bytes] = set()
        while self._dirty and len(batch) < self._batch_blocks:
            key, dirty = self._dirty.popitem(last=False)
            node, parent = dirty.node, dirty.node.parent
            has_parent = parent is not None and (parent.parent is None or parent.saved or parent.key in keys)
            if self._store.tree.get(key) is node and has_parent:
                batch.append(dirty)
                keys.add(key)
            else:
                self.dropped_blocks += 1
        return batch

    def _drop_dead(self) -> None:
        for key in [k for k, dirty in self._dirty.items() if self._store.tree.get(k) is not dirty.node]:
            del self._dirty[key]
            self.dropped_blocks += 1

    def _write(self, batch: Sequence[_Dirty], blocks: Sequence[Sequence[BlockId]]) -> set[bytes]:
        """On the writer's thread: copy out, store; the keys that some tier has now."""
        if self._buffer is None:
            self._buffer = np.frombuffer(mmap.mmap(-1, self._batch_blocks * self._block_bytes), np.uint8)
        records: list[Record] = []
        offset = 0
        for dirty, held in zip(batch, blocks, strict=True):
            first, groups = offset, 0
            for group, (spec, block) in enumerate(zip(self._store.groups, held, strict=True)):
                if block != NO_BLOCK:
                    self._device.export_block(group, block, self._buffer[offset : offset + spec.block_bytes])
                    offset += spec.block_bytes
                    groups |= 1 << group
            node = dirty.node
            assert node.parent is not None
            records.append(
                Record(
                    Kind.BLOCK,
                    node.key,
                    self._store.layout,
                    node.content,
                    self._buffer[first:offset].data,
                    dirty.ttl_s,
                    node.parent.key,
                    node.depth,
                    groups,
                )
            )
        kept: set[bytes] = set()
        for tier in self._tiers:
            kept.update(tier.put([r for r, dirty in zip(records, batch, strict=True) if tier in dirty.tiers]))
        return kept

    # -- times to live and upkeep ------------------------------------------------------------------

    def _touch_tick(self) -> None:
        if not self._closed:
            self._ticks[0] = self._workers.later(TOUCH_S, self._touch_tick)
            self._flush_touches()

    def _flush_touches(self) -> None:
        if not self._touched:
            return
        touched, self._touched = self._touched, {}

        def renew() -> tuple[list[bytes], list[bytes]]:
            missing = {tier: tier.touch(touched) for tier in self._tiers}
            tiers = lasting(self._tiers) or self._tiers
            lost = {key for tier in tiers for key in missing[tier]}
            deleted = {key for key in lost if any(tier.fate(key) is Fate.DELETED for tier in tiers)}
            return list(lost - deleted), list(deleted)

        def done(result: tuple[list[bytes], list[bytes]] | None) -> None:
            lost, deleted = result or ([], [])
            self._write_again(lost, touched)
            self._forget_deleted(deleted, touched)

        self._workers.write(renew, done)

    def _forget_deleted(self, keys: Sequence[bytes], ttls: dict[bytes, float]) -> None:
        """Blocks that were stored, and that somebody has deleted since, in this process or another. What is
        held now is looked at again later."""
        tree = self._store.tree
        nodes = [node for key in keys if (node := tree.get(key)) is not None and node.saved]
        self.forget(tree.forget([node.key for node in sorted(nodes, key=lambda n: n.depth)]))
        for node in nodes:
            if tree.get(node.key) is node:
                self._touched.setdefault(node.key, ttls[node.key])

    def _write_again(self, missing: Sequence[bytes], ttls: dict[bytes, float]) -> None:
        """Blocks in use that a tier has no more (evicted, expired, dropped): write them anew."""
        nodes = [node for key in missing if (node := self._store.tree.get(key)) is not None and node.saved]
        for node in nodes:
            node.saved = False
        for node in sorted(nodes, key=lambda n: n.depth):
            self.save(node, ttls[node.key])

    def _maintain_tick(self) -> None:
        if not self._closed:
            self._ticks[1] = self._workers.later(MAINTAIN_S, self._maintain_tick)
            self._workers.write(self.maintain, _nothing)


def _nothing(_: object = None) -> None:
    pass
