"""The answer of `/v1/messages`: the message object, its content blocks, and the events that lead to it."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from ...engine import Delta, Usage
from ...engine.codec.segments import CallArguments, CallBegin, CallEnd, Reasoning, Segment, Text
from ..errors import ApiError, anthropic_error_body
from ..stream.answers import Answers
from ..stream.events import ResponseSteps, Step
from ..stream.named import Event
from .cache_report import CacheDiagnostics, PromptDiagnosis
from .types import encode

LONG_TTL_S = 3600.0
"""From here on what is written counts as `ephemeral_1h`."""
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    text: str = ""
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: Any = {}


AnswerBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class CacheCreation(msgspec.Struct, frozen=True):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(msgspec.Struct, frozen=True):
    """Of the prompt, `input_tokens` are those neither read from the cache nor written to it."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation()
    service_tier: str = "standard"


def message_usage(usage: Usage) -> MessageUsage:
    """Return a request's token counts; the three kinds of input add up to the prompt."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    written = usage.prompt_write_tokens
    is_long = usage.cache.ttl_s is None or usage.cache.ttl_s >= LONG_TTL_S
    return MessageUsage(
        fresh - written,
        usage.completion_tokens,
        usage.cached_tokens,
        written,
        CacheCreation(0, written) if is_long else CacheCreation(written, 0),
    )


class MessageBody(msgspec.Struct, kw_only=True):
    """The message object."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    prompt_cache_diagnostics: CacheDiagnostics | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class _TextDelta(msgspec.Struct, gc=False):
    """The delta of the hot path."""

    text: str
    type: str = "text_delta"


class _BlockDelta(msgspec.Struct, gc=False):
    index: int
    delta: _TextDelta | dict[str, str]
    type: str = "content_block_delta"


class MessageEvents:
    """Makes the events (`stream.named.EventMaker`) and keeps `body` up to date with them."""

    def __init__(
        self, body: MessageBody, steps: ResponseSteps, diagnosis: PromptDiagnosis, answers: Answers | None
    ) -> None:
        self.body = body
        self._steps, self._diagnosis, self._answers = steps, diagnosis, answers
        self._open: AnswerBlock | None = None
        self._pieces: list[str] = []
        """Of the open block's text, thought or arguments."""
        self._end: Delta | None = None

    def begin(self) -> list[Event]:
        return [_event("message_start", message=self.body)]

    def step(self, step: Step) -> list[Event]:
        events: list[Event] = []
        for delta in step:
            if delta.finish_reason is not None:
                self._end = delta
            segments: list[Segment]
            if self._answers is not None:
                segments = self._answers.take(delta)
            else:
                segments = [Text(delta.text)] if delta.text else []
            for segment in segments:
                self._segment(segment, events)
        return events

    async def end(self) -> list[Event]:
        events: list[Event] = []
        if not (self._open or self.body.content):
            self._begin(TextBlock(), events)  # an empty answer is a text too
        self._close(events)
        body, usage = self.body, self._steps.usage
        body.stop_reason, body.stop_sequence = self._stop()
        body.usage = message_usage(usage)
        body.prompt_cache_diagnostics = await self._diagnosis.finish(usage)
        events.append(
            _event(
                "message_delta",
                delta={"stop_reason": body.stop_reason, "stop_sequence": body.stop_sequence},
                usage=body.usage,
                prompt_cache_diagnostics=body.prompt_cache_diagnostics,
            )
        )
        events.append(_event("message_stop"))
        return events

    async def fail(self, error: ApiError) -> list[Event]:
        return [Event("error", anthropic_error_body(error))]

    def _stop(self) -> tuple[str, str | None]:
        end = self._end
        if end is None or end.finish_reason == "length":
            return "max_tokens", None
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        if self._answers is not None and self._answers.finish_reason(end) == "tool_calls":
            return "tool_use", None
        return "end_turn", None

    def _segment(self, segment: Segment, events: list[Event]) -> None:
        match segment:
            case Text(text):
                if not isinstance(self._open, TextBlock):
                    self._begin(TextBlock(), events)
                self._delta(_TextDelta(text), text, events)
            case Reasoning(text):
                if not isinstance(self._open, ThinkingBlock):
                    self._begin(ThinkingBlock(), events)
                self._delta({"type": "thinking_delta", "thinking": text}, text, events)
            case CallBegin(_, call_id, name):
                self._begin(ToolUseBlock(id=call_id, name=name), events)
            case CallArguments(_, text):
                self._delta({"type": "input_json_delta", "partial_json": text}, text, events)
            case CallEnd():
                self._close(events)

    @property
    def _index(self) -> int:
        return len(self.body.content)

    def _begin(self, block: AnswerBlock, events: list[Event]) -> None:
        self._close(events)
        self._open, self._pieces = block, []
        events.append(_event("content_block_start", index=self._index, content_block=block))

    def _delta(self, delta: _TextDelta | dict[str, str], text: str, events: list[Event]) -> None:
        self._pieces.append(text)
        events.append(Event("content_block_delta", encode(_BlockDelta(self._index, delta))))

    def _close(self, events: list[Event]) -> None:
        block, text = self._open, "".join(self._pieces)
        if block is None:
            return
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
            # Nothing here needs to be proven to come from here; the SDKs want the field.
            signed = {"type": "signature_delta", "signature": ""}
            events.append(_event("content_block_delta", index=self._index, delta=signed))
        else:
            block.input = tool_input(text)
        events.append(_event("content_block_stop", index=self._index))
        self.body.content = [*self.body.content, block]
        self._open = None


def tool_input(arguments: str) -> Any:
    """Return a call's arguments as an object; one that was cut off is shown as the text it is."""
    try:
        read = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        read = None
    return read if isinstance(read, dict) else {"_partial": arguments}


def _event(kind: str, **fields: Any) -> Event:
    return Event(kind, encode({"type": kind, **fields}))
