"""From the fields of a `/v1/responses` request to a response that runs: the same by HTTP and by WebSocket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from secrets import token_hex
from typing import NamedTuple

import msgspec

from ...engine import CachePolicy, GenerationRequest, InvalidRequest
from ...engine.grammar import JsonSchema
from ..service import Service
from ..stream.events import ResponseSteps
from .cache_report import PromptDiagnosis
from .chat_messages import ChatPrompt, encode_conversation
from .openai_responses_body import ResponseBody, response_body
from .openai_responses_events import ResponseEvents
from .openai_responses_input import (
    Item,
    ResponseRequest,
    check_options,
    conversation_of,
    input_items,
    invalid,
    to_turns,
)
from .openai_responses_store import ResponseStore, StoredResponse
from .openai_responses_tools import ResponseTools, response_tools
from .prompt_cache import cache_policy
from .respond import isolation_salt, off_loop, read_answers
from .sampling import to_params
from .structured import JSON_OBJECT, Asked, prepare
from .thinking import heeds_thinking, thinking_arguments
from .tool_use import ToolUse, shape_of

LOGPROBS = "message.output_text.logprobs"


class Running(NamedTuple):
    """A response whose generation has begun."""

    id: str
    salt: str
    steps: ResponseSteps
    events: ResponseEvents


async def start_response(
    service: Service,
    store: ResponseStore,
    fields: ResponseRequest,
    *,
    ignored: Sequence[str],
    size_bytes: int,
    key_id: str,
    arrived_at: float,
    generates: bool = True,
) -> Running:
    """Read the request, hand it to the engine. `generates` = False computes and keeps the prompt only.

    Raises:
        BadRequest, NotFound: the request; `param` names the field.
        EngineError: it was refused; nothing is left running.
    """
    check_options(fields)
    model = service.model_name(fields.model)
    salt = isolation_salt(key_id, fields.cache_salt)
    with_logprobs = LOGPROBS in (fields.include or ()) or fields.top_logprobs is not None
    prewarms = fields.prewarms or not generates
    params = to_params(
        fields,
        service.config,
        service.engine.model.vocab_size,
        max_tokens=0 if prewarms else fields.max_output_tokens,
        logprobs=(fields.top_logprobs or 0) if with_logprobs else None,
        prompt_logprobs=None,
    )
    own = input_items(fields.input)
    tools = tools_of(fields)
    use = tools.use
    prompt, policy = await read_prompt(service, store, fields, own, salt, size_bytes, use)
    if fields.reasoning and fields.reasoning.effort and not heeds_thinking(service.codec):
        ignored = [*ignored, "reasoning.effort"]
    warnings = [*(f"`{name}` has no effect here" for name in ignored), *tools.warnings]
    asked = shape_of(service, prompt.tokens, use, answer_grammar(fields), warnings)
    warnings += await prepare(service, asked)
    answers = read_answers(service, prompt.tokens, use.parameters, 1)
    if answers is not None and service.dialect.keeps_special:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    generation = GenerationRequest(
        id=f"resp_{token_hex(24)}",
        prompt=prompt.tokens,
        params=params,
        priority=fields.priority or 0,
        salt=salt,
        cache=policy,
        grammar=asked.grammar if asked else None,
    )
    diagnosis = PromptDiagnosis(service, model, fields, [generation], prompt)
    body = response_body(generation.id, int(time.time()), model, fields, warnings)

    async def keep(body: ResponseBody) -> None:
        stored = stored_response(body, own, policy.ttl_s)
        await store.keep(salt, body.id, stored, is_asked=body.store)

    with _naming_input():
        steps = ResponseSteps(service.engine, [generation], service.telemetry, arrived_at)
    events = ResponseEvents(
        body,
        steps,
        diagnosis,
        service.codec,
        answers=answers,
        offered=tools.offered,
        with_logprobs=with_logprobs,
        is_prewarm=prewarms,
        keep=keep,
    )
    return Running(generation.id, salt, steps, events)


def tools_of(fields: ResponseRequest) -> ResponseTools:
    """Return a request's tools.

    Raises:
        BadRequest: see `response_tools`.
    """
    return response_tools(fields.tools or (), fields.tool_choice, fields.parallel_tool_calls)


async def read_prompt(
    service: Service,
    store: ResponseStore,
    fields: ResponseRequest,
    own: list[Item],
    salt: str,
    size_bytes: int,
    use: ToolUse,
) -> tuple[ChatPrompt, CachePolicy]:
    """Return the prompt of a request with all that it continues.

    Raises:
        BadRequest, InvalidRequest, ContextTooLong: the input.
    """
    earlier = await store.items_through(salt, fields.previous_response_id)

    def read() -> tuple[ChatPrompt, CachePolicy]:
        turns = to_turns(fields.instructions, earlier, own)
        prompt = encode_conversation(
            service,
            conversation_of(turns, use),
            kwargs={
                **thinking_arguments(fields.reasoning.effort if fields.reasoning else None, None),
                **(fields.chat_template_kwargs or {}),
            },
            normalises=fields.normalises,
            last_breakpoint=turns.last_breakpoint,
        )
        return prompt, cache_policy(fields, lambda: prompt.breakpoint_tokens(service.codec))

    with _naming_input():
        return await off_loop(service, size_bytes + 200 * len(earlier), read)


@contextmanager
def _naming_input() -> Iterator[None]:
    """The engine calls messages what the client calls input."""
    try:
        yield
    except InvalidRequest as err:
        if err.param is not None and err.param.startswith("messages"):
            err.param = "input"
        raise


def answer_grammar(fields: ResponseRequest) -> Asked | None:
    """Return what `text.format` makes of the answer; None for plain text."""
    given = fields.text.format if fields.text else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Asked("text.format", JsonSchema(JSON_OBJECT))
    if given.schema is None:
        raise invalid("text.format.schema", "text.format.schema is missing")
    return Asked("text.format.schema", JsonSchema(given.schema, strict=bool(given.strict)))


def stored_response(body: ResponseBody, own: list[Item], ttl_s: float | None) -> StoredResponse:
    """Return a response as it is stored."""
    if body.status == "failed":
        output: list[Item] = []  # half an item is nothing to continue from
    else:
        output = msgspec.to_builtins(body.output)
    return StoredResponse(
        body=msgspec.json.encode(body),
        input=own,
        output=output,
        previous=body.previous_response_id,
        kept_at=time.time(),
        ttl_s=ttl_s,
    )
