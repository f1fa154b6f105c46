"""What one step will run: a frozen plan, and the builder that fills it under its budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from ...cache import BlockCopy
from ...kernels.batch import StepBatch
from ..request import Sequence


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, start + count) of one sequence; the last `logits` of them get logits, and with
    `sample` a token is drawn from the very last."""

    sequence: Sequence
    start: int
    count: int
    logits: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that was launched or will be. `copies` hold their source blocks until the step settles."""

    number: int
    segments: tuple[Segment, ...]
    copies: tuple[BlockCopy, ...]
    batch: StepBatch
    estimated_ms: float


@dataclass(slots=True)
class StepBuilder:
    """Collects segments while they fit."""

    budget_ms: float
    max_rows: int
    max_logits_rows: int
    spent_ms: float = 0.0
    rows: int = 0
    logits_rows: int = 0
    chunks: int = 0
    """Segments that belong to prompts."""
    segments: list[Segment] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def remaining_ms(self) -> float:
        return self.budget_ms - self.spent_ms

    def add(self, segment: Segment, cost_ms: float) -> None:
        self.segments.append(segment)
        self.spent_ms += cost_ms
        self.rows += segment.count
        self.logits_rows += segment.logits

    def names(self, seq: Sequence) -> bool:
        return any(segment.sequence is seq for segment in self.segments)

    def build(self, number: int) -> StepPlan:
        return StepPlan(
            number,
            tuple(self.segments),
            tuple(self.copies),
            _batch(self.segments, self.copies),
            self.spent_ms,
        )


def _batch(segments: Seq[Segment], copies: Seq[BlockCopy]) -> StepBatch:
    return StepBatch(
        slots=np.array([s.sequence.slot for s in segments], np.int32),
        starts=np.array([s.start for s in segments], np.int32),
        counts=np.array([s.count for s in segments], np.int32),
        logits=np.array([s.logits for s in segments], np.int32),
        sample=np.array([s.sample for s in segments], np.uint8),
        copies=np.array(copies, np.int32).reshape(-1, 3),
        top_logprobs=max((_top(s) for s in segments), default=0),
        hidden=max((s.sequence.pooled.width for s in segments if s.logits and s.sequence.pooled), default=0),
    )


def _top(segment: Segment) -> int:
    seq = segment.sequence
    prompt = (seq.prompt_logprobs or 0) if segment.start < seq.prompt_len else 0
    return max(seq.logprobs or 0, prompt)
