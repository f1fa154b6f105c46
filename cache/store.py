"""The cache as the scheduler sees it: look a prompt up, get blocks, publish computed blocks, give back.

It ties the pools of all KV groups to the prefix tree. It knows tokens only as numbers, and neither
requests nor devices: copies that it asks for are carried out by the step that needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..kernels.kv import KVKind, KVSpec
from .blocks import NO_BLOCK, BlockId, BlockPool
from .config import CacheConfig
from .spec import block_keys, layout_digest, root_key
from .stats import CacheStats
from .tree import Match, Node, PrefixTree


class BlockCopy(NamedTuple):
    """A whole-block copy that must run before the step's forward."""

    group: int
    source: BlockId
    target: BlockId


@dataclass(slots=True, eq=False)
class Prompt:
    """The content keys of a sequence's tokens, grown as tokens become known."""

    root: bytes
    block_tokens: int
    keys: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)

    def copy(self) -> Prompt:
        """The same content, growing on its own from here: for another choice of one prompt."""
        return Prompt(self.root, self.block_tokens, self.keys.copy(), self.contents.copy())

    def extend(self, tokens: Sequence[int]) -> None:
        """Bring the keys up to `tokens` (all tokens of the sequence, not only the new ones)."""
        done = len(self.keys) * self.block_tokens
        keys, contents = block_keys(
            self.keys[-1] if self.keys else self.root, tokens[done:], self.block_tokens
        )
        self.keys += keys
        self.contents += contents


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks one sequence holds. `blocks[g][i]` covers the positions of block i of group g;
    `NO_BLOCK` where a window has passed."""

    node: Node
    """The deepest tree node that covers the lease's own prefix; grows with `commit`."""
    blocks: list[list[BlockId]]
    passed: list[int]
    """Per group: leading blocks given back because the window has passed them."""
    tokens: int = 0
    """Tokens whose KV was there when the lease was taken."""


@dataclass(slots=True, eq=False)
class Hold:
    """References on cached blocks that belong to no sequence: what is being loaded, or written below."""

    blocks: list[tuple[int, BlockId]]


