"""A model's vocabulary: the tokenizer with the ids that generation must know. It knows no messages."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from ..errors import ModelError
from .record import VocabRecord


@dataclass(frozen=True, slots=True)
class Vocab:
    """Text <-> token ids."""

    tokenizer: Tokenizer
    """Encode with `add_special_tokens=False` and add `bos_token_id` where `add_bos` says so: a file's
    own post-processor is one of several ways to say it."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a turn; the model's main one first."""
    pad_token_id: int | None
    add_bos: bool
    """A plain prompt starts with `bos_token_id` (a chat template writes it itself)."""
    add_eos: bool
    special_ids: frozenset[int]
    """Control tokens, which are no text."""


def open_vocab(record: VocabRecord, file: str) -> Vocab:
    """Build the tokenizer of a record.

    Raises:
        ModelError: the tokenizers package refuses it.
    """
    try:
        tokenizer = Tokenizer.from_buffer(record.tokenizer_json)
    except Exception as err:  # the package raises plain Exception for whatever it dislikes
        raise ModelError(f"{file}: the tokenizer cannot be built: {err}") from err
    return Vocab(
        tokenizer=tokenizer,
        bos_token_id=record.bos_token_id,
        eos_token_ids=record.eos_token_ids,
        pad_token_id=record.pad_token_id,
        add_bos=record.add_bos,
        add_eos=record.add_eos,
        special_ids=frozenset(record.special_ids),
    )
