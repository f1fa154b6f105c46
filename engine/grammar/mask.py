"""One choice's place in its grammar: which tokens may come next, and whether any may."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

EVERYTHING = np.uint32(0xFFFF_FFFF)


class Matcher:
    """Follows the tokens of one choice. Used on one thread at a time; no method raises: a fault stays in
    `error`, and then everything is allowed."""

    def __init__(self, state: LLMatcher) -> None:
        self._state = state
        self.error: str | None = None
        """Why the grammar cannot be followed any more."""
        self.is_complete = state.is_stopped()
        """The answer is whole and nothing may follow."""

    @property
    def may_end(self) -> bool:
        """The answer is whole as it stands."""
        return self.error is None and bool(self._state.is_accepting())

    def fill(self, row: NDArray[np.uint32]) -> None:
        """Write which tokens may come next, one bit a token: uint32 [ceil(V / 32)]."""
        if self.error is None:
            self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._check()
        if self.error is not None:
            row[:] = EVERYTHING

    def advance(self, token: int) -> None:
        """Take the token that was drawn."""
        if self.error is None:
            self._state.consume_token(token)
            self._check()
            self.is_complete = self.error is None and self._state.is_stopped()

    def accepted(self, draft: list[int]) -> int:
        """How many leading tokens of a draft may follow; changes nothing."""
        return 0 if self.error is not None else int(self._state.validate_tokens(draft))

    def rollback(self, tokens: int) -> None:
        """Take back the last tokens."""
        if self.error is None and tokens:
            self._state.rollback(tokens)
            self._check()
            self.is_complete = False

    def _check(self) -> None:
        if self._state.is_error():
            self.error = self._state.get_error().partition("\n")[0] or "the grammar cannot be followed"
