"""`/v1/caches`: named prompts that are computed ahead, pinned, listed, explained and deleted.

A name is a tenant's own: of another API key or salt it does not exist. What is stored under it is the tokens
of the prompt; the KV itself lies in the prompt cache like any other.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from secrets import token_hex
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...engine import CachedPrompt, CachePolicy, ContextTooLong, GenerationRequest, SamplingParams, Usage
from ..cache_trace import I32, as_array, common_prefix, pack_tokens, unpack_tokens
from ..errors import BadRequest, NotFound, Unavailable
from ..middleware import request_info
from ..service import Service
from .body import ignored_header, typed
from .cache_report import CacheDiagnostics, PromptDiagnosis
from .chat_messages import ChatPrompt, MessageFields, encode_chat
from .openai_chat_tools import ToolForm, tool_use
from .prompt_cache import MAX_TTL_S, PromptCacheFields, cache_policy, parse_ttl
from .respond import collect, isolation_salt, off_loop, submit
from .sampling import read_fields, token_ids
from .types import UsageBody, encode, usage_body

NAMES = "caches"
_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,128}", re.ASCII)
MAX_LISTED = 100
RETRY_S = 5.0
ACTS = ("pin", "unpin", "prewarm")


class PromptFields(PromptCacheFields, kw_only=True):
    """A prompt as the generation endpoints take it."""

    model: str | None = None
    messages: list[MessageFields] | None = None
    prompt: str | list[Annotated[int, Meta(ge=0)]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolForm] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: bool | None = None


class CreateCache(PromptFields, kw_only=True):
    """The body of POST /v1/caches."""

    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{_NAME.pattern}$"})]
    ttl: str | float | None = None
    pinned: bool | None = None


class SaltFields(msgspec.Struct):
    """The body of the calls that act on a name."""

    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class NamedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored under a name (msgpack)."""

    model: str
    created_at: float
    count: int
    packed: bytes
    policy: CachePolicy = CachePolicy()
    pinned: bool = False
    key: str = ""


class CacheBody(msgspec.Struct, kw_only=True, tag_field="object", tag="cache"):
    """One cache as the API shows it. Times are seconds since the epoch."""

    name: str
    model: str
    created_at: float
    tokens: int
    cached_tokens: int
    sources: dict[str, int]
    bytes: int
    pinned: bool
    expires_at: float | None = None
    """null = pinned, or nothing of it is kept below the device."""
    ends_with: str | None = None
    """Why not more of the prompt is cached."""
    prompt_cache_key: str | None = None
    usage: UsageBody | UnsetType = UNSET
    """What computing it took, where this call has computed it."""


class PromptBody(msgspec.Struct, kw_only=True, tag_field="object", tag="cache.prompt"):
    """A prompt that was answered lately."""

    id: str
    model: str
    created_at: float
    tokens: int
    prompt_cache_key: str | None = None


