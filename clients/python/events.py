"""What a chat stream and a tool loop tell while they run."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .types import CacheDiagnostics, ToolCall, Usage


class ContentDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the answer's text."""

    choice: int = 0
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of what the model thinks before it answers."""

    choice: int = 0
    text: str


class ToolCallBegun(msgspec.Struct, frozen=True, kw_only=True):
    """The model calls a tool; its arguments follow."""

    choice: int = 0
    index: int
    id: str
    name: str


class ToolArgumentsDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call's arguments: JSON text, cut anywhere."""

    choice: int = 0
    index: int
    text: str


class ToolCallDone(msgspec.Struct, frozen=True, kw_only=True):
    """A call is complete."""

    choice: int = 0
    index: int
    call: ToolCall


class ChoiceDone(msgspec.Struct, frozen=True, kw_only=True):
    """A choice has come to its end."""

    choice: int = 0
    finish_reason: str


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the request took, and what the prompt cache did for it."""

    usage: Usage
    prompt_cache_diagnostics: CacheDiagnostics | None = None


ChatEvent: TypeAlias = (
    ContentDelta
    | ReasoningDelta
    | ToolCallBegun
    | ToolArgumentsDelta
    | ToolCallDone
    | ChoiceDone
    | UsageReport
)


class ToolStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's function begins to run."""

    call: ToolCall


class ToolFinished(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's function has ended."""

    call: ToolCall
    content: str
    """What the model is told."""
    is_error: bool
    seconds: float


ToolLoopEvent: TypeAlias = ChatEvent | ToolStarted | ToolFinished
