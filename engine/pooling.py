"""From a prompt's hidden rows to one vector: the rows are added up as steps bring them."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..kernels.batch import F32

Pooling = Literal["mean", "last"]


class Pooled:
    """The running sum of one prompt's rows, and how many they are."""

    def __init__(self, kind: Pooling, width: int) -> None:
        self.kind, self.width = kind, width
        self._sum = np.zeros(width, np.float64)
        self._rows = 0

    def add(self, rows: F32) -> None:
        """Take hidden rows [R, width] in the order of their positions."""
        if self.kind == "last":
            rows = rows[-1:]
            self._sum[:], self._rows = 0.0, 0
        for row in rows:  # one by one: the sum must not depend on how a prompt was cut into steps
            self._sum += row
        self._rows += len(rows)

    def vector(self) -> bytes:
        """The mean of the rows, float32 [width] little endian."""
        return (self._sum / max(self._rows, 1)).astype("<f4").tobytes()
