"""The answer of `/v1/chat/completions`: the chunks of its stream, and the body of the whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...engine import Delta, GenerationRequest, PositionLogprobs
from ...engine.codec.segments import CallArguments, CallBegin, CallEnd, Reasoning, Segment, Text
from ..service import Service
from ..stream.answers import Answers
from ..stream.events import ResponseSteps, Step
from .cache_report import CacheDiagnostics, PromptDiagnosis
from .sampling import StreamOptions
from .tool_use import custom_input
from .types import (
    ChatLogprobs,
    ContentLogprob,
    PromptLogprobs,
    UsageBody,
    chat_logprobs,
    encode,
    prompt_logprobs_body,
    usage_body,
)

GAP = "\0text\0"
"""Stands for a chunk's text while what is around it is encoded."""


class FunctionPiece(msgspec.Struct, omit_defaults=True, gc=False):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomPiece(msgspec.Struct, omit_defaults=True, gc=False):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class CallPiece(msgspec.Struct, omit_defaults=True):
    """A piece of a call. The first one has id, type and name, the others go on with its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionPiece | UnsetType = UNSET
    custom: CustomPiece | UnsetType = UNSET


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """What the model thinks, as DeepSeek's API and other servers name it."""
    tool_calls: list[CallPiece] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageBody | None | UnsetType = UNSET
    prompt_cache_diagnostics: CacheDiagnostics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class CalledCustom(msgspec.Struct):
    name: str
    input: str


class FunctionCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class CustomCall(msgspec.Struct, tag_field="type", tag="custom"):
    id: str
    custom: CalledCustom


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    """null where there are calls and no text."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[FunctionCall | CustomCall] | UnsetType = UNSET


class AnswerChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The body of a whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[AnswerChoice]
    usage: UsageBody
    prompt_cache_diagnostics: CacheDiagnostics
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer's text is read."""

    answers: Answers | None = None
    """None: it is all text."""
    custom_tools: frozenset[str] = frozenset()
    is_named: bool = False
    """The request named the one tool to call: that it was called is no news, and the reason for the end is
    "stop", as OpenAI has it."""

    def take(self, delta: Delta) -> Sequence[Segment]:
        if self.answers is None:
            return (Text(delta.text),) if delta.text else ()
        return self.answers.take(delta)

    def finish_reason(self, delta: Delta) -> str | None:
        if self.answers is None or self.is_named:
            return delta.finish_reason
        return self.answers.finish_reason(delta)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self.answers is None else self.answers.reasoning_tokens


class ChatAnswering:
    """What chunks and body have in common."""

    def __init__(
        self,
        service: Service,
        options: StreamOptions | None,
        model: str,
        request: GenerationRequest,
        reading: Reading,
        warnings: list[str],
        diagnosis: PromptDiagnosis,
        *,
        with_token_ids: bool,
    ) -> None:
        self.diagnosis, self.reading = diagnosis, reading
        self.codec = service.codec
        self.id, self.created, self.model = request.id, int(time.time()), model
        self.fingerprint = service.system_fingerprint
        self.n = request.params.n
        self.with_logprobs = request.params.logprobs is not None
        self.with_token_ids = with_token_ids
        self.prompt_token_ids = request.prompt if with_token_ids else UNSET
        self.warnings = warnings or UNSET
        self.with_usage = bool(options and options.include_usage)
        self.with_running_usage = bool(options and options.include_usage and options.continuous_usage_stats)


