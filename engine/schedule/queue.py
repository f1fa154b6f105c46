"""Who waits, in order. Pure bookkeeping: no blocks, no costs."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from ..request import Sequence

PRIORITY_SECONDS = 10.0  # one priority level is worth this much waiting: ageing without re-sorting


def order_of(arrival_s: float, priority: int) -> float:
    """Rank of a request: its arrival, shifted by its priority. Since everybody ages alike, the order of
    two requests never changes while they wait, and a low priority cannot starve."""
    return arrival_s + PRIORITY_SECONDS * priority


class WaitingQueue:
    """Waiting sequences by `order`, ties in order of arrival."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []
        self.tokens = 0
        """Tokens that the waiting sequences still have to compute, cache hits not subtracted."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def push(self, seq: Sequence) -> None:
        bisect.insort_right(self._items, seq, key=lambda s: s.order)
        self.tokens += len(seq.tokens)

    def remove(self, seq: Sequence) -> None:
        self._items.remove(seq)
        self.tokens -= len(seq.tokens)
