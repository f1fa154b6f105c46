"""Plain counters of the cache, published by the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Totals since start."""

    lookup_tokens: int = 0
    """Prompt tokens that were looked up."""
    hit_tokens: int = 0
    """Of these, the tokens whose KV was reused."""
    inserted_blocks: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    """Copies of a partly shared last block (copy-on-write)."""
