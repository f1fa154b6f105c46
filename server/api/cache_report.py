"""`prompt_cache_diagnostics`: whether a prompt's KV was reused, and if not, why and since which token.

The shapes are those of OpenAI's Responses API, with more fields; every protocol gives the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...engine import CachedPrompt, CachePolicy, CacheReport, InvalidRequest, Usage
from ...engine.codec import Conversation
from ..cache_trace import I32, Trace, TraceBook, Turn, as_array, common_prefix, digest, pack_tokens
from ..service import Service
from .normalise import Change

LOST = frozenset({"expired", "evicted", "deleted", "corrupt", "slow", "fault", "disabled"})
"""Reasons of the store: the prompt did not change."""


class Divergence(msgspec.Struct, frozen=True):
    """Where this prompt parts from the one it is compared with."""

    compared_with: str
    token_offset: int
    message_index: int | None
    role: str | None
    what: str
    """model, tools, template, system or messages."""


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


@dataclass(slots=True)
class PromptDiagnosis:
    """One request's prompt on its way to its diagnostics and its trace."""

    service: Service
    id: str
    tokens: I32
    salt: str
    model: str
    key: str
    policy: CachePolicy = CachePolicy()
    conversation: Conversation | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    normalised: tuple[Change, ...] = ()
    comparison_id: str | None = None
    compared: tuple[Trace, I32] | None = None

    @property
    def _book(self) -> TraceBook:
        return self.service.traces

    async def prepare(self) -> None:
        """Fetch what must be waited for: the trace of the response that is compared with."""
        if self.comparison_id is not None:
            self.compared = await self._book.get(
                self.service.engine.prompt_cache, self.salt, self.comparison_id
            )

    def finish(self, usage: Usage) -> CacheDiagnostics:
        """The diagnostics of the finished request; leaves its trace."""
        diagnostics = self.explain(usage)
        report = usage.cache
        if self.policy.write:
            turns = () if self.conversation is None else _turns(self.conversation)
            trace = Trace(
                id=self.id,
                model=self.model,
                weights=self.service.engine.model.weights_digest,
                created_at=time.time(),
                count=len(self.tokens),
                packed=pack_tokens(self.tokens),
                turns=turns,
                settings=digest(self.template_kwargs) if self.template_kwargs else b"",
                key=self.key,
            )
            self._book.add(self.service.engine.prompt_cache, self.salt, trace, self.tokens, report.ttl_s)
        return diagnostics

    def explain_ahead(self, found: CachedPrompt) -> CacheDiagnostics:
        """The diagnostics that a request would get now."""
        report = CacheReport(
            sources=found.sources,
            created_at=found.created_at,
            expires_at=found.expires_at,
            miss=found.ends_with,
        )
        return self.explain(
            Usage(
                prompt_tokens=found.tokens,
                completion_tokens=0,
                cached_tokens=min(found.cached_tokens, max(found.tokens - 1, 0)),
                cache=report,
            )
        )

    def explain(self, usage: Usage) -> CacheDiagnostics:
        """The diagnostics, without leaving a trace."""
        report, cached = usage.cache, usage.cached_tokens
        facts: dict[str, Any] = {"cached_tokens": cached}
        if report.sources:
            facts["sources"] = report.sources
        if report.created_at is not None:
            facts |= {"created_at": report.created_at, "age_s": max(0.0, time.time() - report.created_at)}
        if report.expires_at is not None:
            facts["expires_at"] = report.expires_at if math.isfinite(report.expires_at) else UNSET
        if report.ttl_s is not None:
            facts["ttl_s"] = report.ttl_s
        if report.load_s:
            facts["load_s"] = round(report.load_s, 6)
        if self.normalised:
            facts["normalised"] = self.normalised
        if self.comparison_id is not None and self.compared is None:
            return CacheDiagnostics(type="comparison_response_not_found", **facts)
        compared = self.compared or self._book.closest(self.salt, self.tokens, self.key)
        shared = common_prefix(compared[1], self.tokens) if compared is not None else 0
        block_tokens = self.service.engine.prompt_cache.block_tokens
        reusable = shared // block_tokens * block_tokens
        reason = self._reason(compared, shared, reusable, cached, report.miss)
        if reason is None:
            return CacheDiagnostics(type="cache_hit", **facts)
        diverges = compared is not None and shared < min(len(compared[1]), len(self.tokens))
        if compared is not None and (diverges or reason == "model_changed"):
            facts["divergence"] = self._divergence(compared[0], shared)
        return CacheDiagnostics(
            type="cache_miss",
            reason=reason,
            cache_missed_tokens=len(self.tokens) - max(cached, min(shared, len(self.tokens))),
            comparison_reusable_tokens=reusable if compared is not None else None,
            **facts,
        )

    def _reason(
        self, compared: tuple[Trace, I32] | None, shared: int, reusable: int, cached: int, miss: str | None
    ) -> str | None:
        """Why not more was reused; None if nothing is amiss."""
        block_tokens = self.service.engine.prompt_cache.block_tokens
        if len(self.tokens) <= block_tokens and not cached:
            return "too_short"
        is_hit = cached >= block_tokens or not miss
        if miss in LOST and cached < max(reusable, 1):
            return miss
        if compared is None:
            return None if is_hit else miss or "never_seen"
        trace, tokens = compared
        if trace.weights != self.service.engine.model.weights_digest:
            return None if is_hit and cached >= reusable else "model_changed"
        if shared < min(len(tokens), len(self.tokens)) and (self.compared is not None or not is_hit):
            return "tools_changed" if trace.settings != self._settings() else "input_changed"
        return None if is_hit else miss

    def _settings(self) -> bytes:
        return digest(self.template_kwargs) if self.template_kwargs else b""

    def _divergence(self, trace: Trace, offset: int) -> Divergence:
        index = self._message_at(offset)
        role = None
        if trace.weights != self.service.engine.model.weights_digest:
            what = "model"
        elif trace.settings != self._settings():
            what = "tools"
        elif index is None or self.conversation is None:
            what = "template" if self.conversation is not None else "prompt"
        else:
            role = self.conversation.messages[index].role
            what = "system" if role in ("system", "developer") else "messages"
        return Divergence(trace.id, offset, index, role, what)

    def _message_at(self, offset: int) -> int | None:
        """The message that the token at `offset` belongs to: the first whose prompt, cut behind it, reaches
        beyond that token."""
        if self.conversation is None:
            return None
        low, high = 0, len(self.conversation.messages) - 1
        while low < high:
            middle = (low + high) // 2
            reached = self.tokens_through(middle)
            if reached is None:
                return None
            if reached > offset:
                high = middle
            else:
                low = middle + 1
        return low

    def tokens_through(self, index: int) -> int | None:
        """Tokens of this prompt that the messages up to `index` make up; None if the template refuses such
        a beginning."""
        assert self.conversation is not None
        begun = Conversation(self.conversation.messages[: index + 1])
        try:
            tokens = self.service.codec.encode_chat(
                begun, add_generation_prompt=False, kwargs=self.template_kwargs
            )
        except InvalidRequest:
            return None
        return common_prefix(as_array(tokens), self.tokens)


def _turns(conversation: Conversation) -> tuple[Turn, ...]:
    return tuple(Turn(message.role, digest(message)) for message in conversation.messages)
