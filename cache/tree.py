"""The prefix tree: which block holds the KV of which run of tokens, found by chained content keys.

A node is one full block of tokens behind its parent's prefix. It keeps at most one block per KV group:
groups that see everything always have theirs; a sliding-window group's block may have been evicted, and
then the prefix can be used only up to where the window behind its end is still complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..kernels.kv import KVKind, KVSpec
from .blocks import NO_BLOCK, BlockId, BlockPool
from .errors import CacheCorrupt

GHOSTS = 8192  # keys of evicted blocks that are remembered, to tell "gone" from "never seen"
TAIL_CANDIDATES = 16  # children compared for a partly equal block; bounds a look-up below a popular prefix


@dataclass(slots=True, eq=False)
class Node:
    """One cached block. `depth` counts blocks from the root; the root has depth 0 and no blocks."""

    key: bytes
    parent: Node | None
    content: bytes
    """The block's tokens as int32 bytes: compared on every match, so that no hash is trusted alone."""
    blocks: list[BlockId]
    depth: int
    children: OrderedDict[bytes, Node] = field(default_factory=OrderedDict)
    created_at: float = 0.0
    """When it was computed; wall clock, seconds."""
    saved: bool = False
    """Whether a tier below the device has it, as far as is known."""

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root left out."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix: the nodes from the root down, and perhaps a part of one more block.

    Its blocks stay valid until the tree changes; take references (`store.acquire`) before anything else.
    """

    root: Node
    nodes: tuple[Node, ...]
    tokens: int
    """Tokens whose KV can be reused, the tail's included."""
    tail: Node | None = None
    """A block whose first `tokens % block_tokens` tokens are equal: to be copied, then overwritten."""

    @property
    def last(self) -> Node:
        return self.nodes[-1] if self.nodes else self.root


