"""The keywords of the calls: the fields of a request, all optional, as docs/api.md describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from .types import Message


class PromptCacheOptions(TypedDict, total=False):
    """`prompt_cache_options`."""

    ttl: str | float
    """How long the prompt is kept after its last use: "30m", "72h", "7d", or seconds."""
    mode: Literal["implicit", "explicit"]
    comparison_response_id: str
    """The earlier response that the diagnostics compare with."""
    prewarm: bool
    normalise: bool


class CallParams(TypedDict, total=False):
    """What every call takes besides its own fields."""

    extra_body: Mapping[str, Any]
    """Fields that have no keyword here."""
    extra_headers: Mapping[str, str]
    timeout_s: float
    """Instead of the client's."""
    max_retries: int
    """Instead of the client's."""
    idempotency_key: str
    """The server answers a key once: a second call with it gets the same answer, or joins the running one."""


class CacheParams(TypedDict, total=False):
    """How a request steers the prompt cache."""

    prompt_cache_options: PromptCacheOptions
    prompt_cache_key: str
    prompt_cache_retention: Literal["in_memory", "24h"]
    cache_salt: str


class SamplingParams(CallParams, CacheParams, total=False):
    """Fields of both generation endpoints."""

    model: str
    """Without it, the server's main model."""
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    allowed_token_ids: Sequence[int]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    min_tokens: int
    max_tokens: int
    skip_special_tokens: bool
    prompt_logprobs: int
    return_token_ids: bool
    priority: int
    user: str
    metadata: Mapping[str, str]


class ChatParams(SamplingParams, total=False):
    """Fields of chat completions."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    response_format: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]


class ToolChatParams(SamplingParams, total=False):
    """Fields of a chat that runs tools; the tools are a parameter of their own."""

    max_completion_tokens: int
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    chat_template_kwargs: Mapping[str, Any]


class ResponseParams(SamplingParams, total=False):
    """Fields of responses."""

    instructions: str
    previous_response_id: str
    """Goes on from that response."""
    store: bool
    background: bool
    max_output_tokens: int
    max_tool_calls: int
    include: Sequence[str]
    top_logprobs: int
    text: Mapping[str, Any]
    reasoning: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]


class CompletionParams(SamplingParams, total=False):
    """Fields of text completions."""

    logprobs: int
    echo: bool
    add_special_tokens: bool


class PromptParams(CallParams, CacheParams, total=False):
    """A prompt by itself, for the calls of the prompt cache: `messages` or `prompt`."""

    model: str
    messages: Sequence[Message]
    prompt: str | Sequence[int]
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    add_special_tokens: bool


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP call, as it will be sent."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    timeout_s: float | None = None
    max_retries: int | None = None


CALL_NAMES = frozenset(CallParams.__annotations__)
_encode = msgspec.json.Encoder().encode


def json_call(path: str, params: Mapping[str, Any], **fields: Any) -> Call:
    """Return a POST of the fields and of the keywords that are not about the call itself.

    Raises:
        TypeError, ValueError: something that JSON cannot hold.
    """
    body = {**params, **fields, **params.get("extra_body", {})}
    for name in CALL_NAMES:
        body.pop(name, None)
    headers = {"content-type": "application/json", **_headers(params)}
    return Call(
        method="POST",
        path=path,
        body=_encode(body),
        headers=headers,
        timeout_s=params.get("timeout_s"),
        max_retries=params.get("max_retries"),
    )


def plain_call(method: str, path: str, params: Mapping[str, Any]) -> Call:
    """Return a call without a body."""
    return Call(
        method=method,
        path=path,
        headers=_headers(params),
        timeout_s=params.get("timeout_s"),
        max_retries=params.get("max_retries"),
    )


def _headers(params: Mapping[str, Any]) -> dict[str, str]:
    headers = dict(params.get("extra_headers", {}))
    if key := params.get("idempotency_key"):
        headers["idempotency-key"] = key
    return headers
