"""The text of one sequence as the engine makes it: detokenizer and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .detokenizer import Detokenizer
from .stops import StopMatcher, StopSet
from .tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What some tokens added to the text."""

    text: str
    """Whole characters, nothing that may still become a stop string."""
    matched_stop: str | None
    """The stop string that ends the sequence here."""
    consumed: int
    """How many of the ids belong to the sequence: all, or up to the one that completes the stop."""


class TextStream:
    """Turns the ids of one sequence into text and ends it at a stop string.

    Args:
        prompt: The ids before the sequence (or their last few), see `Detokenizer`.
        stops: A `StopSet` can be shared by the choices of a request.
        min_tokens: Stop strings are looked for only in the text of the tokens after this many.
    """

    __slots__ = ("_detokenizer", "_matcher", "_unwatched")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        stops: StopSet | Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt=prompt, skip_special=skip_special)
        compiled = stops if isinstance(stops, StopSet) else StopSet(stops)
        self._matcher = StopMatcher(compiled, include_stop=include_stop) if compiled.stops else None
        self._unwatched = min_tokens

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the tokens of one step. Not to be called again after a match."""
        push, matcher = self._detokenizer.push, self._matcher
        if matcher is None:
            text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
            return TextDelta(text, None, len(token_ids))
        text = ""
        for i, token_id in enumerate(token_ids):
            piece = push(token_id)
            if self._unwatched > 0:
                self._unwatched -= 1
                text += piece
                continue
            emit, matched = matcher.push(piece)
            text += emit
            if matched is not None:
                return TextDelta(text, matched, i + 1)
        return TextDelta(text, None, len(token_ids))

    def finish(self) -> TextDelta:
        """The text held back, once no token is to come. A half character's U+FFFD may complete a stop."""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return TextDelta(text, None, 0)
        emit, matched = self._matcher.push(text)
        return TextDelta(emit if matched else emit + self._matcher.flush(), matched, 0)
