"""What a step costs, from the program and the lengths alone: FLOPs, bytes, and (calibrated) milliseconds.

A prompt chunk at position 100,000 costs far more than one at position 0, so steps are filled by estimated
compute and not by a count of tokens. Pure functions; nothing here knows requests.

    t(step)  = overhead + sum over its chunks of t(chunk)
    t(chunk) = linear / rate + max(attention / attention_rate, kv_bytes / bandwidth)

`overhead` is what a step pays once (streaming the weights, dispatch); weights / overhead is the bandwidth.
All are fitted on three measured steps at start, and then corrected by what real steps took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...kernels.program import Program, Rows

CALIBRATION_ROWS = (1, 64)
CALIBRATION_DEPTH = 1024  # keys that the rows of the attention measurement see
CORRECTION_WEIGHT = 0.05  # of one step's ratio; a step disturbed by others must not swing the budget
CORRECTION_RANGE = (0.25, 8.0)


@dataclass(frozen=True, slots=True)
class Attention:
    """The layers that see the same keys."""

    window: int
    """0 = everything before."""
    flops_per_key: int
    bytes_per_key: int
    """K and V of one position in all of these layers."""


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """FLOPs of one program (2 per multiply-add) and the bytes of its KV."""

    row_flops: int
    """Linear work of one token row."""
    logits_flops: int
    """Linear work of one logits row."""
    attention: tuple[Attention, ...] = ()

    @classmethod
    def of(cls, program: Program) -> ProgramCost:
        """Sum the ops of a recorded program. A macro-op counts by its `flops_per_row` attribute."""
        rows = logits = 0
        attention: dict[int, Attention] = {}
        for op in program.ops:
            flops = op.integer("flops_per_row") if "flops_per_row" in op.attrs else 0
            if op.code == "linear":
                n, k = program.weights[op.weights[0]].shape
                flops = 2 * n * k
            elif op.code == "attention":
                group = program.kv_groups[op.integer("group")]
                known = attention.get(group.window, Attention(group.window, 0, 0))
                attention[group.window] = Attention(
                    group.window,
                    known.flops_per_key + 4 * op.integer("heads") * op.integer("head_dim"),
                    known.bytes_per_key + group.bytes_per_entry // len(group.layers),
                )
            if op.outputs and program.buffers[op.outputs[0]].rows is Rows.LOGITS:
                logits += flops
            else:
                rows += flops
        return cls(rows, logits, tuple(attention.values()))

    def linear_flops(self, count: int, logits_rows: int = 0) -> int:
        """FLOPs of the matrix products of `count` rows."""
        return count * self.row_flops + logits_rows * self.logits_flops

    def attention_flops(self, start: int, count: int) -> int:
        """FLOPs of attention of the rows at positions [start, start + count) of one sequence."""
        return sum(a.flops_per_key * visible_keys(start, count, a.window) for a in self.attention)

    def kv_bytes(self, start: int, count: int) -> int:
        """Bytes of KV that these rows read, each position once."""
        end = start + count
        return sum(a.bytes_per_key * min(end, a.window + count if a.window else end) for a in self.attention)


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
    weight_bytes: int = 0
    """Bytes that every step streams."""
    overhead_ms: float = 1.0
    flops_per_ms: float = 1e8
    attention_flops_per_ms: float = 1e8
    correction: float = 1.0
    """Slowly adapted ratio of measured to estimated time."""

    @property
    def bytes_per_ms(self) -> float:
        return self.weight_bytes / max(self.overhead_ms, 1e-3)

    def calibrate(self, measure: Callable[[int, int], float], deepest: int) -> None:
        """Fit the rates. `measure(start, rows)` runs one step of `rows` rows at `start` and returns its
        milliseconds (the better of several tries); `deepest` is the last position it can take."""
        few, many = CALIBRATION_ROWS
        many = min(many, deepest)
        short_ms, long_ms = measure(0, few), measure(0, many)
        linear = self.cost.linear_flops(many, 1) - self.cost.linear_flops(few, 1)
        self.flops_per_ms = max(linear, 1) / max(long_ms - short_ms, 1e-3)
        self.overhead_ms = max(short_ms - self.cost.linear_flops(few, 1) / self.flops_per_ms, 0.0)
        start = min(CALIBRATION_DEPTH, deepest) - many
        attention = self.cost.attention_flops(start, many) - self.cost.attention_flops(0, many)
        if start > 0 and attention > 0:
            self.attention_flops_per_ms = attention / max(measure(start, many) - long_ms, 1e-3)

    def observe(self, estimated_ms: float, measured_ms: float) -> None:
        """Correct the estimate by a step that was run."""
        ratio = self.correction * measured_ms / max(estimated_ms, 1e-6)
        low, high = CORRECTION_RANGE
        self.correction += CORRECTION_WEIGHT * (min(max(ratio, low), high) - self.correction)

    def chunk_ms(self, start: int, count: int, logits_rows: int = 0) -> float:
        """Cost that a chunk of rows at positions [start, start + count) adds to a step."""
        linear_ms = self.cost.linear_flops(count, logits_rows) / self.flops_per_ms
        attention_ms = self.cost.attention_flops(start, count) / self.attention_flops_per_ms
        if self.weight_bytes:
            attention_ms = max(attention_ms, self.cost.kv_bytes(start, count) / self.bytes_per_ms)
        return self.correction * (linear_ms + attention_ms)

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
