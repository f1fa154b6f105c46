"""The fields that all generation endpoints share, and their way into the engine's `SamplingParams`.

Three lists say what happens to the fields of other servers and of OpenAI that no Struct here has: what cannot
be honoured is refused by name, what only steers is named back as ignored, labels are accepted silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from ...engine import SamplingParams
from ..config import ServerConfig
from ..errors import BadRequest
from .body import gc_paused, parse_object, read_body, typed, unknown_fields
from .prompt_cache import PromptCacheFields

S = TypeVar("S", bound=msgspec.Struct)

MAX_LOGPROBS = 20
"""OpenAI's bound for chat; more would make a token's event larger than a network packet."""
MAX_STOP_CHARS = 4096
"""Longer than any sentence to stop at; a longer one is a mistake."""
MAX_IGNORED_NAMES = 32
"""Names of ignored fields that are given back; they travel in a header and in the answer."""
MAX_NAME_CHARS = 64
"""Longer than any field's name that someone meant."""
GREEDY_BELOW = 1e-5
"""A temperature this close to 0 only divides by nearly nothing: it is taken as 0 (as vLLM does)."""

UNAVAILABLE: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "audio": (),
    "modalities": ([], ["text"]),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "stop_regex": ([], ""),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
}
"""Fields that would change the output and that we cannot honour; with the values that ask for nothing."""

WITHOUT_EFFECT = frozenset("reasoning_effort thinking verbosity prediction moderation".split())
"""Known fields that steer what this server has no wheel for; named back in `x-ignored-fields`."""

LABELS = frozenset(
    "user metadata store service_tier safety_identifier request_id parallel_tool_calls".split()
)
"""Known fields that never change an answer here; accepted silently."""

TokenIds = list[Annotated[int, Meta(ge=0)]]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing is padded here, since the connection is the operator's own."""
    resume: bool | None = None
    """Keep the stream going for a while when its reader leaves, and its events for one that comes back."""


class SamplingFields(PromptCacheFields, kw_only=True):
    """Fields of both `/v1/chat/completions` and `/v1/completions`; null is the default everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: TokenIds | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None


async def read_fields(request: Request, form: type[S], config: ServerConfig) -> tuple[S, list[str], int]:
    """Read a request's body into its form; also the names of the fields that had no effect, and its bytes.

    Raises:
        Refused, BadRequest, ClientDisconnect: see `read_body`, `parse_object`, `check_names` and `typed`.
    """
    data = await read_body(request, config.max_body_bytes)
    with gc_paused():
        fields, ignored = read_object(parse_object(data), form, config)
    return fields, ignored, len(data)


def read_object(raw: dict[str, Any], form: type[S], config: ServerConfig) -> tuple[S, list[str]]:
    """Read a request's fields into its form; also the names of the fields that had no effect.

    Raises:
        BadRequest: see `read_fields`.
    """
    check_names(raw, form)
    fields = typed(raw, form)
    return fields, ignored_fields(raw, fields, strict=config.strict_fields)


def check_names(fields: Mapping[str, Any], form: type[msgspec.Struct]) -> None:
    """Refuse fields that cannot be honoured, except those that the form itself reads.

    Raises:
        BadRequest: names the field.
    """
    for name, neutral in UNAVAILABLE.items():
        value = None if name in form.__struct_fields__ else fields.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(
                f"`{name}` is not available on this server.", code="unsupported_parameter", param=name
            )


def ignored_fields(fields: dict[str, Any], known: msgspec.Struct, *, strict: bool) -> list[str]:
    """Return the names of the first fields that had no effect and might have been meant to.

    Raises:
        BadRequest: `strict`, and there is a field that no one knows.
    """
    unknown = [
        name for name in unknown_fields(fields, known) if name not in LABELS and name not in UNAVAILABLE
    ]
    if strict and (strange := [name for name in unknown if name not in WITHOUT_EFFECT]):
        raise BadRequest(
            f"Unknown fields: {', '.join(name[:MAX_NAME_CHARS] for name in strange[:8])}.",
            code="unknown_parameter",
            param=strange[0][:MAX_NAME_CHARS],
        )
    return [name[:MAX_NAME_CHARS] for name in unknown[:MAX_IGNORED_NAMES]]


def to_params(
    fields: SamplingFields,
    config: ServerConfig,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the engine's form of a request's fields.

    Raises:
        BadRequest: a value out of its bounds; names the field.
    """
    n = fields.n or 1
    if n > config.max_n:
        raise _invalid("n", f"n={n} is more than this server's limit of {config.max_n}")
    if fields.stream_options is not None and not fields.stream:
        raise _invalid("stream_options", "stream_options needs stream=true")
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise _invalid("min_tokens", f"min_tokens={min_tokens} is more than max_tokens={max_tokens}")
    allowed = fields.allowed_token_ids
    if allowed is not None and not allowed:
        raise _invalid("allowed_token_ids", "allowed_token_ids is empty: no token could be drawn")
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_p = 1.0 if fields.top_p is None else fields.top_p
    if temperature < GREEDY_BELOW or top_p == 0:
        temperature, top_p = 0.0, 1.0  # top_p=0 keeps only the most likely token, as OpenAI's does
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, fields.top_k or 0),
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        seed=fields.seed,
        n=n,
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size),
        allowed_token_ids=None if allowed is None else token_ids(allowed, vocab_size, "allowed_token_ids"),
        stop=_stops(fields.stop, config.max_stops),
        stop_token_ids=token_ids(fields.stop_token_ids or (), vocab_size, "stop_token_ids"),
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def token_ids(ids: Iterable[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """Return the ids once all are known to be in the vocabulary.

    Raises:
        BadRequest: the first that is not, with its place.
    """
    checked = tuple(ids)
    if checked and not 0 <= min(checked) <= max(checked) < vocab_size:
        at = next(i for i, token in enumerate(checked) if not 0 <= token < vocab_size)
        raise _invalid(
            param, f"{param}[{at}]={checked[at]} is no token id; the ids are 0 to {vocab_size - 1}"
        )
    return checked


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # isdecimal alone would let other scripts' digits in.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise _invalid(
                "logit_bias",
                f"logit_bias has the key {key[:40]!r}; expected a token id from 0 to {vocab_size - 1}",
            )
        checked[int(key)] = value
    return checked


def _stops(stop: str | list[str] | None, limit: int) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > limit:
        raise _invalid("stop", f"stop has {len(stops)} strings; this server's limit is {limit}")
    for one in stops:
        if not one:
            raise _invalid("stop", "stop has an empty string, which would end every answer at once")
        if len(one) > MAX_STOP_CHARS:
            raise _invalid("stop", f"a stop string has {len(one)} characters; the limit is {MAX_STOP_CHARS}")
    return stops


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)
