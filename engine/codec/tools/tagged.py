"""Calls whose arguments stand in tags of their own.

Qwen3-Coder's `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>` and GLM's
`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`. Both readers take Hermes' form too.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from ..segments import Segment
from . import hermes
from .base import SPACE, Markers
from .call_machine import MAX_HEAD_CHARS, CallMachine
from .typed_arguments import TypedArguments

_NAME = re.compile(r"\s*[\w.-]*\s*")


class Tags(msgspec.Struct, frozen=True):
    """How a dialect spells a call."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    function: str
    """In front of the name, if there is something."""
    function_head: str
    """Behind the name; "": the next tag is."""
    function_end: str
    parameter: str
    key_end: str
    value: str
    """Between key and value, if there is something."""
    value_end: str
    edge: str
    """White space at a value's ends that is the tags', once."""

    @property
    def markers(self) -> tuple[str, ...]:
        rest = (self.function, self.function_end, self.parameter, self.value, self.value_end)
        return (*self.opens, *self.closes, *filter(None, rest))


QWEN = Tags(
    opens=("<tool_call>", "<seed:tool_call>"),
    closes=("</tool_call>", "</seed:tool_call>"),
    function="<function=",
    function_head=">",
    function_end="</function>",
    parameter="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    edge="\n",
)
GLM = Tags(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    function="",
    function_head="",
    function_end="",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    edge="",
)
FORMS = msgspec.structs.replace(hermes.FORMS, is_own=False)


class TaggedParser(CallMachine):
    """Reads one answer.

    Args:
        tools: The tools on offer; as a mapping it tells their schemas, and so the types of arguments.
    """

    def __init__(self, tags: Tags, tools: Collection[str] = ()) -> None:
        super().__init__(tools)
        self._tags, self._tools = tags, tools
        self._typed = TypedArguments(self.calls.arguments, tools, "")
        ends = tuple(filter(None, (tags.function_end, *tags.closes)))
        self._outside = Markers(*tags.opens, *filter(None, (tags.function,)))
        self._function = Markers(tags.function or tags.parameter)
        name_ends = (tags.function_head,) if tags.function_head else (tags.parameter, *ends)
        self._name_ends = Markers(*name_ends)
        self._inside = Markers(tags.parameter, *ends, *tags.opens)
        self._behind_value = Markers(tags.parameter, *ends)
        self._key_end, self._value = Markers(tags.key_end), Markers(tags.value or tags.key_end)
        self._value_end, self._closes = Markers(tags.value_end), Markers(*ends)
        self._edge = ""
        """A value's last white space, which may be the tag's."""
        self._is_fresh = False

    def read_text(self) -> bool:
        before, marker, rest = self._outside.split(self.rest)
        self.calls.text(before)
        self.rest = (marker or "") + rest
        if marker is None:
            return False
        return self.lead(self._read_name if marker == self._tags.function else self._read_opening, marker)

    def _read_opening(self) -> bool:
        solid = self.rest.lstrip(SPACE)
        if not solid:
            return False
        if solid[0] == "{":
            self.lead(self._read_opening, self.rest[: len(self.rest) - len(solid)])
            return self.begin_object()
        if not self._tags.function:
            self.state = self._read_name
            return True
        marker = self._function.at_start(solid)
        if marker is None:
            return self.give_up()
        space = self.rest[: len(self.rest) - len(solid)]
        return bool(marker) and self.lead(self._read_name, space + marker)

    def _read_name(self) -> bool:
        before, marker, _ = self._name_ends.split(self.rest)
        if not _NAME.fullmatch(before) or len(before) > MAX_HEAD_CHARS:
            return self.give_up()
        if marker is None:
            return False
        name = before.strip()
        if not name:
            return self.give_up()
        self.lead(self._read_parameters, before + (marker if self._tags.function_head else ""))
        self.led = ""
        self.calls.begin(name)
        self._typed = TypedArguments(self.calls.arguments, self._tools, name)
        return True

    def _read_parameters(self) -> bool:
        """Between arguments, where nothing but tags counts."""
        _, marker, rest = self._inside.split(self.rest)
        if marker is None:
            self.rest = rest
            return False
        if marker == self._tags.parameter:
            self.rest, self.state = rest, self._read_key
            return True
        self._typed.close()
        self.calls.end()
        self.rest, self.state = marker + rest, self.read_behind
        return True

    def _read_key(self) -> bool:
        key, marker, rest = self._key_end.split(self.rest)
        if marker is None:
            return False
        solid = rest.lstrip(SPACE)
        if self._tags.value:
            value = self._value.at_start(solid)
            if value == "":
                return False
            rest = solid.removeprefix(value or "")
        self.rest, self.state = rest, self._read_value
        self._typed.begin(key.strip())
        self._edge, self._is_fresh = "", True
        return True

    def _read_value(self) -> bool:
        before, marker, rest = self._value_end.split(self.rest)
        self._take(before)
        self.rest = (marker or "") + rest
        if marker is None:
            return False
        behind = rest.lstrip(SPACE)
        follows = self._behind_value.at_start(behind)
        if follows == "":
            return False
        self.rest = rest
        if follows is None:  # the text speaks of such tags
            self._take(marker)
            return True
        self._typed.end()
        self.state = self._read_parameters
        return True

    def _take(self, text: str) -> None:
        if not text:
            return
        edge = self._tags.edge
        if self._is_fresh:
            self._is_fresh = False
            text = text.removeprefix(edge) if edge else text
        text = self._edge + text
        self._edge = edge if edge and text.endswith(edge) else ""
        self._typed.text(text.removesuffix(self._edge))

    def read_behind(self) -> bool:
        """The tags that close a call."""
        solid = self.rest.lstrip(SPACE)
        marker = self._closes.at_start(solid)
        if marker == "":
            return False
        if marker:
            self.rest = solid.removeprefix(marker)
        if marker != self._tags.function_end:
            self.state = self.read_text
        return True

    def finish(self) -> list[Segment]:
        if self.state == self._read_value:
            if self.rest.startswith(self._tags.value_end):
                self._typed.end()
            else:
                self._take(self.rest)
        if self.state in (self._read_value, self._read_parameters, self._read_key):
            self._typed.cut()
            self.rest = ""
        return super().finish()


def qwen(tools: Collection[str] = ()) -> TaggedParser:
    """A reader of Qwen3-Coder's calls."""
    return TaggedParser(QWEN, tools)


def glm(tools: Collection[str] = ()) -> TaggedParser:
    """A reader of GLM's calls."""
    return TaggedParser(GLM, tools)
