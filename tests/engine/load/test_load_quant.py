"""Dequantisation against blocks written out by hand (layouts: struct block_q* in ggml-common.h)."""

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from artesian.kernels.backend import Tensor
from artesian.kernels.quant import dequantize, stored_bytes


def tensor(format: str, shape: tuple[int, ...], content: bytes) -> Tensor:
    return Tensor(format, shape, np.frombuffer(content, np.uint8))


def nibbles(values: NDArray[np.int64]) -> bytes:
    """Values 0..15 of one block of 32: value i and value i + 16 share byte i."""
    return bytes((values[:16] | values[16:] << 4).astype(np.uint8))


def test_q8_0_is_scale_times_signed_bytes() -> None:
    quants = np.arange(-16, 16, dtype=np.int8)
    block = tensor("Q8_0", (1, 32), struct.pack("<e", 0.5) + quants.tobytes())
    assert np.array_equal(dequantize(block), 0.5 * quants[None].astype(np.float32))


def test_q4_0_is_centred_and_q4_1_has_a_minimum() -> None:
    quants = np.arange(32) % 16
    centred = tensor("Q4_0", (32,), struct.pack("<e", 0.25) + nibbles(quants))
    shifted = tensor("Q4_1", (32,), struct.pack("<ee", 0.25, -3.0) + nibbles(quants))
    assert np.array_equal(dequantize(centred), 0.25 * (quants - 8))
    assert np.array_equal(dequantize(shifted), 0.25 * quants - 3.0)


def test_bf16_is_the_upper_half_of_float32() -> None:
    values = np.array([[1.0, -2.5], [0.0, 3.0e38]], np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    truncated = (stored.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(dequantize(tensor("BF16", (2, 2), stored.tobytes())), truncated)


def test_a_float32_result_is_a_copy_that_may_be_written() -> None:
    source = tensor("F32", (2,), np.array([1, 2], np.float32).tobytes())
    dequantize(source)[0] = 9
    assert dequantize(source)[0] == 1


@pytest.mark.parametrize(
    ("shape", "format", "said"),
    [
        ((4, 33), "Q8_0", "rows of 33"),
        ((4, 32), "Q4_K", "rows of 32"),
        ((4,), "I8", "format I8 is not supported"),
    ],
)
def test_a_shape_that_a_format_cannot_store_is_refused(
    shape: tuple[int, ...], format: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        stored_bytes(format, shape)


def test_data_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 34 bytes, got 33"):
        dequantize(tensor("Q8_0", (32,), bytes(33)))
