"""What crosses from the host to a device for one engine step, and what comes back.

A *slot* is a running sequence's place in the tables. The host writes a slot's prompt, block tables
and sampling parameters before the first step that names the slot; the device appends every sampled
token to `SlotTables.tokens` itself. So step N+1 may be launched before the host has seen the tokens of
step N: its inputs are read from the table (the relay), and so are the histories that penalties need.
A slot, and a block that it names, is reused only after the last step that names it has retired.

# S segments of the step, R logits rows, V vocabulary, N slots, K top logprobs
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .kv import KVSpec

MASK_NAP_S = 5e-5

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

SAMPLING_DTYPE = np.dtype(
    [
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("repetition", "<f8"),
        ("presence", "<f8"),
        ("frequency", "<f8"),
        ("seed", "<u8"),
        ("bias_ids", "<u8"),
        ("bias_values", "<u8"),
        ("stop_ids", "<u8"),
        ("allowed", "<u8"),
        ("top_k", "<i4"),
        ("bias_count", "<i4"),
        ("stop_count", "<i4"),
        ("prompt_len", "<i4"),
        ("min_len", "<i4"),
        ("pad", "<i4"),
    ],
    align=True,
)
"""One slot's sampling parameters as the native backend reads them; the four `<u8` fields between
`seed` and `top_k` are addresses of the arrays in the slot's `SlotSampling` (0 = none)."""


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How the tokens of one sequence are drawn. The order of the steps is fixed (see `sampling.py`)."""

    temperature: float = 1.0
    """0 = greedy: the highest logit, the lowest id on a tie."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    prompt_len: int = 0
    """Tokens before this position count for `repetition` only."""
    min_len: int = 0
    """While the sequence is shorter than this, `stop_ids` cannot be drawn."""
    bias_ids: I32 | None = None
    bias_values: F32 | None = None
    stop_ids: I32 | None = None
    allowed: NDArray[np.uint32] | None = None
    """Bit mask over the vocabulary, uint32[ceil(V / 32)], bit i % 32 of word i // 32."""


class SlotTables:
    """Per-slot arrays shared by host and device.

    Attributes:
        tokens: int32 [N, max_len]; prompt written by the host, sampled tokens by the device.
        block_tables: one int32 [N, blocks] per KV group; entry i of a row is the block that holds the
            positions [i * block_tokens, (i + 1) * block_tokens). Entries are written once, before the
            first step that reads or writes them; -1 = none (not yet, or behind the window).
        sampling: `SAMPLING_DTYPE` [N].
    """

    def __init__(self, slots: int, max_len: int, groups: Sequence[KVSpec]) -> None:
        self.slots = slots
        self.max_len = max_len
        self.tokens: I32 = np.zeros((slots, max_len), np.int32)
        self.block_tables: tuple[I32, ...] = tuple(
            np.full((slots, group.blocks_for(max_len)), -1, np.int32) for group in groups
        )
        self.sampling = np.zeros(slots, SAMPLING_DTYPE)
        self.slot_sampling: list[SlotSampling] = [SlotSampling()] * slots

    def set_sampling(self, slot: int, sampling: SlotSampling) -> None:
        """Install a slot's parameters; the arrays they name stay alive until the slot is set again."""
        self.slot_sampling[slot] = sampling
        row = self.sampling[slot]
        for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
            row[name] = getattr(sampling, name)
        row["seed"] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        row["top_k"], row["prompt_len"], row["min_len"] = (
            sampling.top_k,
            sampling.prompt_len,
            sampling.min_len,
        )
        for array, name in (
            (sampling.bias_ids, "bias_ids"),
            (sampling.bias_values, "bias_values"),
            (sampling.stop_ids, "stop_ids"),
            (sampling.allowed, "allowed"),
        ):
            row[name] = 0 if array is None else array.ctypes.data
        row["bias_count"] = 0 if sampling.bias_ids is None else len(sampling.bias_ids)
        row["stop_count"] = 0 if sampling.stop_ids is None else len(sampling.stop_ids)


@dataclass(slots=True)
class StepBatch:
    """One step. Segment s computes the rows at positions [start, start + count) of its slot.

    The last `logits[s]` rows of a segment get logits. With `sample[s]` the last of them is sampled: the
    token drawn is written to tokens[slot, start + count]. The other logits rows are scored against the
    token that follows them in the table (prompt logprobs).
    """

    slots: I32
    starts: I32
    counts: I32
    logits: I32
    sample: NDArray[np.uint8]
    mask: NDArray[np.uint32] | None = None
    """Optional [S, ceil(V / 32)] bit mask of what may be drawn; rows of unsampled segments are ignored."""
    mask_ready: I32 | None = None
    """Optional [1]: 0 while the host still fills `mask`. Sampling waits until it is 1, the forward does not;
    whoever sets it to 0 must set it to 1, whatever happens."""
    copies: I32 = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    """[C, 3] of (group, source block, target block): whole-block copies made before the forward."""
    top_logprobs: int = 0
    """K, the number of most likely tokens reported for every logits row."""
    hidden: int = 0
    """H, the width of the program's hidden rows if they are wanted for every logits row; 0 = they are not."""

    def await_mask(self) -> None:
        """Block until the mask is filled."""
        while self.mask_ready is not None and not self.mask_ready[0]:
            time.sleep(MASK_NAP_S)

    @property
    def rows(self) -> int:
        """T, the rows of the forward."""
        return int(self.counts.sum())

    @property
    def logits_rows(self) -> int:
        """R."""
        return int(self.logits.sum())


@dataclass(slots=True)
class StepOutput:
    """Results of a step, one entry per logits row, segments back to back.

    Logprobs are of the raw distribution: log_softmax of the logits before penalties, bias, masks and
    temperature. `tokens` is the drawn token, or the scored one.
    """

    tokens: I32
    """[R]."""
    logprobs: F32
    """[R]."""
    ranks: I32
    """[R]; 0 = the token is the most likely one (ties: the lower id ranks first)."""
    finite: NDArray[np.uint8]
    """[R]; 0 where a logit is NaN or all are -inf: the row's other results mean nothing."""
    top_tokens: I32
    """[R, K], most likely first, ties by lower id."""
    top_logprobs: F32
    """[R, K]."""
    hidden: F32
    """[R, H]: the rows that the logits were made of."""

    @classmethod
    def empty(cls, rows: int, top: int, hidden: int = 0) -> StepOutput:
        return cls(
            np.zeros(rows, np.int32),
            np.zeros(rows, np.float32),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.uint8),
            np.zeros((rows, top), np.int32),
            np.zeros((rows, top), np.float32),
            np.zeros((rows, hidden), np.float32),
        )
