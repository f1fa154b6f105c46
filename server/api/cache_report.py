"""`prompt_cache_diagnostics`: whether a prompt's KV was reused, and if not, why and since which token.

The shapes are those of OpenAI's Responses API, with more fields; every protocol gives the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from ...engine import CachedPrompt, CacheReport, GenerationRequest, Usage
from ..cache_trace import I32, Trace, Turn, as_array, common_prefix, digest
from ..service import Service
from .chat_messages import ChatPrompt
from .normalise import Change
from .prompt_cache import PromptCacheFields
from .respond import off_loop

LOST = frozenset({"expired", "evicted", "deleted", "corrupt", "slow", "fault", "disabled"})
"""Reasons of the store: the prompt did not change."""


class Divergence(msgspec.Struct, frozen=True):
    """Where this prompt parts from the one it is compared with."""

    compared_with: str
    token_offset: int
    message_index: int | None
    role: str | None
    what: str
    """model, tools, template, system, messages; prompt, where there are no messages."""


class CacheDiagnostics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer's `prompt_cache_diagnostics`. Times are seconds since the epoch."""

    type: str
    reason: str | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET
    comparison_reusable_tokens: int | None | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    sources: dict[str, int] | UnsetType = UNSET
    created_at: float | UnsetType = UNSET
    age_s: float | UnsetType = UNSET
    expires_at: float | UnsetType = UNSET
    ttl_s: float | UnsetType = UNSET
    load_s: float | UnsetType = UNSET
    divergence: Divergence | UnsetType = UNSET
    normalised: tuple[Change, ...] | UnsetType = UNSET


class Comparison(NamedTuple):
    """An earlier prompt beside this one."""

    trace: Trace
    shared: int
    """Tokens that both begin with; 0 if the weights differ."""
    reusable: int
    """Of those, what this prompt could have reused: whole blocks that were kept."""
    diverges: bool
    """False if one is the beginning of the other."""


