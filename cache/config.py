"""Budgets of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LANES = 8
"""Attention sums by position modulo 8: in whole groups of 8, a block's size never shows in the bits."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much KV is kept and in which form."""

    kv_cache_memory_bytes: int = 1 << 30
    """Memory for KV blocks of running sequences and of the prefix cache together."""
    kv_cache_dtype: Literal["auto", "f16", "f32"] = "auto"
    """auto = f16."""
    enable_prefix_caching: bool = True
    """Keep the blocks of finished prompts for prompts that begin alike."""
    block_tokens: int = 64
    """Tokens per block: the unit of sharing and of eviction. A multiple of 8."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.block_tokens % LANES:
            raise ValueError(
                f"block_tokens={self.block_tokens} must be a multiple of {LANES}, at least {LANES}"
            )
