"""A Python function as a tool: a JSON schema from its type hints and docstring, and arguments to match."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Params):\s*$")
_ANY_SECTION = re.compile(r"^[A-Z][A-Za-z ]+:\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ToolArgumentsError(ValueError):
    """The arguments do not fit the tool's parameters; the text goes back to the model."""


class Tool:
    """A function that the model may call.

    Parameters need type hints: whatever msgspec knows (numbers, text, enums, `Literal`, lists, mappings,
    dataclasses, TypedDicts, Structs, `X | None`); `Annotated[int, msgspec.Meta(ge=0)]` adds bounds. Defaults
    make a parameter optional. The docstring's first paragraphs describe the tool, its `Args:` section the
    parameters.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        strict: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Make a tool of a function, plain or async.

        Args:
            function: Called with keywords.
            name: Instead of the function's.
            description: Instead of the docstring's.
            strict: Whether the server must hold the model to the schema; None leaves it to the server.
            timeout_s: Instead of the loop's limit for one call.

        Raises:
            TypeError: a parameter without a type, or of a type that has no schema.
            ValueError: a name that tools cannot have.
        """
        self.function = function
        self.name = name or str(getattr(function, "__name__", ""))
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name for a tool: 1 to 64 of A-Z a-z 0-9 _ -")
        self.strict, self.timeout_s = strict, timeout_s
        self.is_async = inspect.iscoroutinefunction(function)
        summary, about = _read_docstring(inspect.getdoc(function) or "")
        self.description = summary if description is None else description
        self._form = _form(function, self.name, about)
        self.parameters = _schema(self._form, self.name)
        """JSON schema of the arguments."""
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(self._form)

    def definition(self) -> dict[str, Any]:
        """Return the entry of a request's `tools`."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.parameters}
        if self.description:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}

    def arguments(self, text: str) -> dict[str, Any]:
        """Return a call's arguments as the function takes them.

        Raises:
            ToolArgumentsError: not JSON, or not what the schema says.
        """
        try:
            found = self._decoder.decode(text or "{}")
        except (msgspec.DecodeError, UnicodeError) as err:
            raise ToolArgumentsError(f"The arguments of {self.name} are wrong: {err}") from None
        values = ((name, getattr(found, name)) for name in found.__struct_fields__)
        return {name: value for name, value in values if value is not msgspec.UNSET}


def _form(function: Callable[..., Any], name: str, about: Mapping[str, str]) -> type[msgspec.Struct]:
    """Return a Struct with the function's parameters as its fields."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}: the parameter {parameter} cannot be given by its name")
        if parameter.name not in hints:
            raise TypeError(f"{name}: the parameter {parameter.name} has no type")
        hint = hints[parameter.name]
        if parameter.name in about:
            hint = Annotated[hint, msgspec.Meta(description=about[parameter.name])]
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        else:  # the function's own default applies
            fields.append((parameter.name, hint | msgspec.UnsetType, msgspec.UNSET))
    return msgspec.defstruct(name.replace("-", "_"), fields, kw_only=True, forbid_unknown_fields=True)


def _schema(form: type[msgspec.Struct], name: str) -> dict[str, Any]:
    try:
        _, components = msgspec.json.schema_components([form], ref_template="#/$defs/{name}")
    except TypeError as err:
        raise TypeError(f"{name}: {err}") from None
    schema: dict[str, Any] = components.pop(form.__name__)
    schema.pop("title", None)
    if components:
        schema["$defs"] = components
    return schema


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring (Google form) says of the function, and of each parameter."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if _ANY_SECTION.match(line)), len(lines))
    about: dict[str, str] = {}
    in_section, name, indent = False, "", 0
    for line in lines[start:]:
        if line and not line[0].isspace():
            in_section, name = bool(_SECTION.match(line)), ""
            continue
        said = line.strip()
        if not in_section or not said:
            continue
        depth = len(line) - len(line.lstrip())
        found = _ARGUMENT.match(said)
        if found and (not name or depth <= indent):
            name, indent = found[1], depth
            about[name] = found[2]
        elif name:
            about[name] = f"{about[name]} {said}".strip()
    return "\n".join(lines[:start]).strip(), about
