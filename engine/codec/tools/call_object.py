"""A call as a JSON object with a name and arguments, read as it comes.

It follows the JSON's form without judging it: what a model writes between the braces is given on as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from .base import SPACE, Calls

NAMES = frozenset({"name"})
ARGUMENTS = frozenset({"arguments", "parameters"})
MEMBERS = NAMES | ARGUMENTS | {"type", "id"}
"""What may stand in front of the name where nothing but its members tells a call."""

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class JsonSpan:
    """Follows one JSON value to its end; its first character must not be white space."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_scalar: bool | None = None

    def take(self, text: str) -> int | None:
        """Where in this piece the value ends; None: it takes all of the piece and goes on."""
        if self._is_scalar is None and text:
            self._is_scalar = text[0] not in '"{['
        if self._is_scalar:
            found = _SCALAR_END.search(text)
            return found.start() if found else None
        at, length = 0, len(text)
        while at < length:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            character = text[at - 1]
            if character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
            if self._depth <= 0 and not self._in_string and not self._escaped:
                return at
        return None


class CallObject:
    """Reads `{"name": ..., "arguments": ...}`, members in any order, into `calls`.

    The call begins once its name is known, and from there on its arguments are given out as they come.
    Arguments that are a JSON text in a string are unpacked, none at all are `{}`. What turns out to be no
    call is text.

    Args:
        opening: The text that led here; text too if this is no call.
        known: Names that count, and no other members in front of them; None = all.
    """

    def __init__(self, calls: Calls, opening: str = "", known: Collection[str] | None = None) -> None:
        self._calls, self._known = calls, known
        self.is_over = False
        """It has ended, or is no call."""
        self._raw = [opening]
        self._has_begun = False
        self._has_arguments = False
        self._state = "open"
        self._span = JsonSpan()
        self._key = ""
        self._value: list[str] = []
        self._streams = False
        self._flows = False
        """Within arguments that are given out as they come."""
        self._held: list[str] = []

    @property
    def is_call(self) -> bool:
        return self._has_begun

    def feed(self, text: str) -> str:
        """Take a piece; what is behind the object, or behind where it breaks, is given back."""
        at = 0
        while at < len(text) and not self.is_over:
            if self._state in ("key", "value"):
                piece = text[at:]
                end = self._span.take(piece)
                if end is not None:
                    piece = piece[:end]
                if self._flows:
                    self._calls.arguments(piece)
                else:
                    self._take_piece(piece)
                at += len(piece)
                if end is not None:
                    self._end_span()
            elif text[at] in SPACE:
                self._note(text[at])
                at += 1
            else:
                at += self._structure(text[at])
        return text[at:]

    def _note(self, text: str) -> None:
        if not self._has_begun:
            self._raw.append(text)

    def _structure(self, character: str) -> int:
        """Take one character between strings and values; how many were taken: none where a value begins."""
        follows = {
            ("open", "{"): "first",
            ("first", '"'): "key",
            ("next", '"'): "key",
            ("colon", ":"): "begin",
            ("comma", ","): "next",
        }
        if self._state == "begin":
            self._begin_value(character)
            return 0
        if character == "}" and self._state in ("first", "comma"):
            self._note(character)
            self._close()
            return 1
        state = follows.get((self._state, character))
        if state is None:
            self._close()
            return 0
        self._state = state
        if state == "key":
            self._span, self._value = JsonSpan(), []
            return 0
        self._note(character)
        return 1

    def _begin_value(self, character: str) -> None:
        self._state, self._span, self._value = "value", JsonSpan(), []
        self._streams = self._key in ARGUMENTS and not self._has_arguments and character in "{["
        self._flows = self._streams and self._has_begun
        if character in ",}]:":
            self._close()

    def _take_piece(self, piece: str) -> None:
        self._note(piece)
        if self._state == "value" and self._streams:
            self._arguments(piece)
        else:
            self._value.append(piece)

    def _end_span(self) -> None:
        self._flows = False
        text = "".join(self._value)
        if self._state == "key":
            key = _string(text)
            self._key = "" if key is None else key
            self._state = "colon"
            if self._known is not None and not self._has_begun and self._key not in MEMBERS:
                self._close()
            return
        self._state = "comma"
        if self._key in ARGUMENTS:
            if not self._streams and not self._has_arguments:
                inner = _string(text)
                self._arguments("{}" if text == "null" or inner == "" else text if inner is None else inner)
            self._has_arguments = True
        elif self._key in NAMES and not self._has_begun:
            name = _string(text)
            if not name or (self._known is not None and name not in self._known):
                self._close()
                return
            self._calls.begin(name)
            self._has_begun = True
            self._raw.clear()
            for piece in self._held:
                self._calls.arguments(piece)
            self._held.clear()

    def _arguments(self, piece: str) -> None:
        if self._has_begun:
            self._calls.arguments(piece)
        else:
            self._held.append(piece)

    def finish(self) -> None:
        """No more is to come."""
        if self.is_over:
            return
        is_whole = self._has_arguments
        if self._state == "value" and self._key in ARGUMENTS and not self._streams:
            self._arguments("".join(self._value))
            self._has_arguments = True
        self._close(is_whole=is_whole)

    def _close(self, *, is_whole: bool = True) -> None:
        """What has begun ends here; what has not was no call."""
        self.is_over = True
        if not self._has_begun:
            self._calls.text("".join(self._raw))
            return
        if not self._has_arguments and not self._streams:
            self._calls.arguments("{}")
        self._calls.end(is_whole=is_whole)


def _string(text: str) -> str | None:
    """The value of a JSON string; None for another value."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
