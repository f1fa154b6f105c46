"""Who may start a generation now: nobody during shutdown, and each key within its own limits.

The engine bounds its queue itself (`EngineOverloaded`); this knows only keys and time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Unavailable, draining
from .middleware import is_generation, request_info


@dataclass(slots=True)
class _Allowance:
    """One key's open requests and its bucket of requests it may start."""

    tokens: float
    filled_at: float
    open: int = 0


@dataclass
class KeyLimits:
    """Per-key limits; the keys are the configured ones, so their number is bounded."""

    requests_per_minute: int
    concurrency: int
    clock: Callable[[], float]
    """Seconds, monotonic. A step backwards gives nothing and takes nothing."""
    _keys: dict[str, _Allowance] = field(default_factory=dict)

    def take(self, key_id: str) -> dict[str, str]:
        """Count one more request of this key; return the headers that tell where the key stands.

        Raises:
            Unavailable: 429, the key is at a limit; nothing was counted.
        """
        now = self.clock()
        limit = self.requests_per_minute
        allowance = self._keys.setdefault(key_id, _Allowance(float(limit), now))
        if self.concurrency and allowance.open >= self.concurrency:
            raise _limited(f"This key has {allowance.open} requests open, the most it may have.", 1.0)
        if not limit:
            allowance.open += 1
            return {}
        allowance.tokens = min(
            float(limit), allowance.tokens + max(0.0, now - allowance.filled_at) * limit / 60
        )
        allowance.filled_at = now
        if allowance.tokens < 1:
            wait_s = (1 - allowance.tokens) * 60 / limit
            raise _limited(f"This key may start {limit} requests a minute.", wait_s)
        allowance.tokens -= 1
        allowance.open += 1
        return {
            "x-ratelimit-limit-requests": str(limit),
            "x-ratelimit-remaining-requests": str(int(allowance.tokens)),
            "x-ratelimit-reset-requests": f"{(limit - allowance.tokens) * 60 / limit:.3f}s",
        }

    def give_back(self, key_id: str) -> None:
        """End one open request of this key."""
        self._keys[key_id].open -= 1


def _limited(message: str, retry_after_s: float) -> Unavailable:
    return Unavailable(message, code="rate_limit_exceeded", retry_after_s=retry_after_s, status=429)


class Admission:
    """The gate in front of the generation endpoints."""

    def __init__(self, app: ASGIApp, limits: KeyLimits, is_draining: Callable[[], bool]) -> None:
        self.app, self.limits, self.is_draining = app, limits, is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_generation(scope):
            await self.app(scope, receive, send)
            return
        if self.is_draining():
            raise draining()
        if not (self.limits.requests_per_minute or self.limits.concurrency):
            await self.app(scope, receive, send)
            return
        key_id = request_info(scope).key_id
        standing = self.limits.take(key_id)

        async def send_with_standing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(standing)
            await send(message)

        try:
            await self.app(scope, receive, send_with_standing)
        finally:
            self.limits.give_back(key_id)
