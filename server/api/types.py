"""Answers' parts that the protocols share: token counts and logprobs in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...engine import PositionLogprobs, TokenLogprob, Usage
from ...engine.codec import Codec

LOGPROB_FLOOR = -9999.0
"""Stands for anything less likely: JSON has no infinity."""

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct, frozen=True):
    """`usage`; the cached tokens are always told."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def usage_body(usage: Usage, reasoning_tokens: int = 0) -> UsageBody:
    """Return OpenAI's form of a request's token counts."""
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens, usage.prompt_write_tokens),
        CompletionTokensDetails(reasoning_tokens),
    )


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's form: one entry per prompt token, keyed by token id; null for the first."""


def floored(logprob: float) -> float:
    """Return the logprob as JSON can hold it; NaN counts as least likely."""
    return logprob if logprob >= LOGPROB_FLOOR else LOGPROB_FLOOR


def chat_logprobs(positions: Sequence[PositionLogprobs], codec: Codec) -> list[ContentLogprob]:
    """Return chat's form: a label, the logprob, the exact bytes, and the alternatives."""
    return [
        ContentLogprob(
            codec.label(position.chosen.token_id),
            floored(position.chosen.logprob),
            list(position.chosen.bytes),
            [
                TopLogprob(codec.label(top.token_id), floored(top.logprob), list(top.bytes))
                for top in position.top
            ],
        )
        for position in positions
    ]


def prompt_logprobs_body(positions: Sequence[PositionLogprobs | None], codec: Codec) -> PromptLogprobs:
    """Return vLLM's form of the prompt's logprobs."""

    def entry(token: TokenLogprob) -> PromptLogprob:
        return PromptLogprob(floored(token.logprob), token.rank, codec.label(token.token_id))

    return [
        None
        if position is None
        else {str(token.token_id): entry(token) for token in (*position.top, position.chosen)}
        for position in positions
    ]
