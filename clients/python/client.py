"""The clients: where the server is, how long to wait, how often to try."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Unpack

import httpx

from .caches import AsyncCaches, Caches
from .chat import AsyncChat, Chat
from .params import CallParams, CompletionParams, json_call, plain_call
from .responses import AsyncResponses, Responses
from .retry import RetryPolicy
from .transport import AsyncTransport, Target, Transport
from .types import CompletionAnswer, ModelList

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0
"""Between two pieces of an answer; a whole answer comes as one piece."""
COMPLETIONS_PATH, MODELS_PATH = "/v1/completions", "/v1/models"


def _policy(retry: RetryPolicy | None, max_retries: int | None) -> RetryPolicy:
    policy = retry or RetryPolicy()
    return policy if max_retries is None else dataclasses.replace(policy, max_retries=max_retries)


class Client:
    """A client that waits; safe to use from several threads. Close it, or use it with `with`."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int | None = None,
        retry: RetryPolicy | None = None,
        http_client: httpx.Client | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connect to nothing yet.

        Args:
            base_url: Of the server, with or without `/v1`.
            api_key: Sent as a bearer token.
            timeout_s: Until the next piece of an answer.
            max_retries: Attempts after the first; 2 if nothing is said.
            retry: How retries are timed.
            http_client: For proxies and certificates of your own; stays open when this client is closed.
            sleep: Waits between attempts.
        """
        self._http = http_client or httpx.Client()
        self._owns_http = http_client is None
        target = Target.of(base_url, api_key, timeout_s, _policy(retry, max_retries))
        self._transport = Transport(self._http, target, sleep)
        self.chat = Chat(self._transport)
        self.responses = Responses(self._transport)
        self.caches = Caches(self._transport)

    def complete(self, prompt: str | list[int], **params: Unpack[CompletionParams]) -> CompletionAnswer:
        """Return a text that continues the prompt (`/v1/completions`)."""
        return self._transport.send(json_call(COMPLETIONS_PATH, params, prompt=prompt), CompletionAnswer)

    def models(self, **params: Unpack[CallParams]) -> ModelList:
        """Return what is served."""
        return self._transport.send(plain_call("GET", MODELS_PATH, params), ModelList)

    def close(self) -> None:
        """Close the connections."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """A client for asyncio. Close it, or use it with `async with`."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int | None = None,
        retry: RetryPolicy | None = None,
        http_client: httpx.AsyncClient | None = None,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """See `Client`."""
        self._http = http_client or httpx.AsyncClient()
        self._owns_http = http_client is None
        target = Target.of(base_url, api_key, timeout_s, _policy(retry, max_retries))
        self._transport = AsyncTransport(self._http, target, sleep)
        self.chat = AsyncChat(self._transport)
        self.responses = AsyncResponses(self._transport)
        self.caches = AsyncCaches(self._transport)

    async def complete(self, prompt: str | list[int], **params: Unpack[CompletionParams]) -> CompletionAnswer:
        """See `Client.complete`."""
        call = json_call(COMPLETIONS_PATH, params, prompt=prompt)
        return await self._transport.send(call, CompletionAnswer)

    async def models(self, **params: Unpack[CallParams]) -> ModelList:
        """See `Client.models`."""
        return await self._transport.send(plain_call("GET", MODELS_PATH, params), ModelList)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
