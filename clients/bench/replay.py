"""Replays traces through the real store, on a real directory, with a clock of its own and a tiny device.

What is replayed is exactly what the scheduler does with a prompt: load, match, acquire, publish, save, touch.
Blocks carry a few bytes instead of KV; each is checked when it comes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...cache import CacheConfig, KVStore
from ...cache.mover import Mover
from ...cache.tiers.nvme import NvmeTier
from ...cache.tiers.segment import record_length
from ...cache.workers import InlineWorkers
from ...kernels.kv import KVKind, KVSpec
from .traces import AgentTrace, BlockRequest, hit_tokens

START = 1_800_000_000.0
ALIGN = 64
MAINTAIN_S = 30.0
UNLIMITED = 1 << 40


class TinyDevice:
    """Block bytes in memory."""

    def __init__(self, blocks: int, spec: KVSpec) -> None:
        self.memory = np.zeros((blocks, spec.block_bytes), np.uint8)

    def export_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        out[:] = self.memory[block]

    def import_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        self.memory[block] = data


@dataclass(slots=True)
class Outcome:
    """Sums of a replay."""

    hits: int = 0
    total: int = 0
    from_disk: int = 0
    evicted: int = 0
    expired: int = 0
    dropped: int = 0
    kept: list[int] = field(default_factory=list)
    """Records on disk after each request."""
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.total

    @property
    def told(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in self.faults.items()) or "none"
        return (
            f"{self.from_disk} blocks came from disk, {self.evicted} gave way early, {self.expired} expired, "
            f"{self.dropped} were not written, {self.kept[-1]} are kept in the end, {max(self.kept)} were at "
            f"most, faults: {faults}"
        )


class Replay:
    """A store over one directory that has room for `capacity` blocks; None = without a limit.

    With payloads this small, the index and the memory of what gave way would take most of a budget, where
    with real ones they take a thousandth of it: so the budget in bytes follows what they take.
    """

    def __init__(
        self, directory: Path, *, block_tokens: int, device_blocks: int, capacity: int | None, ttl_s: float
    ) -> None:
        spec = KVSpec(
            "tiny", KVKind.LATENT, (0,), 1, 1, "packed", block_tokens=block_tokens,
            tokens_per_entry=block_tokens, entry_bytes=_entry_bytes(block_tokens),
        )  # fmt: skip
        self.now = START
        self.outcome = Outcome()
        self._spec, self._directory, self._blocks = spec, directory, device_blocks
        self._capacity, self._ttl_s = capacity, ttl_s
        self._record_bytes = _record_bytes(block_tokens)
        self._maintained = START
        self._open()

    def _clock(self) -> float:
        return self.now

    def _open(self) -> None:
        self.device = TinyDevice(self._blocks, self._spec)
        self.tier = NvmeTier(
            self._directory, budget_bytes=self._room(), min_free_bytes=0,
            clock=self._clock, align=ALIGN,
        )  # fmt: skip
        self._follow()
        self.store = KVStore([self._spec], [self._blocks], "replay", CacheConfig(), clock=self._clock)
        self.mover = Mover(
            self.store, [self.tier], self.device, InlineWorkers(), default_ttl_s=self._ttl_s,
            compute_s=lambda start, count: math.inf, reserved_blocks=lambda: 0, on_ready=lambda: None,
            clock=self._clock,
        )  # fmt: skip

    def _room(self) -> int:
        return UNLIMITED if self._capacity is None else self._capacity * self._record_bytes

    def _follow(self) -> None:
        stats = self.tier.stats
        self.tier._budget = self._room() + stats.bytes - stats.records * self._record_bytes

    def close(self) -> None:
        """Write what waits and close everything."""
        stats, outcome = self.tier.stats, self.outcome
        self.mover.flush(lambda: None)
        self.mover.close()
        outcome.evicted += stats.evicted
        outcome.expired += stats.expired
        outcome.dropped += stats.dropped + self.mover.writer.dropped_blocks
        for kind, count in stats.faults.items():
            outcome.faults[kind] = outcome.faults.get(kind, 0) + count

    def restart(self) -> None:
        """Lose the device and all memory, keep the directory."""
        self.close()
        self._open()

    def request(self, at: float, tokens: NDArray[np.int32], computed: NDArray[np.int32]) -> int:
        """Serve a prompt that grows to `computed` (prompt and output); returns how many blocks it reused."""
        store, mover = self.store, self.mover
        self.now = START + at
        prompt = store.prompt(tokens, "")  # type: ignore[arg-type]
        load = mover.begin(prompt)
        assert load is not None
        if not load.done:  # a long prompt is only loaded when it is next in the queue: here each one is
            mover.loader.start_waiting(load)
        assert load.done, "an inline load must be done at once"
        match = store.full_match(prompt)
        leased = store.acquire(match)
        assert leased is not None
        lease, _ = leased
        mover.loader.end(load)
        reused = len(match.nodes)
        for node, block in zip(match.nodes, lease.blocks[0], strict=True):
            assert bytes(self.device.memory[block][:8]) == node.content[:8], "another block's bytes"
        self.outcome.from_disk += sum(node.key in load.sources for node in match.nodes)
        mover.touch(match.last, None)
        count = len(computed) // store.block_tokens
        assert store.reserve(lease, count), "the device is too small for one prompt"
        prompt.extend(computed)  # type: ignore[arg-type]
        for index in range(reused, count):
            self.device.memory[lease.blocks[0][index]][:8] = np.frombuffer(
                prompt.contents[index][:8], np.uint8
            )
        store.commit(lease, prompt, count * store.block_tokens)
        mover.save(lease.node, None)
        mover.touch(lease.node, None)
        store.release(lease)
        mover.flush(lambda: None)
        if self.now - self._maintained >= MAINTAIN_S:
            self._maintained = self.now
            mover.writer.maintain()
        self._follow()
        self.outcome.kept.append(self.tier.stats.records)
        return reused


def replay_blocks(
    directory: Path, requests: list[BlockRequest], *, block_tokens: int, capacity: int | None
) -> Outcome:
    """Replay a trace of block ids. A prompt's last, partial block counts as whole, as the trace means it."""
    most = max(len(request.blocks) for request in requests)
    replay = Replay(
        directory, block_tokens=block_tokens, device_blocks=most + 8, capacity=capacity,
        ttl_s=72 * 3600.0,
    )  # fmt: skip
    for request in requests:
        tokens = np.repeat(np.asarray(request.blocks, np.int32), block_tokens)
        reused = replay.request(request.at, tokens, tokens)
        replay.outcome.hits += hit_tokens(reused, request, block_tokens)
        replay.outcome.total += request.tokens
    replay.close()
    return replay.outcome


def replay_agents(
    directory: Path, trace: AgentTrace, *, grain: int, capacity: int | None, restarts: int
) -> Outcome:
    """Replay the agents' trace, with restarts spread over it."""
    most = max(request.prompt + request.output for request in trace.requests) // grain + 8
    replay = Replay(directory, block_tokens=grain, device_blocks=most, capacity=capacity, ttl_s=72 * 3600.0)
    every = len(trace.requests) // (restarts + 1)
    for number, request in enumerate(trace.requests):
        if restarts and number and number % every == 0:
            replay.restart()
        text = trace.texts[request.session]
        prompt = text[: request.prompt]
        reused = replay.request(request.at, prompt[:-1], text[: request.prompt + request.output - 1])
        replay.outcome.hits += reused * grain
        replay.outcome.total += request.prompt
    replay.close()
    return replay.outcome


def _record_bytes(block_tokens: int) -> int:
    return record_length(4 * block_tokens, _entry_bytes(block_tokens), ALIGN)


def _entry_bytes(block_tokens: int) -> int:
    return 8 * max(1, block_tokens // 64)
