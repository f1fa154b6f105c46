"""`/v1/caches`: named prompts that are computed ahead, pinned, listed, explained and deleted.

A name is a tenant's own: of another API key or salt it does not exist. What is stored under it is the tokens
of the prompt; the KV itself lies in the prompt cache like any other.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable
from secrets import token_hex
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...engine import CachedPrompt, ContextTooLong, GenerationRequest, SamplingParams
from ..cache_trace import NAMESPACE, as_array, pack_tokens, unpack_tokens
from ..errors import BadRequest, NotFound, Unavailable
from ..middleware import request_info
from ..service import Service
from ..stream.events import ResponseSteps
from .cache_report import CacheDiagnostics, PromptDiagnosis
from .chat_messages import ChatPrompt, MessageFields, encode_chat
from .prompt_cache import MAX_TTL_S, PromptCacheFields, cache_policy, parse_ttl
from .respond import isolation_salt, off_loop
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
    add_special_tokens: bool | None = None


class CreateCache(PromptFields, kw_only=True):
    """The body of POST /v1/caches."""

    name: str
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
    ttl_s: float | None = None
    pinned: bool = False
    key: str = ""


class CacheBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One cache as the API shows it. Times are seconds since the epoch."""

    name: str
    model: str
    created_at: float
    tokens: int
    cached_tokens: int
    sources: dict[str, int]
    bytes: int
    pinned: bool
    object: str = "cache"
    expires_at: float | None = None
    ends_with: str | None = None
    """Why not more of the prompt is cached."""
    prompt_cache_key: str | None = None
    usage: UsageBody | None = None


class PromptBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A prompt that was answered lately."""

    id: str
    model: str
    created_at: float
    tokens: int
    prompt_cache_key: str | None = None
    object: str = "cache.prompt"


class CacheList(msgspec.Struct, kw_only=True):
    data: list[CacheBody]
    prompts: list[PromptBody]
    object: str = "list"


class Explanation(msgspec.Struct, kw_only=True):
    """The body of POST /v1/caches/explain."""

    model: str
    prompt: CachedPrompt
    prompt_cache_diagnostics: CacheDiagnostics
    object: str = "cache.explanation"


class Deleted(msgspec.Struct, kw_only=True):
    deleted_tokens: int
    deleted_prompts: int
    name: str | None = None
    object: str = "cache.deleted"
    deleted: bool = True


class CachesApi:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/caches: compute a prompt and remember it by name."""
        service = self._service
        fields, _, size = await read_fields(request, CreateCache, service.config)
        model, name, salt = service.model_name(fields.model), _name(fields.name), _salt(request, fields)
        policy = cache_policy(fields)
        if fields.ttl is not None:
            policy = msgspec.structs.replace(policy, ttl_s=parse_ttl(fields.ttl, "ttl"))
        prompt = self._checked(await self._prompt(fields, size))
        steps = await self._compute(request, prompt.tokens, salt, policy.ttl_s)
        cache = service.engine.prompt_cache
        tokens = as_array(prompt.tokens)
        stored = NamedPrompt(
            model=model, created_at=time.time(), count=len(tokens), packed=pack_tokens(tokens),
            ttl_s=policy.ttl_s, pinned=bool(fields.pinned), key=fields.prompt_cache_key or "",
        )  # fmt: skip
        await self._remember(name, stored, salt)
        if stored.pinned:
            await cache.pin(prompt.tokens, salt, True)
        body = await self._body(name, stored, salt)
        body.usage = usage_body(steps.usage)
        return _json(body, 201)

    async def list_all(self, request: Request) -> Response:
        """GET /v1/caches."""
        salt = _salt(request, SaltFields(request.query_params.get("cache_salt")))
        bodies = []
        for entry in (await self._service.engine.prompt_cache.names(NAMES, salt))[:MAX_LISTED]:
            stored = await self._stored(entry.name, salt)
            if stored is not None:
                bodies.append(await self._body(entry.name, stored, salt))
        prompts = [
            PromptBody(
                id=t.id,
                model=t.model,
                created_at=t.created_at,
                tokens=t.count,
                prompt_cache_key=t.key or None,
            )
            for t in self._service.traces.recent(salt)[:MAX_LISTED]
        ]
        return _json(CacheList(data=bodies, prompts=prompts))

    async def get(self, request: Request) -> Response:
        """GET /v1/caches/{name}."""
        salt = _salt(request, SaltFields(request.query_params.get("cache_salt")))
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
            tokens = unpack_tokens(stored.count, stored.packed).tolist()
            cache = self._service.engine.prompt_cache
            if act == "prewarm":
                await self._compute(request, tokens, salt, stored.ttl_s)
            else:
                stored = msgspec.structs.replace(stored, pinned=act == "pin")
                await cache.pin(tokens, salt, stored.pinned)
                if not stored.pinned:
                    await self._pin_others(name, salt)
            await self._remember(name, stored, salt)
            return _json(await self._body(name, stored, salt))

        return answer

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/caches/{name}: the name and its prompt's blocks."""
        salt = _salt(request, SaltFields(request.query_params.get("cache_salt")))
        name = request.path_params["name"]
        stored = await self._named(name, salt)
        cache, tokens = self._service.engine.prompt_cache, unpack_tokens(stored.count, stored.packed).tolist()
        if stored.pinned:
            await cache.pin(tokens, salt, False)
            await self._pin_others(name, salt)
        erased = await cache.erase(tokens, salt)
        await cache.delete(NAMES, salt, name)
        return _json(Deleted(name=name, deleted_tokens=erased, deleted_prompts=1))

    async def delete_by_key(self, request: Request) -> Response:
        """DELETE /v1/caches?prompt_cache_key=...: every prompt of that key that is remembered."""
        key = request.query_params.get("prompt_cache_key")
        if not key:
            raise _invalid("prompt_cache_key", "prompt_cache_key says which prompts to delete; it is missing")
        salt = _salt(request, SaltFields(request.query_params.get("cache_salt")))
        cache, traces = self._service.engine.prompt_cache, self._service.traces
        erased = prompts = 0
        known = {trace.id: trace for trace in traces.recent(salt)}
        for entry in await cache.names(NAMESPACE, salt):
            if entry.name not in known and (found := await traces.get(cache, salt, entry.name)) is not None:
                known[entry.name] = found[0]
        for trace in known.values():
            if trace.key == key:
                erased += await cache.erase(unpack_tokens(trace.count, trace.packed).tolist(), salt)
                await cache.delete(NAMESPACE, salt, trace.id)
                traces.forget(salt, trace.id)
                prompts += 1
        return _json(Deleted(deleted_tokens=erased, deleted_prompts=prompts))

    async def explain(self, request: Request) -> Response:
        """POST /v1/caches/explain: what would be reused of a prompt, and why not more; nothing is run."""
        service = self._service
        fields, _, size = await read_fields(request, PromptFields, service.config)
        model, salt = service.model_name(fields.model), _salt(request, fields)
        prompt = self._checked(await self._prompt(fields, size))
        found = await service.engine.prompt_cache.explain(prompt.tokens, salt)
        diagnosis = PromptDiagnosis(
            service=service,
            id="",
            tokens=as_array(prompt.tokens),
            salt=salt,
            model=model,
            key=fields.prompt_cache_key or "",
            conversation=prompt.conversation,
            template_kwargs=prompt.kwargs,
            normalised=prompt.normalised,
            comparison_id=fields.comparison_id,
        )
        await diagnosis.prepare()
        return _json(
            Explanation(model=model, prompt=found, prompt_cache_diagnostics=diagnosis.explain_ahead(found))
        )

    # -- pieces ------------------------------------------------------------------------------------

    async def _prompt(self, fields: PromptFields, size: int) -> ChatPrompt:
        service = self._service
        if (fields.messages is None) == (fields.prompt is None):
            raise _invalid("messages", "Give either `messages` or `prompt`")
        if fields.messages is not None:
            messages = fields.messages
            return await off_loop(service, size, lambda: encode_chat(service, fields, messages))
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

    async def _compute(
        self, request: Request, tokens: list[int], salt: str, ttl_s: float | None
    ) -> ResponseSteps:
        """Run a prompt without generating, and wait until it is stored."""
        service = self._service
        info = request_info(request.scope)
        info.generation_id = f"cache-{token_hex(16)}"
        policy = cache_policy(PromptCacheFields())
        generation = GenerationRequest(
            id=info.generation_id,
            prompt=tokens,
            params=SamplingParams(max_tokens=0),
            salt=salt,
            cache=msgspec.structs.replace(policy, ttl_s=ttl_s),
        )
        steps = ResponseSteps(service.engine, [generation], service.telemetry, info.arrived_at)
        try:
            async for _ in steps:
                pass
        finally:
            await steps.aclose()
        await service.engine.prompt_cache.flush()
        return steps

    async def _pin_others(self, name: str, salt: str) -> None:
        """Blocks that pinned names share were unpinned with one of them: pin the others' again."""
        cache = self._service.engine.prompt_cache
        for entry in await cache.names(NAMES, salt):
            other = await self._stored(entry.name, salt) if entry.name != name else None
            if other is not None and other.pinned:
                await cache.pin(unpack_tokens(other.count, other.packed).tolist(), salt, True)

    async def _remember(self, name: str, stored: NamedPrompt, salt: str) -> None:
        """Keep the name as long as its prompt."""
        ttl_s = MAX_TTL_S if stored.pinned else stored.ttl_s
        value = msgspec.msgpack.encode(stored)
        if await self._service.engine.prompt_cache.put(NAMES, salt, name, value, ttl_s) is None:
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

    async def _body(self, name: str, stored: NamedPrompt, salt: str) -> CacheBody:
        tokens = unpack_tokens(stored.count, stored.packed).tolist()
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
            pinned=found.pinned,
            expires_at=expires_at if expires_at is not None and math.isfinite(expires_at) else None,
            ends_with=found.ends_with,
            prompt_cache_key=stored.key or None,
        )


def _salt(request: Request, fields: SaltFields | PromptCacheFields) -> str:
    return isolation_salt(request_info(request.scope).key_id, fields.cache_salt)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise _invalid("name", "name must be 1 to 128 characters of A-Z, a-z, 0-9, '.', '_' and '-'")
    return name


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)


def _json(answer: object, status: int = 200) -> Response:
    return Response(encode(answer), status, media_type="application/json")
