"""OpenAI's `/v1/chat/completions`: its fields, its conversation, its chunks and its body."""

from __future__ import annotations

import time
from dataclasses import dataclass
from secrets import token_hex
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...engine import CachePolicy, Delta, GenerationRequest, PositionLogprobs
from ...engine.codec import Codec
from ..middleware import request_info
from ..service import Service
from ..stream.events import ResponseSteps, Step
from .body import ignored_header
from .cache_report import CacheDiagnostics, PromptDiagnosis
from .chat_messages import ChatPrompt, MessageFields, encode_chat, invalid
from .estimate import estimate
from .prompt_cache import cache_policy
from .respond import isolation_salt, off_loop, stream_response, submit, wants_resume, whole_response
from .resume import taken_up
from .sampling import MAX_LOGPROBS, read_fields, to_params
from .structured import StructuredFields, asked_grammar, prepare
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


class ChatRequest(StructuredFields, kw_only=True):
    """The body of a request."""

    messages: list[MessageFields]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Counts when both are given: `max_tokens` is its old name."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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


class AnswerMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


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


class _Answer:
    """What chunks and body have in common."""

    def __init__(
        self,
        service: Service,
        fields: ChatRequest,
        model: str,
        request: GenerationRequest,
        warnings: list[str],
        diagnosis: PromptDiagnosis,
    ) -> None:
        self.diagnosis = diagnosis
        self.codec: Codec = service.codec
        self.id, self.created, self.model = request.id, int(time.time()), model
        self.fingerprint = service.system_fingerprint
        self.n = request.params.n
        self.with_logprobs = request.params.logprobs is not None
        self.with_token_ids = bool(fields.return_token_ids)
        self.prompt_token_ids = request.prompt if self.with_token_ids else UNSET
        self.warnings = warnings or UNSET
        options = fields.stream_options
        self.with_usage = bool(options and options.include_usage)
        self.with_running_usage = bool(options and options.include_usage and options.continuous_usage_stats)


class ChatChunks:
    """Encodes steps as chunks. The role comes with the first token, not before: its time means something."""

    def __init__(self, answer: _Answer, steps: ResponseSteps) -> None:
        self._answer, self._steps = answer, steps
        self._is_begun = False
        self._is_plain = not (answer.with_logprobs or answer.with_token_ids)

    def step(self, step: Step) -> list[bytes]:
        events: list[bytes] = []
        if not self._is_begun:
            self._is_begun = True
            events = self._roles()
        for delta in step:
            if delta.text or delta.finish_reason is not None or not self._is_plain:
                events.append(self._event([self._choice(delta)]))
        return events

    async def end(self) -> list[bytes]:
        usage, diagnosis = self._steps.usage, self._answer.diagnosis
        if not self._answer.with_usage:
            diagnosis.remember(usage)
            return []
        chunk = self._chunk([], usage_body(usage))
        chunk.prompt_cache_diagnostics = await diagnosis.finish(usage)
        return [encode(chunk)]

    def _roles(self) -> list[bytes]:
        answer, events = self._answer, []
        for index in range(answer.n):
            chunk = self._chunk([ChunkChoice(index, ChunkDelta("assistant", ""))], self._usage())
            if index == 0:
                chunk.prompt_token_ids, chunk.warnings = answer.prompt_token_ids, answer.warnings
            events.append(encode(chunk))
        return events

    def _choice(self, delta: Delta) -> ChunkChoice:
        choice = ChunkChoice(delta.index, ChunkDelta(content=delta.text), None, delta.finish_reason)
        if not self._is_plain:
            if self._answer.with_logprobs:
                choice.logprobs = ChatLogprobs(chat_logprobs(delta.logprobs or (), self._answer.codec))
            if self._answer.with_token_ids:
                choice.token_ids = delta.token_ids
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        return choice

    def _event(self, choices: list[ChunkChoice]) -> bytes:
        return encode(self._chunk(choices, self._usage()))

    def _chunk(self, choices: list[ChunkChoice], usage: UsageBody | None | UnsetType) -> ChatChunk:
        answer = self._answer
        return ChatChunk(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            system_fingerprint=answer.fingerprint,
            choices=choices,
            usage=usage,
        )

    def _usage(self) -> UsageBody | None | UnsetType:
        if not self._answer.with_usage:
            return UNSET
        return usage_body(self._steps.usage) if self._answer.with_running_usage else None


