"""The tools of a `/v1/responses` request: their forms, namespaces, and the names that the model sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ...engine.codec import ForcedTool, Tool
from ..errors import BadRequest
from .tool_use import ToolChoice, ToolUse, allowed_names, custom_tool, tool_named

HOSTED = (
    "web_search", "file_search", "code_interpreter", "computer", "image_generation", "mcp", "local_shell",
    "shell", "apply_patch", "tool_search", "programmatic_tool_calling",
)  # fmt: skip
"""How the types of tools begin that OpenAI runs, or whose calls have forms of their own."""


class ToolFields(msgspec.Struct, kw_only=True):
    """A tool on offer: a function, a custom tool, or a namespace of those."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    """Of a custom tool: `{"type": "text"}` or a grammar."""
    tools: list[ToolFields] | None = None
    """Of a namespace."""


class Offered(NamedTuple):
    """What a name that the model sees stands for."""

    namespace: str | None
    name: str
    is_custom: bool


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """A request's tools."""

    use: ToolUse = ToolUse()
    offered: dict[str, Offered] = field(default_factory=dict)
    """By the name that the model sees."""
    warnings: tuple[str, ...] = ()
    """What is not offered, or not enforced."""


def seen_name(namespace: str | None, name: str) -> str:
    """Return the name that the model sees."""
    return name if namespace is None else f"{namespace}__{name}"


def response_tools(
    given: Sequence[ToolFields], choice: str | dict[str, Any] | None, parallel: bool | None
) -> ResponseTools:
    """Return the tools on offer. What OpenAI would run is left out, with a warning.

    Raises:
        BadRequest: a tool that cannot be offered, or a choice that cannot be made.
    """
    tools: list[Tool] = []
    offered: dict[str, Offered] = {}
    warnings: list[str] = []
    places: list[str] = []

    def add(tool: ToolFields, path: str, namespace: str | None) -> None:
        if tool.type.startswith(HOSTED):
            warnings.append(f"{path} is not offered: this server runs no tools of the type {tool.type!r}")
            return
        if tool.type not in ("function", "custom", "namespace") or (namespace and tool.type == "namespace"):
            raise BadRequest(
                f"{path} has type {tool.type[:40]!r}; this server offers functions and custom tools only",
                code="unsupported_parameter",
                param=f"{path}.type",
            )
        if tool.name is None:
            raise _invalid(f"{path}.name", f"{path}.name is missing")
        if tool.type == "namespace":
            for number, inner in enumerate(tool.tools or ()):
                add(inner, f"{path}.tools[{number}]", tool.name)
            return
        name, is_custom = seen_name(namespace, tool.name), tool.type == "custom"
        offered[name] = Offered(namespace, tool.name, is_custom)
        if is_custom:
            tools.append(custom_tool(name, tool.description, tool.format, path, warnings))
        else:
            place = f"{path}.parameters"
            tools.append(tool_named(name, tool.description, tool.parameters, bool(tool.strict), place))
        places.append(f"{path}.format" if is_custom else f"{path}.parameters")

    for number, tool in enumerate(given):
        add(tool, f"tools[{number}]", None)
    chosen, allowed = _choice(choice, offered)
    use = ToolUse(tuple(tools), chosen, parallel is not False, allowed, tuple(places))
    return ResponseTools(use, offered, tuple(warnings))


def _choice(
    given: str | dict[str, Any] | None, offered: dict[str, Offered]
) -> tuple[ToolChoice, frozenset[str] | None]:
    if given is None or given == "auto":
        return "auto", None
    if given == "none":
        return "none", None
    if given == "required":
        return "required", None
    if isinstance(given, dict):
        kind, name = given.get("type"), given.get("name")
        if kind in ("function", "custom") and isinstance(name, str):
            return ForcedTool(_seen(given, offered)), None
        entries = given.get("tools")
        if kind == "allowed_tools" and isinstance(entries, list):
            allowed_names(entries, "tool_choice.tools")
            allowed = frozenset(seen for entry in entries for seen in _all_seen(entry, offered))
            return ("required" if given.get("mode") == "required" else "auto"), allowed
    raise _invalid("tool_choice", "tool_choice must be auto, none, required, or an object that names tools")


def _seen(entry: dict[str, Any], offered: dict[str, Offered]) -> str:
    """The name that the model sees of a tool that is named with or without its namespace."""
    name, namespace = str(entry["name"]), entry.get("namespace")
    if isinstance(namespace, str):
        return seen_name(namespace, name)
    inner = [seen for seen, tool in offered.items() if tool.name == name]
    return inner[0] if len(inner) == 1 else name


def _all_seen(entry: dict[str, Any], offered: dict[str, Offered]) -> list[str]:
    if entry.get("type") == "namespace":
        return [seen for seen, tool in offered.items() if tool.namespace == entry["name"]]
    return [_seen(entry, offered)]


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)
