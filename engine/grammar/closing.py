"""How an answer can be brought to a valid end soon: the way there, and what may be said before it.

A way is found greedily, by trying what closes things first; the grammar itself checks every token of it. So a
way that is found is right, but it need not be the shortest, and there may be one where none is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

LONGEST_WAY = 512
"""Tokens; an answer that needs more to close is not closed."""
BRACKET, QUOTE, SEPARATOR, LITERAL = range(4)
LITERALS = (b"0", b"1", b"null", b"true", b"false", b"[", b"{")
SAME = 2
CHARACTERS = b"a@0.-/:1b_A+TZ"
"""Tried in turn where a text needs more than one kind of character, such as an address."""
STRUCTURE = frozenset(b'{}[]",:\\')


class Closings:
    """One vocabulary's tokens, sorted by how they close. May be used on any thread."""

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self._eos = eos_token_id
        self._words = -(-len(tokens) // 32)
        ranked = sorted((rank, token_id) for token_id, data in enumerate(tokens) if (rank := _rank(data)))
        quotes_first = sorted(ranked, key=lambda entry: entry[0][0] != QUOTE)
        self._outside = np.array([token_id for _, token_id in ranked], np.int64)
        self._inside = np.array([token_id for _, token_id in quotes_first], np.int64)
        characters = [bytes([code]) for code in (*CHARACTERS, *range(0x20, 0x7F)) if code not in STRUCTURE]
        at = {data: token_id for token_id, data in enumerate(tokens) if len(data) == 1}
        self._characters = [at[data] for data in dict.fromkeys(characters) if data in at]
        self._brackets = [tokens.index(data) for data in (b"}", b"]") if data in tokens]
        self._text = np.zeros(self._words, np.uint32)
        for token_id, data in enumerate(tokens):
            if _is_text(data):
                self._text[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def way(self, state: LLMatcher, most: int, first: Sequence[int] = ()) -> list[int] | None:
        """Tokens that lead from a state to the answer's end, EOS included where it is needed; None if none
        is found within `most`. They begin with those of `first`."""
        begun = state.deep_copy()
        if first:
            begun.consume_tokens(list(first))
        rest = self._find(begun.deep_copy(), most) or self._find(begun, most, inside=True)
        return None if rest is None else [*first, *rest]

    def _find(self, state: LLMatcher, most: int, *, inside: bool = False) -> list[int] | None:
        row = np.empty(self._words, np.uint32)
        way: list[int] = []
        tried: Counter[int] = Counter()
        while len(way) <= most:
            if state.is_error():
                return None
            if state.is_accepting():
                return way if state.is_stopped() else [*way, self._eos]
            tokens = state.compute_ff_tokens()
            if not tokens:
                state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                # Where either bracket may come, both are a string's content.
                is_text = all(_has(row, token_id) for token_id in self._brackets)
                token = _first(row, self._inside if inside or is_text else self._outside)
                if tried[token] >= SAME and way[-1] == token:  # more of the same leads nowhere
                    others = [other for other in self._characters if _has(row, other)]
                    token = min(others, key=tried.__getitem__, default=token)
                tried[token] += 1
                tokens = [token]
            state.consume_tokens(tokens)
            way += tokens
        return None

    def end(self, row: NDArray[np.uint32]) -> None:
        """Leave in a mask the answer's end only."""
        row[:] = 0
        row[self._eos >> 5] = np.uint32(1 << (self._eos & 31))

    def steer(self, row: NDArray[np.uint32], token: int) -> None:
        """Leave in a mask the next token of the way, and text that opens nothing."""
        row &= self._text
        row[token >> 5] |= np.uint32(1 << (token & 31))


def _has(row: NDArray[np.uint32], token: int) -> bool:
    return bool(row[token >> 5] >> (token & 31) & 1)


def _first(row: NDArray[np.uint32], order: NDArray[np.int64]) -> int:
    """The first token of an order that a mask has; if it has none of them, any."""
    allowed = row[order >> 5] >> (order & 31).astype(np.uint32) & 1
    if allowed.any():
        return int(order[int(allowed.argmax())])
    word = int((row != 0).argmax())
    bits = int(row[word])
    return word * 32 + (bits & -bits).bit_length() - 1


def _rank(data: bytes) -> tuple[int, int] | None:
    """The order in which tokens are tried: brackets that close, what ends a text, what goes on, values."""
    if not data:
        return None
    if not data.strip(b"}]"):
        return BRACKET, -len(data)
    if data[:1] == b'"' and not data[1:].strip(b"}]"):
        return QUOTE, -len(data)
    if not data.strip(b'",:'):
        return SEPARATOR, -len(data)
    return (LITERAL, LITERALS.index(data)) if data in LITERALS else None


def _is_text(data: bytes) -> bool:
    """Whole characters, none of which opens, separates or escapes anything."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return bool(data) and not STRUCTURE & set(data)
