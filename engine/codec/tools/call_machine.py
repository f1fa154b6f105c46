"""What dialects share whose markers lead to a call step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..segments import Segment
from .base import SPACE, Calls, Machine, Markers, new_call_id
from .call_object import CallObject, JsonSpan

MAX_HEAD_CHARS = 256
"""What leads from a marker to a call's arguments; what goes on longer leads nowhere."""


class BareArguments:
    """Reads arguments that stand by themselves, to the end of a JSON object; anything else up to a marker.

    None at all are `{}`.
    """

    def __init__(self, calls: Calls, ends: Markers) -> None:
        self._calls, self._ends = calls, ends
        self._span: JsonSpan | None = None
        self._is_empty = True
        self._space = ""
        """Behind arguments that are no object: it waits for what follows."""
        self.is_over = self._is_closed = False

    @property
    def has_open_object(self) -> bool:
        """An object has begun and not ended."""
        return self._span is not None and not self._is_closed

    def feed(self, text: str) -> str:
        """Take a piece; what is behind the arguments, or may yet become a marker, is given back."""
        if self._is_empty:
            text = text.lstrip(SPACE)
            if text.startswith("{"):
                self._span = JsonSpan()
        if self._span is not None:
            end = self._span.take(text)
            self._give(text[:end])
            self.is_over = self._is_closed = end is not None
            return "" if end is None else text[end:]
        before, marker, rest = self._ends.split(text)
        solid = before.rstrip(SPACE)
        if solid:
            self._give(self._space + solid)
            self._space = ""
        self._space += before[len(solid) :]
        if marker is None:
            return rest
        self.finish()
        return marker + rest

    def finish(self) -> None:
        """No more is to come."""
        self.is_over = True
        if self._is_empty:
            self._give("{}")

    def _give(self, text: str) -> None:
        self._is_empty = False
        self._calls.arguments(text)


class CallMachine(Machine):
    """A machine that remembers what led to a call, which is text if none comes."""

    def __init__(self, names: Collection[str] = (), new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(new_id)
        self.names = frozenset(names)
        self.led = ""
        self._object = CallObject(self.calls)
        self._arguments = BareArguments(self.calls, Markers("{"))

    def lead(self, to: Callable[[], bool], text: str) -> bool:
        """Take this text off `rest`; it leads to a state."""
        self.led += text
        self.rest = self.rest[len(text) :]
        self.state = to
        return True

    def give_up(self) -> bool:
        """What led here is text."""
        self.calls.text(self.led)
        self.led, self.state = "", self.read_text
        return True

    def begin_object(self, known: Collection[str] | None = None) -> bool:
        """A call may begin here as one object with its name and arguments."""
        self._object, self.led = CallObject(self.calls, self.led, known), ""
        self.state = self._read_object
        return True

    def begin_arguments(self, name: str, ends: Markers) -> bool:
        """A call begins here, with its arguments."""
        self._arguments, self.led = BareArguments(self.calls, ends), ""
        self.calls.begin(name)
        self.state = self._read_arguments
        return True

    def read_behind(self) -> bool:
        """The state behind a call's arguments or its object."""
        raise NotImplementedError

    def _read_object(self) -> bool:
        self.rest = self._object.feed(self.rest)
        if self._object.is_over:
            self.state = self.read_behind if self._object.is_call else self.read_text
        return True

    def _read_arguments(self) -> bool:
        self.rest = self._arguments.feed(self.rest)
        if self._arguments.is_over:
            self.calls.end()
            self.state = self.read_behind
        return self._arguments.is_over

    def finish(self) -> list[Segment]:
        if self.state == self._read_object:
            self._object.finish()
        elif self.state == self._read_arguments:
            self.calls.arguments(self.rest)
            self._arguments.finish()
            self.calls.end(is_whole=not self._arguments.has_open_object)
            self.rest = ""
        self.calls.text(self.led)
        self.led = ""
        return super().finish()
