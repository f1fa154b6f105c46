"""Responses: turns that the server remembers, streamed, in the background, taken up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack
from urllib.parse import quote, urlencode

from .params import Call, CallParams, ResponseParams, json_call, plain_call
from .response_stream import AsyncResponseStream, ResponseStream
from .response_types import InputItems, InputTokens, ModelResponse, ResponseDeleted
from .transport import AsyncTransport, Transport

PATH = "/v1/responses"
Input = str | Sequence[Any]
"""A text, or items: mappings, or items of an earlier response's output."""


def _place(response_id: str, rest: str = "", **query: str | int | None) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return f"{PATH}/{quote(response_id, safe='')}{rest}{'?' + urlencode(given) if given else ''}"


def _stream_call(input: Input, resume: bool, params: Mapping[str, Any]) -> Call:
    fields: dict[str, Any] = {"stream_options": {"resume": True}} if resume else {}
    return json_call(PATH, params, input=input, stream=True, **fields)


def _resume_call(response_id: str, after: int, params: Mapping[str, Any]) -> Call:
    path = _place(response_id, stream="true", starting_after=after if after >= 0 else None,
                  cache_salt=params.get("cache_salt"))  # fmt: skip
    kept = {name: params[name] for name in ("extra_headers", "timeout_s", "max_retries") if name in params}
    return plain_call("GET", path, kept)


class Responses:
    """`client.responses`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, input: Input, **params: Unpack[ResponseParams]) -> ModelResponse:
        """Return a whole response; with `background=True` at once, to be read with `get`.

        Raises:
            APIError: see `errors`.
        """
        return self._transport.send(json_call(PATH, params, input=input), ModelResponse)

    def stream(
        self, input: Input, *, resume: bool = False, **params: Unpack[ResponseParams]
    ) -> ResponseStream:
        """Return a stream of events, to be used with `with`; the request is sent there.

        With `resume` (or `background=True`) the response goes on when the connection is lost, and the stream
        takes it up again by itself, without a gap and without repeating an event.
        """
        call = _stream_call(input, resume, params)

        def reopen(response_id: str, after: int) -> Any:
            return self._transport.open(_resume_call(response_id, after, params))

        resumable = resume or params.get("background", False)
        retries = self._transport.max_retries(call)
        return ResponseStream(lambda: self._transport.open(call), reopen if resumable else None, retries)

    def resume(
        self,
        response_id: str,
        *,
        after: int = -1,
        cache_salt: str | None = None,
        **params: Unpack[CallParams],
    ) -> ResponseStream:
        """Return the events behind number `after` of a response that goes on, as a stream of its own."""
        known = {**params, "cache_salt": cache_salt}
        call = _resume_call(response_id, after, known)

        def reopen(response_id: str, after: int) -> Any:
            return self._transport.open(_resume_call(response_id, after, known))

        retries = self._transport.max_retries(call)
        return ResponseStream(lambda: self._transport.open(call), reopen, retries, after)

    def get(
        self, response_id: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> ModelResponse:
        """Return a stored response, or a running one as it stands."""
        call = plain_call("GET", _place(response_id, cache_salt=cache_salt), params)
        return self._transport.send(call, ModelResponse)

    def cancel(
        self, response_id: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> ModelResponse:
        """End a response in the background; what it said until then stays."""
        call = plain_call("POST", _place(response_id, "/cancel", cache_salt=cache_salt), params)
        return self._transport.send(call, ModelResponse)

    def delete(
        self, response_id: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> ResponseDeleted:
        """Forget a response."""
        call = plain_call("DELETE", _place(response_id, cache_salt=cache_salt), params)
        return self._transport.send(call, ResponseDeleted)

    def input_items(
        self,
        response_id: str,
        *,
        order: str | None = None,
        after: str | None = None,
        limit: int | None = None,
        cache_salt: str | None = None,
        **params: Unpack[CallParams],
    ) -> InputItems:
        """Return what a response was given, page by page."""
        path = _place(
            response_id, "/input_items", order=order, after=after, limit=limit, cache_salt=cache_salt
        )
        return self._transport.send(plain_call("GET", path, params), InputItems)

    def count_tokens(self, input: Input, **params: Unpack[ResponseParams]) -> int:
        """Return how many tokens such a request's prompt has."""
        call = json_call(f"{PATH}/input_tokens", params, input=input)
        return self._transport.send(call, InputTokens).input_tokens


class AsyncResponses:
    """`async_client.responses`; see `Responses`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, input: Input, **params: Unpack[ResponseParams]) -> ModelResponse:
        """See `Responses.create`."""
        return await self._transport.send(json_call(PATH, params, input=input), ModelResponse)

    def stream(
        self, input: Input, *, resume: bool = False, **params: Unpack[ResponseParams]
    ) -> AsyncResponseStream:
        """See `Responses.stream`; to be used with `async with`."""
        call = _stream_call(input, resume, params)

        async def reopen(response_id: str, after: int) -> Any:
            return await self._transport.open(_resume_call(response_id, after, params))

        resumable = resume or params.get("background", False)
        retries = self._transport.max_retries(call)
        return AsyncResponseStream(lambda: self._transport.open(call), reopen if resumable else None, retries)

    def resume(
        self,
        response_id: str,
        *,
        after: int = -1,
        cache_salt: str | None = None,
        **params: Unpack[CallParams],
    ) -> AsyncResponseStream:
        """See `Responses.resume`."""
        known = {**params, "cache_salt": cache_salt}
        call = _resume_call(response_id, after, known)

        async def reopen(response_id: str, after: int) -> Any:
            return await self._transport.open(_resume_call(response_id, after, known))

        retries = self._transport.max_retries(call)
        return AsyncResponseStream(lambda: self._transport.open(call), reopen, retries, after)

    async def get(
        self, response_id: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> ModelResponse:
        """See `Responses.get`."""
        call = plain_call("GET", _place(response_id, cache_salt=cache_salt), params)
        return await self._transport.send(call, ModelResponse)

    async def cancel(
        self, response_id: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> ModelResponse:
        """See `Responses.cancel`."""
        call = plain_call("POST", _place(response_id, "/cancel", cache_salt=cache_salt), params)
        return await self._transport.send(call, ModelResponse)

    async def delete(
        self, response_id: str, *, cache_salt: str | None = None, **params: Unpack[CallParams]
    ) -> ResponseDeleted:
        """See `Responses.delete`."""
        call = plain_call("DELETE", _place(response_id, cache_salt=cache_salt), params)
        return await self._transport.send(call, ResponseDeleted)

    async def input_items(
        self,
        response_id: str,
        *,
        order: str | None = None,
        after: str | None = None,
        limit: int | None = None,
        cache_salt: str | None = None,
        **params: Unpack[CallParams],
    ) -> InputItems:
        """See `Responses.input_items`."""
        path = _place(
            response_id, "/input_items", order=order, after=after, limit=limit, cache_salt=cache_salt
        )
        return await self._transport.send(plain_call("GET", path, params), InputItems)

    async def count_tokens(self, input: Input, **params: Unpack[ResponseParams]) -> int:
        """See `Responses.count_tokens`."""
        call = json_call(f"{PATH}/input_tokens", params, input=input)
        return (await self._transport.send(call, InputTokens)).input_tokens
