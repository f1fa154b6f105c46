"""DSML of DeepSeek V4 and V4.1: `<｜DSML｜invoke name="f">`, and each parameter in a tag of its own.

A string stands in its tag as it is, any other value as JSON. The two models differ in the names of the tags
only; the reader takes both. It reads thoughts as well: a call ends a thought that was not closed.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import msgspec

from ..segments import Reasoning, Segment
from .base import Machine, Markers, new_call_id
from .forms import CallForms, MemberForms

MARK = "｜DSML｜"
THINK, THOUGHT = "<think>", "</think>"
NEWLINE = "\n"
"""What belongs to the markers it stands next to; other white space is the text's."""
MAX_HEAD_CHARS = 1024
"""A tag's name and attributes; what goes on longer is no tag."""


class Tags(msgspec.Struct, frozen=True):
    """How a model spells its tags, without the angle brackets."""

    block: str
    invoke: str
    parameter: str

    def members(self, none: str) -> MemberForms:
        """How parameters are written; none of them as `none`."""
        begin = f'<{self.parameter} name="{{name}}" string="{{is_string}}">'
        return MemberForms(begin, f"</{self.parameter}>\n", none)

    def forms(self, members: MemberForms) -> CallForms:
        """How calls are written."""
        return CallForms(
            trigger=f"<{self.block}>",
            opening=f"\n\n<{self.block}>\n",
            begin=f'<{self.invoke} name="{{name}}">\n',
            members=members,
            end=f"</{self.invoke}>\n",
            closing=f"</{self.block}>",
        )


V4 = Tags(f"{MARK}tool_calls", f"{MARK}invoke", f"{MARK}parameter")
V41 = Tags(f"{MARK} calls", f"{MARK} invoke", f"{MARK} parameter")
V4_MEMBERS, V41_MEMBERS = V4.members(""), V41.members("\n")
V4_FORMS, V41_FORMS = V4.forms(V4_MEMBERS), V41.forms(V41_MEMBERS)

_BLOCKS = tuple(f"<{tags.block}>" for tags in (V4, V41))
_BLOCK_ENDS = tuple(f"</{tags.block}>" for tags in (V4, V41))
_CALLS = tuple(f'<{tags.invoke} name="' for tags in (V4, V41))
_CALL_ENDS = tuple(f"</{tags.invoke}>" for tags in (V4, V41))
_PARAMETERS = tuple(f'<{tags.parameter} name="' for tags in (V4, V41))
_VALUE_ENDS = tuple(f"</{tags.parameter}>" for tags in (V4, V41))

MARKERS = (MARK, THINK, THOUGHT, *_BLOCKS, *_BLOCK_ENDS, *_CALLS, *_CALL_ENDS, *_PARAMETERS, *_VALUE_ENDS)

_OUTSIDE = Markers(THOUGHT, *_BLOCKS, *_BLOCK_ENDS, *_CALLS)
_WITHOUT_TOOLS = Markers(THOUGHT)
_IN_CALL = Markers(*_PARAMETERS, *_CALL_ENDS, *_CALLS, *_BLOCKS, *_BLOCK_ENDS)
_IN_VALUE = Markers(*_VALUE_ENDS, *_CALL_ENDS, *_BLOCK_ENDS)


