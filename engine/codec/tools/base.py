"""What tool dialects are made of: markers that arrive in pieces, calls that open and end.

It knows no dialect. A machine never raises: what it cannot read as a call is text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable

from ..segments import CallArguments, CallBegin, CallEnd, Segment, Text

_ALPHABET = string.ascii_letters + string.digits
CALL_ID_CHARS = 24
SPACE = " \t\r\n"


def new_call_id() -> str:
    """A call's id in OpenAI's form: `call_` and 24 letters and digits."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(CALL_ID_CHARS))


class Markers:
    """Finds markers in a text that grows. None may be the beginning of another."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._find = re.compile("|".join(re.escape(marker) for marker in markers))
        self._heads = frozenset(marker[0] for marker in markers)
        self._longest = max(map(len, markers))

    def split(self, text: str) -> tuple[str, str | None, str]:
        """What is before the first marker, the marker, what is behind it. Without one: what is certain, None,
        and the end that may still become one."""
        found = self._find.search(text)
        if found:
            return text[: found.start()], found[0], text[found.end() :]
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._heads and any(marker.startswith(text[at:]) for marker in self._markers):
                return text[:at], None, text[at:]
        return text, None, ""

    def at_start(self, text: str) -> str | None:
        """The marker that the text begins with; "" if it may still become one, None if not."""
        for marker in self._markers:
            if text.startswith(marker):
                return marker
            if marker.startswith(text):
                return ""
        return None


class Calls:
    """The segments of one answer as they are found. White space around calls is theirs, not the text's."""

    def __init__(self, new_id: Callable[[], str] = new_call_id, space: str = SPACE) -> None:
        self._new_id, self._white = new_id, space
        self._out: list[Segment] = []
        self._count = 0
        self._is_open = False
        self._space = ""
        self._is_behind_marker = False

    def drain(self) -> list[Segment]:
        """What has been found since the last call."""
        out, self._out = self._out, []
        return out

    def text(self, text: str) -> None:
        """Text; white space at its end waits for what follows."""
        if self._is_behind_marker:
            text = text.lstrip(self._white)
        solid = text.rstrip(self._white)
        if solid:
            self._is_behind_marker = False
            self._out.append(Text(self._space + solid))
            self._space = text[len(solid) :]
        else:
            self._space += text

    def add(self, segment: Segment) -> None:
        """Something that is neither text nor of a call."""
        self._out.append(segment)

    def marker(self) -> None:
        """A marker that is shown to nobody: white space around it is its own."""
        self._space, self._is_behind_marker = "", True

    def begin(self, name: str) -> None:
        self._space = ""
        self._is_open = True
        self._out.append(CallBegin(self._count, self._new_id(), name))

    def arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._count, text))

    def end(self, *, is_whole: bool = True) -> None:
        self._out.append(CallEnd(self._count, is_whole))
        self._count += 1
        self._is_open, self._is_behind_marker = False, True

    def close(self) -> None:
        """The answer ends: an open call ends with the arguments it has."""
        if self._is_open:
            self.end(is_whole=False)
        if self._space:
            self._out.append(Text(self._space))
        self._space = ""


class Machine:
    """A parser as states. A state takes from `rest` what it can and says whether another may go on."""

    def __init__(self, new_id: Callable[[], str] = new_call_id, space: str = SPACE) -> None:
        self.calls = Calls(new_id, space)
        self.rest = ""
        self.state: Callable[[], bool] = self.read_text

    def read_text(self) -> bool:
        """The state outside calls."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Segment]:
        self.rest += text
        while self.rest and self.state():
            pass
        return self.calls.drain()

    def finish(self) -> list[Segment]:
        """By default what is held is text."""
        self.calls.text(self.rest)
        self.rest = ""
        self.calls.close()
        return self.calls.drain()

    def skip_space(self) -> bool:
        """Take white space; whether anything is left."""
        self.rest = self.rest.lstrip(SPACE)
        return bool(self.rest)
