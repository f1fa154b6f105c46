"""The vocabulary as the grammar library sees it, made from our own tokenizer: any model file's will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import llguidance
from llguidance import LLTokenizer

from ..codec.tokenizer import Tokenizer
from .closing import Closings


class Vocabulary(NamedTuple):
    """The library's tables of a vocabulary, and ours."""

    view: LLTokenizer
    closings: Closings


class _View:
    """What the library asks of a tokenizer. Special tokens are apart: their names never match as text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | set(eos_token_ids))

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Build the tables, 0.3 s for 49,152 tokens; `vocab_size` is the width of the model's logits.
    An id without a token is never allowed; any of the EOS ids is, where an answer may end."""
    view = _View(tokenizer, vocab_size, eos_token_ids)
    wrapped = llguidance.TokenizerWrapper(view)
    tables = LLTokenizer(wrapped, vocab_size, list(eos_token_ids), LLTokenizer.json_slices())
    special = set(view.special_token_ids)
    plain = [b"" if token_id in special else data for token_id, data in enumerate(view.tokens)]
    return Vocabulary(tables, Closings(plain, eos_token_ids[0]))
