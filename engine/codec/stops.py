"""Stop strings in a stream of text: hold back what may still become one, cut where one is found.

It knows text only. The match that completes first wins; of those that complete at the same character the
longest, which is the one that starts first. A text character costs the same for one stop and for ten
thousand (Aho and Corasick 1975: an automaton over all stops, amortised O(1) per character).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InvalidRequest
from .unicode import require_unicode

# The automaton takes about 250 bytes and 1 us to build per character of the stops.
MAX_STOP_CHARS = 1 << 17

_CODE_POINTS = 0x110000


class StopSet:
    """Stop strings, compiled; immutable, shared by the sequences of a request.

    Raises:
        InvalidRequest: an empty stop, one with a lone surrogate, or more than `MAX_STOP_CHARS` in all.
    """

    __slots__ = ("depth", "fail", "first", "goto", "match", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidRequest("stop has an empty string, which would end every text at once", "stop")
        total = sum(map(len, stops))
        if total > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop has {total} characters in all; the limit is {MAX_STOP_CHARS}", "stop")
        for stop in stops:
            require_unicode(stop, "stop")
        self.stops = tuple(stops)
        self.first = frozenset(stop[0] for stop in stops)
        self.goto: dict[int, int] = {}
        """state * 0x110000 + code point -> next state; state 0 is "nothing begun"."""
        self.depth = [0]
        """By state: how many characters of a stop have been read."""
        self.match: list[str | None] = [None]
        """By state: the longest stop that ends here."""
        self.fail = [0]
        """By state: the state of the longest proper suffix that some stop begins with."""
        self._build()

    def step(self, state: int, code_point: int) -> int:
        """The state after one more character."""
        goto, fail = self.goto, self.fail
        while (target := goto.get(state * _CODE_POINTS + code_point)) is None:
            if state == 0:
                return 0
            state = fail[state]
        return target

    def _build(self) -> None:
        growing = [(stop, 0) for stop in self.stops]
        depth = 0
        while growing:  # all stops by one character: a state's suffixes are shorter, so they exist already
            longer = []
            for stop, state in growing:
                code_point = ord(stop[depth])
                target = self.goto.get(state * _CODE_POINTS + code_point)
                if target is None:
                    suffix = self.step(self.fail[state], code_point) if state else 0
                    target = self.goto[state * _CODE_POINTS + code_point] = len(self.depth)
                    self.depth.append(depth + 1)
                    self.match.append(self.match[suffix])
                    self.fail.append(suffix)
                if len(stop) == depth + 1:
                    self.match[target] = stop
                else:
                    longer.append((stop, target))
            growing, depth = longer, depth + 1


class StopStep(NamedTuple):
    """What is certain after a piece of text."""

    emit: str
    matched: str | None


class StopMatcher:
    """Watches the text of one sequence. With `include_stop` the stop itself is emitted too."""

    __slots__ = ("_held", "_include_stop", "_set", "_state")

    def __init__(self, stops: StopSet | Sequence[str], *, include_stop: bool = False) -> None:
        self._set = stops if isinstance(stops, StopSet) else StopSet(stops)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str) -> StopStep:
        """Take more text; emit all of it but the longest end that may still become a stop.

        On a match the text up to where it starts is emitted and what follows it is dropped; the sequence
        has ended and the matcher is not to be used any more.
        """
        compiled, state = self._set, self._state
        if state == 0 and compiled.first.isdisjoint(text):
            return StopStep(text, None)
        step, matches = compiled.step, compiled.match
        for i, character in enumerate(text):
            state = step(state, ord(character))
            stop = matches[state]
            if stop is not None:
                whole = self._held + text[: i + 1]
                return StopStep(whole if self._include_stop else whole[: -len(stop)], stop)
        whole = self._held + text
        certain = len(whole) - compiled.depth[state]
        self._state, self._held = state, whole[certain:]
        return StopStep(whole[:certain], None)

    def flush(self) -> str:
        """The text held back: no more is to come, so that it cannot become a stop."""
        held, self._held, self._state = self._held, "", 0
        return held
