"""What `/v1/responses` answers with: the response object, its output items, its usage."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from ...engine import Usage
from .cache_report import CacheDiagnostics
from .openai_responses_input import Item, ResponseRequest
from .types import ContentLogprob, PromptTokensDetails

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class MessageOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class ReasoningOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought, in full: there is no summary of it."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


OutputItem: TypeAlias = MessageOutput | ReasoningOutput | FunctionCallOutput | CustomCallOutput


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


def response_usage(usage: Usage, reasoning_tokens: int = 0) -> ResponseUsage:
    """Return a response's token counts."""
    return ResponseUsage(
        usage.prompt_tokens,
        PromptTokensDetails(usage.cached_tokens, usage.prompt_write_tokens),
        usage.completion_tokens,
        ReasoningTokens(reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )


class FailureBody(msgspec.Struct, frozen=True):
    """A response's `error`."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ReasoningBody(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponseBody(msgspec.Struct, kw_only=True):
    """The response object."""

    id: str
    object: str = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool
    completed_at: int | None = None
    error: FailureBody | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | UnsetType = UNSET
    reasoning: ReasoningBody
    safety_identifier: str | UnsetType = UNSET
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | UnsetType = UNSET
    user: str | UnsetType = UNSET
    metadata: dict[str, str]
    prompt_cache_diagnostics: CacheDiagnostics | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ResponseDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemPage(msgspec.Struct, kw_only=True):
    """A page of a response's input items."""

    object: str = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    object: str = "response.input_tokens"
    input_tokens: int


def response_body(
    response_id: str, created_at: int, model: str, fields: ResponseRequest, warnings: list[str]
) -> ResponseBody:
    """Return the response as it stands before anything is generated."""
    return ResponseBody(
        id=response_id,
        created_at=created_at,
        background=bool(fields.background),
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        max_tool_calls=fields.max_tool_calls,
        model=model,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key or UNSET,
        reasoning=ReasoningBody(fields.reasoning.effort if fields.reasoning else None),
        safety_identifier=fields.safety_identifier or UNSET,
        store=fields.store is not False,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        text=_text(fields),
        tool_choice=fields.tool_choice or "auto",
        tools=[_tool(tool) for tool in msgspec.to_builtins(fields.tools or [])],
        top_logprobs=fields.top_logprobs or 0,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        user=fields.user or UNSET,
        metadata=fields.metadata or {},
        warnings=warnings or UNSET,
    )


def _text(fields: ResponseRequest) -> dict[str, Any]:
    given = (
        msgspec.to_builtins(fields.text.format) if fields.text and fields.text.format else {"type": "text"}
    )
    shown = {name: value for name, value in given.items() if value is not None}
    return {"format": shown, "verbosity": (fields.text.verbosity if fields.text else None) or "medium"}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in tool.items() if value is not None}
    if "tools" in shown:
        shown["tools"] = [_tool(inner) for inner in shown["tools"]]
    if shown["type"] == "function":
        shown.setdefault("parameters", None)
        shown.setdefault("strict", False)
    return shown
