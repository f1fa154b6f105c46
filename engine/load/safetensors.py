"""safetensors files by their headers: names, formats, shapes and byte ranges, checked against the file.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes.
Source: github.com/huggingface/safetensors, README "Format".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...kernels.quant import stored_bytes
from ..errors import ModelError
from .names import NORMS_WITHOUT_ONE, canonical_name
from .record import TensorEntry

MAX_HEADER_BYTES = 100 << 20
"""The format's own limit."""

DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_Entry)
_index = msgspec.json.Decoder(dict[str, Any])


def tensor_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files: those of its index, or all there are.

    Raises:
        ModelError: there is none, or the index names one that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ModelError(f"{folder}: no *.safetensors file (other weight formats are not supported)")
        return found
    try:
        shards = _index.decode(index.read_bytes())["weight_map"].values()
        files = [folder / name for name in sorted(set(shards))]
    except (msgspec.MsgspecError, KeyError, AttributeError, TypeError, OSError) as err:
        raise ModelError(f"{index}: not a safetensors index: {err}") from err
    for file in files:
        if not file.exists():
            raise ModelError(f"{index}: names {file.name}, which is missing; fetch the whole folder again")
    return files


def read_tensors(files: list[Path], architecture: str, tied: bool) -> tuple[TensorEntry, ...]:
    """Return the text model's tensors under canonical names, ordered by name.

    The output matrix of a tied model is left out even where the file repeats it.

    Raises:
        ModelError: a file is truncated or no safetensors file, or a tensor is unexpected, given twice or
            of an unsupported type; names it.
    """
    entries: dict[str, TensorEntry] = {}
    for number, file in enumerate(files):
        for stored_name, entry, start in _read_header(file):
            try:
                name = canonical_name(architecture, stored_name)
            except KeyError:
                raise ModelError(
                    f"{file}: unexpected tensor {stored_name}; {architecture} has no such tensor"
                ) from None
            if name is None or (tied and name == "output.weight"):
                continue
            if name in entries:
                raise ModelError(f"{file}: the tensor {stored_name} is given twice")
            if entry.dtype not in DTYPES:
                raise ModelError(
                    f"{file}: tensor {stored_name} has type {entry.dtype} (supported: {', '.join(DTYPES)})"
                )
            begin, end = entry.data_offsets
            expected = stored_bytes(entry.dtype, entry.shape)
            if end - begin != expected:
                raise ModelError(
                    f"{file}: tensor {stored_name} {entry.dtype} {entry.shape} needs {expected} bytes, "
                    f"its range has {end - begin}"
                )
            add_one = architecture in NORMS_WITHOUT_ONE and "norm" in name
            entries[name] = TensorEntry(
                name, entry.dtype, entry.shape, number, start + begin, expected, add_one
            )
    return tuple(entries[name] for name in sorted(entries))


def _read_header(file: Path) -> Iterator[tuple[str, _Entry, int]]:
    """Yield each tensor's name and entry, with the offset at which the file's tensors start."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(f"{file}: not a whole safetensors file (its header is cut off)")
            header = _header.decode(stream.read(length))
    except OSError as err:
        raise ModelError(f"{file}: cannot be read: {err.strerror}") from err
    except msgspec.MsgspecError as err:
        raise ModelError(f"{file}: its safetensors header is not valid: {err}") from err
    data_bytes = size - 8 - length
    for name, raw in header.items():
        if name == "__metadata__":
            continue
        try:
            entry = _entry.decode(raw)
        except msgspec.MsgspecError as err:
            raise ModelError(f"{file}: the header's entry of tensor {name} is not valid: {err}") from err
        begin, end = entry.data_offsets
        if any(size < 0 for size in entry.shape) or not 0 <= begin <= end:
            raise ModelError(f"{file}: the header's entry of tensor {name} is not valid")
        if end > data_bytes:
            raise ModelError(
                f"{file}: truncated: tensor {name} ends at byte {end} of {data_bytes}; fetch the file again"
            )
        yield name, entry, 8 + length