class ChatBody:
    """Collects steps into the body of a whole answer."""

    def __init__(self, answer: _Answer, steps: ResponseSteps) -> None:
        self._answer, self._steps = answer, steps
        self._texts: list[list[str]] = [[] for _ in range(answer.n)]
        self._token_ids: list[list[int]] = [[] for _ in range(answer.n)]
        self._logprobs: list[list[ContentLogprob]] = [[] for _ in range(answer.n)]
        self._ends: list[Delta | None] = [None] * answer.n
        self._prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None

    def step(self, step: Step) -> None:
        for delta in step:
            self._texts[delta.index].append(delta.text)
            if self._answer.with_token_ids:
                self._token_ids[delta.index] += delta.token_ids
            if delta.logprobs:
                self._logprobs[delta.index] += chat_logprobs(delta.logprobs, self._answer.codec)
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason is not None:
                self._ends[delta.index] = delta

    async def body(self) -> bytes:
        answer = self._answer
        prompt_logprobs, usage = self._prompt_logprobs, self._steps.usage
        return encode(
            ChatAnswer(
                id=answer.id,
                created=answer.created,
                model=answer.model,
                system_fingerprint=answer.fingerprint,
                choices=[self._choice(index) for index in range(answer.n)],
                usage=usage_body(usage),
                prompt_cache_diagnostics=await answer.diagnosis.finish(usage),
                prompt_logprobs=UNSET
                if prompt_logprobs is None
                else prompt_logprobs_body(prompt_logprobs, answer.codec),
                prompt_token_ids=answer.prompt_token_ids,
                warnings=answer.warnings,
            )
        )

    def _choice(self, index: int) -> AnswerChoice:
        end = self._ends[index]
        return AnswerChoice(
            index,
            AnswerMessage("".join(self._texts[index])),
            ChatLogprobs(self._logprobs[index]) if self._answer.with_logprobs else None,
            end.finish_reason if end else None,
            end.stop_reason if end else None,
            self._token_ids[index] if self._answer.with_token_ids else UNSET,
        )


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request that was read."""

    fields: ChatRequest
    ignored: list[str]
    model: str
    prompt: ChatPrompt
    generation: GenerationRequest
    loose: list[str]
    """What of the answer's form is not enforced."""

    @property
    def warnings(self) -> list[str]:
        return [f"`{name}` has no effect here" for name in self.ignored] + self.loose

    def diagnosis(self, service: Service) -> PromptDiagnosis:
        return PromptDiagnosis(service, self.model, self.fields, [self.generation], self.prompt)


class ChatApi:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        service = self._service
        if (rest := taken_up(service, request)) is not None:
            return rest
        call = await self._read(request)
        fields, diagnosis = call.fields, call.diagnosis(service)
        resumes = wants_resume(service, fields.stream_options)
        steps = submit(service, request, [call.generation])
        answer = _Answer(service, fields, call.model, call.generation, call.warnings, diagnosis)
        headers = ignored_header(call.ignored)
        if fields.stream:
            resumable = (call.generation.id, call.generation.salt) if resumes else None
            chunks = ChatChunks(answer, steps)
            return stream_response(service, request, steps, chunks, headers, resumable=resumable)
        return await whole_response(request, steps, ChatBody(answer, steps), headers)

    async def estimate(self, request: Request) -> Response:
        """POST /v1/chat/completions/estimate."""
        service = self._service
        call = await self._read(request)
        answer = await estimate(service, call.model, call.generation, call.diagnosis(service), call.warnings)
        return Response(encode(answer), media_type="application/json", headers=ignored_header(call.ignored))

    async def _read(self, request: Request) -> ChatCall:
        """Read a request up to what the engine takes.

        Raises:
            ApiError, InvalidRequest, ContextTooLong: it cannot be served; names the field.
        """
        fields, ignored, size_bytes = await read_fields(request, ChatRequest, self._service.config)
        return await read_call(self._service, fields, ignored, size_bytes, request_info(request.scope).key_id)


async def read_call(
    service: Service, fields: ChatRequest, ignored: list[str], size_bytes: int, key_id: str
) -> ChatCall:
    """Make of a request's fields what the engine takes.

    Raises:
        ApiError, InvalidRequest, ContextTooLong: it cannot be served; names the field.
    """
    config = service.config
    model = service.model_name(fields.model)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not available with stream=true")
    asked = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    params = to_params(
        fields,
        config,
        service.engine.model.vocab_size,
        max_tokens=0 if fields.prewarms else asked,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
    )

    shape = asked_grammar(fields)
    loose = await prepare(service, shape)

    def read_prompt() -> tuple[ChatPrompt, CachePolicy]:
        prompt = encode_chat(service, fields, fields.messages, normalises=fields.normalises)
        return prompt, cache_policy(fields, lambda: prompt.breakpoint_tokens(service.codec))

    prompt, policy = await off_loop(service, size_bytes, read_prompt)
    generation = GenerationRequest(
        id=f"chatcmpl-{token_hex(16)}",
        prompt=prompt.tokens,
        params=params,
        priority=fields.priority or 0,
        salt=isolation_salt(key_id, fields.cache_salt),
        cache=policy,
        grammar=None if shape is None else shape.grammar,
    )
    return ChatCall(fields, ignored, model, prompt, generation, loose)


def begin_stream(service: Service, call: ChatCall, arrived_at: float) -> tuple[ResponseSteps, ChatChunks]:
    """Hand a request to the engine, by another way than HTTP.

    Raises:
        EngineError: it was refused.
    """
    diagnosis = call.diagnosis(service)
    steps = ResponseSteps(service.engine, [call.generation], service.telemetry, arrived_at)
    answer = _Answer(service, call.fields, call.model, call.generation, call.warnings, diagnosis)
    return steps, ChatChunks(answer, steps)
