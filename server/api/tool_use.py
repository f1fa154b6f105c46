"""Tools on offer: which of them an answer may call, and what holds it to that. Every protocol's requests end
here; their forms are the protocols' own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from ...engine.codec import ForcedTool, Tool
from ...engine.codec.dialects import Dialect
from ...engine.grammar import Tag, Tags
from ..errors import BadRequest
from .structured import Asked

ToolChoice: TypeAlias = Literal["auto", "none", "required"] | ForcedTool

MAX_TOOLS = 512
CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""A custom tool takes text: to the model it is a function of one string."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True)
class ToolUse:
    """A request's tools."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True
    """Whether an answer may call more than once."""
    allowed: frozenset[str] | None = None
    """The names that may be called, of those on offer; None = all."""

    def __post_init__(self) -> None:
        """Raises: BadRequest: names the tool, or the choice."""
        if len(self.tools) > MAX_TOOLS:
            raise _invalid("tools", f"{len(self.tools)} tools are more than the {MAX_TOOLS} allowed")
        seen: set[str] = set()
        for i, tool in enumerate(self.tools):
            if not _NAME.fullmatch(tool.name):
                raise _invalid(
                    f"tools[{i}].name",
                    f"tools[{i}].name must have 1 to 128 of the characters a-z, A-Z, 0-9, _ and -",
                )
            if tool.name in seen:
                raise _invalid(f"tools[{i}].name", f"there are two tools with the name {tool.name!r}")
            seen.add(tool.name)
        if self.choice in ("auto", "none"):
            return
        if not self.tools:
            raise _invalid("tool_choice", "tool_choice asks for a call, but there are no tools")
        if isinstance(self.choice, ForcedTool) and self.choice.name not in seen:
            raise _invalid("tool_choice", "tool_choice does not name a tool of this request")

    @property
    def names(self) -> tuple[str, ...]:
        """What the answer may call."""
        if self.choice == "none":
            return ()
        if isinstance(self.choice, ForcedTool):
            return (self.choice.name,)
        return tuple(tool.name for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    def grammar(self, dialect: Dialect) -> Asked | None:
        """What holds the answer to calls of the tools' schemas; None where nothing can be called, or the
        dialect's calls are no JSON between fixed texts.

        Raises:
            BadRequest: a call is asked for, and nothing could hold the model to that.
        """
        names = set(self.names)
        forms = dialect.tools.forms
        if not names:
            return None
        must = self.choice == "required" or isinstance(self.choice, ForcedTool)
        if forms is None:
            if must:
                raise BadRequest(
                    "This model's calls have no form that could be asked for: use tool_choice auto.",
                    code="unsupported_parameter",
                    param="tool_choice",
                )
            return None
        tags = tuple(
            Tag(forms.begin_of(tool.name), tool.parameters or NO_PARAMETERS, forms.end, tool.strict)
            for tool in self.tools
            if tool.name in names
        )
        shape = Tags(
            tags,
            (forms.trigger,),
            required=must,
            parallel=self.parallel,
            between=forms.between,
            opening=forms.opening,
            closing=forms.closing,
        )
        return Asked("tools", shape)


NO_TOOLS = ToolUse()


def one_shape(calls: Asked | None, text: Asked | None, warnings: list[str]) -> Asked | None:
    """Return what the answer is held to, of the tools' forms and the text's: with both, free text must stay
    possible for the calls, so the text's form is not enforced, and the client is told."""
    if calls is not None and text is not None:
        warnings.append(f"`{text.param}` is not enforced while tools are on offer")
    return calls or text


def tool_named(name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool) -> Tool:
    """Return a tool; without parameters it takes none."""
    return Tool(name, description, parameters or NO_PARAMETERS, strict)


def custom_tool(name: str, description: str | None, form: dict[str, Any] | None, path: str) -> Tool:
    """Return a tool that takes text.

    Raises:
        BadRequest: its `format` is not text; `path` is the tool's place.
    """
    if (form or {}).get("type", "text") != "text":
        raise BadRequest(
            f"{path}.format: only text is available", code="unsupported_parameter", param=f"{path}.format"
        )
    return tool_named(name, description, CUSTOM_PARAMETERS, True)


def custom_arguments(text: str) -> str:
    """Return the arguments that stand for a custom tool's input in the model's own form."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """Return a custom tool's input from the arguments `{"input": ...}` that the model wrote; what is not of
    that form is the input itself."""
    try:
        read = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    if isinstance(read, dict) and isinstance(read.get("input"), str):
        return str(read["input"])
    return arguments


def allowed_names(entries: Sequence[Any], path: str) -> frozenset[str]:
    """Return the names of `allowed_tools`.

    Raises:
        BadRequest: an entry without a name.
    """
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise _invalid(f"{path}[{i}].name", f"{path}[{i}].name is missing")
    return frozenset(name for name in names if isinstance(name, str))


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)
