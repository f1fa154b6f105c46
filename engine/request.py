"""One sequence (a choice being generated) with its lengths. It knows positions and counts; text, blocks'
contents and the device are others' business.

    cached <= settled <= computed <= length <= max_len

`computed` runs ahead of `settled` by the steps in flight, and `length` counts tokens whose value only the
device knows yet (`pending`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from ..cache import Lease, Load, Prompt
from ..kernels.batch import SlotSampling
from .api import CacheMiss, CachePolicy
from .grammar.mask import Matcher
from .pooling import Pooled


class Status(IntEnum):
    """Life of a sequence, in order; everything from FINISHED on takes no more tokens."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Leaves its blocks when its last step retires, then waits again."""
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence as the scheduler sees it."""

    request_id: str
    index: int
    tokens: list[int]
    """Prompt and all settled output."""
    prompt_len: int
    max_len: int
    """Prompt and output together may grow to this many tokens."""
    sampling: SlotSampling
    prompt: Prompt
    """Content keys of the tokens."""
    order: float = 0.0
    """Turn in the queue and rank among the running: smaller goes first (see `queue.order_of`)."""
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache: CachePolicy = CachePolicy()
    matcher: Matcher | None = None
    """Its place in its grammar: it has taken the settled output."""
    parent: Sequence | None = None
    """The choice whose prompt this one shares: it waits until that prompt is computed, then forks."""

    status: Status = Status.WAITING
    slot: int = -1
    lease: Lease | None = None
    computed: int = 0
    settled: int = 0
    pending: int = 0
    in_flight: int = 0
    """Steps launched and not settled that name this sequence."""
    scoring: int = 1
    """Prompt tokens whose logprob has been asked of a step (the first has none); the rows, when they are
    pooled."""
    pooled: Pooled | None = None
    """Takes the prompt's hidden rows."""
    load: Load | None = None
    """Blocks on their way up from below the device: the sequence waits for them."""
    cached: int = 0
    """Prompt tokens found in the cache at the first admission."""
    sources: dict[str, int] = field(default_factory=dict)
    """Those tokens by where their blocks were."""
    cached_since: float | None = None
    """When the last of those blocks was computed; wall clock."""
    miss: CacheMiss | None = None
    """Why the block behind them was not reused."""
    load_s: float = 0.0
    """Seconds until the load was done."""
    written_blocks: int = 0
    """Blocks this sequence added to the prefix tree."""
    preemptions: int = 0
    admitted: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def waits_for_rows(self) -> int:
        """Rows that can be planned now."""
        return self.length - self.computed

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.prompt_len or self.waits_for_rows > 1

    @property
    def is_scoring(self) -> bool:
        """Whether rows of the prompt besides the last are wanted still: they cannot come from the cache."""
        return self.scores_prompt and self.scoring < self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs is not None or (self.pooled is not None and self.pooled.kind == "mean")

    @property
    def can_sample(self) -> bool:
        """Whether another token may be drawn behind the known and pending ones."""
        return self.length < self.max_len


@dataclass(frozen=True, slots=True)
class Settled:
    """What one step brought for one sequence: rows [first_row, first_row + rows) of the output."""

    sequence: Sequence
    start: int
    count: int
    first_row: int
    rows: int
    sampled: bool
    finite: bool = field(default=True)
