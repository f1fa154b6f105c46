"""How a request wants its tokens drawn and when it ends. Plain data; checked by `engine.local`."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Per-request generation parameters; the defaults are OpenAI's."""

    max_tokens: int | None = None
    """None = up to the context limit. 0 = no generation (only with `prompt_logprobs`)."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None = random per request; choice i of n uses seed + i."""
    n: int = 1
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    """Keep the matched stop string (or stop token's text) in the output."""
    logprobs: int | None = None
    """Number of alternatives per generated token; 0 = only the token's own; None = off."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
