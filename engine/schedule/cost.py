"""What a step costs, from the program and the lengths alone: FLOPs, bytes, and (calibrated) milliseconds.

A prompt chunk at position 100,000 costs far more than one at position 0, so steps are filled by estimated
compute and not by a count of tokens. Pure functions; nothing here knows requests.

    t(step) = overhead + flops(step) / rate

`overhead` holds what is paid once per step (streaming the weights, dispatch); both are fitted on measured
steps at start and then corrected by what real steps took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...kernels.program import Program, Rows

CALIBRATION_ROWS = (1, 64)
CORRECTION_WEIGHT = 0.05  # of one step's ratio; a step disturbed by others must not swing the budget
CORRECTION_RANGE = (0.25, 8.0)


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """FLOPs of one program (2 per multiply-add)."""

    row_flops: int
    """Linear work of one token row."""
    logits_flops: int
    """Linear work of one logits row."""
    attention: tuple[tuple[int, int], ...]
    """Per distinct window: (FLOPs per visible key, window; 0 = unlimited)."""

    @classmethod
    def of(cls, program: Program) -> ProgramCost:
        """Sum the ops of a recorded program. A macro-op counts by its `flops_per_row` attribute."""
        rows = logits = 0
        attention: dict[int, int] = {}
        for op in program.ops:
            flops = int(op.attrs.get("flops_per_row", 0))  # type: ignore[arg-type]
            if op.code == "linear":
                n, k = program.weights[op.weights[0]].shape
                flops = 2 * n * k
            elif op.code == "attention":
                window = int(op.attrs["window"])  # type: ignore[arg-type]
                per_key = 4 * int(op.attrs["heads"]) * int(op.attrs["head_dim"])  # type: ignore[arg-type]
                attention[window] = attention.get(window, 0) + per_key
            if op.outputs and program.buffers[op.outputs[0]].rows is Rows.LOGITS:
                logits += flops
            else:
                rows += flops
        return cls(rows, logits, tuple((flops, window) for window, flops in sorted(attention.items())))

    def chunk_flops(self, start: int, count: int, logits_rows: int = 0) -> int:
        """FLOPs of `count` rows at positions [start, start + count) of one sequence."""
        total = count * self.row_flops + logits_rows * self.logits_flops
        for flops, window in self.attention:
            total += flops * visible_keys(start, count, window)
        return total


def visible_keys(start: int, count: int, window: int = 0) -> int:
    """Sum over positions p in [start, start + count) of min(p + 1, window) (window 0: p + 1)."""
    end = start + count
    if not window:
        return (end * (end + 1) - start * (start + 1)) // 2
    growing = max(0, min(end, window) - start)  # rows that still see everything before them
    first = start
    return (2 * first + growing + 1) * growing // 2 + (count - growing) * window


@dataclass(slots=True)
class CostModel:
    """Milliseconds of a step on this machine."""

    cost: ProgramCost
    overhead_ms: float = 1.0
    flops_per_ms: float = 1e8
    correction: float = 1.0
    """Slowly adapted ratio of measured to estimated time."""

    def calibrate(self, measure: Callable[[int], float]) -> None:
        """Fit both parameters; `measure(rows)` runs one prefill of `rows` rows at position 0 and returns
        its milliseconds (the better of several tries)."""
        few, many = CALIBRATION_ROWS
        short_ms, long_ms = measure(few), measure(many)
        flops = self.cost.chunk_flops(0, many, 1) - self.cost.chunk_flops(0, few, 1)
        per_ms = flops / max(long_ms - short_ms, 1e-3)
        self.flops_per_ms = per_ms
        self.overhead_ms = max(short_ms - self.cost.chunk_flops(0, few, 1) / per_ms, 0.0)

    def observe(self, estimated_ms: float, measured_ms: float) -> None:
        """Correct the estimate by a step that was run."""
        ratio = self.correction * measured_ms / max(estimated_ms, 1e-6)
        low, high = CORRECTION_RANGE
        self.correction += CORRECTION_WEIGHT * (min(max(ratio, low), high) - self.correction)

    def chunk_ms(self, start: int, count: int, logits_rows: int = 0) -> float:
        """Cost that a chunk adds to a step."""
        return self.correction * self.cost.chunk_flops(start, count, logits_rows) / self.flops_per_ms

    def step_overhead_ms(self) -> float:
        return self.correction * self.overhead_ms

    def rows_within(self, budget_ms: float, start: int, most: int) -> int:
        """The longest chunk from `start` that costs at most `budget_ms`, 0 <= rows <= `most`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.chunk_ms(start, middle) <= budget_ms:
                low = middle
            else:
                high = middle - 1
        return low

    def prompt_ms(self, lengths: Sequence[int]) -> float:
        """Estimated time to compute whole prompts, for telling a client when to come back."""
        return sum(self.chunk_ms(0, length, 1) for length in lengths)