class CacheList(msgspec.Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[CacheBody]
    prompts: list[PromptBody]


class Explanation(msgspec.Struct, kw_only=True, tag_field="object", tag="cache.explanation"):
    """The body of POST /v1/caches/explain."""

    model: str
    prompt: CachedPrompt
    prompt_cache_diagnostics: CacheDiagnostics


class Deleted(msgspec.Struct, kw_only=True, tag_field="object", tag="cache.deleted"):
    deleted_tokens: int
    deleted_prompts: int
    """Named or answered ones."""
    name: str | UnsetType = UNSET
    deleted: bool = True


class CachesApi:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/caches: compute a prompt and remember it by name."""
        service = self._service
        fields, ignored, size = await read_fields(request, CreateCache, service.config)
        model, name, salt = service.model_name(fields.model), _name(fields.name), _salt(request, fields)
        ttl_s = None if fields.ttl is None else parse_ttl(fields.ttl, "ttl")
        prompt = self._checked(await self._prompt(fields, size))
        policy = await off_loop(
            service, size, lambda: cache_policy(fields, lambda: prompt.breakpoint_tokens(service.codec))
        )
        if not policy.write:
            raise _invalid(
                "prompt_cache_options.mode", "mode=explicit without a prompt_cache_breakpoint keeps nothing"
            )
        if ttl_s is not None:
            policy = msgspec.structs.replace(policy, ttl_s=ttl_s)
        usage = await self._compute(request, prompt.tokens, salt, policy)
        before = await self._stored(name, salt)
        if before is not None and before.pinned:
            await self._pin(name, msgspec.structs.replace(before, pinned=False), salt)
        tokens = as_array(prompt.tokens)
        stored = NamedPrompt(
            model=model, created_at=time.time(), count=len(tokens), packed=pack_tokens(tokens), policy=policy,
            pinned=bool(fields.pinned), key=fields.prompt_cache_key or "",
        )  # fmt: skip
        if stored.pinned:
            await self._pin(name, stored, salt)
        await self._remember(name, stored, salt)
        return _json(await self._body(name, stored, salt, usage), 201, ignored)

    async def list_all(self, request: Request) -> Response:
        """GET /v1/caches."""
        salt = _query_salt(request)
        bodies = []
        for entry in (await self._service.engine.prompt_cache.names(NAMES, salt))[:MAX_LISTED]:
            stored = await self._stored(entry.name, salt)
            if stored is not None:
                bodies.append(await self._body(entry.name, stored, salt))
        traces = self._service.traces
        await traces.recall(self._service.engine.prompt_cache, salt)
        prompts = [
            PromptBody(
                id=trace.id, model=trace.model, created_at=trace.created_at, tokens=trace.count,
                prompt_cache_key=trace.key or None,
            )
            for trace, _ in traces.recent(salt)[:MAX_LISTED]
        ]  # fmt: skip
        return _json(CacheList(data=bodies, prompts=prompts))

    async def get(self, request: Request) -> Response:
        """GET /v1/caches/{name}."""
        salt = _query_salt(request)
        name = request.path_params["name"]
        return _json(await self._body(name, await self._named(name, salt), salt))

    def act(self, act: str) -> Callable[[Request], Awaitable[Response]]:
        """POST /v1/caches/{name}/{pin, unpin, prewarm}."""

        async def answer(request: Request) -> Response:
            fields = SaltFields()
            if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
                fields, _, _ = await read_fields(request, SaltFields, self._service.config)
            salt, name = _salt(request, fields), request.path_params["name"]
            stored = await self._named(name, salt)
            usage: Usage | None = None
            if act == "prewarm":
                usage = await self._compute(request, unpack(stored).tolist(), salt, stored.policy)
            else:
                stored = msgspec.structs.replace(stored, pinned=act == "pin")
                await self._pin(name, stored, salt)
            await self._remember(name, stored, salt)
            return _json(await self._body(name, stored, salt, usage))

        return answer

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/caches/{name}: the name, its prompt's blocks, and the traces of the answers to it."""
        salt, name = _query_salt(request), request.path_params["name"]
        tokens = unpack(await self._named(name, salt))
        erased = await self._erase_name(name, salt)
        cache, traces = self._service.engine.prompt_cache, self._service.traces
        prompts = 1
        async for trace, theirs in traces.all(cache, salt):
            if common_prefix(tokens, theirs) == len(tokens):
                await traces.erase(cache, salt, trace.id)
                prompts += 1
        return _json(Deleted(name=name, deleted_tokens=erased, deleted_prompts=prompts))

    async def delete_by_key(self, request: Request) -> Response:
        """DELETE /v1/caches?prompt_cache_key=...: every prompt of that key, named or answered."""
        key = request.query_params.get("prompt_cache_key")
        if not key:
            raise _invalid("prompt_cache_key", "prompt_cache_key says which prompts to delete; it is missing")
        salt = _query_salt(request)
        cache, traces = self._service.engine.prompt_cache, self._service.traces
        erased = prompts = 0
        for entry in await cache.names(NAMES, salt):
            stored = await self._stored(entry.name, salt)
            if stored is not None and stored.key == key:
                erased += await self._erase_name(entry.name, salt)
                prompts += 1
        async for trace, tokens in traces.all(cache, salt):
            if trace.key == key:
                erased += await cache.erase(tokens.tolist(), salt)
                await traces.erase(cache, salt, trace.id)
                prompts += 1
        return _json(Deleted(deleted_tokens=erased, deleted_prompts=prompts))

    async def explain(self, request: Request) -> Response:
        """POST /v1/caches/explain: what would be reused of a prompt, and why not more; nothing is run."""
        service = self._service
        fields, ignored, size = await read_fields(request, PromptFields, service.config)
        model, salt = service.model_name(fields.model), _salt(request, fields)
        prompt = self._checked(await self._prompt(fields, size))
        cache = service.engine.prompt_cache
        await service.traces.recall(cache, salt)
        found = await cache.explain(prompt.tokens, salt)
        asked = GenerationRequest(id="", prompt=prompt.tokens, params=SamplingParams(), salt=salt)
        diagnosis = PromptDiagnosis(service, model, fields, [asked], prompt)
        diagnostics = await diagnosis.explain_ahead(found)
        explanation = Explanation(model=model, prompt=found, prompt_cache_diagnostics=diagnostics)
        return _json(explanation, ignored=ignored)

    # -- pieces ------------------------------------------------------------------------------------

    async def _prompt(self, fields: PromptFields, size: int) -> ChatPrompt:
        service = self._service
        if (fields.messages is None) == (fields.prompt is None):
            raise _invalid("messages", "Give either `messages` or `prompt`")
        if fields.messages is not None:
            messages = fields.messages
            return await off_loop(
                service,
                size,
                lambda: encode_chat(
                    service, fields, messages, tool_use(fields), normalises=fields.normalises
                ),
            )
        prompt = fields.prompt
        if isinstance(prompt, str):
            text, limit = prompt, service.engine.model.max_model_len
            special = fields.add_special_tokens is not False
            return ChatPrompt(
                await off_loop(
                    service,
                    size,
                    lambda: service.codec.encode_prompt(text, add_special=special, limit=limit),
                )
            )
        return ChatPrompt(list(token_ids(prompt or (), service.engine.model.vocab_size, "prompt")))

    def _checked(self, prompt: ChatPrompt) -> ChatPrompt:
        """Refuse what no request could have.

        Raises:
            BadRequest, ContextTooLong.
        """
        limit = self._service.engine.model.max_model_len
        if not prompt.tokens:
            raise _invalid("prompt", "The prompt has no tokens; at least one is needed")
        if len(prompt.tokens) > limit:
            raise ContextTooLong(len(prompt.tokens), limit)
        return prompt

    async def _compute(self, request: Request, tokens: list[int], salt: str, policy: CachePolicy) -> Usage:
        """Run a prompt without generating, and wait until it is stored."""
        service = self._service
        generation = GenerationRequest(
            id=f"cache-{token_hex(16)}",
            prompt=tokens,
            params=SamplingParams(max_tokens=0),
            salt=salt,
            cache=policy,
        )
        steps = submit(service, request, [generation])
        await collect(request, steps, lambda step: None)
        await service.engine.prompt_cache.flush()
        return steps.usage

    async def _pin(self, name: str, stored: NamedPrompt, salt: str) -> None:
        """Pin or unpin a prompt as `stored` says. What it shares with other pinned names stays pinned."""
        cache = self._service.engine.prompt_cache
        pinned_tokens = await cache.pin(unpack(stored).tolist(), salt, stored.pinned)
        if stored.pinned:
            if not pinned_tokens and stored.count >= cache.block_tokens:
                raise Unavailable(
                    f"{name!r} cannot be pinned: this server keeps no prompts below the device.",
                    code="cache_unavailable", retry_after_s=RETRY_S,
                )  # fmt: skip
            return
        for entry in await cache.names(NAMES, salt):
            other = await self._stored(entry.name, salt) if entry.name != name else None
            if other is not None and other.pinned:
                await cache.pin(unpack(other).tolist(), salt, True)

    async def _erase_name(self, name: str, salt: str) -> int:
        """Delete a name and its prompt's blocks; returns the tokens deleted."""
        stored, cache = await self._named(name, salt), self._service.engine.prompt_cache
        if stored.pinned:
            await self._pin(name, msgspec.structs.replace(stored, pinned=False), salt)
        erased = await cache.erase(unpack(stored).tolist(), salt)
        await cache.delete(NAMES, salt, name)
        return erased

    async def _remember(self, name: str, stored: NamedPrompt, salt: str) -> None:
        """Keep the name as long as its prompt."""
        ttl_s = MAX_TTL_S if stored.pinned else stored.policy.ttl_s
        value = msgspec.msgpack.encode(stored)
        cache = self._service.engine.prompt_cache
        if await cache.put(NAMES, salt, name, value, ttl_s, pinned=stored.pinned) is None:
            raise Unavailable(
                f"The cache {name!r} could not be stored.", code="cache_unavailable", retry_after_s=RETRY_S
            )

    async def _stored(self, name: str, salt: str) -> NamedPrompt | None:
        data = await self._service.engine.prompt_cache.get(NAMES, salt, name)
        if data is None:
            return None
        try:
            return msgspec.msgpack.decode(data, type=NamedPrompt)
        except msgspec.DecodeError:
            return None

    async def _named(self, name: str, salt: str) -> NamedPrompt:
        stored = await self._stored(_name(name), salt)
        if stored is None:
            raise NotFound(f"There is no cache named {name!r}.", code="cache_not_found", param="name")
        return stored

    async def _body(self, name: str, stored: NamedPrompt, salt: str, usage: Usage | None = None) -> CacheBody:
        tokens = unpack(stored).tolist()
        found = await self._service.engine.prompt_cache.explain(tokens, salt)
        expires_at = found.expires_at
        return CacheBody(
            name=name,
            model=stored.model,
            created_at=stored.created_at,
            tokens=len(tokens),
            cached_tokens=found.cached_tokens,
            sources=found.sources,
            bytes=found.bytes,
            pinned=stored.pinned,
            expires_at=expires_at if expires_at is not None and math.isfinite(expires_at) else None,
            ends_with=found.ends_with,
            prompt_cache_key=stored.key or None,
            usage=UNSET if usage is None else usage_body(usage),
        )


def unpack(stored: NamedPrompt) -> I32:
    """The tokens of a named prompt."""
    return unpack_tokens(stored.count, stored.packed)


def _query_salt(request: Request) -> str:
    """The tenant of a call without a body."""
    return _salt(request, typed(dict(request.query_params), SaltFields))


def _salt(request: Request, fields: SaltFields | PromptCacheFields) -> str:
    return isolation_salt(request_info(request.scope).key_id, fields.cache_salt)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise _invalid("name", "name must be 1 to 128 characters of A-Z, a-z, 0-9, '.', '_' and '-'")
    return name


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)


def _json(answer: object, status: int = 200, ignored: Sequence[str] = ()) -> Response:
    return Response(encode(answer), status, ignored_header(list(ignored)), "application/json")
