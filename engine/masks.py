"""The masks of launched steps: laid out with the plan, filled when the tokens before them are known.

A step is launched before the tokens of the step before it are known. Its forward runs meanwhile; only its
sampling waits for the masks (`StepBatch.mask_ready`). It knows sequences and their matchers; nothing of text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .grammar.mask import EVERYTHING
from .request import Settled, Status
from .schedule import Segment, StepPlan


@dataclass(slots=True)
class _Unfilled:
    """A launched step and its rows that still wait."""

    ready: NDArray[np.int32]
    rows: list[tuple[Segment, NDArray[np.uint32]]]


class StepMasks:
    """`open` before a step is launched, `fill` after; `advance` when one has settled, then `fill` again."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._steps: deque[_Unfilled] = deque()

    def open(self, plan: StepPlan) -> None:
        """Give a step its mask if a sequence that draws in it has a grammar."""
        bound = [i for i, s in enumerate(plan.segments) if s.sample and s.sequence.matcher is not None]
        if bound:
            mask = np.full((len(plan.segments), self._words), EVERYTHING, np.uint32)
            ready = np.zeros(1, np.int32)
            plan.batch.mask, plan.batch.mask_ready = mask, ready
            self._steps.append(_Unfilled(ready, [(plan.segments[i], mask[i]) for i in bound]))

    def advance(self, results: Iterable[Settled]) -> None:
        """Take the tokens that a step brought."""
        for settled in results:
            matcher = settled.sequence.matcher
            if matcher is not None and settled.sampled and settled.finite:
                matcher.advance(settled.sequence.tokens[-1])

    def fill(self) -> None:
        """Fill what can be filled, and let those steps go on."""
        while self._steps:
            step = self._steps[0]
            try:
                step.rows = [(segment, row) for segment, row in step.rows if not _filled(segment, row)]
            except BaseException:
                step.ready[0] = 1  # a device must never wait for a host that has failed
                raise
            if step.rows:
                return
            step.ready[0] = 1
            self._steps.popleft()


def _filled(segment: Segment, row: NDArray[np.uint32]) -> bool:
    seq, matcher = segment.sequence, segment.sequence.matcher
    if matcher is None or matcher.is_complete or seq.status is Status.FINISHED:
        return True  # what is drawn here will be dropped
    if len(seq.tokens) < segment.start + segment.count:
        return False
    at = len(seq.tokens)
    if at < seq.sampling.min_len:
        matcher.fill(row)  # the device keeps the end away: no time to bring one about
    else:
        matcher.fill(row, seq.max_len - at)
    if seq.sampling.allowed is not None and not (row & seq.sampling.allowed).any():
        matcher.fail("none of allowed_token_ids may come next")
        row[:] = EVERYTHING
    return True
