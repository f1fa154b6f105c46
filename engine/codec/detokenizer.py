"""The text of one sequence while its tokens arrive. It knows nothing of stops or requests.

The pieces join to exactly the full decode, whatever way the tokens are split: text is given out as soon as
its characters are whole. Tokens that are whole characters (nearly all) cost one dictionary look-up.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from .tokenizer import Pieces, Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the ids of one sequence into text, one at a time.

    The text is what `decode(prompt + ids)` adds to `decode(prompt)`: a first token's space stays when there
    is a prompt, and a character that the prompt's last token left half is given whole. Only the prompt's
    tail matters: its last tokens that hold four bytes of text.
    """

    __slots__ = ("_clean", "_pending", "_pieces", "_prompt_is_cut", "_spaces_to_drop")

    def __init__(self, tokenizer: Tokenizer, *, prompt: Sequence[int] = (), skip_special: bool) -> None:
        self._pieces = tokenizer.pieces_without_special if skip_special else tokenizer.pieces
        tail = _tail_bytes(self._pieces, prompt)
        before = tail.lstrip(b" ")
        self._spaces_to_drop = 0 if before else max(0, tokenizer.leading_spaces - len(tail))
        self._pending = tail[utf_8_decode(tail, "replace", False)[1] :]
        self._prompt_is_cut = bool(self._pending)
        self._clean = not self._pending and not self._spaces_to_drop

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is certain now, possibly none."""
        piece = self._pieces[token_id]
        if piece is not None and self._clean:
            return piece
        return self._join(self._pieces.bytes_of(token_id), final=False)

    def finish(self) -> str:
        """The rest: a character whose end never came is given as U+FFFD."""
        return self._join(b"", final=True) if self._pending else ""

    def _join(self, data: bytes, *, final: bool) -> str:
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        if text and self._prompt_is_cut:
            # The prompt's own decode already ends in the replacement of its half character.
            text = text.removeprefix(_REPLACEMENT)
            self._prompt_is_cut = False
        elif text and self._spaces_to_drop:
            kept = text[: self._spaces_to_drop].lstrip(" ") + text[self._spaces_to_drop :]
            self._spaces_to_drop = 0 if kept else self._spaces_to_drop - len(text)
            text = kept
        self._clean = not (self._pending or self._prompt_is_cut or self._spaces_to_drop)
        return text


def _tail_bytes(pieces: Pieces, prompt: Sequence[int]) -> bytes:
    """The prompt's last tokens, at least four bytes of text if it has them: a character's most."""
    tail = b""
    for token_id in reversed(prompt):
        tail = pieces.bytes_of(token_id) + tail
        if len(tail) >= 4:
            break
    return tail
