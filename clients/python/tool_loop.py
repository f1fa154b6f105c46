"""The tool loop: the model calls, functions run, the model reads what they gave; until it answers in text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .chat_stream import AsyncChatStream, ChatStream
from .errors import APIError, ToolLoopCancelled, ToolRoundsExceeded
from .tool import Tool
from .tool_calls import OnEvent, ToolLimits, run_calls
from .types import ChatAnswer, Message, ToolCall

ToolLike = Tool | Callable[..., Any]
_MAY_CALL = frozenset({"tool_calls", "stop", "function_call"})
"""Reasons with which calls are whole; behind "length" the last one is cut."""


@dataclass(frozen=True, kw_only=True)
class ToolRun:
    """What a tool loop came to."""

    answer: ChatAnswer
    """The last one."""
    messages: list[dict[str, Any]]
    """The whole conversation, the last answer included: what the next turn begins with."""
    answers: list[ChatAnswer] = field(default_factory=list)
    """Of every round, with its usage and cache diagnostics."""

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def rounds(self) -> int:
        return len(self.answers)


class Cancellation:
    """Ends a waiting tool loop from another thread, or from a signal's handler."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may come while this very thread holds it
        self._callbacks: list[Callable[[], None]] = []
        self._is_set = False

    @property
    def is_set(self) -> bool:
        return self._is_set

    def cancel(self) -> None:
        """End it; a second call changes nothing."""
        with self._lock:
            self._is_set = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once when cancelled, at once if it is; returns what ends the watch."""
        with self._lock:
            if not self._is_set:
                self._callbacks.append(callback)
                return lambda: self._unwatch(callback)
        callback()
        return lambda: None

    def _unwatch(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)


class Conversation:
    """What both loops share: the messages so far, and what comes next. Does no input or output."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolLike],
        params: dict[str, Any],
        limits: ToolLimits,
    ) -> None:
        named = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        self.tools = {tool.name: tool for tool in named}
        if not named or len(self.tools) < len(named):
            raise ValueError("run_tools needs tools, each with a name of its own")
        if params.get("n", 1) not in (None, 1):
            raise ValueError("run_tools follows one answer: n must be 1")
        self.messages: list[dict[str, Any]] = [msgspec.to_builtins(message) for message in messages]
        self.answers: list[ChatAnswer] = []
        self.limits = limits
        self._definitions = [tool.definition() for tool in named]
        self._params = params

    def next_request(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the messages and the keywords of the next round."""
        params = {**self._params, "tools": self._definitions}
        if key := params.get("idempotency_key"):
            params["idempotency_key"] = f"{key}-{len(self.answers)}"
        if self.answers and "tool_choice" in params:
            # A call that is demanded is demanded once: in each round it would never end.
            if params["tool_choice"] != "none":
                params["tool_choice"] = "auto"
        return self.messages, params

    def take(self, answer: ChatAnswer) -> list[ToolCall]:
        """Add the model's answer; return the calls to run, none if it is the last answer.

        Raises:
            ToolRoundsExceeded: there are calls, but no round is left to answer them in.
        """
        self.answers.append(answer)
        message: dict[str, Any] = msgspec.to_builtins(answer.message)
        calls = answer.message.tool_calls if answer.finish_reason in _MAY_CALL else None
        if calls and len(self.answers) >= self.limits.max_rounds:
            raise ToolRoundsExceeded(
                f"The model still calls tools after {len(self.answers)} rounds.", self.messages
            )
        self.messages.append(message)
        return calls or []

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[str]) -> None:
        """Add what the calls gave."""
        self.messages += [
            {"role": "tool", "tool_call_id": call.id, "content": content}
            for call, content in zip(calls, results, strict=True)
        ]

    def result(self) -> ToolRun:
        return ToolRun(answer=self.answers[-1], messages=self.messages, answers=self.answers)


def run_tools(
    conversation: Conversation,
    stream: Callable[..., ChatStream],
    on_event: OnEvent | None,
    cancellation: Cancellation,
) -> ToolRun:
    """Run the loop to its end; `stream(messages, **params)` asks the model.

    Raises:
        ToolRoundsExceeded, ToolLoopCancelled, APIError, RuntimeError: see `Chat.run_tools`.
    """
    if _is_in_event_loop():
        raise RuntimeError("Client.run_tools would stop the event loop that runs here: use AsyncClient")
    while True:
        _check(cancellation, conversation)
        messages, params = conversation.next_request()
        calls = conversation.take(_ask(stream(messages, **params), on_event, cancellation, conversation))
        if not calls:
            return conversation.result()
        results = asyncio.run(_run_until_cancelled(calls, conversation, on_event, cancellation))
        if results is None:
            raise _cancelled(conversation)
        conversation.add_results(calls, results)


async def run_tools_async(
    conversation: Conversation, stream: Callable[..., AsyncChatStream], on_event: OnEvent | None
) -> ToolRun:
    """`run_tools` as a coroutine: cancelling its task ends the request or the functions that run."""
    while True:
        messages, params = conversation.next_request()
        async with stream(messages, **params) as events:
            async for event in events:
                if on_event is not None:
                    on_event(event)
            answer = await events.get_answer()
        calls = conversation.take(answer)
        if not calls:
            return conversation.result()
        results = await run_calls(calls, conversation.tools, conversation.limits, on_event)
        conversation.add_results(calls, results)


def _ask(
    stream: ChatStream, on_event: OnEvent | None, cancellation: Cancellation, conversation: Conversation
) -> ChatAnswer:
    try:
        with stream:
            unwatch = cancellation.watch(stream.interrupt)
            try:
                for event in stream:
                    if on_event is not None:
                        on_event(event)
                    _check(cancellation, conversation)
                return stream.get_answer()
            finally:
                unwatch()
    except APIError:
        _check(cancellation, conversation)  # then it is what the interruption looks like
        raise


async def _run_until_cancelled(
    calls: Sequence[ToolCall],
    conversation: Conversation,
    on_event: OnEvent | None,
    cancellation: Cancellation,
) -> list[str] | None:
    """Return the results; None if it was cancelled before all were there."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(run_calls(calls, conversation.tools, conversation.limits, on_event))

    def stop() -> None:
        loop.call_soon_threadsafe(running.cancel)

    unwatch = cancellation.watch(stop)
    try:
        return await running
    except asyncio.CancelledError:
        if cancellation.is_set:
            return None
        raise
    finally:
        unwatch()


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check(cancellation: Cancellation, conversation: Conversation) -> None:
    if cancellation.is_set:
        raise _cancelled(conversation)


def _cancelled(conversation: Conversation) -> ToolLoopCancelled:
    return ToolLoopCancelled("The tool loop was cancelled.", conversation.messages)