class PrefixTree:
    """Prefix tree over the pools of all KV groups of one model."""

    def __init__(self, groups: Sequence[KVSpec], pools: Sequence[BlockPool]) -> None:
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self.block_tokens = groups[0].block_tokens
        self.usable = all(group.prefix_cacheable for group in groups)
        self._window_blocks = {
            index: -(-(group.window - 1) // group.block_tokens)
            for index, group in enumerate(groups)
            if group.kind is KVKind.WINDOW
        }
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()  # least recently used first
        self._roots: dict[bytes, Node] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def has_lost(self, key: bytes) -> bool:
        """Whether a block was here and gave way, not long ago."""
        return key in self._ghosts

    def root(self, key: bytes) -> Node:
        """The root of one identity (model and salt). It lives while something hangs below it."""
        return self._roots.get(key) or Node(key, None, b"", [], 0)

    def match(
        self, root_key: bytes, keys: Sequence[bytes], contents: Sequence[bytes], tail: bytes, limit: int
    ) -> Match:
        """Return the longest usable cached prefix, without changing the tree.

        Args:
            keys, contents: of the prompt's full blocks (`spec.block_keys`).
            tail: the int32 bytes of the tokens behind the last full block.
            limit: the most tokens that may be reused (the last prompt token must always be computed).

        Cost: one dictionary look-up and one comparison of the tokens per block.
        Source: RadixAttention, Zheng et al. 2024, section 3, on fixed blocks; chained keys as in vLLM v1.
        """
        root = self.root(root_key)
        if not self.usable:
            return Match(root, (), 0)
        nodes: list[Node] = []
        usable = 0
        run = dict.fromkeys(self._window_blocks, 0)
        for key, content in zip(keys, contents, strict=True):
            node = self._nodes.get(key)
            if node is None or node.content != content or (node.depth) * self.block_tokens > limit:
                break
            nodes.append(node)
            for group in run:
                run[group] = run[group] + 1 if node.blocks[group] != NO_BLOCK else 0
            if all(have >= min(len(nodes), self._window_blocks[group]) for group, have in run.items()):
                usable = len(nodes)
        del nodes[usable:]
        rest = contents[usable] if usable < len(contents) else tail
        return self._with_tail(Match(root, tuple(nodes), usable * self.block_tokens), rest, limit)

    def _with_tail(self, match: Match, rest: bytes, limit: int) -> Match:
        best, best_tokens = None, 0
        room = min(limit - match.tokens, len(rest) // 4, self.block_tokens - 1)
        if room > 0:
            for count, child in enumerate(reversed(match.last.children.values())):
                if count == TAIL_CANDIDATES or best_tokens == room:
                    break
                if NO_BLOCK not in child.blocks:
                    tokens = min(_common_prefix(child.content, rest) // 4, room)
                    if tokens > best_tokens:
                        best, best_tokens = child, tokens
        return Match(match.root, match.nodes, match.tokens + best_tokens, best)

    def touch(self, node: Node) -> None:
        """Mark a node and its whole path as used now. A parent becomes younger than its children, so
        that one pass from the oldest node on evicts whole chains from their ends."""
        for current in node.path():
            self._nodes.move_to_end(current.key)

    def insert(
        self, parent: Node, key: bytes, content: bytes, blocks: Sequence[BlockId], created_at: float = 0.0
    ) -> Node:
        """Add a computed block below `parent` and return its node.

        If the node is there already it is kept, and only blocks that it lacks are taken over; the
        caller's own block then stays the caller's. The tree takes a reference of its own on what it
        takes. The caller touches the deepest node of what it inserts.
        """
        if parent.parent is None:
            parent = self._roots.setdefault(parent.key, parent)
        node = self._nodes.get(key)
        if node is None:
            node = Node(
                key,
                parent,
                content,
                [NO_BLOCK] * len(self.pools),
                parent.depth + 1,
                created_at=created_at,
            )
            self._nodes[key] = node
            self._ghosts.pop(key, None)
            parent.children[key] = node
        for group, block in enumerate(blocks):
            if node.blocks[group] == NO_BLOCK and block != NO_BLOCK:
                self.pools[group].set_cached(block)
                node.blocks[group] = block
        return node

    def evict(self, group: int, count: int) -> int:
        """Free up to `count` idle blocks of `group`, the least recently used first; return how many.

        A window group gives up single blocks; in the others a leaf goes as a whole.
        """
        freed = 0
        pool = self.pools[group]
        windowed = group in self._window_blocks
        for node in list(self._nodes.values()):  # children before their parents (see `touch`)
            if freed == count:
                break
            block = node.blocks[group]
            if block == NO_BLOCK or not pool.is_idle(block):
                continue
            if windowed:
                pool.clear_cached(block)
                node.blocks[group] = NO_BLOCK
                self._prune(node)
                freed += 1
            elif not node.children:
                self._remove(node)
                freed += 1
        return freed

    def clear(self) -> int:
        """Drop everything that no sequence holds; return how many nodes went."""
        removed = 0
        while True:
            leaves = [node for node in self._nodes.values() if not node.children and self._is_idle(node)]
            for node in leaves:
                self._remove(node)
            removed += len(leaves)
            if not leaves:
                return removed

    def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop the nodes of a chain and all that hangs below its last one, except what somebody holds and
        what other chains hang on; return the keys of what lay below the chain, dropped or not."""
        below: list[bytes] = []
        last = self._nodes.get(keys[-1]) if keys else None
        stack = [] if last is None else list(last.children.values())
        while stack:
            child = stack.pop()
            below.append(child.key)
            stack += child.children.values()
        for key in [*reversed(below), *reversed(keys)]:
            node = self._nodes.get(key)
            if node is not None and not node.children and self._is_idle(node):
                self._remove(node)
        return below

    def cached_blocks(self, group: int) -> set[BlockId]:
        return {n.blocks[group] for n in self._nodes.values() if n.blocks[group] != NO_BLOCK}

    def check_integrity(self) -> None:
        """Raise `CacheCorrupt` if a node is unreachable, misfiled or lacks the block of a full group."""
        age = {key: index for index, key in enumerate(self._nodes)}
        for key, node in self._nodes.items():
            parent = node.parent
            if parent is None or node.key != key or parent.children.get(key) is not node:
                raise CacheCorrupt(f"node {key.hex()} is not a child of its parent")
            if parent.parent is None:
                if self._roots.get(parent.key) is not parent:
                    raise CacheCorrupt(f"node {key.hex()} hangs below a root that is not registered")
            elif self._nodes.get(parent.key) is not parent:
                raise CacheCorrupt(f"node {key.hex()} has an evicted parent")
            if parent.parent is not None and age[key] > age[parent.key]:
                raise CacheCorrupt(f"node {key.hex()} is younger than its parent")
            if node.depth != parent.depth + 1:
                raise CacheCorrupt(f"node {key.hex()} has depth {node.depth} below {parent.depth}")
            for group, block in enumerate(node.blocks):
                if block == NO_BLOCK and group not in self._window_blocks:
                    raise CacheCorrupt(f"node {key.hex()} lacks the block of group {group}")
        for root in self._roots.values():
            if not root.children:
                raise CacheCorrupt("an empty root is kept")

    def _is_idle(self, node: Node) -> bool:
        return all(self.pools[g].is_idle(b) for g, b in enumerate(node.blocks) if b != NO_BLOCK)

    def _prune(self, node: Node | None) -> None:
        """Remove nodes that hold nothing any more, from a leaf upwards."""
        while node is not None and node.parent is not None and not node.children:
            if any(block != NO_BLOCK for block in node.blocks):
                return
            parent = node.parent
            self._remove(node)
            node = parent

    def _remove(self, node: Node) -> None:
        assert not node.children and node.parent is not None, "only a leaf can be removed"
        del self._nodes[node.key]
        del node.parent.children[node.key]
        self._ghosts[node.key] = None
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        for group, block in enumerate(node.blocks):
            if block != NO_BLOCK:
                self.pools[group].clear_cached(block)
        if node.parent.parent is None and not node.parent.children:
            self._roots.pop(node.parent.key, None)


def _common_prefix(a: bytes, b: bytes) -> int:
    """Length in bytes of the common prefix of two runs of int32 tokens, a multiple of 4."""
    if a.startswith(b):
        return len(b)
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:  # binary search on equal prefixes: memcmp does the work
        middle = (low + high + 1) // 2
        if a[: 4 * middle] == b[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return 4 * low
