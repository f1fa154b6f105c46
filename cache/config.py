"""Budgets of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LANES = 8
"""Attention sums by position modulo 8: in whole groups of 8, a block's size never shows in the bits."""
MIN_TTL_S, MAX_TTL_S = 1.0, 366 * 86400.0


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
    disk_cache: bool = True
    """Keep prompts on the local disk, across restarts."""
    cache_dir: Path | None = None
    """Where prompts are kept; default: `prompts` in ARTESIAN_HOME, or in the user's cache folder."""
    cache_bytes: int = 0
    """Bytes that the disk cache may use; 0 = a tenth of the disk, at most half of what is free."""
    cache_min_free_bytes: int = 1 << 30
    """Bytes of the disk that the cache leaves free, whatever its budget."""
    cache_ttl: float = 72 * 3600.0
    """How long a prompt is kept after its last use, such as 90s, 30m, 72h or 7d."""
    cache_compression: Literal["none", "zstd"] = "none"
    """zstd = keep blocks byte-split and compressed: smaller by a third, slower than a local disk."""
    cache_host_bytes: int = 0
    """Memory for blocks that left the device; 0 = none (on the cpu backend blocks are in memory anyway)."""
    cache_shared_dir: Path | None = None
    """A directory that several servers share (NFS, 3FS); written to as well, and looked into last."""
    cache_shared_bytes: int = 0
    """Bytes that the shared directory may use; 0 = as cache_bytes, of its own disk."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.block_tokens % LANES:
            raise ValueError(
                f"block_tokens={self.block_tokens} must be a multiple of {LANES}, at least {LANES}"
            )
        for name in ("cache_bytes", "cache_min_free_bytes", "cache_host_bytes", "cache_shared_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not MIN_TTL_S <= self.cache_ttl <= MAX_TTL_S:
            raise ValueError(f"cache_ttl={self.cache_ttl} seconds must be between 1s and 366d")
