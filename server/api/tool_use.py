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
from ...engine.grammar import Tag, Tags, Thoughtful
from ..errors import BadRequest
from ..service import Service
from ..stream.answers import prompt_end
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
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SAYS_MORE = frozenset("properties additionalProperties patternProperties $ref anyOf oneOf allOf if".split())
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
    places: tuple[str, ...] = ()
    """Where each tool's schema stands in the request."""

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
        if self.allowed is not None and (not self.allowed or self.allowed - seen):
            raise _invalid("tool_choice", "tool_choice must allow tools of this request, and no others")
        if self.choice in ("auto", "none"):
            return
        if not self.tools:
            raise _invalid("tool_choice", "tool_choice asks for a call, but there are no tools")
        if isinstance(self.choice, ForcedTool) and self.choice.name not in seen:
            raise _invalid("tool_choice", "tool_choice does not name a tool of this request")

    @property
    def names(self) -> tuple[str, ...]:
        """What the answer may call."""
        return tuple(self.parameters)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """What the answer may call, with the arguments' schemas."""
        callable_ones = (tool for tool in self.tools if self._may_call(tool.name))
        return {tool.name: tool.parameters or NO_PARAMETERS for tool in callable_ones}

    def _may_call(self, name: str) -> bool:
        if isinstance(self.choice, ForcedTool):
            return name == self.choice.name
        return self.choice != "none" and (self.allowed is None or name in self.allowed)

    def grammar(self, dialect: Dialect, text: Asked | None = None) -> Asked | None:
        """What holds the answer to calls of the tools' schemas, or to `text`; None where nothing can be
        called, or the dialect's own calls are no JSON between fixed texts.

        Raises:
            BadRequest: a call is asked for, and nothing could hold the model to that.
        """
        names = set(self.names)
        forms = dialect.tools.forms
        if not names:
            return None
        must = self.choice == "required" or isinstance(self.choice, ForcedTool)
        if forms is None or not (must or forms.is_own):
            if must:
                raise BadRequest(
                    "This model's calls have no form that could be asked for: use tool_choice auto.",
                    code="unsupported_parameter",
                    param="tool_choice",
                )
            return None
        tags = tuple(
            Tag(
                forms.begin_of(tool.name),
                tool.parameters or NO_PARAMETERS,
                forms.end,
                tool.strict,
                forms.members,
            )
            for tool in self.tools
            if tool.name in names
        )
        at = self.places or [f"tools[{i}]" for i in range(len(self.tools))]
        places = tuple(at[i] for i, tool in enumerate(self.tools) if tool.name in names)
        instead = None if must or text is None else text.grammar
        if isinstance(instead, Tags | Thoughtful):
            raise _invalid("response_format", "structural tags and tools cannot shape one answer; give one")
        row = (forms.between, forms.opening, forms.closing, instead)
        grammar = Tags(tags, (forms.trigger,), must, self.parallel, *row)
        return Asked("tools" if text is None else text.param, grammar, places)


NO_TOOLS = ToolUse()


def shape_of(
    service: Service, prompt: Sequence[int], use: ToolUse, text: Asked | None, warnings: list[str]
) -> Asked | None:
    """Return what the answer is held to: calls of the tools, or the form that its text shall have, after a
    thought where the model has one. `warnings` get what cannot be had together.

    Raises:
        BadRequest: see `ToolUse.grammar`.
    """
    shape = use.grammar(service.dialect, text)
    if shape is None and text is not None and use.names:
        warnings.append(
            f"`tools` are not called: `{text.param}` binds, and this model's calls have no grammar"
        )
    shape = shape or text
    if shape is None:
        return None
    marks = service.dialect.thought_before(prompt_end(service.codec, prompt))
    if marks is None:
        return shape
    assert not isinstance(shape.grammar, Thoughtful)
    return shape._replace(grammar=Thoughtful(marks[1], shape.grammar, marks[0]))


def tool_named(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool, place: str
) -> Tool:
    """Return a tool. Its arguments are an object, whether its schema says so or not; without parameters it
    takes none. `place` is the schema's in the request.

    Raises:
        BadRequest: they are to be something else.
    """
    given = parameters or NO_PARAMETERS
    if given.get("type", "object") != "object":
        raise _invalid(f"{place}.type", f"{place}.type must be 'object': arguments are named")
    says = {key for key in _SAYS_MORE & given.keys() if given[key] != {}}
    if not says:
        given = {**given, **NO_PARAMETERS}
    elif not says & {"$ref", "anyOf", "oneOf", "allOf"}:
        given = {"type": "object", **given}
    return Tool(name, description, given, strict)


def custom_tool(
    name: str, description: str | None, form: dict[str, Any] | None, path: str, warnings: list[str]
) -> Tool:
    """Return a tool that takes text, held to a regex if `form` has one. A Lark grammar cannot see the text,
    which travels inside a JSON string: it is not enforced, and `warnings` say so.

    Raises:
        BadRequest: a `format` that is neither text nor a grammar; `path` is the tool's place.
    """
    form = form or {"type": "text"}
    grammar = form.get("grammar", form) if form.get("type") == "grammar" else None
    if form.get("type") not in ("text", "grammar") or (grammar is not None and not _is_grammar(grammar)):
        raise _invalid(f"{path}.format", f"{path}.format must be text, or a grammar in regex or lark syntax")
    parameters = CUSTOM_PARAMETERS
    if grammar is not None and grammar["syntax"] == "regex":
        held = {"type": "string", "pattern": f"^(?:{grammar['definition']})$"}
        parameters = {**CUSTOM_PARAMETERS, "properties": {"input": held}}
    elif grammar is not None:
        warnings.append(f"{path}.format is not enforced: only text and regexes are")
    return tool_named(name, description, parameters, True, f"{path}.format")


def _is_grammar(given: Any) -> bool:
    return (
        isinstance(given, dict)
        and given.get("syntax") in ("regex", "lark")
        and isinstance(given.get("definition"), str)
    )


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
