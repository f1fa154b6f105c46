"""Who holds which KV block of one group: reference counts, the free list, and which blocks are only cached.

A block is an index; the pool knows nothing of tokens, tensors or time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

from .errors import CacheCorrupt

BlockId = NewType("BlockId", int)
NO_BLOCK = BlockId(-1)


class BlockPool:
    """Reference-counted blocks of one KV group.

    A block is *free* (no reference), *held* (at least one sequence refers to it) or *idle*: kept by the
    prefix tree alone, and so evictable. The tree's reference is marked with `set_cached`.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._refs = [0] * blocks
        self._cached = bytearray(blocks)
        self._free = [BlockId(i) for i in range(blocks - 1, -1, -1)]  # low indices first: dense KV memory
        self._idle = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        return self._idle

    @property
    def available(self) -> int:
        """Blocks that an allocation can get, evicting where it must."""
        return len(self._free) + self._idle

    def is_idle(self, block: BlockId) -> bool:
        return self._refs[block] == 1 and bool(self._cached[block])

    def take(self) -> BlockId:
        """Take a free block with one reference. The caller has made sure that there is one."""
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def hold(self, block: BlockId) -> None:
        """Add a reference to a block that has one."""
        assert self._refs[block] > 0, f"block {block} is free and cannot be held"
        if self.is_idle(block):
            self._idle -= 1
        self._refs[block] += 1

    def drop(self, block: BlockId) -> None:
        """Give back one reference; the last one frees the block."""
        assert self._refs[block] > 0, f"block {block} is dropped once too often"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            assert not self._cached[block], f"block {block} freed while the tree refers to it"
            self._free.append(block)
        elif self.is_idle(block):
            self._idle += 1

    def drop_all(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if block != NO_BLOCK:
                self.drop(block)

    def set_cached(self, block: BlockId) -> None:
        """The tree adds its reference."""
        assert not self._cached[block], f"block {block} is in the tree twice"
        self.hold(block)
        self._cached[block] = 1

    def clear_cached(self, block: BlockId) -> None:
        """The tree gives its reference back."""
        assert self._cached[block], f"block {block} is not in the tree"
        if self.is_idle(block):
            self._idle -= 1
        self._cached[block] = 0
        self.drop(block)

    def check_integrity(self, held: dict[BlockId, int], cached: set[BlockId]) -> None:
        """Compare with the owners' own account: references by sequences, and the tree's blocks.

        Raises:
            CacheCorrupt: naming the first block on which they disagree.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise CacheCorrupt("a block is in the free list twice")
        for index in range(self.total):
            block = BlockId(index)
            expected = held.get(block, 0) + (block in cached)
            if self._refs[block] != expected:
                raise CacheCorrupt(f"block {block}: {self._refs[block]} references, owners know {expected}")
            if bool(self._cached[block]) != (block in cached):
                raise CacheCorrupt(f"block {block}: cached flag differs from the tree")
            if (block in free) != (expected == 0):
                raise CacheCorrupt(f"block {block}: free list and references disagree")
        idle = sum(1 for b in cached if held.get(b, 0) == 0)
        if idle != self._idle:
            raise CacheCorrupt(f"{self._idle} idle blocks counted, the tree has {idle}")
