"""The engine in this process: requests in, deltas out, one loop task and one device thread."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from ..cache.mover import Mover
from ..cache.workers import ThreadWorkers
from .admission import check_request, make_choices
from .api import Delta, EngineStatus, ErrorCode, GenerationRequest, ModelInfo
from .codec import Codec
from .config import EngineConfig
from .errors import EngineDraining, EngineOverloaded, EngineStopped
from .grammar.compiler import GrammarCompiler
from .grammar.schema import SchemaReport
from .grammar.spec import Grammar, Schema
from .loop import StepLoop, StepStats
from .masks import StepMasks
from .prompt_cache import LocalPromptCache
from .request import Sequence, Settled
from .run import CompletedStep, Runtime, assemble
from .schedule import Scheduler, order_of
from .stream import DeltaStream
from .tracking import Tracked

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0  # at the end, for what was computed and is not stored yet
RETRY_AFTER_RANGE_S = (1.0, 60.0)
SERVICE_WEIGHT = 0.1  # of one request in the running mean of how long a request holds its slot


class LocalEngine:
    """`Engine` over a runtime. All methods are called on the event loop's thread.

    `clock` gives seconds, monotonic; injected so that tests can age requests.
    """

    def __init__(
        self, runtime: Runtime, config: EngineConfig, clock: Callable[[], float] | None = None
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._clock = clock
        self._scheduler = Scheduler(
            runtime.store,
            runtime.tables,
            runtime.cost,
            step_budget_ms=config.step_budget_ms,
            max_rows=runtime.limits.rows,
            max_logits_rows=runtime.limits.logits_rows,
        )
        self._grammars = GrammarCompiler(
            runtime.codec.tokenizer, runtime.info.vocab_size, runtime.info.eos_token_ids
        )
        self._steps = StepLoop(
            self._scheduler,
            runtime.executor,
            runtime.cost,
            config.loop,
            StepMasks(runtime.info.vocab_size),
            self._on_settled,
            self._on_failed,
        )
        self._tracked: dict[str, Tracked] = {}
        self._task: asyncio.Task[None] | None = None
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._service_s = 1.0
        self._prompt_cache: LocalPromptCache | None = None

    @classmethod
    def load(cls, config: EngineConfig) -> LocalEngine:
        """Load the model; blocking.

        Raises:
            ModelError: it cannot be served as configured.
        """
        return cls(assemble(config), config)

    @property
    def model(self) -> ModelInfo:
        return self._runtime.info

    @property
    def codec(self) -> Codec:
        return self._runtime.codec

    @property
    def step_stats(self) -> StepStats:
        return self._steps.stats

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    @property
    def prompt_cache(self) -> LocalPromptCache:
        assert self._prompt_cache is not None, "the engine has not started"
        return self._prompt_cache

    async def start(self) -> None:
        """Begin to serve; returns once the loop runs."""
        assert self._task is None, "the engine is started twice"
        runtime = self._runtime
        mover = self._scheduler.mover = Mover(
            runtime.store,
            runtime.tiers,
            runtime.executor,
            ThreadWorkers(),
            default_ttl_s=self._config.cache.cache_ttl,
            compute_s=lambda start, count: runtime.cost.chunk_ms(start, count) / 1000,
            reserved_blocks=self._scheduler.reserved_blocks,
            on_ready=self._steps.wake,
            clock=runtime.store.clock,
        )
        self._prompt_cache = LocalPromptCache(mover)
        self._task = asyncio.create_task(self._steps.run(), name="engine")
        self._task.add_done_callback(self._on_loop_end)
        await asyncio.sleep(0)

    # -- requests ----------------------------------------------------------------------------------

    async def prepare(self, grammar: Grammar) -> tuple[str, ...]:
        """See `Engine.prepare`."""
        return (await self._grammars.prepare(grammar)).warnings

    async def report_schema(self, schema: Schema, *, strict: bool) -> SchemaReport:
        """See `Engine.report_schema`."""
        return await self._grammars.report(schema, strict=strict)

    def submit(self, request: GenerationRequest) -> DeltaStream:
        """See `Engine.submit`."""
        if self._draining or self._task is None:
            raise EngineDraining("The server is shutting down and takes no new requests")
        if self._task.done():
            raise EngineStopped("The engine has failed and must be restarted")
        check_request(request, self.model)
        if request.id in self._tracked:
            raise ValueError(f"request id {request.id} is in use")
        self._check_queue(len(request.prompt))
        grammar = None if request.grammar is None else self._grammars.get(request.grammar)
        now = self._now()
        choices = make_choices(
            request,
            self.model,
            self._runtime.store,
            self.codec.tokenizer,
            order=order_of(now, request.priority),
            seed=self._config.seed,
            grammar=grammar,
        )
        stream = DeltaStream(lambda: self.abort(request.id))
        self._tracked[request.id] = Tracked(
            request,
            choices,
            stream,
            self._runtime.eos_token_ids,
            time.perf_counter(),
            kept_s=self.prompt_cache.kept_s(request.cache),
            clock=self._runtime.store.clock,
        )
        self._idle.clear()
        if request.deadline_s is not None:
            self._deadlines[request.id] = asyncio.get_running_loop().call_later(
                request.deadline_s, self._cut, request.id, "the request's deadline has passed", "deadline"
            )
        for choice in choices:
            self._scheduler.add(choice.sequence)
        self._steps.wake()
        return stream

    def queue_position(self, request_id: str) -> int:
        """See `Engine.queue_position`."""
        tracked, waiting, free = self._tracked.get(request_id), self._scheduler.waiting, self._free_slots()
        if tracked is None or len(waiting) <= free:
            return 0
        first = tracked.choices[0].sequence
        place = next((place for place, seq in enumerate(waiting, 1) if seq is first), 0)
        return max(0, place - free)

    def prompt_s(self, tokens: int, cached: int) -> float:
        """See `Engine.prompt_s`."""
        cost = self._runtime.cost
        prompt_ms = cost.chunk_ms(cached, tokens - cached, 1)
        steps = math.ceil(prompt_ms / self._config.step_budget_ms)
        return (prompt_ms + max(1, steps) * cost.step_overhead_ms()) / 1000

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            open_choices = [choice for choice in tracked.choices if not choice.finished]
            self._deliver(tracked, [tracked.end(choice, "abort") for choice in open_choices])

    def _cut(self, request_id: str, why: str, code: ErrorCode) -> None:
        """Fail what is left of a request."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            open_choices = [choice for choice in tracked.choices if not choice.finished]
            self._deliver(
                tracked, [tracked.end(choice, "error", error=why, error_code=code) for choice in open_choices]
            )

    def _check_queue(self, prompt_tokens: int) -> None:
        waiting = len(self._scheduler.waiting) - self._free_slots()
        limit, token_limit = self._config.max_num_queued_reqs, self._config.max_num_queued_tokens
        if waiting >= limit:
            message = f"The server is overloaded: {waiting} requests are waiting (limit {limit})"
        elif token_limit and waiting > 0 and self._scheduler.waiting.tokens + prompt_tokens > token_limit:
            message = f"The server is overloaded: too many prompt tokens are waiting (limit {token_limit})"
        else:
            return
        low, high = RETRY_AFTER_RANGE_S
        raise EngineOverloaded(message, min(max(self._backlog_s(), low), high))

    # -- from the loop -----------------------------------------------------------------------------

    def _on_settled(self, step: CompletedStep, results: list[Settled]) -> None:
        tokenizer = self.codec.tokenizer
        deltas: dict[str, list[Delta]] = {}
        for settled in results:
            request_id = settled.sequence.request_id
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if tracked.started is None:
                tracked.started = step.timing.started
            delta = tracked.advance(settled, step.output, tokenizer)
            if delta is not None:
                deltas.setdefault(request_id, []).append(delta)
        for request_id, batch in deltas.items():
            self._deliver(self._tracked[request_id], batch)

    def _on_failed(self, sequences: list[Sequence]) -> None:
        for request_id in dict.fromkeys(seq.request_id for seq in sequences):
            self._cut(request_id, "the step that ran this request failed", "failed")

    def _deliver(self, tracked: Tracked, deltas: list[Delta]) -> None:
        """Hand one step's deltas to the reader; let go of what they end."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self._scheduler.finish(tracked.choices[delta.index].sequence)
        done = tracked.is_done
        tracked.stream.put(deltas, last=done)
        if done:
            self._forget(tracked)
        self._steps.wake()

    def _forget(self, tracked: Tracked) -> None:
        request_id = tracked.request.id
        del self._tracked[request_id]
        deadline = self._deadlines.pop(request_id, None)
        if deadline is not None:
            deadline.cancel()
        self._service_s += SERVICE_WEIGHT * (time.perf_counter() - tracked.arrived - self._service_s)
        if not self._tracked:
            self._idle.set()

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical("the engine loop has failed", exc_info=task.exception())
        for request_id in list(self._tracked):
            self._cut(request_id, "the engine has stopped", "failed")

    # -- state -------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """See `Engine.status`."""
        scheduler, store = self._scheduler, self._runtime.store
        pool = store.pools[0]
        return EngineStatus(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            blocks_total=pool.total,
            blocks_free=pool.available,
            blocks_cached=len(store.tree),
            draining=self._draining,
            healthy=self._task is not None and not self._task.done(),
            preemptions=scheduler.preemptions,
            evicted_blocks=store.stats.evicted_blocks,
            backlog_s=self._backlog_s(),
        )

    def check_integrity(self) -> None:
        """Check every block and slot against its owners (see `Scheduler.check_integrity`)."""
        self._scheduler.check_integrity()

    async def drain(self, timeout_s: float) -> bool:
        """See `Engine.drain`."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
            return True
        except TimeoutError:
            for request_id in list(self._tracked):
                self._cut(request_id, "the server is shutting down", "draining")
            return False

    async def close(self) -> None:
        """End everything: open requests are failed, the device thread is joined, memory is released."""
        self._draining = True
        if self._task is None:
            return
        for request_id in list(self._tracked):
            self._cut(request_id, "the server is shutting down", "draining")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.prompt_cache.close(FLUSH_TIMEOUT_S)
        self._grammars.close()
        self._runtime.executor.close()

    def _now(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    def _free_slots(self) -> int:
        return self._runtime.tables.slots - len(self._scheduler.running)

    def _backlog_s(self) -> float:
        """Time until a request that comes now would start: prompts before it, and slots to come free."""
        scheduler = self._scheduler
        prompts_s = self._runtime.cost.prompt_ms([len(seq.tokens) for seq in scheduler.waiting]) / 1000
        queued = len(scheduler.waiting) - self._free_slots()
        turns = max(0, queued + 1) / self._runtime.tables.slots
        return prompts_s + turns * self._service_s