class PromptDiagnosis:
    """A response's prompts on their way to its diagnostics and its traces."""

    def __init__(
        self,
        service: Service,
        model: str,
        fields: PromptCacheFields,
        requests: Sequence[GenerationRequest],
        prompt: ChatPrompt,
    ) -> None:
        self._service, self._model, self._requests, self._prompt = service, model, requests, prompt
        self._key, self._comparison_id = fields.prompt_cache_key or "", fields.comparison_id
        self._salt, self._policy = requests[0].salt, requests[0].cache
        self._tokens = as_array(prompt.tokens)
        tools = () if prompt.conversation is None else prompt.conversation.tools
        self._settings = digest(prompt.kwargs) if prompt.kwargs else b""
        self._tools = digest(tools) if tools else b""

    @cached_property
    def _turns(self) -> tuple[Turn, ...]:
        conversation = self._prompt.conversation
        messages = () if conversation is None else conversation.messages
        return tuple(Turn(message.role, digest(message)) for message in messages)

    async def finish(self, usage: Usage) -> CacheDiagnostics:
        """The diagnostics of the finished response; leaves its traces."""
        try:
            return await self.explain(usage)
        finally:
            self.remember(usage)

    def remember(self, usage: Usage) -> None:
        """Leave a trace of each prompt, unless the request did not let it be kept."""
        if not self._policy.write:
            return
        now, engine = time.time(), self._service.engine
        for row, request in enumerate(self._requests):
            tokens = as_array(request.prompt) if row else self._tokens
            trace = Trace(
                id=request.id,
                model=self._model,
                weights=engine.model.weights_digest,
                created_at=now,
                count=len(tokens),
                turns=self._turns,
                settings=self._settings,
                tools=self._tools,
                key=self._key,
                kept=self._policy.write_tokens,
            )
            self._service.traces.add(engine.prompt_cache, self._salt, trace, tokens, usage.cache.ttl_s)

    async def explain_ahead(self, found: CachedPrompt) -> CacheDiagnostics:
        """The diagnostics that a request would get now."""
        report = CacheReport(
            sources=found.sources,
            created_at=found.created_at,
            expires_at=found.expires_at,
            miss=found.ends_with,
        )
        cached = min(found.cached_tokens, max(found.tokens - 1, 0))
        usage = Usage(prompt_tokens=found.tokens, completion_tokens=0, cached_tokens=cached, cache=report)
        return await self.explain(usage)

    async def explain(self, usage: Usage) -> CacheDiagnostics:
        """The diagnostics, without leaving a trace."""
        cached, miss, facts = usage.cached_tokens, usage.cache.miss, self._facts(usage)
        if len(self._requests) > 1:  # of several prompts there is no one reason
            return CacheDiagnostics(type="unavailable", **facts)
        against: Comparison | None = None
        if self._comparison_id is not None:
            cache, traces = self._service.engine.prompt_cache, self._service.traces
            known = await traces.get(cache, self._salt, self._comparison_id)
            if known is None:
                return CacheDiagnostics(type="comparison_response_not_found", **facts)
            against = self._compare(*known)
        elif miss and len(self._tokens) > self._block_tokens and (closest := self._closest()):
            against = self._compare(*closest)
        where = None
        if against is not None and against.diverges:
            where = facts["divergence"] = await self._divergence(against)
        reason = self._reason(against, cached, miss, where)
        if reason is None:
            return CacheDiagnostics(type="cache_hit", **facts)
        affected = cached
        if against is not None and reason.endswith("_changed"):
            affected = max(cached, against.shared)
        return CacheDiagnostics(
            type="cache_miss",
            reason=reason,
            cache_missed_tokens=len(self._tokens) - affected,
            comparison_reusable_tokens=None if against is None else against.reusable,
            **facts,
        )

    def _facts(self, usage: Usage) -> dict[str, Any]:
        """What is told whatever the type."""
        report = usage.cache
        facts: dict[str, Any] = {"cached_tokens": usage.cached_tokens}
        if report.sources:
            facts["sources"] = report.sources
        if report.created_at is not None:
            facts |= {"created_at": report.created_at, "age_s": max(0.0, time.time() - report.created_at)}
        if report.expires_at is not None and math.isfinite(report.expires_at):
            facts["expires_at"] = report.expires_at
        if report.ttl_s is not None:
            facts["ttl_s"] = report.ttl_s
        if report.load_s:
            facts["load_s"] = round(report.load_s, 6)
        if self._prompt.normalised:
            facts["normalised"] = self._prompt.normalised
        return facts

    @property
    def _block_tokens(self) -> int:
        return self._service.engine.prompt_cache.block_tokens

    def _closest(self) -> tuple[Trace, I32] | None:
        return self._service.traces.closest(self._salt, self._tokens, self._key, self._block_tokens)

    def _compare(self, trace: Trace, tokens: I32) -> Comparison:
        if trace.weights != self._service.engine.model.weights_digest:
            return Comparison(trace, 0, 0, True)
        shared = common_prefix(tokens, self._tokens)
        ends = [shared, len(self._tokens) - 1, *([] if trace.kept is None else [trace.kept])]
        reusable = min(ends) // self._block_tokens * self._block_tokens
        return Comparison(trace, shared, reusable, shared < min(len(tokens), len(self._tokens)))

    def _reason(
        self, against: Comparison | None, cached: int, miss: str | None, where: Divergence | None
    ) -> str | None:
        """Why not more was reused. None if all was that could be: of what the compared prompt and this one
        share, if the request names one to compare with, else of all that was there, and at least a block."""
        reusable = 0 if against is None else against.reusable
        is_named = self._comparison_id is not None
        if cached < reusable or miss in LOST and not (is_named and reusable):
            return miss or "never_seen"
        if len(self._tokens) <= self._block_tokens and not cached:
            return "too_short"
        if where is not None and (is_named or cached < self._block_tokens):
            return f"{where.what}_changed" if where.what in ("model", "tools") else "input_changed"
        if cached >= self._block_tokens or cached and miss is None:
            return None
        return miss or "never_seen"

    async def _divergence(self, against: Comparison) -> Divergence:
        """Where and in what the prompts part."""
        trace, offset = against.trace, against.shared
        if trace.weights != self._service.engine.model.weights_digest:
            return Divergence(trace.id, 0, None, None, "model")
        conversation = self._prompt.conversation
        if conversation is None:
            return Divergence(trace.id, offset, None, None, "prompt")
        pairs = list(zip(trace.turns, self._turns, strict=False))
        first = next((i for i, (theirs, mine) in enumerate(pairs) if theirs != mine), len(pairs))
        count = len(conversation.messages)
        size_bytes = 4 * len(self._tokens)  # about: it decides whether this is worth a thread
        index = await off_loop(self._service, size_bytes, lambda: self._message_at(offset, first, count))
        role = None if index is None else conversation.messages[index].role
        if trace.tools != self._tools:
            what = "tools"
        elif index is None or index < first:  # the message is the same: it is what the template adds
            what = "template"
        else:
            what = "system" if role in ("system", "developer") else "messages"
        return Divergence(trace.id, offset, index, role, what)

    def _message_at(self, offset: int, guess: int, count: int) -> int | None:
        """The message that the token at `offset` belongs to: the first whose prompt, cut behind it, reaches
        beyond that token. `guess` is most often it. None if the template renders no such beginning.
        Renders and encodes beginnings of the conversation."""
        low, high, likely = 0, count - 1, iter((guess - 1, guess))
        while low < high:
            middle = next((index for index in likely if low <= index < high), (low + high) // 2)
            reached = self._prompt.tokens_through(self._service.codec, middle)
            if reached is None:
                return None
            if reached > offset:
                high = middle
            else:
                low = middle + 1
        return low
