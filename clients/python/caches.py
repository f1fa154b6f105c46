"""The prompt cache by name: compute ahead, pin, list, explain, delete (`/v1/caches`)."""

from __future__ import annotations

from typing import Any, Unpack
from urllib.parse import quote, urlencode

from .params import Call, CallParams, PromptParams, json_call, plain_call
from .transport import AsyncTransport, Transport
from .types import CacheDeleted, CacheExplanation, CacheList, NamedCache

PATH = "/v1/caches"


def _query(**fields: str | None) -> str:
    given = {name: value for name, value in fields.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _create_call(name: str, ttl: str | float | None, pinned: bool, params: PromptParams) -> Call:
    fields: dict[str, Any] = {"name": name, "pinned": pinned}
    if ttl is not None:
        fields["ttl"] = ttl
    return json_call(PATH, params, **fields)


def _named_path(name: str) -> str:
    return f"{PATH}/{quote(name, safe='')}"


def _act_call(name: str, act: str, cache_salt: str | None, params: CallParams) -> Call:
    fields = {} if cache_salt is None else {"cache_salt": cache_salt}
    return json_call(f"{_named_path(name)}/{act}", params, **fields)


class Caches:
    """`client.caches`. Names belong to the API key and to `cache_salt`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        name: str,
        *,
        ttl: str | float | None = None,
        pinned: bool = False,
        **params: Unpack[PromptParams],
    ) -> NamedCache:
        """Compute a prompt (`messages` or `prompt`) and keep it by name, instead of what had the name.

        `ttl` is how long it is kept after its last use: "30m", "72h", "7d", or seconds.
        """
        return self._transport.send(_create_call(name, ttl, pinned, params), NamedCache)

    def list(self, *, cache_salt: str | None = None, **params: Unpack[CallParams]) -> CacheList:
        """Return what is named, and the prompts that were answered lately."""
        path = f"{PATH}{_query(cache_salt=cache_salt)}"
        return self._transport.send(plain_call("GET", path, params), CacheList)

    def get(self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]) -> NamedCache:
        """Return one; `NotFoundError` if there is none of that name."""
        path = f"{_named_path(name)}{_query(cache_salt=cache_salt)}"
        return self._transport.send(plain_call("GET", path, params), NamedCache)

    def pin(self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]) -> NamedCache:
        """Keep it whatever happens: it neither expires nor gives way."""
        return self._transport.send(_act_call(name, "pin", cache_salt, params), NamedCache)

    def unpin(self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]) -> NamedCache:
        """Let it expire again."""
        return self._transport.send(_act_call(name, "unpin", cache_salt, params), NamedCache)

    def prewarm(
        self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> NamedCache:
        """Compute what is missing of it, and load it."""
        return self._transport.send(_act_call(name, "prewarm", cache_salt, params), NamedCache)

    def explain(self, **params: Unpack[PromptParams]) -> CacheExplanation:
        """Return what would be reused of a prompt now, and why not more; nothing is computed."""
        return self._transport.send(json_call(f"{PATH}/explain", params), CacheExplanation)

    def delete(
        self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> CacheDeleted:
        """Erase the prompt and the answers to it, in memory and on disk."""
        path = f"{_named_path(name)}{_query(cache_salt=cache_salt)}"
        return self._transport.send(plain_call("DELETE", path, params), CacheDeleted)

    def delete_by_key(
        self, prompt_cache_key: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> CacheDeleted:
        """Erase every prompt of that key, named or answered, pinned or not."""
        path = f"{PATH}{_query(prompt_cache_key=prompt_cache_key, cache_salt=cache_salt)}"
        return self._transport.send(plain_call("DELETE", path, params), CacheDeleted)


class AsyncCaches:
    """`async_client.caches`; see `Caches`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        name: str,
        *,
        ttl: str | float | None = None,
        pinned: bool = False,
        **params: Unpack[PromptParams],
    ) -> NamedCache:
        """See `Caches.create`."""
        return await self._transport.send(_create_call(name, ttl, pinned, params), NamedCache)

    async def list(self, *, cache_salt: str | None = None, **params: Unpack[CallParams]) -> CacheList:
        """See `Caches.list`."""
        path = f"{PATH}{_query(cache_salt=cache_salt)}"
        return await self._transport.send(plain_call("GET", path, params), CacheList)

    async def get(
        self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> NamedCache:
        """See `Caches.get`."""
        path = f"{_named_path(name)}{_query(cache_salt=cache_salt)}"
        return await self._transport.send(plain_call("GET", path, params), NamedCache)

    async def pin(
        self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> NamedCache:
        """See `Caches.pin`."""
        return await self._transport.send(_act_call(name, "pin", cache_salt, params), NamedCache)

    async def unpin(
        self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> NamedCache:
        """See `Caches.unpin`."""
        return await self._transport.send(_act_call(name, "unpin", cache_salt, params), NamedCache)

    async def prewarm(
        self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> NamedCache:
        """See `Caches.prewarm`."""
        return await self._transport.send(_act_call(name, "prewarm", cache_salt, params), NamedCache)

    async def explain(self, **params: Unpack[PromptParams]) -> CacheExplanation:
        """See `Caches.explain`."""
        return await self._transport.send(json_call(f"{PATH}/explain", params), CacheExplanation)

    async def delete(
        self, name: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> CacheDeleted:
        """See `Caches.delete`."""
        path = f"{_named_path(name)}{_query(cache_salt=cache_salt)}"
        return await self._transport.send(plain_call("DELETE", path, params), CacheDeleted)

    async def delete_by_key(
        self, prompt_cache_key: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> CacheDeleted:
        """See `Caches.delete_by_key`."""
        path = f"{PATH}{_query(prompt_cache_key=prompt_cache_key, cache_salt=cache_salt)}"
        return await self._transport.send(plain_call("DELETE", path, params), CacheDeleted)