class DsmlParser(Machine):
    """Reads one answer.

    Args:
        names: The tools on offer; none: calls are text.
        prompt_end: The prompt's last text; it tells whether the answer begins inside a thought, and whether
            it continues a text.
    """

    def __init__(self, names: Collection[str] = (), prompt_end: str = "") -> None:
        super().__init__(self._next_id, space=NEWLINE)
        self._begun = 0
        self._outside = _OUTSIDE if names else _WITHOUT_TOOLS
        self._marker = ""
        self._is_first = True
        self._is_string = False
        self._space = ""
        self._is_fresh = prompt_end.rstrip(NEWLINE).endswith((THINK, THOUGHT)) or not prompt_end
        """Nothing has been given out: newlines go."""
        if self._is_fresh:
            self.calls.marker()
        if prompt_end.rfind(THINK) > prompt_end.rfind(THOUGHT):
            self.state = self._read_thought

    def _next_id(self) -> str:
        """Ids sort as the calls stand: V4's prompt goes by them."""
        self._begun += 1
        return f"call_{self._begun - 1:02}_{new_call_id().removeprefix('call_')[:20]}"

    def _read_thought(self) -> bool:
        before, marker, rest = self._outside.split(self.rest)
        self._think(before)
        self.rest = rest
        if marker is None:
            return False
        self.calls.marker()
        self.state = self.read_text
        if marker != THOUGHT:
            self._take(marker)
        return True

    def _think(self, text: str) -> None:
        """Newlines at a thought's ends are the markers'."""
        if self._is_fresh:
            text = text.lstrip(NEWLINE)
        solid = text.rstrip(NEWLINE)
        if solid:
            self._is_fresh = False
            self.calls.add(Reasoning(self._space + solid))
            self._space = text[len(solid) :]
        else:
            self._space += text

    def read_text(self) -> bool:
        before, marker, self.rest = self._outside.split(self.rest)
        self.calls.text(before)
        if marker is None:
            return False
        self._take(marker)
        return True

    def _take(self, marker: str) -> None:
        """A marker outside calls; one that only closes something says nothing."""
        if marker in _CALLS:
            self._marker, self.state = marker, self._read_name
        elif marker != THOUGHT:
            self.calls.marker()

    def _read_name(self) -> bool:
        head = self._head()
        if head is None:
            return False
        if head:
            self.calls.begin(head[:-2])
            self._is_first, self.state = True, self._read_call
        else:
            self.calls.text(self._marker)
            self.state = self.read_text
        return True

    def _head(self) -> str | None:
        """The rest of a tag up to `">`; "" if that is too far away to be one, None if it is still to come."""
        at = self.rest.find('">', 0, MAX_HEAD_CHARS)
        if at < 0:
            return "" if len(self.rest) >= MAX_HEAD_CHARS else None
        head, self.rest = self.rest[: at + 2], self.rest[at + 2 :]
        return head

    def _read_call(self) -> bool:
        """Between parameters, where nothing but tags counts."""
        _, marker, self.rest = _IN_CALL.split(self.rest)
        if marker is None:
            return False
        if marker in _PARAMETERS:
            self.state = self._read_parameter
            return True
        self.calls.arguments("{}" if self._is_first else "}")
        self.calls.end()
        self.state = self.read_text
        if marker in _CALLS:
            self._take(marker)
        return True

    def _read_parameter(self) -> bool:
        head = self._head()
        if head is None:
            return False
        self.state = self._read_call
        if head:
            name, _, kind = head[:-2].partition('" string="')
            self._is_string = kind != "false"
            key = json.dumps(name, ensure_ascii=False)
            self.calls.arguments(f"{'{' if self._is_first else ', '}{key}: {self._quote}")
            self._is_first, self.state = False, self._read_value
        return True

    @property
    def _quote(self) -> str:
        return '"' if self._is_string else ""

    def _read_value(self) -> bool:
        before, marker, rest = _IN_VALUE.split(self.rest)
        self._value(before)
        self.rest = rest
        if marker is None:
            return False
        self.calls.arguments(self._quote)
        if marker not in _VALUE_ENDS:
            self.rest = marker + rest
        self.state = self._read_call
        return True

    def _value(self, text: str) -> None:
        self.calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1] if self._is_string else text)

    def finish(self) -> list[Segment]:
        if self.state == self._read_thought:
            self._think(self.rest)
            if self._space and not self._is_fresh:
                self.calls.add(Reasoning(self._space))
            self.rest = ""
        elif self.state == self._read_name:
            self.rest = self._marker + self.rest
        elif self.state == self._read_value:
            self._value(self.rest)
            self.rest = ""
        elif self.state in (self._read_call, self._read_parameter):
            self.calls.arguments("{}" if self._is_first else "")
            self.rest = ""
        return super().finish()
