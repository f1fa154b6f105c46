"""What is known of a model file without its weights' bytes: small enough to keep, enough to map the rest."""

from __future__ import annotations

import msgspec

from ..models.config import ModelConfig


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor lies: `bytes` at `offset` of the record's file number `file`."""

    name: str
    """Canonical."""
    format: str
    shape: tuple[int, ...]
    file: int
    offset: int
    bytes: int
    add_one: bool = False
    """The file stores w for a weight of 1 + w."""


class VocabRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A vocabulary in the form that the tokenizers package loads fastest."""

    tokenizer_json: bytes
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    special_ids: tuple[int, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed model file or folder."""

    name: str
    config: ModelConfig
    files: tuple[str, ...]
    """Absolute paths of the files that hold tensors."""
    tensors: tuple[TensorEntry, ...]
    vocab: VocabRecord
    chat_templates: dict[str, str]
    """By name; "default" is the one to use when none is asked for."""
