"""One choice's place in its grammar: which tokens may come next, and whether any may.

Near its token limit an answer is brought to a valid end: from a distance on it opens nothing new, and where
just the known way to the end has room, nothing else is left.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from .closing import LONGEST_WAY, Closings
from .thought import Marks, ThoughtWatch

EVERYTHING = np.uint32(0xFFFF_FFFF)
UNLIMITED = 1 << 40
MARGIN = 3
"""Tokens kept free on the way to the end: one that is said before may make it longer by one (`1e`)."""
LEAST_RUN = 32
"""Tokens before the end from which on nothing new is opened; more if the shortest answer is longer."""


class Matcher:
    """Follows the tokens of one choice. Used on one thread at a time; no method raises: a fault stays in
    `error`, and then everything is allowed.

    Args:
        shortest: The length of the way from the start to the end, None if it is not known.
        is_free: Some of it is free text, which is cut at the limit.
        repeats: Behind an end another answer of that length may begin.
        marks: Of the thought before it; None: there is none.
    """

    def __init__(
        self,
        state: LLMatcher,
        closings: Closings,
        shortest: int | None,
        *,
        is_free: bool = False,
        repeats: bool = False,
        marks: Marks | None = None,
    ) -> None:
        self._state, self._closings = state, closings
        self._run = max(LEAST_RUN, shortest or 0)
        self._horizon = 0 if shortest is None else 2 * self._run + LEAST_RUN
        self._is_free, self._repeats = is_free, repeats
        self._thought = None if marks is None else ThoughtWatch(marks)
        self._way: list[int] | None = None
        self.error: str | None = None
        """Why the grammar cannot be followed any more."""
        self.is_complete = bool(state.is_stopped())
        """The answer is whole and nothing may follow."""

    @property
    def may_end(self) -> bool:
        """The answer is whole as it stands."""
        return self.error is None and bool(self._state.is_accepting())

    def fill(self, row: NDArray[np.uint32], room: int = UNLIMITED) -> None:
        """Write which tokens may come next, one bit a token: uint32 [ceil(V / 32)].

        `room` is how many tokens may still be drawn, this one included.
        """
        if self.error is None:
            self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._check()
        if self.error is not None:
            row[:] = EVERYTHING
        elif room <= self._horizon:
            self._close(row, room)

    def advance(self, token: int) -> None:
        """Take the token that was drawn."""
        if self.error is None:
            self._state.consume_token(token)
            self._check()
            if self._thought is not None:
                self._thought.advance(token)
            self.is_complete = self.error is None and bool(self._state.is_stopped())
            if self._way is not None:
                self._way = self._way[1:] if self._way[:1] == [token] else self._still(self._way)

    def fail(self, why: str) -> None:
        """Give up: the grammar is right, but cannot be followed."""
        self.error = self.error or why

    def accepted(self, draft: list[int]) -> int:
        """How many leading tokens of a draft may follow; changes nothing."""
        return 0 if self.error is not None else int(self._state.validate_tokens(draft))

    def rollback(self, tokens: int) -> None:
        """Take back the last tokens."""
        if self.error is None and tokens:
            self._state.rollback(tokens)
            self._check()
            self.is_complete, self._way = False, None
            if self._thought is not None:
                self._thought.rollback(tokens)

    def _close(self, row: NDArray[np.uint32], room: int) -> None:
        """Narrow a mask to what leaves room for an end."""
        through = () if self._thought is None else self._thought.way
        if through and self._is_free:
            return
        if self._way is None:
            self._way = self._closings.way(self._state, min(room, LONGEST_WAY), through)
        way = self._way
        if not way or len(way) > room or room > len(way) + self._run:
            return
        if self.may_end and self._repeats and not self._is_free:
            self._closings.end(row)  # one more would not come to its end
            return
        if self.may_end and (self._is_free or room > MARGIN):
            return  # it is whole at every moment; free text is cut, not ended
        if room <= len(way) + MARGIN:
            row[:] = 0
        self._closings.steer(row, way[0])

    def _still(self, way: list[int]) -> list[int] | None:
        """A known way, if it leads on from here too."""
        if not way or self.accepted(way) < len(way):
            return None
        end = self._state.deep_copy()
        end.consume_tokens(way)
        return way if end.is_stopped() and not end.is_error() else None

    def _check(self) -> None:
        if self._state.is_error():
            self.error = self._state.get_error().partition("\n")[0] or "the grammar cannot be followed"
