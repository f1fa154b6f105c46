"""Packed payloads: what comes back is what went in, or an error; never something else."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from artesian.cache.tiers.compression import NONE, SPLIT_ZSTD, pack, unpack

GUARD = 64


def smooth(items: int) -> bytes:
    """bf16-like values: random low bytes, high bytes that are nearly all alike."""
    low = np.random.default_rng(7).integers(0, 256, items, dtype=np.uint8)
    return np.stack([low, np.full(items, 0x3F, np.uint8)], axis=1).tobytes()


def unpacked(codec: int, data: bytes | memoryview, size: int) -> bytes:
    """Unpack between guard bytes, which must stay as they are."""
    room = bytearray(b"\xa5" * (size + 2 * GUARD))
    try:
        unpack(codec, memoryview(data), memoryview(room)[GUARD : GUARD + size])
    finally:
        assert room[:GUARD] == room[GUARD + size :] == b"\xa5" * GUARD
    return bytes(room[GUARD : GUARD + size])


@given(
    block=st.binary(min_size=1, max_size=40),
    repeats=st.integers(1, 200),
    item_bytes=st.sampled_from([1, 2, 4]),
)
def test_any_payload_comes_back(block: bytes, repeats: int, item_bytes: int) -> None:
    data = block * repeats
    codec, stored = pack(SPLIT_ZSTD, item_bytes, memoryview(data))
    back = bytes(stored) if codec == NONE else unpacked(codec, stored, len(data))
    assert back == data and len(stored) <= len(data)


def test_bytes_of_equal_weight_compress_better_together() -> None:
    data = smooth(50_000)
    _, split = pack(SPLIT_ZSTD, 2, memoryview(data))
    _, whole = pack(SPLIT_ZSTD, 1, memoryview(data))
    assert len(split) < 0.55 * len(data) < len(whole)


@pytest.mark.parametrize("data", [b"", np.random.default_rng(1).bytes(4096), bytes(4097)])
def test_what_cannot_shrink_is_stored_as_it_is(data: bytes) -> None:
    codec, stored = pack(SPLIT_ZSTD, 2, memoryview(data))
    assert codec == NONE and bytes(stored) == data


def test_what_was_packed_says_how_to_unpack_it() -> None:
    data = np.linspace(0, 1, 2000, dtype=np.float32).tobytes()
    packed = {size: pack(SPLIT_ZSTD, size, memoryview(data)) for size in (1, 2, 4)}
    assert len({codec for codec, _ in packed.values()}) == 3
    assert all(unpacked(codec, stored, len(data)) == data for codec, stored in packed.values())


def test_without_a_codec_nothing_is_copied() -> None:
    data = memoryview(bytes(4096))
    assert pack(NONE, 2, data) == (NONE, data)


PACKED = bytes(pack(SPLIT_ZSTD, 2, memoryview(smooth(2000)))[1])


@given(data=st.binary(max_size=300))
def test_strange_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpacked(SPLIT_ZSTD, data, 4000)


@given(at=st.integers(0, len(PACKED) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_never_writes_beyond_its_place(at: int, bit: int) -> None:
    damaged = bytearray(PACKED)
    damaged[at] ^= 1 << bit
    try:
        unpacked(SPLIT_ZSTD, bytes(damaged), 4000)
    except ValueError:
        pass  # the record's checksum is what tells a flip that still decodes


@pytest.mark.parametrize(
    ("codec", "data", "size"),
    [
        (SPLIT_ZSTD, PACKED[:-1], 4000),
        (SPLIT_ZSTD, PACKED + b"junk", 4000),
        (SPLIT_ZSTD, PACKED + PACKED, 4000),
        (SPLIT_ZSTD, PACKED, 3998),
        (SPLIT_ZSTD, PACKED, 4002),
        (SPLIT_ZSTD, PACKED, 3999),
        (SPLIT_ZSTD, PACKED, 0),
        (SPLIT_ZSTD, b"", 4000),
        (NONE, PACKED, 4000),
        (7, PACKED, 4000),
    ],
)
def test_another_codec_or_length_is_refused(codec: int, data: bytes, size: int) -> None:
    with pytest.raises(ValueError):
        unpacked(codec, data, size)


def test_a_frame_that_would_fill_the_memory_is_refused_before_it_does() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            unpacked(SPLIT_ZSTD, bomb, 4000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_threads_do_not_disturb_each_other() -> None:
    payloads = [np.random.default_rng(i).integers(0, 4, 100_000, dtype=np.uint8).tobytes() for i in range(4)]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            codec, stored = pack(SPLIT_ZSTD, 2, memoryview(payloads[index]))
            if unpacked(codec, stored, 100_000) != payloads[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
