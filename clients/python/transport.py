"""Sends calls over httpx: attempts, the waits between them, typed errors and answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import msgspec

from .errors import APIConnectionError, APIError, APIResponseError, APITimeoutError, status_error
from .params import Call
from .retry import RetryPolicy
from .types import Answer

A = TypeVar("A", bound=Answer)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where calls go, and what all of them carry."""

    base_url: str
    """Of the server, without /v1."""
    api_key: str | None
    timeout_s: float
    policy: RetryPolicy

    @classmethod
    def of(cls, base_url: str, api_key: str | None, timeout_s: float, policy: RetryPolicy) -> Target:
        """Take the address of the server or of its API: `http://host:8000`, with or without `/v1`."""
        return cls(base_url.rstrip("/").removesuffix("/v1"), api_key, timeout_s, policy)

    def request(self, http: httpx.Client | httpx.AsyncClient, call: Call) -> httpx.Request:
        """Return the HTTP request of a call."""
        headers = {"accept": "application/json, text/event-stream", **call.headers}
        if self.api_key is not None:
            headers.setdefault("authorization", f"Bearer {self.api_key}")
        total_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        timeout = httpx.Timeout(total_s, connect=min(total_s, 10.0))
        url = f"{self.base_url}{call.path}"
        return http.build_request(call.method, url, content=call.body, headers=headers, timeout=timeout)

    def retries(self, call: Call) -> RetryPolicy:
        """Return the policy for this call."""
        if call.max_retries is None:
            return self.policy
        return dataclasses.replace(self.policy, max_retries=call.max_retries)


def decoded(response: httpx.Response, form: type[A]) -> A:
    """Return a read response as its type.

    Raises:
        APIResponseError: it is something else.
    """
    request_id = response.headers.get("x-request-id")
    try:
        answer = msgspec.json.decode(response.content, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        message = f"The answer to {response.request.url.path} cannot be read: {err}"
        raise APIResponseError(message, request_id=request_id) from err
    answer.request_id = request_id
    return answer


def connection_error(err: httpx.TransportError) -> APIConnectionError:
    """Return our error for one of httpx's."""
    what = str(err) or type(err).__name__
    if isinstance(err, httpx.TimeoutException):
        return APITimeoutError(f"No answer in time ({what}).")
    return APIConnectionError(f"The connection failed: {what}.")


class Transport:
    """Sends one call after the other."""

    def __init__(self, http: httpx.Client, target: Target, sleep: Callable[[float], None]) -> None:
        self._http, self._target, self._sleep = http, target, sleep

    def max_retries(self, call: Call) -> int:
        """Return how often this call is tried again."""
        return self._target.retries(call).max_retries

    def send(self, call: Call, form: type[A]) -> A:
        """Send a call and return its answer.

        Raises:
            APIError: see `errors`; after the last attempt.
        """
        return decoded(self._send(call, stream=False), form)

    def open(self, call: Call) -> httpx.Response:
        """Send a call and return the response as soon as its head is there. It must be closed.

        Raises:
            APIError: see `errors`; after the last attempt.
        """
        return self._send(call, stream=True)

    def _send(self, call: Call, *, stream: bool) -> httpx.Response:
        policy, attempt = self._target.retries(call), 0
        while True:
            error: APIError
            status, headers = None, httpx.Headers()
            try:
                response = self._http.send(self._target.request(self._http, call), stream=stream)
                if response.is_success:
                    return response
                try:
                    body = response.read()
                finally:
                    response.close()
                status, headers = response.status_code, response.headers
                error = status_error(status, headers, body)
            except httpx.TransportError as err:
                error = connection_error(err)
                error.__cause__ = err
            wait_s = policy.wait_s(attempt, status, headers)
            if wait_s is None:
                raise error
            self._sleep(wait_s)
            attempt += 1


class AsyncTransport:
    """Sends calls of many tasks at once."""

    def __init__(
        self, http: httpx.AsyncClient, target: Target, sleep: Callable[[float], Awaitable[Any]]
    ) -> None:
        self._http, self._target, self._sleep = http, target, sleep

    def max_retries(self, call: Call) -> int:
        """See `Transport.max_retries`."""
        return self._target.retries(call).max_retries

    async def send(self, call: Call, form: type[A]) -> A:
        """See `Transport.send`. Cancelling it ends the request in the server too."""
        return decoded(await self._send(call, stream=False), form)

    async def open(self, call: Call) -> httpx.Response:
        """See `Transport.open`."""
        return await self._send(call, stream=True)

    async def _send(self, call: Call, *, stream: bool) -> httpx.Response:
        policy, attempt = self._target.retries(call), 0
        while True:
            error: APIError
            status, headers = None, httpx.Headers()
            try:
                response = await self._http.send(self._target.request(self._http, call), stream=stream)
                if response.is_success:
                    return response
                try:
                    body = await response.aread()
                finally:
                    await response.aclose()
                status, headers = response.status_code, response.headers
                error = status_error(status, headers, body)
            except httpx.TransportError as err:
                error = connection_error(err)
                error.__cause__ = err
            wait_s = policy.wait_s(attempt, status, headers)
            if wait_s is None:
                raise error
            await self._sleep(wait_s)
            attempt += 1
