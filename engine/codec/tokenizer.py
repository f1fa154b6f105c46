"""Text to token ids and back, for one vocabulary. It knows no messages, no templates and no streams.

All may be called from any thread. Encoding takes about 0.5 s per MB, so callers run long texts off the
event loop; the library works without the GIL meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import tokenizers

from ..errors import InvalidRequest, ModelError
from .spelling import spelling_of
from .unicode import require_unicode

PROBED_CHARS_PER_TOKEN = 8
"""A first look at a long text: twice what prose has, so that one look tells."""
CUT_TOKENS = 64
"""More than a cut through a word or a special token's name can add."""


class Pieces(dict[int, str | None]):
    """The text of each token that is whole characters by itself, None for others; filled on first use."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        super().__init__()
        self._tokenizer, self._skip_special = tokenizer, skip_special

    def __missing__(self, token_id: int) -> str | None:
        piece: str | None
        try:
            piece = self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            piece = None
        if token_id < self._tokenizer.vocab_size:  # what a client may invent must not make this grow
            self[token_id] = piece
        return piece

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text: none for a special token that is skipped."""
        skipped = self._skip_special and self._tokenizer.is_special(token_id)
        return b"" if skipped else self._tokenizer.token_bytes(token_id)


class Tokenizer:
    """A vocabulary and its rules. Takes over `hf`: its truncation and padding are switched off.

    Raises:
        ModelError: the decoder is not supported, or BOS or EOS is to be added and has no id.
    """

    def __init__(
        self,
        hf: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        add_bos: bool,
        add_eos: bool,
        special_ids: Collection[int],
    ) -> None:
        if add_bos and bos_token_id is None:
            raise ModelError("The tokenizer adds a BOS token but names none")
        if add_eos and not eos_token_ids:
            raise ModelError("The tokenizer adds an EOS token but names none")
        hf.no_truncation()
        hf.no_padding()
        hf.encode_special_tokens = False
        self._hf = hf
        self._plain: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        self._spelling = spelling_of(hf)
        self._added = frozenset(hf.get_added_tokens_decoder())
        self._bytes: dict[int, bytes] = {}
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.add_bos, self.add_eos = add_bos, add_eos
        self.special_ids = frozenset(special_ids)
        self.vocab_size: int = hf.get_vocab_size(with_added_tokens=True)
        """Number of tokens; a model's logits may have more entries, whose ids have no text."""
        self.leading_spaces = self._spelling.leading_spaces
        """How many spaces a decode removes from the very start of a text."""
        self.pieces = Pieces(self, skip_special=False)
        self.pieces_without_special = Pieces(self, skip_special=True)

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """Turn text into ids.

        Args:
            add_special: Add BOS and EOS where the vocabulary asks for them; never a second BOS when the
                text already starts with one, nor a second EOS.
            parse_special: Read the names of special tokens in the text as those tokens; otherwise as
                ordinary text (the first such call copies the tokenizer: about 0.1 s).

        Raises:
            InvalidRequest: the text has a lone surrogate.
        """
        return self.encode_batch([text], add_special=add_special, parse_special=parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` of several texts; the library uses all cores."""
        for text in texts:
            require_unicode(text)
        hf = self._hf if parse_special else self._without_special()
        # Unlike the library's `encode`, which holds the GIL, this releases it, and computes no offsets.
        encodings = hf.encode_batch_fast(list(texts), add_special_tokens=False)
        rows: list[list[int]] = [encoding.ids for encoding in encodings]
        return [self._with_ends(ids) for ids in rows] if add_special else rows

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with exactly one BOS in front if the vocabulary asks for one."""
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a long text surely has more than `limit` tokens, at the cost of encoding about that many.

        A text's beginning is encoded, a longer one while it has too few tokens to tell. It was cut
        somewhere, which changes the last few of its tokens: so it must have a quarter more than the limit.
        """
        size = PROBED_CHARS_PER_TOKEN * limit
        while 2 * size < len(text):
            if self.token_count(text[:size], add_special=False) > limit + limit // 4 + CUT_TOKENS:
                return True
            size *= 4
        return False

    def token_count(self, text: str, *, add_special: bool) -> int:
        """How many tokens `encode` makes of the text."""
        return len(self.encode(text, add_special=add_special))

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of all ids. Bytes that are not UTF-8 become U+FFFD, one per maximal subpart (Unicode
        standard, §3.9). Ids without a token add nothing.

        Raises:
            InvalidRequest: an id outside 0..2^32-1.
        """
        bytes_of = (self.pieces_without_special if skip_special else self.pieces).bytes_of
        text = b"".join([bytes_of(token_id) for token_id in ids]).decode(errors="replace")
        return text[: self.leading_spaces].lstrip(" ") + text[self.leading_spaces :]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; a special token's are those of its visible name; none if the id has
        no token.

        Raises:
            InvalidRequest: the id is outside 0..2^32-1.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._spell(token_id)
            if token_id < self.vocab_size:
                self._bytes[token_id] = data
        return data

    def token_name(self, token_id: int | None) -> str | None:
        """The token as the vocabulary lists it; None if there is none."""
        return None if token_id is None else self._hf.id_to_token(token_id)

    def token_id(self, name: str) -> int | None:
        """The id of a token of exactly this name; None if there is none."""
        return self._hf.token_to_id(name)

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def _spell(self, token_id: int) -> bytes:
        if not 0 <= token_id < 1 << 32:
            raise InvalidRequest(f"{token_id} is not a token id")
        token = self._hf.id_to_token(token_id)
        if token is None:
            return b""
        is_plain = token_id in self.special_ids or (token_id in self._added and self._spelling.added_is_plain)
        return token.encode() if is_plain else self._spelling.to_bytes(token)

    def _with_ends(self, ids: list[int]) -> list[int]:
        ids = self.with_bos(ids)
        if self.add_eos and ids[-1:] != [self.eos_token_ids[0]]:
            ids = [*ids, self.eos_token_ids[0]]
        return ids

    def _without_special(self) -> tokenizers.Tokenizer:
        with self._plain_lock:
            if self._plain is None:
                # The switch belongs to the tokenizer, not to the call: threads must not share it.
                plain = tokenizers.Tokenizer.from_str(self._hf.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain
