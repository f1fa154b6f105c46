"""Stored responses: named records of the prompt cache, as durable as its tiers, a tenant's own only."""

from __future__ import annotations

import time

import msgspec

from ...engine import Engine, PromptCache
from ..errors import BadRequest, NotFound
from .openai_responses_input import Item

NAMESPACE = "stored_responses"
MAX_TURNS = 10_000
"""Longest chain of `previous_response_id`: a chain of damaged records must end."""
RENEWED_AFTER = 0.25
"""Of its time to live: a turn that is used later than that after it was written is written again."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response, as it is stored (msgpack)."""

    body: bytes
    """The response object, JSON."""
    input: list[Item]
    """Its own input items."""
    output: list[Item]
    previous: str | None
    kept_at: float
    ttl_s: float | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredResponse).decode


class ResponseStore:
    """The stored responses of one server. Reads and writes as the prompt cache does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def _cache(self) -> PromptCache:
        return self._engine.prompt_cache  # there is none before the engine has started

    async def put(self, salt: str, response_id: str, stored: StoredResponse) -> bool:
        """Keep a response; durable when this returns, as far as a disk tier is there. Whether it is kept."""
        kept = await self._cache.put(NAMESPACE, salt, response_id, _encode(stored), stored.ttl_s)
        return kept is not None

    async def keep(self, salt: str, response_id: str, stored: StoredResponse, *, is_asked: bool) -> None:
        """Take a finished response; `is_asked` = its request wants it stored."""
        if is_asked:
            await self.put(salt, response_id, stored)

    async def find(self, salt: str, response_id: str) -> StoredResponse | None:
        value = await self._cache.get(NAMESPACE, salt, response_id)
        try:
            return None if value is None else _decode(value)
        except msgspec.DecodeError:
            return None  # of another version: as good as not there

    async def get(self, salt: str, response_id: str) -> StoredResponse:
        """Raises: NotFound."""
        stored = await self.find(salt, response_id)
        if stored is None:
            raise not_found(response_id)
        return stored

    async def delete(self, salt: str, response_id: str) -> bool:
        return await self._cache.delete(NAMESPACE, salt, response_id)

    async def items_through(self, salt: str, response_id: str | None) -> list[Item]:
        """All input and output items up to the end of a response, the oldest first; renews their lifetime.

        Raises:
            BadRequest: it, or one that it continues, is not stored (any more).
        """
        turns: list[StoredResponse] = []
        while response_id is not None:
            stored = await self.find(salt, response_id)
            if stored is None or len(turns) == MAX_TURNS:
                raise BadRequest(
                    f"previous_response_id: the response `{response_id[:80]}` is not stored here (any more).",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            self._renew(salt, response_id, stored)
            turns.append(stored)
            response_id = stored.previous
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def _renew(self, salt: str, response_id: str, stored: StoredResponse) -> None:
        now = time.time()
        if now - stored.kept_at > RENEWED_AFTER * (stored.ttl_s or self._cache.default_ttl_s):
            value = _encode(msgspec.structs.replace(stored, kept_at=now))
            self._cache.put_soon(NAMESPACE, salt, response_id, value, stored.ttl_s)


def not_found(response_id: str) -> NotFound:
    shown = response_id[:80]
    return NotFound(
        f"There is no response with the id `{shown}`.", code="response_not_found", param="response_id"
    )