class ChatChunks:
    """Encodes steps as chunks. A choice's role comes with the first it has to say, not before: its time means
    something, and whether it begins with text is known then."""

    def __init__(self, answering: ChatAnswering, steps: ResponseSteps) -> None:
        self._answering, self._steps = answering, steps
        self._begun: set[int] = set()
        self._is_plain = not (answering.with_logprobs or answering.with_token_ids)
        self._inputs: dict[int, list[str]] = {}
        """By choice: the arguments so far of an open call of a custom tool."""
        self._frames: dict[tuple[type[Segment], int, int], tuple[bytes, bytes]] = {}
        """What stands before and behind the text of a chunk: by kind, choice and call."""

    def step(self, step: Step) -> list[bytes]:
        events: list[bytes] = []
        reading = self._answering.reading
        for delta in step:
            segments, is_last = reading.take(delta), delta.finish_reason is not None
            if len(segments) == 1 and not is_last and (event := self._continued(segments[0], delta.index)):
                events.append(event)
                continue
            pieces = [piece for segment in segments if (piece := self._piece(segment, delta.index))]
            if is_last and (not pieces or pieces[-1].tool_calls):
                pieces.append(ChunkDelta() if pieces or reading.answers else ChunkDelta(content=""))
            elif not pieces:
                if self._is_plain:
                    continue
                pieces.append(ChunkDelta() if reading.answers else ChunkDelta(content=delta.text))
            if delta.index not in self._begun:
                begins_with_text = isinstance(pieces[0].content, str) or reading.answers is None
                events.append(self._role(delta.index, "" if begins_with_text else None))
            choices = [ChunkChoice(delta.index, piece) for piece in pieces]
            self._tell_tokens(choices[0], delta)
            if is_last:
                choices[-1].finish_reason = reading.finish_reason(delta)
                choices[-1].stop_reason = delta.stop_reason
            events += [self._event([choice]) for choice in choices]
        return events

    async def end(self) -> list[bytes]:
        usage, diagnosis = self._steps.usage, self._answering.diagnosis
        if not self._answering.with_usage:
            diagnosis.remember(usage)
            return []
        chunk = self._chunk([], usage_body(usage, self._answering.reading.reasoning_tokens))
        chunk.prompt_cache_diagnostics = await diagnosis.finish(usage)
        return [encode(chunk)]

    def _role(self, index: int, content: str | None) -> bytes:
        """A choice's first chunk."""
        chunk = self._chunk([ChunkChoice(index, ChunkDelta("assistant", content))], self._usage())
        if not self._begun:
            answering = self._answering
            chunk.prompt_token_ids, chunk.warnings = answering.prompt_token_ids, answering.warnings
        self._begun.add(index)
        return encode(chunk)

    def _piece(self, segment: Segment, choice: int) -> ChunkDelta | None:
        match segment:
            case Text(text):
                return ChunkDelta(content=text)
            case Reasoning(text):
                return ChunkDelta(reasoning_content=text)
            case CallBegin(index, call_id, name):
                if name in self._answering.reading.custom_tools:
                    self._inputs[choice] = []
                    return _call(CallPiece(index, call_id, "custom", custom=CustomPiece(name, "")))
                return _call(CallPiece(index, call_id, "function", FunctionPiece(name, "")))
            case CallArguments(index, text):
                if (pieces := self._inputs.get(choice)) is not None:
                    pieces.append(text)
                    return None
                return _call(CallPiece(index, function=FunctionPiece(arguments=text)))
            case CallEnd(index):
                if (pieces := self._inputs.pop(choice, None)) is not None:
                    written = CustomPiece(input=custom_input("".join(pieces)))
                    return _call(CallPiece(index, custom=written))
                return None

    def _tell_tokens(self, choice: ChunkChoice, delta: Delta) -> None:
        """A step's tokens belong to its first chunk, whatever became of their text."""
        if self._answering.with_logprobs:
            choice.logprobs = ChatLogprobs(chat_logprobs(delta.logprobs or (), self._answering.codec))
        if self._answering.with_token_ids:
            choice.token_ids = delta.token_ids

    def _event(self, choices: list[ChunkChoice]) -> bytes:
        return encode(self._chunk(choices, self._usage()))

    def _continued(self, segment: Segment, choice: int) -> bytes | None:
        """The chunk of a text that goes on, around which all chunks are alike; None for any other."""
        if not self._is_plain or self._answering.with_running_usage or choice not in self._begun:
            return None
        key: tuple[type[Segment], int, int]
        match segment:
            case Text(text) | Reasoning(text):
                key = type(segment), choice, 0
            case CallArguments(index, text) if choice not in self._inputs:
                key = type(segment), choice, index
            case _:
                return None
        frame = self._frames.get(key)
        if frame is None:
            piece = self._piece(msgspec.structs.replace(segment, text=GAP), choice)
            assert piece is not None
            before, _, behind = self._event([ChunkChoice(choice, piece)]).partition(encode(GAP))
            frame = self._frames[key] = before, behind
        return b"%b%b%b" % (frame[0], encode(text), frame[1])

    def _chunk(self, choices: list[ChunkChoice], usage: UsageBody | None | UnsetType) -> ChatChunk:
        answering = self._answering
        return ChatChunk(
            id=answering.id,
            created=answering.created,
            model=answering.model,
            system_fingerprint=answering.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _usage(self) -> UsageBody | None | UnsetType:
        answering = self._answering
        if not answering.with_usage:
            return UNSET
        if not answering.with_running_usage:
            return None
        return usage_body(self._steps.usage, answering.reading.reasoning_tokens)


def _call(piece: CallPiece) -> ChunkDelta:
    return ChunkDelta(tool_calls=[piece])


@dataclass(slots=True)
class _Choice:
    """What a choice has become so far."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[CallBegin, list[str]]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ContentLogprob] = field(default_factory=list)
    end: Delta | None = None

    def take(self, segment: Segment) -> None:
        match segment:
            case Text(text):
                self.texts.append(text)
            case Reasoning(text):
                self.thoughts.append(text)
            case CallBegin():
                self.calls.append((segment, []))
            case CallArguments(_, text):
                self.calls[-1][1].append(text)

    def message(self, custom_tools: frozenset[str]) -> AnswerMessage:
        calls: list[FunctionCall | CustomCall] = []
        for begin, pieces in self.calls:
            written = "".join(pieces)
            if begin.name in custom_tools:
                calls.append(CustomCall(begin.id, CalledCustom(begin.name, custom_input(written))))
            else:
                calls.append(FunctionCall(begin.id, CalledFunction(begin.name, written)))
        return AnswerMessage(
            content="".join(self.texts) if self.texts or not calls else None,
            reasoning_content="".join(self.thoughts) if self.thoughts else UNSET,
            tool_calls=calls or UNSET,
        )


class ChatBody:
    """Collects steps into the body of a whole answer."""

    def __init__(self, answering: ChatAnswering, steps: ResponseSteps) -> None:
        self._answering, self._steps = answering, steps
        self._choices = [_Choice() for _ in range(answering.n)]
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

    def step(self, step: Step) -> None:
        answering = self._answering
        for delta in step:
            choice = self._choices[delta.index]
            for segment in answering.reading.take(delta):
                choice.take(segment)
            if answering.with_token_ids:
                choice.token_ids += delta.token_ids
            if delta.logprobs:
                choice.logprobs += chat_logprobs(delta.logprobs, answering.codec)
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason is not None:
                choice.end = delta

    async def body(self) -> bytes:
        answering = self._answering
        prompt_logprobs, usage = self._prompt_logprobs, self._steps.usage
        return encode(
            ChatAnswer(
                id=answering.id,
                created=answering.created,
                model=answering.model,
                system_fingerprint=answering.fingerprint,
                choices=[self._choice(index, choice) for index, choice in enumerate(self._choices)],
                usage=usage_body(usage, answering.reading.reasoning_tokens),
                prompt_cache_diagnostics=await answering.diagnosis.finish(usage),
                prompt_logprobs=UNSET
                if prompt_logprobs is None
                else prompt_logprobs_body(prompt_logprobs, answering.codec),
                prompt_token_ids=answering.prompt_token_ids,
                warnings=answering.warnings,
            )
        )

    def _choice(self, index: int, choice: _Choice) -> AnswerChoice:
        answering, end = self._answering, choice.end
        return AnswerChoice(
            index,
            choice.message(answering.reading.custom_tools),
            ChatLogprobs(choice.logprobs) if answering.with_logprobs else None,
            answering.reading.finish_reason(end) if end else None,
            end.stop_reason if end else None,
            choice.token_ids if answering.with_token_ids else UNSET,
        )
