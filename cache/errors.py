"""What can go wrong in the cache.

CacheError
└── CacheCorrupt     an invariant of pool or tree does not hold (found by `check_integrity`)
"""

from __future__ import annotations


class CacheError(Exception):
    """Root of the cache's errors."""


class CacheCorrupt(CacheError):
    """Pool, tree and holders disagree about who owns a block."""
