"""The life of blocks below the device, for one engine: its tiers, what comes up, what goes down."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .config import CacheConfig
from .loads import BlockBytes, Load, Loader
from .records import RecordBook
from .sizing import disk_budget
from .store import KVStore, Prompt
from .tiers import Tier, lasting
from .tiers.host import HostTier
from .tiers.nvme import NvmeTier
from .tiers.shared import SharedTier
from .tree import Node
from .workers import Workers
from .writes import Writer

logger = logging.getLogger(__name__)

NAMES_BYTES = 32 << 20
"""Memory for named records where no durable tier keeps them."""


def open_tiers(config: CacheConfig, item_bytes: int, clock: Callable[[], float] = time.time) -> list[Tier]:
    """The tiers that a configuration asks for, fastest first. What is wrong with a directory switches its
    tier off and shows in its counters; it never keeps a server from starting."""
    tiers: list[Tier] = []
    if config.cache_host_bytes:
        tiers.append(
            HostTier(budget_bytes=config.cache_host_bytes, default_ttl_s=config.cache_ttl, clock=clock)
        )
    if config.disk_cache and config.cache_dir is not None:
        tiers.append(
            NvmeTier(
                config.cache_dir,
                budget_bytes=config.cache_bytes or disk_budget(config.cache_dir),
                min_free_bytes=config.cache_min_free_bytes,
                clock=clock,
                compression=config.cache_compression,
                item_bytes=item_bytes,
            )
        )
    if config.cache_shared_dir is not None:
        tiers.append(_open_shared(config, config.cache_shared_dir, item_bytes, clock))
    return tiers


def _open_shared(
    config: CacheConfig, directory: Path, item_bytes: int, clock: Callable[[], float]
) -> SharedTier:
    return SharedTier(
        directory,
        budget_bytes=config.cache_shared_bytes or disk_budget(directory),
        min_free_bytes=config.cache_min_free_bytes,
        default_ttl_s=config.cache_ttl,
        clock=clock,
        compression=config.cache_compression,
        item_bytes=item_bytes,
    )


class Mover:
    """Everything that happens to blocks below the device. Called on the loop's thread; see `loads` for what
    comes up and `writes` for what goes down. Without tiers it does nothing at all."""

    def __init__(
        self,
        store: KVStore,
        tiers: Sequence[Tier],
        device: BlockBytes,
        workers: Workers,
        *,
        default_ttl_s: float,
        compute_s: Callable[[int, int], float],
        reserved_blocks: Callable[[], int],
        on_ready: Callable[[], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """See `Loader` for the callables."""
        self.store, self.tiers = store, tuple(tiers)
        self.default_ttl_s, self.clock = default_ttl_s, clock
        self.writer = Writer(store, self.tiers, device, workers)
        self.loader = Loader(
            store, self.tiers, device, workers, compute_s=compute_s, reserved_blocks=reserved_blocks,
            on_ready=on_ready, on_adopted=self._adopted, monotonic=monotonic,
        )  # fmt: skip
        self._names = lasting(self.tiers) or [
            HostTier(budget_bytes=NAMES_BYTES, default_ttl_s=default_ttl_s, clock=clock)
        ]
        self.records = RecordBook(self._names, self.writer, workers, default_ttl_s, clock)
        self._workers = workers

    def begin(self, prompt: Prompt) -> Load | None:
        """See `Loader.begin`."""
        return self.loader.begin(prompt)

    def save(self, node: Node, ttl_s: float | None) -> None:
        """A path was computed: write what is missing of it."""
        self.writer.save(node, ttl_s or self.default_ttl_s)

    def touch(self, node: Node, ttl_s: float | None) -> None:
        """A path was used."""
        self.writer.touch(node, ttl_s or self.default_ttl_s)

    def flush(self, done: Callable[[], None]) -> None:
        """Write all that waits; `done` when it is durable or dropped."""
        self.records.flush()
        self.writer.flush(done)

    def close(self) -> None:
        """End the threads and close the tiers. What must be kept is flushed before (`flush`)."""
        self.writer.close()
        self._workers.close()
        for tier in (*self.tiers, *(t for t in self._names if t not in self.tiers)):
            tier.close()

    def _adopted(self, node: Node, tier: Tier) -> None:
        self.writer.promote(node, tier, self.default_ttl_s)
