"""OpenAI's `/v1/chat/completions`: its fields, and their way to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...engine import CachePolicy, GenerationRequest
from ...engine.codec import ForcedTool
from ..middleware import request_info
from ..service import Service
from ..stream.events import ResponseSteps
from .body import ignored_header
from .cache_report import PromptDiagnosis
from .chat_messages import ChatPrompt, MessageFields, encode_chat, invalid
from .estimate import estimate
from .openai_chat_answer import ChatAnswering, ChatBody, ChatChunks, Reading
from .openai_chat_tools import ToolForm, custom_names, tool_use
from .prompt_cache import cache_policy
from .respond import (
    isolation_salt,
    off_loop,
    read_answers,
    stream_response,
    submit,
    wants_resume,
    whole_response,
)
from .resume import taken_up
from .sampling import MAX_LOGPROBS, read_fields, to_params
from .structured import StructuredFields, asked_grammar, prepare
from .thinking import Effort, Thinking, heeds_thinking, thinking_arguments
from .tool_use import shape_of
from .types import encode


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
    tools: list[ToolForm] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request that was read."""

    fields: ChatRequest
    ignored: list[str]
    model: str
    prompt: ChatPrompt
    generation: GenerationRequest
    reading: Reading
    loose: list[str]
    """What of the answer's form is not enforced."""

    @property
    def warnings(self) -> list[str]:
        return [f"`{name}` has no effect here" for name in self.ignored] + self.loose

    def diagnosis(self, service: Service) -> PromptDiagnosis:
        return PromptDiagnosis(service, self.model, self.fields, [self.generation], self.prompt)

    def answering(self, service: Service) -> ChatAnswering:
        fields = self.fields
        return ChatAnswering(
            service,
            fields.stream_options,
            self.model,
            self.generation,
            self.reading,
            self.warnings,
            self.diagnosis(service),
            with_token_ids=bool(fields.return_token_ids),
        )


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
        answering = call.answering(service)
        resumes = wants_resume(service, call.fields.stream_options)
        steps = submit(service, request, [call.generation])
        headers = ignored_header(call.ignored)
        if call.fields.stream:
            resumable = (call.generation.id, call.generation.salt) if resumes else None
            chunks = ChatChunks(answering, steps)
            return stream_response(service, request, steps, chunks, headers, resumable=resumable)
        return await whole_response(request, steps, ChatBody(answering, steps), headers)

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

    if said := thinking_arguments(fields.reasoning_effort, fields.thinking):
        fields.chat_template_kwargs = {**said, **(fields.chat_template_kwargs or {})}
        if not heeds_thinking(service.codec):
            given = ("reasoning_effort", "thinking")
            ignored = [*ignored, *(name for name in given if getattr(fields, name) is not None)]
    loose: list[str] = []
    use = tool_use(fields, loose)

    def read_prompt() -> tuple[ChatPrompt, CachePolicy]:
        prompt = encode_chat(service, fields, fields.messages, use, normalises=fields.normalises)
        return prompt, cache_policy(fields, lambda: prompt.breakpoint_tokens(service.codec))

    prompt, policy = await off_loop(service, size_bytes, read_prompt)
    shape = shape_of(service, prompt.tokens, use, asked_grammar(fields), loose)
    loose += await prepare(service, shape)
    answers = read_answers(service, prompt.tokens, use.parameters, params.n)
    if answers is not None and service.dialect.keeps_special:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    generation = GenerationRequest(
        id=f"chatcmpl-{token_hex(16)}",
        prompt=prompt.tokens,
        params=params,
        priority=fields.priority or 0,
        salt=isolation_salt(key_id, fields.cache_salt),
        cache=policy,
        grammar=None if shape is None else shape.grammar,
    )
    reading = Reading(answers, custom_names(fields), isinstance(use.choice, ForcedTool))
    return ChatCall(fields, ignored, model, prompt, generation, reading, loose)


def begin_stream(service: Service, call: ChatCall, arrived_at: float) -> tuple[ResponseSteps, ChatChunks]:
    """Hand a request to the engine, by another way than HTTP.

    Raises:
        EngineError: it was refused.
    """
    answering = call.answering(service)
    steps = ResponseSteps(service.engine, [call.generation], service.telemetry, arrived_at)
    return steps, ChatChunks(answering, steps)
