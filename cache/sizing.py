"""How a memory budget becomes blocks per KV group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..kernels.kv import KVKind, KVSpec


def blocks_for_budget(
    groups: Sequence[KVSpec], budget_bytes: int, *, sequences: int, chunk_tokens: int
) -> tuple[int, ...]:
    """Blocks for each group within `budget_bytes`.

    A sliding-window group needs, per running sequence, its window and the chunk being computed, however
    long the context is; it gets that for all `sequences`, but at most half of the budget. The groups
    that keep every token share the rest in proportion.

    Raises:
        ValueError: the budget does not hold even one window and chunk, or one block of each group.
    """
    windows = {i: g for i, g in enumerate(groups) if g.kind is KVKind.WINDOW}
    counts = [0] * len(groups)
    rest = budget_bytes
    others = [g for i, g in enumerate(groups) if i not in windows]
    for index, group in windows.items():
        least = (
            group.blocks_for(group.window + chunk_tokens) + 2
        )  # + the two blocks that are cut by the edges
        share = (budget_bytes // 2 if others else budget_bytes) // len(windows)
        counts[index] = max(least, min(least * sequences, share // group.block_bytes))
        rest -= counts[index] * group.block_bytes
    per_block = sum(g.block_bytes for g in others)
    full = rest // per_block if others else 1
    if full < 1 or rest < 0:
        need = budget_bytes - rest + per_block
        raise ValueError(f"{budget_bytes} bytes of KV cache are too few: this model needs at least {need}")
    for index in range(len(groups)):
        if index not in windows:
            counts[index] = full
    if others:
        for index in windows:
            counts[index] = min(counts[index], full)
    return tuple(counts)


def context_capacity(groups: Sequence[KVSpec], kv_blocks: Sequence[int]) -> int:
    """The most tokens that one sequence alone can have in these blocks."""
    full = [
        count * group.block_tokens
        for group, count in zip(groups, kv_blocks, strict=True)
        if group.kind is not KVKind.WINDOW
    ]
    return min(full, default=1 << 31)


def disk_budget(directory: Path) -> int:
    """Bytes that a cache in this directory may use if nobody says: a tenth of the disk, and at most half of
    what is free or the cache's already."""
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        disk = os.statvfs(existing)
    except OSError:
        return 0
    files = (os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names)
    ours = sum(_occupied(path) for path in files)
    return min(disk.f_blocks * disk.f_frsize // 10, (disk.f_bavail * disk.f_frsize + ours) // 2)


def _occupied(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0
