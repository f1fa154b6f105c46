"""Chat completions: whole, streamed, and with tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack
from urllib.parse import quote, urlencode

from .chat_stream import AsyncChatStream, ChatStream
from .params import Call, ChatParams, ToolChatParams, json_call, plain_call
from .tool_calls import OnEvent, ToolLimits
from .tool_loop import (
    Cancellation,
    Conversation,
    ToolLike,
    ToolRun,
    run_tools,
    run_tools_async,
)
from .transport import AsyncTransport, Transport
from .types import ChatAnswer, ChatEstimate, Message

PATH = "/v1/chat/completions"


def _stream_call(messages: Sequence[Message], resume: bool, params: Mapping[str, Any]) -> Call:
    options = {"include_usage": True, **({"resume": True} if resume else {})}
    return json_call(PATH, params, messages=messages, stream=True, stream_options=options)


def _resume_call(event_id: str, params: Mapping[str, Any]) -> Call:
    name, _, number = event_id.rpartition(":")
    query = {"starting_after": number}
    if salt := params.get("cache_salt"):
        query["cache_salt"] = salt
    kept = {name: params[name] for name in ("extra_headers", "timeout_s", "max_retries") if name in params}
    return plain_call("GET", f"/v1/streams/{quote(name, safe='')}?{urlencode(query)}", kept)


def _prewarm_call(messages: Sequence[Message], params: Mapping[str, Any]) -> Call:
    options = {**params.get("prompt_cache_options", {}), "prewarm": True}
    return json_call(PATH, params, messages=messages, prompt_cache_options=options)


class Chat:
    """`client.chat`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, messages: Sequence[Message], **params: Unpack[ChatParams]) -> ChatAnswer:
        """Return a whole answer.

        Raises:
            APIError: see `errors`.
        """
        return self._transport.send(json_call(PATH, params, messages=messages), ChatAnswer)

    def stream(
        self, messages: Sequence[Message], *, resume: bool = False, **params: Unpack[ChatParams]
    ) -> ChatStream:
        """Return a stream of typed events, to be used with `with`; the request is sent there.

        With `resume` the answer goes on when the connection is lost, and the stream takes it up again by
        itself, without a gap and without repeating an event.
        """
        call = _stream_call(messages, resume, params)
        if not resume:
            return ChatStream(lambda: self._transport.open(call))
        return ChatStream(
            lambda: self._transport.open(call),
            lambda event_id: self._transport.open(_resume_call(event_id, params)),
            self._transport.max_retries(call),
        )

    def prewarm(self, messages: Sequence[Message], **params: Unpack[ChatParams]) -> ChatAnswer:
        """Compute and keep the prompt, answer nothing: a later request that begins alike starts at once."""
        return self._transport.send(_prewarm_call(messages, params), ChatAnswer)

    def estimate(self, messages: Sequence[Message], **params: Unpack[ChatParams]) -> ChatEstimate:
        """Return what such a request would take now: tokens, cached ones, seconds to the first token."""
        return self._transport.send(json_call(f"{PATH}/estimate", params, messages=messages), ChatEstimate)

    def run_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolLike],
        *,
        limits: ToolLimits | None = None,
        on_event: OnEvent | None = None,
        cancellation: Cancellation | None = None,
        **params: Unpack[ToolChatParams],
    ) -> ToolRun:
        """Let the model call functions until it answers.

        Calls of one round run at once. What a function raises goes to the model as text. A `tool_choice` that
        demands a call holds for the first round. An answer that was cut ("length") ends the loop.

        Args:
            messages: The conversation so far; it is not changed.
            tools: Functions (see `Tool` for what they need), plain or async, or `Tool`s.
            limits: Rounds, time and concurrency; see `ToolLimits`.
            on_event: Told of everything that happens, in this thread.
            cancellation: Ends the loop from another thread.
            params: Fields of every request.

        Raises:
            ToolRoundsExceeded, ToolLoopCancelled: with the conversation so far.
            APIError: a request failed.
            RuntimeError: called inside a running event loop, where `AsyncClient` belongs.
        """
        conversation = Conversation(messages, tools, dict(params), limits or ToolLimits())
        return run_tools(conversation, self.stream, on_event, cancellation or Cancellation())


class AsyncChat:
    """`async_client.chat`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, messages: Sequence[Message], **params: Unpack[ChatParams]) -> ChatAnswer:
        """See `Chat.create`. Cancelling it ends the request in the server."""
        return await self._transport.send(json_call(PATH, params, messages=messages), ChatAnswer)

    def stream(
        self, messages: Sequence[Message], *, resume: bool = False, **params: Unpack[ChatParams]
    ) -> AsyncChatStream:
        """See `Chat.stream`; to be used with `async with`."""
        call = _stream_call(messages, resume, params)
        if not resume:
            return AsyncChatStream(lambda: self._transport.open(call))
        return AsyncChatStream(
            lambda: self._transport.open(call),
            lambda event_id: self._transport.open(_resume_call(event_id, params)),
            self._transport.max_retries(call),
        )

    async def prewarm(self, messages: Sequence[Message], **params: Unpack[ChatParams]) -> ChatAnswer:
        """See `Chat.prewarm`."""
        return await self._transport.send(_prewarm_call(messages, params), ChatAnswer)

    async def estimate(self, messages: Sequence[Message], **params: Unpack[ChatParams]) -> ChatEstimate:
        """See `Chat.estimate`."""
        call = json_call(f"{PATH}/estimate", params, messages=messages)
        return await self._transport.send(call, ChatEstimate)

    async def run_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolLike],
        *,
        limits: ToolLimits | None = None,
        on_event: OnEvent | None = None,
        **params: Unpack[ToolChatParams],
    ) -> ToolRun:
        """See `Chat.run_tools`. Cancelling its task ends the request or the async functions that run."""
        conversation = Conversation(messages, tools, dict(params), limits or ToolLimits())
        return await run_tools_async(conversation, self.stream, on_event)
