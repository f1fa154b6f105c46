"""A Hugging Face folder as a record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import ModelError
from .config import config_from_json
from .record import Record
from .safetensors import read_tensors, tensor_files
from .vocab_hf import read_json, templates_from_folder, vocab_from_folder


def parse_folder(folder: Path) -> Record:
    """Read everything but the weights.

    Raises:
        ModelError: see `artesian.engine.load.model.open_model`.
    """
    if not (folder / "config.json").exists():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; give the file, as {folder / files[0]}" if files else "; it is no Hugging Face model"
        raise ModelError(f"{folder}: the folder has no config.json{hint}")
    settings = read_json(folder / "config.json")
    config = config_from_json(settings)
    shards = tensor_files(folder)
    tensors = read_tensors(shards, config.architecture, config.tied)
    vocab = vocab_from_folder(folder, settings)
    return Record(
        name=folder.name,
        config=replace(config, eos_token_ids=vocab.eos_token_ids, bos_token_id=vocab.bos_token_id),
        files=tuple(str(shard) for shard in shards),
        tensors=tensors,
        vocab=vocab,
        chat_templates=templates_from_folder(folder),
    )
