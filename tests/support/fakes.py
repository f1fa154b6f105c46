"""Fakes for what reality will not give on demand: a device whose KV memory checks itself, a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from artesian.kernels.batch import SlotTables, StepBatch, StepOutput
from artesian.kernels.kv import KVKind, KVSpec

MODULUS = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    """Fingerprint of a prefix, from that of the prefix before it and its last token."""
    return (previous * 1_000_003 + token + 1) % MODULUS


def next_token(fingerprint: int, vocab: int) -> int:
    """The only token this "model" ever predicts after a prefix."""
    return (fingerprint >> 7) % vocab


def next_allowed(token: int, mask: NDArray[np.uint32], vocab: int) -> int:
    """The token, or the next one behind it that the mask has."""
    allowed = [t for t in range(vocab) if mask[t // 32] >> (t % 32) & 1]
    return next((t for t in allowed if t >= token), allowed[0])


def expected_output(
    prompt: Sequence[int], count: int, vocab: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    """What a sequence must generate, whatever happens around it."""
    value = 0
    for token in prompt:
        value = chain(value, token)
    out: list[int] = []
    while len(out) < count and not (out and out[-1] in stop):
        out.append(next_token(value, vocab))
        value = chain(value, out[-1])
    return out


def kv_group(name: str = "full", *, block_tokens: int = 4, window: int = 0) -> KVSpec:
    return KVSpec(
        name,
        KVKind.WINDOW if window else KVKind.FULL,
        (0,),
        1,
        8,
        "f32",
        window=window,
        block_tokens=block_tokens,
    )


class FakeExecutor:
    """An executor whose "KV" is the fingerprint of the prefix up to each position. Before it computes a
    row it checks every entry that the row may read: a block that was shared, freed, copied or reused
    wrongly fails the step."""

    def __init__(
        self, tables: SlotTables, groups: Sequence[KVSpec], kv_blocks: Sequence[int], vocab: int = 32
    ) -> None:
        self.tables, self.groups, self.vocab = tables, tuple(groups), vocab
        self.memory = [
            np.zeros((count, group.block_tokens), np.int64)
            for count, group in zip(kv_blocks, groups, strict=True)
        ]
        self.steps = 0
        self.rows = 0
        self.fail_next: Exception | None = None

    def step(self, batch: StepBatch, output: StepOutput) -> None:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.steps += 1
        for group, source, target in batch.copies.tolist():
            self.memory[group][target] = self.memory[group][source]
        row = 0
        for index, slot in enumerate(batch.slots.tolist()):
            start, count = int(batch.starts[index]), int(batch.counts[index])
            self.rows += count
            fingerprints = self._forward(slot, start, count)
            logits = int(batch.logits[index])
            for position in range(start + count - logits, start + count):
                sampled = bool(batch.sample[index]) and position == start + count - 1
                if sampled:
                    token = next_token(fingerprints[position], self.vocab)
                    batch.await_mask()
                    if batch.mask is not None:
                        token = next_allowed(token, batch.mask[index], self.vocab)
                    self.tables.tokens[slot, position + 1] = token
                else:
                    token = int(self.tables.tokens[slot, position + 1])
                output.tokens[row] = token
                output.logprobs[row] = -0.5
                output.finite[row] = 1
                row += 1

    def _forward(self, slot: int, start: int, count: int) -> dict[int, int]:
        fingerprints, value = {}, 0
        for position, token in enumerate(self.tables.tokens[slot, : start + count].tolist()):
            value = chain(value, token)
            fingerprints[position] = value
        for group, spec in enumerate(self.groups):
            oldest = max(0, start - spec.window + 1) if spec.window else 0
            for position in range(oldest, start):
                block = int(self.tables.block_tables[group][slot, position // spec.block_tokens])
                found = int(self.memory[group][block, position % spec.block_tokens]) if block >= 0 else None
                assert found == fingerprints[position], (
                    f"slot {slot} group {group}: position {position} in block {block} holds another prefix"
                )
            for position in range(start, start + count):
                block = int(self.tables.block_tables[group][slot, position // spec.block_tokens])
                assert block >= 0, f"slot {slot} group {group}: no block for position {position}"
                self.memory[group][block, position % spec.block_tokens] = fingerprints[position]
        return fingerprints

    def open_queue(self) -> None:
        return None

    kv_layout = "fake-1"

    def export_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        row = self.memory[group][block].view(np.uint8)
        assert out.nbytes == self.groups[group].block_bytes >= row.nbytes
        out[: row.nbytes], out[row.nbytes :] = row, 0

    def import_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        assert data.nbytes == self.groups[group].block_bytes
        row = self.memory[group][block].view(np.uint8)
        row[:] = data[: row.nbytes]

    def memory_bytes(self) -> Mapping[str, int]:
        return {"kv": sum(m.nbytes for m in self.memory)}

    def close(self) -> None:
        pass


@dataclass
class FakeClock:
    """A clock that moves when told."""

    now: float = field(default=1000.0)

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
