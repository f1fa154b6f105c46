"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from secrets import token_hex

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ...engine import CachePolicy, GenerationRequest, Usage
from ...engine.grammar import JsonSchema
from ..middleware import request_info
from ..service import Service
from ..stream.events import Step
from ..stream.named import make_events, sse_frame
from ..stream.sse import SseResponse
from .anthropic_events import PING, MessageBody, MessageEvents, message_usage
from .anthropic_input import (
    MessagesRequest,
    Reading,
    invalid,
    sampling_fields,
    template_arguments,
    tool_use,
)
from .body import ignored_header
from .cache_report import PromptDiagnosis
from .chat_messages import ChatPrompt, encode_conversation
from .respond import isolation_salt, off_loop, read_answers, submit, whole_response
from .sampling import read_fields, to_params
from .structured import Asked, prepare
from .thinking import heeds_thinking
from .tool_use import ToolUse, shape_of
from .types import encode


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class _Whole:
    """Collects a message without its events."""

    def __init__(self, events: MessageEvents) -> None:
        self._events = events

    def step(self, step: Step) -> None:
        self._events.step(step)

    async def body(self) -> bytes:
        await self._events.end()
        return encode(self._events.body)


class MessagesApi:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/messages."""
        service, info = self._service, request_info(request.scope)
        fields, ignored, size_bytes = await read_fields(request, MessagesRequest, service.config)
        model = service.model_name(fields.model)
        if fields.max_tokens is None:
            raise invalid("max_tokens", "max_tokens is missing")
        params = to_params(
            sampling_fields(fields),
            service.config,
            service.engine.model.vocab_size,
            max_tokens=0 if fields.prewarms else fields.max_tokens,
            logprobs=None,
            prompt_logprobs=None,
        )
        left_out: list[str] = []
        use = tool_use(fields, left_out)
        prompt, policy = await off_loop(service, size_bytes, lambda: read_prompt(service, fields, use))
        if template_arguments(fields) and not heeds_thinking(service.codec):
            ignored = [*ignored, "thinking" if fields.thinking else "output_config.effort"]
        warnings = [*(f"`{name}` has no effect here" for name in ignored), *left_out]
        asked = shape_of(service, prompt.tokens, use, _grammar(fields), warnings)
        warnings += await prepare(service, asked)
        answers = read_answers(service, prompt.tokens, use.parameters, 1)
        if answers is not None and service.dialect.keeps_special:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        generation = GenerationRequest(
            id=f"msg_{token_hex(16)}",
            prompt=prompt.tokens,
            params=params,
            salt=isolation_salt(info.key_id, fields.cache_salt),
            cache=policy,
            grammar=asked.grammar if asked else None,
        )
        diagnosis = PromptDiagnosis(service, model, fields, [generation], prompt)
        steps = submit(service, request, [generation])
        body = MessageBody(
            id=generation.id,
            model=model,
            usage=message_usage(Usage(prompt_tokens=len(prompt.tokens), completion_tokens=0)),
            warnings=warnings or UNSET,
        )
        events = MessageEvents(body, steps, diagnosis, answers)
        headers = ignored_header(ignored)
        if not fields.stream:
            return await whole_response(request, steps, _Whole(events), headers)

        async def frames() -> AsyncIterator[bytes]:
            async for batch in make_events(steps, events, info.id):
                yield sse_frame(batch)

        return SseResponse(
            frames(),
            steps.aclose,
            keep_alive_interval_s=service.config.keep_alive_interval_s,
            keep_alive=PING,
            headers=headers,
        )

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        service = self._service
        fields, ignored, size_bytes = await read_fields(request, MessagesRequest, service.config)
        service.model_name(fields.model)
        use = tool_use(fields)
        prompt, _ = await off_loop(service, size_bytes, lambda: read_prompt(service, fields, use))
        body = encode(TokenCount(len(prompt.tokens)))
        return Response(body, media_type="application/json", headers=ignored_header(ignored))


def read_prompt(service: Service, fields: MessagesRequest, use: ToolUse) -> tuple[ChatPrompt, CachePolicy]:
    """Return the prompt of a request, and what the cache may do with it.

    Raises:
        BadRequest, InvalidRequest, ContextTooLong: the messages.
    """
    reading = Reading(fields, use)
    prompt = encode_conversation(
        service,
        reading.conversation,
        generates=not reading.continues,
        continues=reading.continues,
        kwargs=template_arguments(fields),
        normalises=fields.normalises,
        last_breakpoint=reading.last_breakpoint,
    )
    return prompt, reading.policy(fields, prompt.breakpoint_tokens(service.codec))


def _grammar(fields: MessagesRequest) -> Asked | None:
    """What `output_config.format` makes of the answer; None for text."""
    given = fields.output_config.format if fields.output_config else None
    return None if given is None else Asked("output_config.format.schema", JsonSchema(given.schema))
