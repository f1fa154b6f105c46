"""Calls as Python writes them: `[f(a=1, b="x"), g()]`, of Llama 3.2 and 4, LFM2 and OLMo 3.

The list may stand between markers. Behind one it needs no brackets, and any name is a call's; without one, a
call is what has the name of a tool on offer.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ..segments import Segment
from .base import SPACE, Markers
from .call_machine import MAX_HEAD_CHARS, CallMachine
from .python_arguments import PythonArguments

OPEN = ("<|python_start|>", "<|tool_call_start|>", "<function_calls>")
CLOSE = ("<|python_end|>", "<|tool_call_end|>", "</function_calls>")
MARKERS = (*OPEN, *CLOSE)
_OUTSIDE, _CLOSE = Markers(*OPEN, "["), Markers(*CLOSE)

_HEAD = re.compile(r"\s*(?P<name>[\w.-]*)\s*(?:(?P<bracket>\()\s*(?P<key>\w*)\s*)?")


class PythonicParser(CallMachine):
    """Reads one answer."""

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._python = PythonArguments()
        self._is_marked = self._is_list = False

    def read_text(self) -> bool:
        before, marker, rest = _OUTSIDE.split(self.rest)
        self.calls.text(before)
        self.rest = (marker or "") + rest
        if marker is None:
            return False
        self._is_marked, self._is_list = marker != "[", marker == "["
        return self.lead(self._read_opening if self._is_marked else self._read_head, marker)

    def _read_opening(self) -> bool:
        """Behind a marker."""
        solid = self.rest.lstrip(SPACE)
        if not solid:
            return False
        self._is_list = solid[0] == "["
        space = self.rest[: len(self.rest) - len(solid)]
        return self.lead(self._read_head, space + "[" * self._is_list)

    def _read_head(self) -> bool:
        """In front of a call."""
        window = self.rest[:MAX_HEAD_CHARS]
        head = _HEAD.match(window)
        assert head is not None, "nothing at all matches too"
        behind = window[head.end() :]
        if not behind and len(window) < MAX_HEAD_CHARS and self._may_be(head["name"], head["bracket"]):
            return False
        if not (head["bracket"] and self._may_be(head["name"], "(") and head["name"]):
            return self.give_up()
        if not behind.startswith("=" if head["key"] else ")"):
            return self.give_up()
        self.lead(self._read_arguments_of, window[: head.start("bracket") + 1])
        self._python, self.led = PythonArguments(), ""
        self.calls.begin(head["name"])
        return True

    def _may_be(self, name: str, bracket: str | None) -> bool:
        """Whether this is a name that counts, or may yet become one."""
        if self._is_marked:
            return True
        return name in self.names if bracket else any(one.startswith(name) for one in self.names)

    def _read_arguments_of(self) -> bool:
        arguments, self.rest = self._python.feed(self.rest)
        self.calls.arguments(arguments)
        if self._python.is_over:
            self.calls.end()
            self.state = self.read_behind
        return self._python.is_over

    def read_behind(self) -> bool:
        solid = self.rest.lstrip(SPACE)
        if not solid:
            return False
        space = self.rest[: len(self.rest) - len(solid)]
        if solid[0] == ",":
            return self.lead(self._read_head, space + ",")
        if solid[0] == "]" and self._is_list:
            self.rest, self._is_list = solid[1:], False
            return True
        marker = _CLOSE.at_start(solid)
        if marker == "":
            return False
        if marker:
            self.rest = solid.removeprefix(marker)
        elif self._is_marked and solid[0] != "[":
            return self.lead(self._read_head, space)
        self.state = self.read_text
        return True

    def finish(self) -> list[Segment]:
        if self.state == self._read_arguments_of:
            self.calls.arguments(self._python.feed(self.rest, is_last=True)[0])
            self.rest = ""
        return super().finish()
