"""What a chat request would take, told before it is sent: tokens, cached tokens, time to the first token."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from ...engine import CachedPrompt, ContextTooLong, GenerationRequest
from ..service import Service
from .cache_report import CacheDiagnostics, PromptDiagnosis


class Estimate(msgspec.Struct, kw_only=True, tag_field="object", tag="chat.completion.estimate"):
    """The body of POST /v1/chat/completions/estimate."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, what would be reused."""
    sources: dict[str, int]
    """Those tokens by where they are now: device, host, disk, shared."""
    queue_s: float
    """Until a request that arrives now would start."""
    compute_s: float
    """For the prompt's tokens that are not cached."""
    time_to_first_token_s: float
    prompt_cache_diagnostics: CacheDiagnostics
    warnings: list[str] | UnsetType = UNSET


async def estimate(
    service: Service, model: str, request: GenerationRequest, diagnosis: PromptDiagnosis, warnings: list[str]
) -> Estimate:
    """Estimate a request as the engine stands; nothing is queued or computed.

    Raises:
        ContextTooLong: it could not be served.
    """
    engine, total = service.engine, len(request.prompt)
    limit, wanted = engine.model.max_model_len, request.params.max_tokens or 0
    if total + wanted > limit or total == limit:
        raise ContextTooLong(total, limit, wanted)
    cache = engine.prompt_cache
    found = CachedPrompt(tokens=total, block_tokens=cache.block_tokens, cached_tokens=0, ends_with="disabled")
    if request.cache.read:
        await service.traces.recall(cache, request.salt)
        found = await cache.explain(request.prompt, request.salt)
    cached = min(found.cached_tokens, total - 1)  # the last token's row is always computed
    queue_s, compute_s = engine.status().backlog_s, engine.prompt_s(total, cached)
    return Estimate(
        model=model,
        prompt_tokens=total,
        cached_tokens=cached,
        sources=found.sources,
        queue_s=round(queue_s, 6),
        compute_s=round(compute_s, 6),
        time_to_first_token_s=round(queue_s + compute_s, 6),
        prompt_cache_diagnostics=await diagnosis.explain_ahead(found),
        warnings=warnings or UNSET,
    )
