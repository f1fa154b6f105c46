"""How a request steers the prompt cache: OpenAI's fields, and their way into the engine's `CachePolicy`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...engine import CachePolicy
from ..errors import BadRequest

MIN_TTL_S, MAX_TTL_S = 1.0, 366 * 86400.0
RETENTION_24H_S = 86400.0
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd])", re.ASCII)


class PromptCacheOptions(msgspec.Struct, kw_only=True):
    """`prompt_cache_options`."""

    mode: Literal["implicit", "explicit"] | None = None
    """explicit = only what lies before a `prompt_cache_breakpoint` is kept; without one, nothing is used."""
    ttl: str | float | None = None
    """Kept at least this long after its last use: `30m`, `72h`, `7d`, or seconds."""
    comparison_response_id: Annotated[str, Meta(max_length=256)] | None = None
    """The earlier response that `prompt_cache_diagnostics` compares with."""
    prewarm: bool | None = None
    """Compute and keep the prompt, generate nothing."""
    normalise: bool | None = None
    """Take volatile identifiers out of this prompt, or leave it as it is; null = as the server is set."""


class PromptCacheBreakpoint(msgspec.Struct):
    """`prompt_cache_breakpoint` of a content part."""

    mode: Literal["explicit"] = "explicit"


class PromptCacheFields(msgspec.Struct, kw_only=True):
    """The prompt cache's fields of a generation request."""

    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h", "in-memory"] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    """A label that groups requests in diagnostics, listings and deletions. Prefixes are shared across it."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    @property
    def prewarms(self) -> bool:
        return bool(self.prompt_cache_options and self.prompt_cache_options.prewarm)

    @property
    def normalises(self) -> bool | None:
        return self.prompt_cache_options.normalise if self.prompt_cache_options else None

    @property
    def comparison_id(self) -> str | None:
        return self.prompt_cache_options.comparison_response_id if self.prompt_cache_options else None


def cache_policy(
    fields: PromptCacheFields, breakpoint_tokens: Callable[[], int | None] = lambda: None
) -> CachePolicy:
    """What the cache may do for a request. `breakpoint_tokens()` is asked in explicit mode only: the prompt's
    tokens up to the last breakpoint, None without one.

    Raises:
        BadRequest: a time to live that is none.
    """
    options = fields.prompt_cache_options or PromptCacheOptions()
    ttl_s = None if options.ttl is None else parse_ttl(options.ttl, "prompt_cache_options.ttl")
    if ttl_s is None and fields.prompt_cache_retention == "24h":
        ttl_s = RETENTION_24H_S
    durable = fields.prompt_cache_retention not in ("in_memory", "in-memory")
    if options.mode != "explicit":
        return CachePolicy(durable=durable, ttl_s=ttl_s)
    tokens = breakpoint_tokens()
    if tokens is None:
        return CachePolicy(read=False, write=False, durable=False, ttl_s=ttl_s)
    return CachePolicy(durable=durable, ttl_s=ttl_s, write_tokens=tokens)


def parse_ttl(value: Any, param: str) -> float:
    """Return the seconds of a duration.

    Raises:
        BadRequest: not a duration, or out of range; names the field.
    """
    seconds: float | None = None
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if match is not None:
            seconds = float(match[1]) * SECONDS[match[2]]
    elif isinstance(value, int | float) and math.isfinite(value):
        seconds = float(value)
    if seconds is None:
        shown = repr(value)[:40]
        raise _invalid(param, f"{param}={shown} is no duration: write 30m, 72h, 7d or a number of seconds")
    if not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise _invalid(param, f"{param} must be between 1s and 366d")
    return seconds


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)
