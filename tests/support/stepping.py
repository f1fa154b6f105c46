"""Drives an executor the way the engine does, with the simplest possible block policy.

A `Session` hands out blocks of every KV group in order of need, so that sequences which grow in turns
lie interleaved in memory. It knows nothing of prefixes, windows or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from artesian.kernels.backend import Backend, Executor, StepLimits, Tensor
from artesian.kernels.batch import I32, SlotSampling, SlotTables, StepBatch, StepOutput
from artesian.kernels.kv import KVSpec
from artesian.kernels.program import Program


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` further rows of a slot; the last `logits` get logits, with `sample` the last is drawn."""

    slot: int
    count: int = 1
    logits: int = 1
    sample: bool = True


class Session:
    """Sequences in the slots of one executor."""

    def __init__(
        self, executor: Executor, tables: SlotTables, groups: Sequence[KVSpec], kv_blocks: Sequence[int]
    ) -> None:
        self.executor = executor
        self.tables = tables
        self.groups = groups
        self.free = [list(range(count - 1, -1, -1)) for count in kv_blocks]
        self.computed = [0] * tables.slots
        """Rows of each slot whose KV is in place; the next segment starts here."""
        self.length = [0] * tables.slots
        self.idle = list(range(tables.slots - 1, -1, -1))

    def start(self, tokens: Sequence[int], sampling: SlotSampling | None = None) -> int:
        """Put a prompt into a free slot and return the slot. Greedy unless `sampling` is given."""
        slot = self.idle.pop()
        self.tables.tokens[slot, : len(tokens)] = tokens
        self.tables.set_sampling(slot, sampling or SlotSampling(temperature=0.0, prompt_len=len(tokens)))
        self.computed[slot], self.length[slot] = 0, len(tokens)
        return slot

    def end(self, slot: int) -> None:
        """Give the slot and its blocks back."""
        for free, table in zip(self.free, self.tables.block_tables, strict=True):
            free.extend(int(block) for block in table[slot] if block >= 0)
            table[slot] = -1
        self.idle.append(slot)

    def rollback(self, slot: int, length: int) -> None:
        """Forget everything from position `length` on; nothing but lengths changes."""
        self.length[slot] = length
        self.computed[slot] = min(self.computed[slot], length)

    def batch(
        self,
        segments: Sequence[Segment],
        *,
        top_logprobs: int = 0,
        mask: NDArray[np.uint32] | None = None,
        copies: I32 | None = None,
    ) -> StepBatch:
        """Lay out one step, allocating the blocks that it writes, and count its rows as computed."""
        starts = []
        for segment in segments:
            start = self.computed[segment.slot]
            starts.append(start)
            self._reserve(segment.slot, start + segment.count)
            self.computed[segment.slot] = start + segment.count
            if segment.sample:
                self.length[segment.slot] = start + segment.count + 1
        batch = StepBatch(
            slots=np.array([s.slot for s in segments], np.int32),
            starts=np.array(starts, np.int32),
            counts=np.array([s.count for s in segments], np.int32),
            logits=np.array([s.logits for s in segments], np.int32),
            sample=np.array([s.sample for s in segments], np.uint8),
            mask=mask,
            top_logprobs=top_logprobs,
        )
        if copies is not None:
            batch.copies = copies
        return batch

    def step(
        self,
        *segments: Segment,
        top_logprobs: int = 0,
        mask: NDArray[np.uint32] | None = None,
        copies: I32 | None = None,
        hidden: int = 0,
    ) -> StepOutput:
        """Run one step and return what it reported."""
        batch = self.batch(segments, top_logprobs=top_logprobs, mask=mask, copies=copies)
        batch.hidden = hidden
        output = StepOutput.empty(batch.logits_rows, top_logprobs, hidden)
        self.executor.step(batch, output)
        return output

    def prefill(self, slot: int, *, chunk: int = 0) -> None:
        """Compute the slot's prompt in chunks (0 = at once) and sample its first token."""
        while (left := self.length[slot] - self.computed[slot]) > 0:
            count = min(chunk or left, left)
            last = count == left
            self.step(Segment(slot, count, logits=int(last), sample=last))
            if last:
                return

    def generate(self, slot: int, count: int, *, chunk: int = 0) -> list[int]:
        """Prefill if needed and return the next `count` sampled tokens."""
        first = self.length[slot]
        if self.computed[slot] < first - 1 or self.computed[slot] == 0:
            self.prefill(slot, chunk=chunk)
        while self.length[slot] - first < count:
            self.step(Segment(slot))
        return [int(token) for token in self.tables.tokens[slot, first : first + count]]

    def _reserve(self, slot: int, length: int) -> None:
        for group, free, table in zip(self.groups, self.free, self.tables.block_tables, strict=True):
            for index in range(group.blocks_for(length)):
                if table[slot, index] < 0:
                    table[slot, index] = free.pop()


def open_session(
    backend: Backend,
    program: Program,
    weights: dict[str, Tensor],
    *,
    slots: int = 8,
    max_len: int = 256,
    rows: int = 512,
    threads: int = 1,
    top_logprobs: int = 20,
) -> Session:
    """Load a program with room for `slots` sequences of `max_len` tokens."""
    tables = SlotTables(slots, max_len, program.kv_groups)
    kv_blocks = [slots * group.blocks_for(max_len) for group in program.kv_groups]
    limits = StepLimits(rows=rows, logits_rows=rows, top_logprobs=top_logprobs)
    executor = backend.load(program, weights, tables, kv_blocks, limits, threads)
    return Session(executor, tables, program.kv_groups, kv_blocks)
