"""Python's keyword arguments as a JSON object, translated as they come.

It goes token by token and judges nothing: literals of Python and of JSON become JSON, other words strings.
"""

from __future__ import annotations

import json
import math
import re

_QUOTES = "'\""
_CLOSERS = {"(": "]", "[": "]", "{": "}"}
_WORD = re.compile(r"[^\s,:=()\[\]{}'\"]+")
_PREFIX = re.compile(r"[rbuf]{1,2}", re.IGNORECASE)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]*")
_OCTAL = re.compile(r"[0-7]{1,3}")


class PythonArguments:
    """Reads from behind a call's opening bracket to behind its closing one."""

    def __init__(self) -> None:
        self.is_over = False
        self._out: list[str] = []
        self._closers: list[str] = []
        """What the brackets that are open become at their end."""
        self._counts: list[int] = []
        self._state = "item"
        """What a token does: it begins an item, is an item's value, or goes on `after` one."""
        self._is_key = True
        self._is_open = False
        """The last string is not closed in the JSON: one that follows, or a word, is part of it."""
        self._has_gap = False
        self._quote = ""
        """What ends the string that is being read; "" outside strings."""
        self._is_raw = False
        self._open("{", "}")

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Take a piece; returns JSON, and what is left: a token cut short, or what is behind the call."""
        while text and not self.is_over:
            size = self._string(text, is_last) if self._quote else self._token(text, is_last)
            if not size:
                break
            text = text[size:]
        out, self._out = "".join(self._out), []
        return out, text

    def _token(self, text: str, is_last: bool) -> int:
        """Take one token outside strings; returns its length, 0 if it is cut short."""
        character = text[0]
        if character in _QUOTES:
            return self._begin_string(text, "", is_last)
        if character in _CLOSERS:
            self._begin_item()
            self._open("[" if character == "(" else character, _CLOSERS[character])
        elif character in ")]}":
            self._close()
        elif character == ",":
            self._end_item()
            self._state, self._is_key = "item", self._closers[-1] == "}"
        elif character in ":=":
            self._colon(character)
        elif character.isspace():
            self._has_gap = True
        else:
            return self._word(text, is_last)
        return 1

    def _word(self, text: str, is_last: bool) -> int:
        found = _WORD.match(text)
        assert found is not None, "every other character has been looked at"
        word, behind = found[0], text[found.end() : found.end() + 1]
        if not behind and not is_last:
            return 0
        if behind and behind in _QUOTES and _PREFIX.fullmatch(word):
            return self._begin_string(text, word, is_last)
        value = None if self._is_key or self._is_open else _value(word)
        if value is None:
            self._begin_text(" " if self._has_gap else "")
            self._out.append(_escaped(word))
        else:
            self._begin_item()
            self._out.append(value)
        return len(word)

    def _begin_string(self, text: str, prefix: str, is_last: bool) -> int:
        text = text[len(prefix) :]
        run = len(text) - len(text.lstrip(text[0]))
        if run < 3 and run == len(text) and not is_last:
            return 0
        self._begin_text("")
        if run == 2:
            return len(prefix) + 2
        self._quote = text[0] * (3 if run >= 3 else 1)
        self._is_raw = "r" in prefix.lower()
        return len(prefix) + len(self._quote)

    def _string(self, text: str, is_last: bool) -> int:
        """Take a piece of a string."""
        quote = self._quote
        if text.startswith(quote):
            self._quote = ""
            self._has_gap = False
            return len(quote)
        if text[0] == "\\":
            return self._escape(text, is_last)
        if text[0] == quote[0]:
            if quote.startswith(text) and not is_last:
                return 0
            size = 1
        else:
            size = min((at for at in (text.find("\\"), text.find(quote[0])) if at >= 0), default=len(text))
        self._out.append(_escaped(text[:size]))
        return size

    def _escape(self, text: str, is_last: bool) -> int:
        kind, size, value = text[1:2], 2, None
        if kind in _HEX_DIGITS and not self._is_raw:
            digits = _HEX.match(text, 2, 2 + _HEX_DIGITS[kind])
            assert digits is not None, "no digits match too"
            is_whole = len(digits[0]) == _HEX_DIGITS[kind]
            if not is_whole and digits.end() == len(text) and not is_last:
                return 0
            if is_whole and int(digits[0], 16) <= 0x10FFFF:
                size, value = digits.end(), chr(int(digits[0], 16))
        elif not self._is_raw and (octal := _OCTAL.match(text, 1)):
            if len(octal[0]) < 3 and octal.end() == len(text) and not is_last:
                return 0
            size, value = octal.end(), chr(int(octal[0], 8))
        elif not kind and not is_last:
            return 0
        elif not self._is_raw:
            value = _ESCAPES.get(kind, kind if kind in ("\\", *_QUOTES) else None)
        self._out.append(_escaped(text[:size] if value is None else value))
        return min(size, len(text))

    def _begin_text(self, joint: str) -> None:
        if self._state == "after" and self._is_open:
            self._out.append(joint)
        else:
            self._begin_item()
            self._out.append('"')
            self._is_open = True
        self._has_gap = False

    def _begin_item(self) -> None:
        self._end_string()
        if self._state == "item":
            if self._counts[-1]:
                self._out.append(", ")
            self._counts[-1] += 1
        self._state, self._has_gap = "after", False

    def _end_item(self) -> None:
        self._end_string()
        if self._is_key and self._state == "after":
            self._out.append(": null")

    def _end_string(self) -> None:
        if self._is_open:
            self._out.append('"')
        self._is_open = False

    def _colon(self, character: str) -> None:
        if self._is_key:
            self._end_string()
            self._out.append(": ")
            self._state, self._is_key = "value", False
        elif self._is_open:
            self._out.append(character)

    def _open(self, bracket: str, closer: str) -> None:
        self._out.append(bracket)
        self._closers.append(closer)
        self._counts.append(0)
        self._state, self._is_key = "item", closer == "}"

    def _close(self) -> None:
        self._end_item()
        self._out.append(self._closers.pop())
        self._counts.pop()
        self._state, self._is_key = "after", False
        self.is_over = not self._closers


def _value(word: str) -> str | None:
    """A word as JSON; None if it is neither a constant nor a number."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None


def _escaped(text: str) -> str:
    """The text as it stands in a JSON string; half of a surrogate pair as an escape."""
    is_half = len(text) == 1 and "\ud800" <= text <= "\udfff"
    return json.dumps(text, ensure_ascii=is_half)[1:-1]
