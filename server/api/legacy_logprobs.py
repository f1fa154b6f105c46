"""`logprobs` as `/v1/completions` has them: four parallel lists, and each token's place in the text.

Knows tokens and characters only.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

import msgspec

from ...engine import PositionLogprobs, TokenLogprob
from ...engine.codec import Codec
from .types import floored

_Utf8 = getincrementaldecoder("utf-8")


class LegacyLogprobs(msgspec.Struct):
    """The lists have equal lengths; a prompt's first token has no logprob."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    """Where a token begins in the choice's text, in characters."""

    def extend(self, other: LegacyLogprobs) -> None:
        """Append another's entries."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


def prompt_part(
    token_ids: Sequence[int], text: str, positions: Sequence[PositionLogprobs | None], codec: Codec
) -> LegacyLogprobs:
    """Return the part of an echoed prompt. What its tokens spell beyond `text` is at the front (a BOS, a
    vocabulary's leading space) and takes no room."""
    part = LegacyLogprobs()
    utf8, at = _Utf8("replace"), 0
    for token_id, position in zip(token_ids, positions, strict=True):
        _append(part, position, token_id, at, codec)
        at += len(utf8.decode(codec.tokenizer.token_bytes(token_id)))
    surplus = max(0, at - len(text))
    part.text_offset = [max(0, offset - surplus) for offset in part.text_offset]
    return part


class GeneratedOffsets:
    """Follows one choice's tokens through its text."""

    def __init__(self, start: int, codec: Codec, skip_special: bool) -> None:
        self._at, self._utf8, self._codec = start, _Utf8("replace"), codec
        tokenizer = codec.tokenizer
        self._pieces = tokenizer.pieces_without_special if skip_special else tokenizer.pieces

    def part(self, positions: Sequence[PositionLogprobs]) -> LegacyLogprobs:
        """Return the entries of the next tokens."""
        part = LegacyLogprobs()
        for position in positions:
            token_id = position.chosen.token_id
            _append(part, position, token_id, self._at, self._codec)
            self._at += len(self._utf8.decode(self._pieces.bytes_of(token_id)))
        return part


def _append(
    part: LegacyLogprobs, position: PositionLogprobs | None, token_id: int, at: int, codec: Codec
) -> None:
    part.tokens.append(codec.label(token_id))
    part.text_offset.append(at)
    if position is None:
        part.token_logprobs.append(None)
        part.top_logprobs.append(None)
        return
    part.token_logprobs.append(floored(position.chosen.logprob))
    part.top_logprobs.append(_top(position.top, codec))


def _top(tokens: Sequence[TokenLogprob], codec: Codec) -> dict[str, float] | None:
    # Two tokens can have one label: the likelier, which comes first, keeps it.
    tops: dict[str, float] = {}
    for token in tokens:
        tops.setdefault(codec.label(token.token_id), floored(token.logprob))
    return tops
