"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, newer `[TOOL_CALLS]name[ARGS]{...}`.

The newer form may tell an id, `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, or leave `[ARGS]` out.
"""

from __future__ import annotations

import re

from .base import SPACE, Markers
from .call_machine import MAX_HEAD_CHARS, CallMachine
from .forms import CallForms

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKERS = (OPEN, ARGS, CALL_ID)
_OPEN = Markers(OPEN)
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]|(?=\{))")
_HEAD_BEGUN = re.compile(r"\s*[\w.-]*\s*(?:\[[A-Z_]*\]?\s*[\w-]*\s*(?:\[[A-Z]*\]?)?)?")

ARRAY_FORMS = CallForms(
    trigger=OPEN,
    begin='{{"name": {quoted}, "arguments": ',
    end="}",
    between=", ",
    opening=OPEN + " [",
    closing="]",
)
FORMS = CallForms(trigger=OPEN, begin=OPEN + "{name}" + ARGS, end="")


class MistralParser(CallMachine):
    """Reads one answer, in either form."""

    _is_array = False

    def read_text(self) -> bool:
        before, marker, rest = _OPEN.split(self.rest)
        self.calls.text(before)
        if marker is None:
            self.rest = rest
            return False
        self.rest = marker + rest
        return self.lead(self._read_opening, marker)

    def _read_opening(self) -> bool:
        solid = self.rest.lstrip(SPACE)
        if not solid:
            return False
        self._is_array = solid[0] == "["
        if self._is_array:
            return self.lead(self._read_item, self.rest[: len(self.rest) - len(solid) + 1])
        self.state = self._read_head
        return True

    def _read_item(self) -> bool:
        """In an array, between its objects."""
        solid = self.rest.lstrip(SPACE + ",")
        if not solid:
            return False
        if solid[0] == "{":
            self.lead(self._read_item, self.rest[: len(self.rest) - len(solid)])
            return self.begin_object()
        if solid[0] == "]" and not self.led:
            self.rest, self.state = solid[1:], self.read_text
            return True
        return self.give_up()

    def _read_head(self) -> bool:
        """In front of a call's arguments."""
        head = self.rest[:MAX_HEAD_CHARS]
        found = _HEAD.match(head)
        if found:
            self.lead(self._read_head, found[0])
            return self.begin_arguments(found[1], _OPEN)
        if len(head) < MAX_HEAD_CHARS and _HEAD_BEGUN.fullmatch(head):
            return False
        return self.give_up()

    def read_behind(self) -> bool:
        self.state = self._read_item if self._is_array else self.read_text
        return True
