"""The types and the protocol at the engine's door; `artesian.engine` re-exports them.

Everything here is a frozen msgspec Struct, so that it can cross a process boundary unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from .params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal["failed", "deadline", "draining"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of tokens and what to do with it."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    """Lower runs earlier; waiting time raises a request's turn (see `engine.schedule.queue`)."""
    salt: str = ""
    """Prefix-cache isolation: prompts share blocks only with prompts of the same salt."""
    deadline_s: float | None = None
    """Seconds from submission after which the request is failed."""


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token with its logprob under the raw distribution."""

    token_id: int
    logprob: float
    """Never NaN or infinite: -9999.0 stands for anything less likely than that."""
    bytes: bytes
    """The token's exact bytes; for a special token the bytes of its visible name."""
    rank: int = -1


class PositionLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The token at one position, and the most likely ones there."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of one request, complete whatever way it ended. `cached_tokens <= prompt_tokens - 1`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    queued_s: float = 0.0
    """Seconds from submission until the first step that ran the request began."""


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step added to one choice of a request."""

    index: int = 0
    """The choice, 0 <= index < n."""
    text: str = ""
    """New text; UTF-8 complete; never a part of a stop string that can still match."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """On the first delta of choice 0, when asked for: one entry per prompt token, the first None."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the choice; None for the model's own end."""
    usage: Usage | None = None
    """On the last delta of the last choice to end: the whole request's."""
    error: str | None = None
    """With finish_reason "error": what failed, in words for the client."""
    error_code: ErrorCode | None = None
    """Beside `error`: a fault, the request's own deadline, or the shutdown."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine serves."""

    name: str
    max_model_len: int
    vocab_size: int
    architecture: str
    weights_digest: str
    root: str
    backend: str
    eos_token_ids: tuple[int, ...]


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges, read at any time from the loop's thread."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    """Free or evictable: a block that only the prefix tree holds counts as free here."""
    blocks_cached: int = 0
    draining: bool = False
    healthy: bool = True
    preemptions: int = 0
    """Since start: sequences that gave up their blocks for others and computed their tokens again."""
    evicted_blocks: int = 0
    """Since start: cached blocks that made room."""
    backlog_s: float = 0.0
    """Estimated seconds until a request that arrives now would start."""


class DeltaIterator(Protocol):
    """A request's stream (see `Engine.submit`)."""

    def __aiter__(self) -> AsyncIterator[tuple[Delta, ...]]: ...

    async def __anext__(self) -> tuple[Delta, ...]: ...

    async def aclose(self) -> None:
        """Stop reading; aborts the request if it has not ended. Idempotent."""
        ...


class Engine(Protocol):
    """An engine serves one model. All methods are called on the event loop's thread."""

    @property
    def model(self) -> ModelInfo: ...

    async def start(self) -> None:
        """Load and begin to serve. Raises `ModelError`."""
        ...

    def submit(self, request: GenerationRequest) -> DeltaIterator:
        """Queue a request and return its stream: one item per engine step that added something (steps
        that pass while the reader is busy are merged). The stream ends after every choice has finished.
        Closing it early (`aclose`) aborts the request.

        Raises:
            InvalidRequest, ContextTooLong, EngineOverloaded, EngineDraining, EngineStopped: at the call,
                before anything is queued. A failure later arrives as a delta with finish_reason "error".
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request now; idempotent, cheap, unknown ids are ignored. Its stream ends with finish
        reason "abort"; its blocks are released as soon as no step in flight names them."""
        ...

    def status(self) -> EngineStatus: ...

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new; wait until all is finished. After the timeout the rest is failed with an
        error delta; returns whether nothing had to be cut."""
        ...

    async def close(self) -> None: ...
