"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..segments import Segment
from .base import SPACE, Machine, Markers, new_call_id
from .call_object import CallObject
from .forms import CallForms

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN, _CLOSE = Markers(OPEN), Markers(CLOSE)

FORMS = CallForms(
    trigger=OPEN, begin=OPEN + '\n{{"name": {quoted}, "arguments": ', end="}\n" + CLOSE, between="\n"
)


class HermesParser(Machine):
    """Reads one answer."""

    def __init__(self, names: Collection[str] = (), new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(new_id)
        self._object = CallObject(self.calls)

    def read_text(self) -> bool:
        before, marker, self.rest = _OPEN.split(self.rest)
        self.calls.text(before)
        if marker is None:
            return False
        self._object = CallObject(self.calls, marker)
        self.state = self._read_object
        return True

    def _read_object(self) -> bool:
        self.rest = self._object.feed(self.rest)
        if self._object.is_over:
            self.state = self._read_close
        return True

    def _read_close(self) -> bool:
        marker = _CLOSE.at_start(self.rest.lstrip(SPACE))
        if marker == "":
            return False
        if marker:
            self.rest = self.rest.lstrip(SPACE).removeprefix(marker)
        self.state = self.read_text
        return True

    def finish(self) -> list[Segment]:
        if self.state == self._read_object:
            self._object.finish()
        return super().finish()