class KVStore:
    """Pools, prefix tree and counters of one loaded model."""

    def __init__(
        self,
        groups: Sequence[KVSpec],
        kv_blocks: Sequence[int],
        weights_digest: str,
        config: CacheConfig,
        kv_layout: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.groups = tuple(groups)
        self.block_tokens = groups[0].block_tokens
        assert all(g.block_tokens == self.block_tokens for g in groups), "groups must share one block size"
        self.pools = tuple(BlockPool(count) for count in kv_blocks)
        self.tree = PrefixTree(groups, self.pools)
        self.stats = CacheStats()
        self.layout = layout_digest(weights_digest, groups, kv_layout)
        self._enabled = config.enable_prefix_caching
        self.clock = clock
        self._holds: dict[int, Hold] = {}

    # -- prompts -----------------------------------------------------------------------------------

    def prompt(self, tokens: Sequence[int], salt: str) -> Prompt:
        prompt = Prompt(root_key(self.layout, salt), self.block_tokens)
        prompt.extend(tokens)
        return prompt

    def lookup(self, prompt: Prompt, tokens: Sequence[int]) -> Match:
        """The longest reusable prefix of `tokens`; at least their last one is left to compute."""
        if not self._enabled or len(tokens) < 2:
            return self.nothing(prompt)
        done = len(prompt.keys) * self.block_tokens
        tail = np.asarray(tokens[done:], dtype="<i4").tobytes()
        return self.tree.match(prompt.root, prompt.keys, prompt.contents, tail, len(tokens) - 1)

    @property
    def is_usable(self) -> bool:
        """Whether prompts can share blocks at all."""
        return self._enabled and self.tree.usable

    def full_match(self, prompt: Prompt) -> Match:
        """The longest usable run of full blocks, without a part of one more."""
        limit = len(prompt.keys) * self.block_tokens
        match = self.tree.match(prompt.root, prompt.keys, prompt.contents, b"", limit)
        return Match(match.root, match.nodes, len(match.nodes) * self.block_tokens)

    # -- blocks ------------------------------------------------------------------------------------

    def acquire(self, match: Match) -> tuple[Lease, list[BlockCopy]] | None:
        """Take references on a match's blocks. A partly equal tail block is replaced by a fresh block and
        a copy; the copies' sources stay held for the caller, who drops them (`drop_copies`) once the step
        that copies has retired. None if there is no block for the tail (then nothing is held)."""
        lease = Lease(match.last, [[] for _ in self.groups], [0] * len(self.groups), match.tokens)
        for group, spec in enumerate(self.groups):
            first = self.first_needed(spec, match.tokens)
            lease.passed[group] = min(first, len(match.nodes))
            for index, node in enumerate(match.nodes):
                block = node.blocks[group] if index >= first else NO_BLOCK
                if block != NO_BLOCK:
                    self.pools[group].hold(block)
                lease.blocks[group].append(block)
        tail = None if match.tail is None else match.tail.blocks
        copies = self._copy_tail(lease, tail)
        if copies is None:
            return None
        self.tree.touch(match.tail or match.last)
        return lease, copies

    def nothing(self, prompt: Prompt) -> Match:
        """The match of a prompt that is not looked up."""
        return Match(self.tree.root(prompt.root), (), 0)

    def fork(self, source: Lease, tokens: int) -> tuple[Lease, list[BlockCopy]] | None:
        """Share the first `tokens` computed tokens of another sequence's lease: full blocks by
        reference, the rest of its open block by a copy (see `acquire`). None if a window has already
        passed what would be needed, or there is no block for the copy."""
        full = tokens // self.block_tokens
        node = source.node
        while node.depth > full and node.parent is not None:
            node = node.parent
        lease = Lease(node, [[] for _ in self.groups], [0] * len(self.groups), tokens)
        for group, spec in enumerate(self.groups):
            first = min(self.first_needed(spec, tokens), full)
            needed = source.blocks[group][first : full + (tokens % self.block_tokens > 0)]
            if NO_BLOCK in needed:
                self.release(lease)
                return None
            lease.passed[group] = first
            lease.blocks[group] = [NO_BLOCK] * first + source.blocks[group][first:full]
            for block in lease.blocks[group][first:]:
                self.pools[group].hold(block)
        open_blocks = [held[full] for held in source.blocks] if tokens % self.block_tokens else None
        copies = self._copy_tail(lease, open_blocks)
        return None if copies is None else (lease, copies)

    def _copy_tail(self, lease: Lease, sources: Sequence[BlockId] | None) -> list[BlockCopy] | None:
        if sources is None:
            return []
        for pool, source in zip(self.pools, sources, strict=True):
            pool.hold(source)
        held = [BlockCopy(group, source, NO_BLOCK) for group, source in enumerate(sources)]
        if not self.reserve(lease, len(lease.blocks[0]) + 1):
            self.drop_copies(held)
            self.release(lease)
            return None
        return [copy._replace(target=lease.blocks[copy.group][-1]) for copy in held]

    def drop_copies(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self.pools[copy.group].drop(copy.source)

    def reserve(self, lease: Lease, blocks: int) -> bool:
        """Grow the lease to `blocks` blocks in every group, evicting idle ones where needed. All or
        nothing: False leaves the lease as it was."""
        taken = self.take([max(0, blocks - len(held)) for held in lease.blocks])
        if taken is None:
            return False
        for held, new in zip(lease.blocks, taken, strict=True):
            held.extend(new)
        return True

    def take(self, counts: Sequence[int]) -> list[list[BlockId]] | None:
        """Take `counts[g]` fresh blocks of every group, evicting idle ones where needed; None if there are
        not as many."""
        if any(count > pool.available for count, pool in zip(counts, self.pools, strict=True)):
            return None
        for group, (count, pool) in enumerate(zip(counts, self.pools, strict=True)):
            if count > pool.free:
                self.stats.evicted_blocks += self.tree.evict(group, count - pool.free)
        # Evicting a leaf for one group frees blocks of the others, and never takes any: still enough.
        return [[pool.take() for _ in range(count)] for count, pool in zip(counts, self.pools, strict=True)]

    def hold(self, nodes: Iterable[Node]) -> Hold:
        """Keep the blocks of cached nodes from being evicted until `unhold`."""
        hold = Hold(
            [(g, block) for node in nodes for g, block in enumerate(node.blocks) if block != NO_BLOCK]
        )
        for group, block in hold.blocks:
            self.pools[group].hold(block)
        self._holds[id(hold)] = hold
        return hold

    def unhold(self, hold: Hold) -> None:
        """Let go of a hold; idempotent."""
        if self._holds.pop(id(hold), None) is not None:
            for group, block in hold.blocks:
                self.pools[group].drop(block)

    def adopt(
        self, parent: Node, key: bytes, content: bytes, blocks: Sequence[BlockId], created_at: float
    ) -> Node:
        """Publish one block that came from below the device; the caller's references (one for each block
        that is not `NO_BLOCK`) go over to the tree or are given back."""
        node = self.tree.insert(parent, key, content, blocks, created_at)
        for group, block in enumerate(blocks):
            if block != NO_BLOCK:
                self.pools[group].drop(block)
        node.saved = True
        return node

    def commit(self, lease: Lease, prompt: Prompt, computed: int) -> int:
        """Publish the lease's blocks that lie below `computed` tokens and are not in the tree yet.

        Where another sequence has published the same tokens first, the lease changes over to that block
        and gives its own back: so a sequence holds every block of its path, and what is idle in the tree
        has only idle blocks below it. The caller rewrites the block-table entries from the depth before
        the call on. A step in flight may read either block, their contents are equal.

        Returns the number of blocks that are new to the tree.
        """
        if not self._enabled or not self.tree.usable:
            return 0
        inserted = 0
        for index in range(lease.node.depth, min(computed // self.block_tokens, len(prompt.keys))):
            before = len(self.tree)
            own = [held[index] for held in lease.blocks]
            key, content = prompt.keys[index], prompt.contents[index]
            lease.node = self.tree.insert(lease.node, key, content, own, self.clock())
            inserted += len(self.tree) - before
            for group, (mine, cached) in enumerate(zip(own, lease.node.blocks, strict=True)):
                if mine not in (cached, NO_BLOCK):
                    self.pools[group].hold(cached)
                    self.pools[group].drop(mine)
                    lease.blocks[group][index] = cached
        self.tree.touch(lease.node)
        return inserted

    def pass_window(self, lease: Lease, computed: int) -> None:
        """Give back blocks of window groups that no position >= `computed` can read."""
        for group, spec in enumerate(self.groups):
            if spec.kind is not KVKind.WINDOW:
                continue
            held = lease.blocks[group]
            for index in range(lease.passed[group], min(self.first_needed(spec, computed), len(held))):
                if held[index] != NO_BLOCK:
                    self.pools[group].drop(held[index])
                    held[index] = NO_BLOCK
                lease.passed[group] = index + 1

    def release(self, lease: Lease) -> None:
        """Give back all blocks of a lease; what the tree knows stays cached."""
        for pool, held in zip(self.pools, lease.blocks, strict=True):
            pool.drop_all(held)
            held.clear()

    def check_integrity(
        self,
        leases: Sequence[Lease],
        copies: Sequence[BlockCopy] = (),
        taken: Sequence[tuple[int, BlockId]] = (),
    ) -> None:
        """Compare pools and tree with all leases, copy sources and other taken (group, block)s that are out.

        Raises:
            CacheCorrupt: naming what disagrees.
        """
        self.tree.check_integrity()
        for group, pool in enumerate(self.pools):
            held: dict[BlockId, int] = {}
            for lease in leases:
                for block in lease.blocks[group]:
                    if block != NO_BLOCK:
                        held[block] = held.get(block, 0) + 1
            for source in [copy.source for copy in copies if copy.group == group]:
                held[source] = held.get(source, 0) + 1
            others = [*taken, *(held_block for hold in self._holds.values() for held_block in hold.blocks)]
            for block in [b for g, b in others if g == group]:
                held[block] = held.get(block, 0) + 1
            pool.check_integrity(held, self.tree.cached_blocks(group))

    def first_needed(self, spec: KVSpec, position: int) -> int:
        """Index of the first block that positions >= `position` can still read."""
        if spec.kind is not KVKind.WINDOW:
            return 0
        return max(0, position - spec.window + 1) // self.block_tokens
