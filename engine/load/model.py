"""Opens a model, whatever it is stored as: config, weights (memory-mapped), vocabulary, chat template.

It knows files; what the weights compute is the families' business (see `check.check_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...kernels.backend import Tensor
from ..errors import ModelError
from ..models.config import ModelConfig
from .digest import weights_digest
from .record import Record, TensorEntry
from .record_cache import load_record, save_record, stamps_of
from .vocab import Vocab, open_vocab

GGUF_MAGIC = b"GGUF"
FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "model.safetensors.index.json",
)
"""What a Hugging Face folder is read from, beside its *.safetensors."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An opened model. The tensors' bytes stay in the files and are paged in when first touched."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    """By canonical name: token_embd, output_norm, output, blk.N.attn_q, ... each with .weight or .bias.
    A norm's weight always multiplies as it is."""
    vocab: Vocab
    chat_templates: Mapping[str, str]
    """By name, as `default` and `tool_use`."""
    digest: str
    """64 hex digits over the weights' content and all that changes the function they compute."""
    name: str
    root: Path
    """The file or folder."""

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")


def open_model(path: Path, *, cache_dir: Path | None = None) -> ModelFile:
    """Open a GGUF file, or a Hugging Face folder with config.json, safetensors and tokenizer.json.

    What was parsed, and the digest, are kept in `cache_dir` for the next time. Blocking: 0.1 to 0.2 s
    for a kept 135 M model, seconds for a large new one.

    Raises:
        ModelError: it is no model, damaged, or of a kind that cannot be served; says which part, and what
            to do where something can be done.
    """
    path = path.absolute()
    sources = _sources(path)
    stamps = stamps_of(sources)
    kept = load_record(cache_dir, path, stamps) if cache_dir is not None else None
    if kept is not None:
        record, digest = kept
        return _opened(record, path, digest)
    record = _parse(path)
    model = _opened(record, path, "")
    model = replace(model, digest=weights_digest(record.config, model.tensors))
    if cache_dir is not None and stamps == stamps_of(sources):
        save_record(cache_dir, path, stamps, record, model.digest)
    return model


def _sources(path: Path) -> list[Path]:
    """The files that decide what `open_model` returns."""
    try:
        if path.is_dir():
            return [path / name for name in FOLDER_FILES] + sorted(path.glob("*.safetensors"))
        with path.open("rb") as stream:
            magic = stream.read(len(GGUF_MAGIC))
    except FileNotFoundError as err:
        raise ModelError(f"{path}: no such file or folder") from err
    except OSError as err:
        raise ModelError(f"{path}: cannot be read: {err.strerror}") from err
    if magic == GGUF_MAGIC:
        return [path]
    if not magic:
        raise ModelError(f"{path}: the file is empty; fetch it again")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: give the folder that holds it with config.json and tokenizer.json")
    raise ModelError(f"{path}: not a GGUF file; give a GGUF file or a Hugging Face folder")


def _parse(path: Path) -> Record:
    # Imported here: a kept record needs neither parser, and the gguf package takes 0.1 s to import.
    if path.is_dir():
        from .folder import parse_folder

        return parse_folder(path)
    from .gguf_model import parse_gguf

    return parse_gguf(path)


def _opened(record: Record, root: Path, digest: str) -> ModelFile:
    try:
        maps = [np.memmap(file, dtype=np.uint8, mode="r") for file in record.files]
    except (OSError, ValueError) as err:
        raise ModelError(f"{root}: cannot be mapped: {err}") from err
    return ModelFile(
        config=record.config,
        tensors={entry.name: _tensor(entry, maps[entry.file]) for entry in record.tensors},
        vocab=open_vocab(record.vocab, str(root)),
        chat_templates=record.chat_templates,
        digest=digest,
        name=record.name,
        root=root,
    )


def _tensor(entry: TensorEntry, file: NDArray[np.uint8]) -> Tensor:
    tensor = Tensor(entry.format, entry.shape, file[entry.offset : entry.offset + entry.bytes])
    if not entry.add_one:
        return tensor
    from ...kernels.quant import dequantize

    values = dequantize(tensor) + np.float32(1)
    return Tensor("F32", entry.shape, values.reshape(-1).view(np.uint8))
