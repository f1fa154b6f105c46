"""The types and the protocol at the engine's door; `artesian.engine` re-exports them.

Everything here is a frozen msgspec Struct, so that it can cross a process boundary unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from ..cache import Miss
from .grammar.schema import SchemaReport
from .grammar.spec import Grammar, Schema
from .params import SamplingParams
from .pooling import Pooling

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal["failed", "deadline", "draining"]


class CachePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a request lets the prompt cache do."""

    read: bool = True
    """Reuse what is cached."""
    write: bool = True
    """Keep what is computed, in memory at least."""
    durable: bool = True
    """Keep it below the device too: in host memory, on disk, in the shared directory."""
    ttl_s: float | None = None
    """Seconds it is kept after its last use; None = the server's default."""
    write_tokens: int | None = None
    """Keep only blocks that lie below this many tokens; None = all, the answer's included."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of tokens and what to do with it."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    """Lower runs earlier; waiting time raises a request's turn (see `engine.schedule.queue`)."""
    salt: str = ""
    """Prefix-cache isolation: prompts share blocks only with prompts of the same salt."""
    cache: CachePolicy = CachePolicy()
    grammar: Grammar | None = None
    """What every choice must look like."""
    pooling: Pooling | None = None
    """Nothing is generated (max_tokens must be 0): the prompt's hidden rows, their mean or the last, come as
    `Delta.embedding`."""
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


CacheMiss = Miss


class CacheReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the prompt cache did for one request."""

    sources: dict[str, int] = {}
    """Reused prompt tokens by where their KV was: "device", "host", "disk", "shared"; their sum is
    `Usage.cached_tokens`."""
    created_at: float | None = None
    """When the last reused block was computed; seconds since the epoch."""
    expires_at: float | None = None
    """Until when this request's own time to live keeps the prompt (what of it is kept below the device) if
    nobody uses it again: a longer one that was given before still holds. None if nothing of it is kept."""
    ttl_s: float | None = None
    """The time to live that was applied; None if nothing is kept below the device."""
    miss: CacheMiss | None = None
    """None = every full block of the prompt that can be reused was."""
    load_s: float = 0.0
    """Seconds the request waited for blocks to be loaded."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of one request, complete whatever way it ended. `cached_tokens <= prompt_tokens - 1`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """In whole blocks, those of the answer included."""
    queued_s: float = 0.0
    """Seconds from submission until the first step that ran the request began."""
    cache: CacheReport = CacheReport()

    @property
    def prompt_write_tokens(self) -> int:
        """Of the prompt, what was written: with the cached tokens and the rest it adds up to the prompt."""
        return min(self.cache_write_tokens, self.prompt_tokens - self.cached_tokens)


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
    embedding: bytes | None = None
    """On the last delta, when pooling: float32 [hidden_size], little endian, not normalised."""
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
    hidden_size: int = 0
    """Width of an embedding; 0 = there are none."""


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


class CachedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is cached now, and what ends it."""

    tokens: int
    """Of the prompt."""
    block_tokens: int
    cached_tokens: int
    """Tokens of the leading run of full blocks that are somewhere."""
    sources: dict[str, int] = {}
    """Those tokens by the fastest place that has them: "device", "host", "disk", "shared"."""
    bytes: int = 0
    """Of those blocks' KV."""
    created_at: float | None = None
    expires_at: float | None = None
    """Of the last of those blocks below the device; None if it is only on the device."""
    pinned: bool = False
    """Whether all of those blocks are pinned."""
    ends_with: CacheMiss | None = None
    """Why the next full block is not there; None if there is no further full block."""


class StoredName(msgspec.Struct, frozen=True, kw_only=True):
    """A small named record without its value."""

    name: str
    bytes: int
    created_at: float
    expires_at: float
    """Infinite while pinned."""
    pinned: bool = False


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's gauges and totals since start (see `cache.tiers.TierStats`)."""

    name: str
    records: int
    bytes: int
    budget_bytes: int
    hits: int
    read_bytes: int
    written_records: int
    written_bytes: int
    expired: int
    evicted: int
    deleted: int
    dropped: int
    faults: dict[str, int]
    suspended: bool


class PromptCache(Protocol):
    """The tiers below the device, and the small named records that live there. Called on the loop's thread;
    a tier's fault is a miss, never an exception."""

    @property
    def default_ttl_s(self) -> float: ...

    @property
    def block_tokens(self) -> int:
        """Tokens per block: what is reused comes in whole blocks, except at a prompt's own end."""
        ...

    async def explain(self, tokens: list[int], salt: str) -> CachedPrompt:
        """Look a prompt up without using it: nothing is loaded, no time to live is renewed."""
        ...

    async def pin(self, tokens: list[int], salt: str, pinned: bool) -> int:
        """Pin or unpin the full blocks of a prompt; returns how many of its tokens are pinned (unpinned)."""
        ...

    async def erase(self, tokens: list[int], salt: str) -> int:
        """Delete the full blocks of a prompt everywhere, except those pinned; returns the tokens deleted.
        What running requests use stays until they end.

        Raises:
            CacheUnavailable: a tier cannot be changed now.
        """
        ...

    async def flush(self) -> None:
        """Return when all that waits to be stored is durable (or was dropped)."""
        ...

    async def put(
        self,
        namespace: str,
        salt: str,
        name: str,
        value: bytes,
        ttl_s: float | None = None,
        *,
        pinned: bool = False,
    ) -> float | None:
        """Keep a small named value (at most 16 MiB) as long as a prompt of that TTL, or one that is pinned;
        replaces an earlier one. Durable as far as a disk tier is there. Returns when it expires; None if it
        could not be kept."""
        ...

    def put_soon(
        self, namespace: str, salt: str, name: str, value: bytes, ttl_s: float | None = None
    ) -> None:
        """`put` without waiting: dropped when too much waits to be written. Readable at once."""
        ...

    async def get(self, namespace: str, salt: str, name: str) -> bytes | None: ...

    async def delete(self, namespace: str, salt: str, name: str) -> bool:
        """Delete a named value; whether there was one. Raises `CacheUnavailable`."""
        ...

    async def names(self, namespace: str, salt: str) -> list[StoredName]:
        """The tenant's names in a namespace, the latest first."""
        ...

    def status(self) -> tuple[TierStatus, ...]: ...


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

    @property
    def prompt_cache(self) -> PromptCache: ...

    async def start(self) -> None:
        """Load and begin to serve. Raises `ModelError`."""
        ...

    async def prepare(self, grammar: Grammar) -> tuple[str, ...]:
        """Compile a grammar off the loop, so that `submit` finds it ready. Returns what of it is not
        enforced, in words for the client.

        Raises:
            GrammarRefused: it is wrong, takes too long, or has a strict part that cannot be enforced.
            EngineOverloaded: too many grammars wait to be compiled.
        """
        ...

    async def report_schema(self, schema: Schema, *, strict: bool) -> SchemaReport:
        """Say which of a schema's keywords are enforced. Raises `EngineOverloaded` as `prepare` does."""
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

    def queue_position(self, request_id: str) -> int:
        """How many starts of sequences it takes until the request's first one runs, its own included; 0 =
        it runs, or starts with the next step."""
        ...

    def prompt_s(self, tokens: int, cached: int) -> float:
        """Estimated seconds to compute a prompt of which the first `cached` tokens are reused, on an engine
        that does nothing else."""
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
