"""The events of one response of `/v1/responses`, numbered from 0, and the response object they lead to.

An item is opened by the first segment that belongs to it and closed by the next that does not. What a done
event says is the object that the final output holds.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any

import msgspec
from msgspec import UNSET

from ...engine import Delta
from ...engine.codec import Codec
from ...engine.codec.segments import CallArguments, CallBegin, CallEnd, Reasoning, Segment, Text
from ..errors import ApiError
from ..stream.answers import Answers
from ..stream.events import ResponseSteps, Step
from ..stream.named import Event
from .cache_report import PromptDiagnosis
from .openai_responses_body import (
    CustomCallOutput,
    FailureBody,
    FunctionCallOutput,
    IncompleteDetails,
    MessageOutput,
    OutputItem,
    OutputText,
    ReasoningOutput,
    ReasoningText,
    ResponseBody,
    Status,
    response_usage,
)
from .openai_responses_tools import Offered
from .tool_use import custom_input
from .types import ContentLogprob, chat_logprobs, encode

TERMINAL: dict[Status, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",  # OpenAI has no event of that name; the response's status tells
}


class _TextDelta(msgspec.Struct, gc=False):
    """The event of the hot path."""

    type: str
    item_id: str
    output_index: int
    content_index: int
    delta: str
    sequence_number: int
    logprobs: Sequence[ContentLogprob] = ()


class ResponseEvents:
    """Makes the events (`stream.named.EventMaker`) and keeps `body` up to date with them."""

    def __init__(
        self,
        body: ResponseBody,
        steps: ResponseSteps,
        diagnosis: PromptDiagnosis,
        codec: Codec,
        *,
        answers: Answers | None = None,
        offered: Mapping[str, Offered] | None = None,
        with_logprobs: bool = False,
        is_prewarm: bool = False,
        keep: Callable[[ResponseBody], Awaitable[None]],
    ) -> None:
        """`keep` stores the finished response; its terminal event waits for that."""
        self.body = body
        self.stopped_by: str | None = None
        """Set by whoever ends the response early: the reason that `incomplete_details` gives."""
        self._steps, self._diagnosis, self._codec, self._keep = steps, diagnosis, codec, keep
        self._is_prewarm = is_prewarm
        self._answers, self._offered, self._with_logprobs = answers, offered or {}, with_logprobs
        self._number = -1
        self._open: OutputItem | None = None
        self._pieces: list[str] = []
        """Of the open item's text or arguments."""
        self._logprobs: list[ContentLogprob] = []
        """Of the open message."""
        self._waiting: list[ContentLogprob] = []
        """Of tokens whose text has not come yet."""
        self._end: Delta | None = None

    @property
    def calls(self) -> list[FunctionCallOutput | CustomCallOutput]:
        """What the answer has called so far, the open call included."""
        items = [*self.body.output, *([self._open] if self._open else [])]
        return [item for item in items if isinstance(item, FunctionCallOutput | CustomCallOutput)]

    @property
    def _thought(self) -> int:
        """Tokens of thoughts."""
        return 0 if self._answers is None else self._answers.reasoning_tokens

    def insert(self, kind: str, **fields: Any) -> Event:
        """Return an event of another kind, numbered as the next one."""
        return self._event(kind, **fields)

    def begin(self) -> list[Event]:
        if self.body.background:
            self.body.status = "queued"
            first = [self._lifecycle("response.created"), self._lifecycle("response.queued")]
        else:
            first = [self._lifecycle("response.created")]
        self.body.status = "in_progress"
        return [*first, self._lifecycle("response.in_progress")]

    def step(self, step: Step) -> list[Event]:
        events: list[Event] = []
        for delta in step:
            segments: list[Segment]
            if self._answers is None:
                segments = [Text(delta.text)] if delta.text else []
            else:
                segments = self._answers.take(delta)
            if self._with_logprobs and delta.logprobs:
                self._waiting += chat_logprobs(delta.logprobs, self._codec)
            if delta.finish_reason is not None:
                self._end = delta
            for segment in segments:
                self._segment(segment, events)
        return events

    async def end(self) -> list[Event]:
        end = self._end
        status: Status = "completed"
        if self.stopped_by is not None and (end is None or end.finish_reason == "abort"):
            status, self.body.incomplete_details = "incomplete", IncompleteDetails(self.stopped_by)
        elif end is None or end.finish_reason == "abort":
            status = "cancelled"
        elif end.finish_reason == "length" and not self._is_prewarm:
            status, self.body.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        usage = self._steps.usage
        self.body.usage = response_usage(usage, self._thought)
        self.body.prompt_cache_diagnostics = await self._diagnosis.finish(usage)
        return await self._finish(status)

    async def fail(self, error: ApiError) -> list[Event]:
        self.body.error = FailureBody("server_error", error.message)
        self.body.usage = response_usage(self._steps.usage, self._thought)
        return await self._finish("failed")

    async def _finish(self, status: Status) -> list[Event]:
        events: list[Event] = []
        if status == "completed" and not (self._open or self.body.output or self._is_prewarm):
            self._begin_message(events)  # an empty answer is a message too
        self._close(events, is_whole=status == "completed")
        self.body.status = status
        if status == "completed":
            self.body.completed_at = int(time.time())
        await self._keep(self.body)
        events.append(self._lifecycle(TERMINAL[status]))
        return events

    def _segment(self, segment: Segment, events: list[Event]) -> None:
        match segment:
            case Text(text):
                if not isinstance(self._open, MessageOutput):
                    self._begin_message(events)
                self._delta("response.output_text.delta", text, events)
            case Reasoning(text):
                if not isinstance(self._open, ReasoningOutput):
                    self._begin_reasoning(events)
                self._delta("response.reasoning_text.delta", text, events)
            case CallBegin(_, call_id, name):
                self._close(events)
                self._add(self._called(call_id, name), events)
            case CallArguments(_, text):
                self._pieces.append(text)
                if isinstance(self._open, FunctionCallOutput):
                    fields = {"item_id": self._open.id, "output_index": self._index, "delta": text}
                    events.append(self._event("response.function_call_arguments.delta", **fields))
            case CallEnd(_, is_whole):
                self._close(events, is_whole=is_whole)

    def _called(self, call_id: str, name: str) -> FunctionCallOutput | CustomCallOutput:
        tool = self._offered.get(name, Offered(None, name, False))
        form, prefix = (CustomCallOutput, "ctc") if tool.is_custom else (FunctionCallOutput, "fc")
        return form(
            id=f"{prefix}_{token_hex(16)}", call_id=call_id, name=tool.name, namespace=tool.namespace or UNSET
        )

    @property
    def _index(self) -> int:
        return len(self.body.output)

    def _delta(self, kind: str, text: str, events: list[Event]) -> None:
        assert self._open is not None
        self._pieces.append(text)
        self._number += 1
        event = _TextDelta(kind, self._open.id, self._index, 0, text, self._number)
        if self._waiting and isinstance(self._open, MessageOutput):
            event.logprobs, self._waiting = self._waiting, []
            self._logprobs += event.logprobs
        events.append(Event(kind, encode(event)))

    def _begin_message(self, events: list[Event]) -> None:
        self._close(events)
        self._add(MessageOutput(id=f"msg_{token_hex(16)}"), events)
        self._part("added", OutputText(), events)

    def _begin_reasoning(self, events: list[Event]) -> None:
        self._close(events)
        self._add(ReasoningOutput(id=f"rs_{token_hex(16)}"), events)
        self._part("added", ReasoningText(), events)

    def _add(self, item: OutputItem, events: list[Event]) -> None:
        self._open, self._pieces, self._logprobs = item, [], []
        events.append(self._event("response.output_item.added", output_index=self._index, item=item))

    def _part(self, what: str, part: OutputText | ReasoningText, events: list[Event]) -> None:
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": self._index, "content_index": 0}
        events.append(self._event(f"response.content_part.{what}", **place, part=part))

    def _close(self, events: list[Event], *, is_whole: bool = True) -> None:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        place: dict[str, Any] = {"item_id": item.id, "output_index": self._index}
        if isinstance(item, MessageOutput):
            part = OutputText(text=text, logprobs=[*self._logprobs, *self._waiting])
            self._waiting = []
            done = {**place, "content_index": 0, "text": text, "logprobs": part.logprobs}
            events.append(self._event("response.output_text.done", **done))
            self._part("done", part, events)
            item.content = [part]
        elif isinstance(item, ReasoningOutput):
            thought = ReasoningText(text=text)
            events.append(self._event("response.reasoning_text.done", **place, content_index=0, text=text))
            self._part("done", thought, events)
            item.content = [thought]
        elif isinstance(item, FunctionCallOutput):
            item.arguments = text
            done = {**place, "name": item.name, "arguments": text}
            events.append(self._event("response.function_call_arguments.done", **done))
        else:
            item.input = custom_input(text)
            if item.input:
                events.append(self._event("response.custom_tool_call_input.delta", **place, delta=item.input))
            events.append(self._event("response.custom_tool_call_input.done", **place, input=item.input))
        item.status = "completed" if is_whole else "incomplete"
        events.append(self._event("response.output_item.done", output_index=self._index, item=item))
        self.body.output = [*self.body.output, item]
        self._open = None

    def _lifecycle(self, kind: str) -> Event:
        return self._event(kind, response=self.body)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return Event(kind, encode({"type": kind, "sequence_number": self._number, **fields}))
