"""Plain counters of the cache, published by the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Totals since start."""

    evicted_blocks: int = 0
    """Cached blocks that made room."""
