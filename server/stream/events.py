"""The steps of one response: from the engine's streams to whoever encodes them, one step at a time.

Owns the life of the engine's requests behind a response: whatever way the reader ends, they are ended too.
It knows nothing of protocols. Nothing is kept: the engine merges the steps that pass while a reader is busy,
so a response that is not read holds one step here and one merged step there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from ...engine import CacheReport, Delta, DeltaIterator, Engine, GenerationRequest, RequestFailed, Usage
from ..errors import draining
from ..metrics import Telemetry

Step = tuple[Delta, ...]


class ResponseSteps:
    """Async iterator of the steps of all requests behind one response; choices are numbered through.

    Request r's choice i is choice r * n + i here. Ends when every choice has finished; must be closed.

    Raises:
        EngineError: when built: a request was refused; then none is left running.
        RequestFailed, Unavailable: while iterating: a choice failed; the rest is ended by `aclose`.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[GenerationRequest], telemetry: Telemetry, arrived_at: float
    ) -> None:
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.generated_tokens = 0
        """Tokens of all choices so far."""
        self._engine, self._requests, self._telemetry = engine, requests, telemetry
        self._arrived_at, self._last_step_at = arrived_at, arrived_at
        self._usages: list[Usage] = []
        self._ended = False
        self._failure: Exception | None = None
        streams: list[DeltaIterator] = []
        try:
            for request in requests:
                streams.append(engine.submit(request))
        except BaseException:
            for request in requests[: len(streams)]:
                engine.abort(request.id)
            raise
        self._source: _Merged | DeltaIterator
        self._source = streams[0] if len(streams) == 1 else _Merged(streams, requests[0].params.n)

    @property
    def has_failed(self) -> bool:
        """Whether a choice has failed."""
        return self._failure is not None

    @property
    def usage(self) -> Usage:
        """Tokens of the whole response: the engine's count once it has ended, until then what was seen."""
        if len(self._usages) < len(self._requests):
            return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.generated_tokens)
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in self._usages),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages),
            cached_tokens=sum(usage.cached_tokens for usage in self._usages),
            cache_write_tokens=sum(usage.cache_write_tokens for usage in self._usages),
            cache=_merged_reports([usage.cache for usage in self._usages]),
        )

    def __aiter__(self) -> ResponseSteps:
        return self

    async def __anext__(self) -> Step:
        if self._failure is not None:
            raise self._failure
        try:
            step = await self._source.__anext__()
        except StopAsyncIteration:
            self._end()
            raise
        self._observe(step)
        for delta in step:
            if delta.finish_reason is not None:
                self._telemetry.finished[delta.finish_reason] += 1
                if delta.finish_reason == "error":
                    self._failure = _as_failure(delta)
            if delta.usage is not None:
                self._usages.append(delta.usage)
                self._telemetry.count_usage(delta.usage)
        if self._failure is None:
            return step
        # What came before the failure is given out first.
        sound = tuple(delta for delta in step if delta.finish_reason != "error")
        if not sound:
            raise self._failure
        return sound

    def abort(self) -> None:
        """Let the requests end now; their last deltas still come. Idempotent."""
        for request in self._requests:
            self._engine.abort(request.id)

    async def aclose(self) -> None:
        """End the requests at once, if they have not ended. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self.abort()
        await self._source.aclose()

    def _observe(self, step: Step) -> None:
        tokens = 0
        for delta in step:
            tokens += len(delta.token_ids)
        if not tokens:
            return
        now = time.perf_counter()
        if not self.generated_tokens:
            self._telemetry.time_to_first_token_s.observe(now - self._arrived_at)
        else:
            self._telemetry.inter_token_latency_s.observe(now - self._last_step_at)
        self._last_step_at = now
        self.generated_tokens += tokens
        self._telemetry.generation_tokens += tokens

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._telemetry.request_latency_s.observe(time.perf_counter() - self._arrived_at)


def _merged_reports(reports: Sequence[CacheReport]) -> CacheReport:
    """What is said of the first prompt, with the tokens of all."""
    if len(reports) == 1:
        return reports[0]
    sources: Counter[str] = Counter()
    for report in reports:
        sources.update(report.sources)
    return msgspec.structs.replace(reports[0], sources=dict(sources))


def _as_failure(delta: Delta) -> Exception:
    if delta.error_code == "draining":
        return draining()
    return RequestFailed(delta.error or "The request could not be finished.")


class _Merged:
    """Several engine streams as one, with the steps that are ready together joined."""

    def __init__(self, streams: Sequence[DeltaIterator], n: int) -> None:
        self._streams, self._n = streams, n
        self._pending: dict[asyncio.Task[Step], int] = {}
        self._is_started = False

    async def __anext__(self) -> Step:
        if not self._is_started:
            self._is_started = True
            for row in range(len(self._streams)):
                self._await_next(row)
        while self._pending:
            done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
            joined: list[Delta] = []
            for task in sorted(done, key=self._pending.__getitem__):
                row = self._pending.pop(task)
                try:
                    step = task.result()
                except StopAsyncIteration:
                    continue
                first = row * self._n
                joined += [msgspec.structs.replace(delta, index=first + delta.index) for delta in step]
                self._await_next(row)
            if joined:
                return tuple(joined)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        self._pending.clear()
        for stream in self._streams:
            await stream.aclose()

    def _await_next(self, row: int) -> None:
        task: asyncio.Task[Step] = asyncio.ensure_future(_next(self._streams[row]))
        self._pending[task] = row


async def _next(stream: DeltaIterator) -> Step:
    return await stream.__anext__()
