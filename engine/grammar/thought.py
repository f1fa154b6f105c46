"""What a model thinks before an answer that follows a grammar: free text up to a marker."""

from __future__ import annotations

from collections.abc import Sequence

from ..codec.tokenizer import Tokenizer
from .spec import Thoughtful
from .terms import Terms

MAX_GAP = 4
"""White space between a thought and its answer."""


def thought_to_lark(thought: Thoughtful, terms: Terms, answer: str) -> str:
    """Return the grammar; `@answer` is what follows the thought."""
    head = f"{terms.of(thought.open)} thought" if thought.open else "thought"
    return "\n".join(
        [
            f"start: ({head} GAP){'?' if thought.open else ''} @{answer}",
            terms.up_to("thought", thought.close),
            rf"GAP: /[ \t\r\n]{{0,{MAX_GAP}}}/",
            r"TEXT: /(.|\n)*/",
            r"PLAIN: /(.|\n)+/",
            "",
        ]
    )


class Marks:
    """A thought's markers as tokens and as bytes."""

    def __init__(self, thought: Thoughtful, tokenizer: Tokenizer) -> None:
        self.open, self.close = thought.open.encode(), thought.close.encode()
        encoded = tokenizer.encode(thought.open + thought.close, add_special=False, parse_special=True)
        self.way_through: Sequence[int] = encoded
        """Both markers."""
        encoded = tokenizer.encode(thought.close, add_special=False, parse_special=True)
        self.way_out: Sequence[int] = encoded
        """The close marker."""
        names = {
            token_id: (tokenizer.token_name(token_id) or "").encode() for token_id in tokenizer.special_ids
        }
        self._special, self._spell = names, tokenizer.token_bytes

    def spell(self, token: int) -> bytes:
        """A token's text; a special one's name."""
        return self._special.get(token) or self._spell(token)


class ThoughtWatch:
    """Tells from an answer's tokens whether it is still in its thought."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._text = b""
        """What may hold the opening marker, then the last bytes only."""
        self._is_begun = not marks.open
        self._count, self._ended_at = 0, -1

    @property
    def way(self) -> Sequence[int]:
        """The tokens that end the thought; with one that may still begin, through it."""
        if self.is_over:
            return ()
        return self._marks.way_out if self._is_begun else self._marks.way_through

    @property
    def is_over(self) -> bool:
        """Also if there is none."""
        return self._ended_at >= 0

    def advance(self, token: int) -> None:
        self._count += 1
        if self.is_over:
            return
        marks = self._marks
        self._text += marks.spell(token)
        if not self._is_begun:
            text = self._text.lstrip()
            if not text.startswith(marks.open):
                if not marks.open.startswith(text):
                    self._ended_at = self._count
                return
            self._is_begun, self._text = True, text[len(marks.open) :]
        if marks.close in self._text:
            self._ended_at = self._count
        self._text = self._text[1 - len(marks.close) :]

    def rollback(self, tokens: int) -> None:
        """Take tokens back. Those of a marker that they leave half said are not seen again."""
        self._count -= tokens
        if self._ended_at > self._count:
            self._ended_at, self._text = -1, b""
        if not self._count:
            self._is_begun, self._text = not self._marks.open, b""
