"""Llama 3 and the JSON form of Llama 4: `{"name": ..., "parameters": {...}}`, several with `;` between them.

A tag in front may mark the first. Without one, a call is what has the name of a tool on offer.
"""

from __future__ import annotations

from .base import SPACE, Markers
from .call_machine import CallMachine
from .forms import CallForms

TAG, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
MARKERS = (TAG, START, END)
_OUTSIDE = Markers(TAG, START, "{")
_TAGS, _END = Markers(TAG, START), Markers(END)

FORMS = CallForms(trigger='{"name": ', begin='{{"name": {quoted}, "parameters": ', end="}", between="; ")


class LlamaParser(CallMachine):
    """Reads one answer."""

    _is_tagged = False

    def read_text(self) -> bool:
        before, marker, self.rest = _OUTSIDE.split(self.rest)
        self.calls.text(before)
        if marker is None:
            return False
        self.rest = marker + self.rest
        self._is_tagged = False
        return self.lead(self._read_opening, "")

    def _read_opening(self) -> bool:
        """In front of an object, or of a tag that leads to one."""
        solid = self.rest.lstrip(SPACE)
        space = self.rest[: len(self.rest) - len(solid)]
        marker = _TAGS.at_start(solid)
        if marker == "":
            return False
        if marker:
            self._is_tagged = True
            return self.lead(self._read_opening, space + marker)
        if solid[0] != "{":
            return self.give_up()
        self.lead(self._read_opening, space)
        return self.begin_object(None if self._is_tagged else self.names)

    def read_behind(self) -> bool:
        solid = self.rest.lstrip(SPACE)
        marker = _END.at_start(solid)
        if marker == "":
            return False
        if marker:
            self.rest, self.state = solid.removeprefix(marker), self.read_text
            return True
        self.rest = solid
        return self.lead(self._read_opening, ";" if solid[0] == ";" else "")
