"""Storage formats of weights: their block sizes, and the plain numpy way from any of them to float32.

The reference for every faster path. It knows nothing of files; the arithmetic is the gguf package's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .backend import Tensor


class BlockSize(NamedTuple):
    """A format's unit: `elements` of one row lie in `bytes` bytes."""

    elements: int
    bytes: int


# Source: struct block_q* in ggml-common.h. A block never crosses a row.
FORMATS: Mapping[str, BlockSize] = {
    "F32": BlockSize(1, 4),
    "F16": BlockSize(1, 2),
    "BF16": BlockSize(1, 2),
    "Q8_0": BlockSize(32, 34),
    "Q4_0": BlockSize(32, 18),
    "Q4_1": BlockSize(32, 20),
    "Q5_0": BlockSize(32, 22),
    "Q5_1": BlockSize(32, 24),
    "Q4_K": BlockSize(256, 144),
    "Q5_K": BlockSize(256, 176),
    "Q6_K": BlockSize(256, 210),
}


def stored_bytes(format: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of `shape` in `format`.

    Raises:
        ValueError: the format is unknown, or a row is not a whole number of its blocks.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format} is not supported (supported: {', '.join(FORMATS)})")
    block = FORMATS[format]
    columns = shape[-1] if shape else 1
    if columns % block.elements:
        raise ValueError(
            f"rows of {columns} are no multiple of the {block.elements} elements of a {format} block"
        )
    count = 1
    for size in shape:
        count *= size
    return count // block.elements * block.bytes


def dequantize(tensor: Tensor) -> NDArray[np.float32]:
    """Return the tensor's values as a new float32 array of `tensor.shape`.

    Raises:
        ValueError: the format is unknown, or `tensor.data` has not the bytes that its shape needs.
    """
    expected = stored_bytes(tensor.format, tensor.shape)
    if tensor.data.nbytes != expected:
        raise ValueError(f"{tensor.format} {tensor.shape} needs {expected} bytes, got {tensor.data.nbytes}")
    raw = np.ascontiguousarray(tensor.data)
    if tensor.format == "F32":
        return raw.view(np.float32).reshape(tensor.shape).copy()
    if tensor.format == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(tensor.shape)
    if tensor.format == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_rows

    rows = raw.reshape(-1, stored_bytes(tensor.format, tensor.shape[-1:]))
    return dequantize_rows(rows, GGMLQuantizationType[tensor.format]).reshape(tensor.shape)
