"""What is said of repeated measurements: least, median, 99th percentile, and ratios of pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """Of some samples of one quantity, in its unit."""

    min: float
    median: float
    p99: float
    """Nearest rank: of fewer than 100 samples the largest."""
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Raises `ValueError` when there is no sample."""
        if not samples:
            raise ValueError("no samples")
        ranked = sorted(samples)
        rank = math.ceil(0.99 * len(ranked))
        return cls(ranked[0], statistics.median(ranked), ranked[rank - 1], len(ranked))


def pair_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Each of `ours` over the one of `theirs` that was measured next to it.

    Raises:
        ValueError: not as many of one as of the other, or one of theirs is 0.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} samples are no pairs")
    if 0.0 in theirs:
        raise ValueError("a sample of 0 has no ratio")
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def alternating(pairs: int) -> list[tuple[int, int]]:
    """Which side goes first in each pair, changing every time, so that drift favours neither."""
    return [(0, 1) if pair % 2 == 0 else (1, 0) for pair in range(pairs)]
