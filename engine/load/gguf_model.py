"""A GGUF file as a record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ...kernels.backend import Tensor
from ...kernels.quant import dequantize
from ..errors import ModelError
from .config import config_from_gguf
from .fields import Fields
from .gguf_file import read_gguf
from .record import Record, TensorEntry
from .vocab_gguf import vocab_from_gguf

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are parameters: they go into the config."""


def parse_gguf(path: Path) -> Record:
    """Read everything but the weights.

    Raises:
        ModelError: see `artesian.engine.load.model.open_model`.
    """
    file = read_gguf(path)
    metadata = Fields(str(path), file.metadata)
    rope = {name: _values(path, file.tensors[name]) for name in ROPE_TENSORS if name in file.tensors}
    tensors = {name: entry for name, entry in file.tensors.items() if name not in ROPE_TENSORS}
    config = config_from_gguf(metadata, {name: entry.shape for name, entry in tensors.items()}, rope)
    vocab = vocab_from_gguf(metadata, config.vocab)
    return Record(
        name=metadata.text("general.name", path.stem),
        config=replace(config, eos_token_ids=vocab.eos_token_ids, bos_token_id=vocab.bos_token_id),
        files=(str(path),),
        tensors=tuple(tensors[name] for name in sorted(tensors)),
        vocab=vocab,
        chat_templates=_templates(metadata),
    )


def _values(path: Path, entry: TensorEntry) -> tuple[float, ...]:
    if len(entry.shape) != 1:
        raise ModelError(f"{path}: tensor {entry.name} has shape {list(entry.shape)}, expected one dimension")
    data = np.fromfile(path, np.uint8, entry.bytes, offset=entry.offset)
    return tuple(dequantize(Tensor(entry.format, entry.shape, data)).tolist())


def _templates(metadata: Fields) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    if metadata.has(prefix):
        templates["default"] = metadata.text(prefix)
    for key in metadata.values:
        if key.startswith(prefix + "."):
            templates[key.removeprefix(prefix + ".")] = metadata.text(key)
    return templates
