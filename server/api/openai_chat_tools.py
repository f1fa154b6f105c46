"""The tools of a chat request: their forms in `/v1/chat/completions`, and what becomes of them."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from ...engine.codec import ForcedTool, Tool
from ..errors import BadRequest
from .tool_use import ToolChoice, ToolUse, allowed_names, custom_tool, tool_named

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionForm(msgspec.Struct, kw_only=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomForm(msgspec.Struct, kw_only=True):
    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None
    """`{"type": "text"}`, or a grammar."""


class ToolForm(msgspec.Struct, kw_only=True):
    """A tool on offer: a function, or a custom tool, which takes text."""

    type: str = "function"
    function: FunctionForm | None = None
    custom: CustomForm | None = None


class ToolFields(Protocol):
    """What a request says of tools."""

    tools: list[ToolForm] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None


def tool_use(fields: ToolFields, warnings: list[str] | None = None) -> ToolUse:
    """Return the tools on offer; `warnings` get what of them is not enforced.

    Raises:
        BadRequest: a tool that is none of the caller's own, or a choice that cannot be made.
    """
    said = [] if warnings is None else warnings
    tools = tuple(_tool(form, f"tools[{i}]", said) for i, form in enumerate(fields.tools or ()))
    choice, allowed = _choice(fields.tool_choice)
    places = tuple(_place(form, f"tools[{i}]") for i, form in enumerate(fields.tools or ()))
    return ToolUse(tools, choice, fields.parallel_tool_calls is not False, allowed, places)


def custom_names(fields: ToolFields) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(form.custom.name for form in fields.tools or () if form.custom and form.type == "custom")


def _place(form: ToolForm, path: str) -> str:
    """Of what holds the tool's arguments."""
    return f"{path}.custom.format" if form.type == "custom" else f"{path}.function.parameters"


def _tool(form: ToolForm, path: str, warnings: list[str]) -> Tool:
    if form.type == "function" and form.function is not None:
        function = form.function
        strict, place = bool(function.strict), _place(form, path)
        return tool_named(function.name, function.description, function.parameters, strict, place)
    if form.type == "custom" and form.custom is not None:
        given = form.custom
        return custom_tool(given.name, given.description, given.format, f"{path}.custom", warnings)
    if form.type in ("function", "custom"):
        raise _invalid(f"{path}.{form.type}", f"{path}.{form.type} is missing")
    raise BadRequest(
        f"{path} has type {form.type[:40]!r}; this server offers functions and custom tools only",
        code="unsupported_parameter",
        param=f"{path}.type",
    )


def _choice(given: str | dict[str, Any] | None) -> tuple[ToolChoice, frozenset[str] | None]:
    if given is None or given == "auto":
        return "auto", None
    if given == "none":
        return "none", None
    if given == "required":
        return "required", None
    if isinstance(given, dict):
        kind = given.get("type", "function")
        inner = given.get(kind) if isinstance(kind, str) else None
        if isinstance(inner, dict):
            if kind in ("function", "custom") and isinstance(inner.get("name"), str):
                return ForcedTool(inner["name"]), None
            if kind == "allowed_tools" and isinstance(inner.get("tools"), list):
                entries = [_inner(entry) for entry in inner["tools"]]
                allowed = allowed_names(entries, "tool_choice.allowed_tools.tools")
                return ("required" if inner.get("mode") == "required" else "auto"), allowed
    raise _invalid("tool_choice", "tool_choice must be auto, none, required, or an object that names tools")


def _inner(entry: Any) -> Any:
    """What has the name, of `{"type": "function", "function": {"name": ...}}`."""
    return entry.get(str(entry.get("type"))) if isinstance(entry, dict) else None


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)
