"""DeepSeek V3 and R1, which fence a call's JSON as a code block, and V3.1, which does not.

`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line "```json", the arguments, a line "```" and
`<｜tool▁call▁end｜>`; or `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
All calls stand between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.
"""

from __future__ import annotations

import re

from .base import SPACE, Markers
from .call_machine import MAX_HEAD_CHARS, CallMachine
from .forms import CallForms

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (OPEN, CLOSE, CALL, SEPARATOR, CALL_END)
_OUTSIDE, _CALL, _NEXT = Markers(OPEN, CALL), Markers(CALL), Markers(CALL, CLOSE)
_SEPARATOR, _BRACE = Markers(SEPARATOR), Markers("{")
_END, _ENDS = Markers(CALL_END, CALL, CLOSE), Markers(CALL_END, CALL, CLOSE, "\n```")

_KIND, _FENCE = "function", "```json"
_NAME = re.compile(r"\s*[\w.-]*\s*")
_FENCED = re.compile(r"\s*([\w.-]+)\s*(?:```(?:json)?\s*)?")
_FENCED_BEGUN = re.compile(r"\s*[\w.-]*\s*`{0,3}[a-z]*\s*")

FENCED_FORMS = CallForms(
    trigger=OPEN,
    begin=CALL + _KIND + SEPARATOR + "{name}\n" + _FENCE + "\n",
    end="\n```" + CALL_END,
    between="\n",
    opening=OPEN,
    closing=CLOSE,
)
FORMS = CallForms(trigger=OPEN, begin=CALL + "{name}" + SEPARATOR, end=CALL_END, opening=OPEN, closing=CLOSE)


class DeepSeekV3Parser(CallMachine):
    """Reads one answer, in either form."""

    _kind = ""

    def read_text(self) -> bool:
        before, marker, rest = _OUTSIDE.split(self.rest)
        self.calls.text(before)
        self.rest = (marker or "") + rest
        if marker is None:
            return False
        return self.lead(self._read_kind if marker == CALL else self._read_block, marker)

    def _read_block(self) -> bool:
        """In front of the first call."""
        solid = self.rest.lstrip(SPACE)
        marker = _CALL.at_start(solid)
        if marker is None:
            return self.give_up()
        head = self.rest[: len(self.rest) - len(solid)] + marker
        return bool(marker) and self.lead(self._read_kind, head)

    def _read_kind(self) -> bool:
        """The word "function", or the name."""
        before, marker, _ = _SEPARATOR.split(self.rest)
        if not _NAME.fullmatch(before) or len(before) > MAX_HEAD_CHARS:
            return self.give_up()
        if marker is None:
            return False
        self._kind = before.strip()
        return self.lead(self._read_form, before + marker) if self._kind else self.give_up()

    def _read_form(self) -> bool:
        solid = self.rest.lstrip(SPACE)
        if not solid:
            return False
        if self._kind != _KIND or solid[0] == "{":
            return self.begin_arguments(self._kind, _ENDS)
        self.state = self._read_fence
        return True

    def _read_fence(self) -> bool:
        """The name and the code block's head."""
        before, marker, _ = _BRACE.split(self.rest)
        if not _FENCED_BEGUN.fullmatch(before) or len(before) > MAX_HEAD_CHARS:
            return self.give_up()
        if marker is None:
            return False
        found = _FENCED.fullmatch(before)
        if found is None:
            return self.give_up()
        self.lead(self._read_fence, before)
        return self.begin_arguments(found[1], _ENDS)

    def read_behind(self) -> bool:
        solid = self.rest.lstrip(SPACE + "`")
        marker = _END.at_start(solid)
        if marker == "":
            return False
        if marker == CALL_END:
            self.rest = solid.removeprefix(CALL_END)
        self.state = self.read_text if marker is None else self._read_next
        return True

    def _read_next(self) -> bool:
        """Behind a call, where the calls may end."""
        solid = self.rest.lstrip(SPACE)
        marker = _NEXT.at_start(solid)
        if marker == "":
            return False
        if marker == CLOSE:
            self.rest = solid.removeprefix(CLOSE)
        self.state = self.read_text
        return True
