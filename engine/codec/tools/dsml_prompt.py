"""Tools and calls as DeepSeek V4 and V4.1 are shown them. The sentences are the models' format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidRequest
from ..conversation import Tool, ToolCall
from . import dsml
from .forms import CallForms, MemberForms

MAX_DEPTH = 127
"""Levels of JSON in a call's arguments, which are else shown as they are, and in a tool's schema."""

_TOOLS = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{block}>" block like the following:

<{block}>
<{invoke} name="$TOOL_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
<{invoke} name="$TOOL_NAME2">
...
</{invoke}>
</{block}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes in one model's tags."""

    tags: dsml.Tags
    forms: CallForms
    members: MemberForms
    float_text: Callable[[float], str]
    """How the model's JSON spells a float."""

    def tools(self, tools: Sequence[Tool]) -> str:
        """The section of the system text about tools.

        Raises:
            InvalidRequest: a schema is too deep.
        """
        tags, schemas = self.tags, "\n".join(self._tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
        return _TOOLS.format(block=tags.block, invoke=tags.invoke, parameter=tags.parameter, schemas=schemas)

    def _tool(self, tool: Tool, path: str) -> str:
        parts = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
        try:
            return self._json(parts)
        except ValueError as err:
            raise InvalidRequest(f"{path}.parameters: {err}", f"{path}.parameters") from None

    def calls(self, calls: Sequence[ToolCall]) -> str:
        """The calls at a turn's end."""
        if not calls:
            return ""
        return self.forms.opening + "".join(self._call(call) for call in calls) + self.forms.closing

    def _call(self, call: ToolCall) -> str:
        try:
            values = _read_arguments(call.arguments)
            parameters = "".join(self._parameter(name, value) for name, value in values.items())
            parameters.encode()
        except (ValueError, RecursionError):  # what a model wrote is shown as it is
            parameters = self._parameter("arguments", call.arguments)
        return self.forms.begin_of(call.name) + (parameters or self.members.none) + self.forms.end

    def _parameter(self, name: str, value: Any) -> str:
        is_string = isinstance(value, str)
        text = value if is_string else self._json(value, 1)
        return self.members.begin_of(name, is_string=is_string) + text + self.members.end

    def _json(self, value: Any, depth: int = 0) -> str:
        if depth == MAX_DEPTH and isinstance(value, dict | list):
            raise ValueError(f"there are more than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            members = (f"{_text(key)}: {self._json(item, depth + 1)}" for key, item in value.items())
            return f"{{{', '.join(members)}}}"
        if isinstance(value, list):
            return f"[{', '.join(self._json(item, depth + 1) for item in value)}]"
        if isinstance(value, float):
            return self.float_text(value)
        return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments. Raises: ValueError, RecursionError: they are no JSON object."""
    values = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    if not isinstance(values, dict):
        raise ValueError("no object")
    return values


def _integer(text: str) -> int | float:
    """Numbers of 64 bits are integers, any other a float."""
    value = int(text)
    return value if -(2**63) <= value < 2**64 and text != "-0" else _finite(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("out of range")
    return value


def _short_float(value: float) -> str:
    """Without zeros in the exponent, and one digit later than Python does."""
    digits, exponent, power = repr(value).partition("e-0")
    if power == "5":
        sign = "-" * digits.startswith("-")
        return f"{sign}0.0000{digits.lstrip('-').replace('.', '')}"
    return f"{digits}e-{power}" if exponent else digits


V4 = Writer(dsml.V4, dsml.V4_FORMS, dsml.V4_MEMBERS, _short_float)
V41 = Writer(dsml.V41, dsml.V41_FORMS, dsml.V41_MEMBERS, repr)
