"""The life of KV blocks: pool, prefix tree, tiers. No text, no sampling, no HTTP."""

from .blocks import NO_BLOCK, BlockId, BlockPool
from .config import CacheConfig
from .errors import CacheCorrupt, CacheError
from .loads import Load, Miss
from .stats import CacheStats
from .store import BlockCopy, KVStore, Lease, Prompt
from .tree import Match, Node, PrefixTree

__all__ = [
    "NO_BLOCK",
    "BlockCopy",
    "BlockId",
    "BlockPool",
    "CacheConfig",
    "CacheCorrupt",
    "CacheError",
    "CacheStats",
    "KVStore",
    "Lease",
    "Load",
    "Match",
    "Miss",
    "Node",
    "PrefixTree",
    "Prompt",
]
