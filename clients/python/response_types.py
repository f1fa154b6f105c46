"""What `/v1/responses` answers and streams, as typed Structs."""

from __future__ import annotations

from typing import Any

import msgspec

from .types import Answer, CacheDiagnostics, PromptTokensDetails


class OutputPart(msgspec.Struct, kw_only=True):
    """One part of a message or of reasoning."""

    type: str
    text: str = ""
    logprobs: list[Any] = []


class OutputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One item of a response: a message, reasoning, or a call; `type` says which fields count."""

    type: str
    """`message`, `reasoning`, `function_call`, `custom_tool_call`."""
    id: str = ""
    status: str | None = None
    role: str | None = None
    content: list[OutputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """Of a function call: JSON text."""
    input: str | None = None
    """Of a custom tool's call."""


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.input_tokens_details.cached_tokens if self.input_tokens_details else 0


class ResponseFailure(msgspec.Struct, kw_only=True):
    code: str | None = None
    message: str = ""


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str | None = None


class ModelResponse(Answer, kw_only=True):
    """A response as it stands."""

    id: str
    status: str
    """`completed`, `incomplete`, `failed`, `cancelled`; before its end `queued`, `in_progress`."""
    model: str = ""
    created_at: float = 0
    output: list[OutputItem] = []
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    previous_response_id: str | None = None
    background: bool = False
    usage: ResponseUsage | None = None
    prompt_cache_diagnostics: CacheDiagnostics | None = None
    metadata: dict[str, str] = {}
    warnings: list[str] = []

    @property
    def text(self) -> str:
        """The text of all its messages."""
        parts = [part for item in self.output if item.type == "message" for part in item.content or ()]
        return "".join(part.text for part in parts)

    @property
    def calls(self) -> list[OutputItem]:
        """The functions and custom tools that the model calls."""
        return [item for item in self.output if item.type in ("function_call", "custom_tool_call")]


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a response's stream; `type` says which fields count."""

    type: str
    """`response.output_text.delta`, `response.completed`, ..."""
    sequence_number: int = -1
    delta: str = ""
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    response: ModelResponse | None = None
    code: str | None = None
    message: str | None = None


class InputItems(Answer, kw_only=True):
    """A page of what a response was given."""

    data: list[dict[str, Any]]
    has_more: bool = False
    last_id: str | None = None


class InputTokens(Answer, kw_only=True):
    input_tokens: int


class ResponseDeleted(Answer, kw_only=True):
    id: str
    deleted: bool = True
