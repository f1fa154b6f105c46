"""What lies in a tier, as prompts: chains of blocks put together from single records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .tiers import Entry


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks from a root down to one that no other block follows."""

    blocks: tuple[Entry, ...]

    @property
    def leaf(self) -> Entry:
        return self.blocks[-1]

    @property
    def tokens(self) -> int:
        return sum(len(block.content) // 4 for block in self.blocks)

    @property
    def content(self) -> bytes:
        """The tokens as int32 bytes."""
        return b"".join(block.content for block in self.blocks)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its blocks, those shared with other chains included."""
        return sum(block.stored_bytes for block in self.blocks)

    @property
    def created_at(self) -> float:
        return self.leaf.found.created_at

    @property
    def expires_at(self) -> float:
        return self.leaf.found.expires_at

    @property
    def last_used_at(self) -> float:
        """When its time to live was last renewed; when it was made, while it is pinned."""
        return self.created_at if self.leaf.found.pinned else self.expires_at - self.leaf.ttl_s

    @property
    def pinned(self) -> bool:
        """All of it is, but for a part of a block at its end, which never is."""
        is_part = len(self.blocks) > 1 and len(self.leaf.content) < len(self.blocks[0].content)
        return self.blocks[-2 if is_part else -1].found.pinned


def chains(entries: Iterable[Entry]) -> list[Chain]:
    """Put blocks together, the last used chain first. Blocks that have lost a forerunner can never be reused
    and are left out."""
    by_key = {entry.found.key: entry for entry in entries}
    parents = {entry.parent for entry in by_key.values()}
    found: list[Chain] = []
    for key, entry in by_key.items():
        if key not in parents:
            path = _path(entry, by_key)
            if path:
                found.append(Chain(tuple(path)))
    return sorted(found, key=lambda chain: chain.last_used_at, reverse=True)


def _path(entry: Entry, by_key: dict[bytes, Entry]) -> Sequence[Entry]:
    path = [entry]
    while path[-1].depth > 1:
        above = by_key.get(path[-1].parent)
        if above is None:
            return ()
        path.append(above)
    return path[::-1]
