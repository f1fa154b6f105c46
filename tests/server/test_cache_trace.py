"""What is remembered of prompts: packed, compared, bounded, brought back, erased."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import zstandard

from artesian.engine import PromptCache
from artesian.engine.prompt_cache import names_only
from artesian.server import cache_trace
from artesian.server.cache_trace import (
    NAMESPACE,
    Trace,
    TraceBook,
    as_array,
    common_prefix,
    pack_tokens,
    unpack_tokens,
)

BLOCK = 8


def add(
    book: TraceBook, cache: PromptCache, id: str, tokens: list[int], key: str = "", salt: str = "",
    ttl_s: float | None = 60.0,
) -> None:  # fmt: skip
    trace = Trace(id=id, model="m", weights="w", created_at=1.0, count=len(tokens), key=key)
    book.add(cache, salt, trace, as_array(tokens), ttl_s)


@pytest.mark.parametrize("tokens", [[], [0], [2**31 - 1, 0, 5], list(range(5000))])
def test_tokens_survive_packing(tokens: list[int]) -> None:
    assert unpack_tokens(len(tokens), pack_tokens(as_array(tokens))).tolist() == tokens


@pytest.mark.parametrize(
    ("count", "packed"),
    [
        (3, b"not zstd"),
        (3, b""),
        (-1, pack_tokens(as_array([1]))),
        (1 << 40, pack_tokens(as_array([1]))),
        (1, zstandard.ZstdCompressor().compress(bytes(1 << 24))),
    ],
)
def test_what_cannot_be_tokens_is_none(count: int, packed: bytes) -> None:
    assert len(unpack_tokens(count, packed)) == 0


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1)],
)
def test_the_common_prefix_ends_at_the_first_difference(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(as_array(a), as_array(b)) == shared


def test_the_longest_prefix_wins_and_the_latest_of_equals() -> None:
    book, cache = TraceBook(), names_only()
    for id, tokens in (("short", [1] * 9 + [2] * 20), ("long", [1] * 17 + [2]), ("later", [1] * 17 + [3])):
        add(book, cache, id, tokens)
    known = book.closest("", as_array([1] * 17 + [7] * 9), "", BLOCK)
    assert known is not None and known.trace.id == "later"


def test_without_a_shared_block_only_what_is_alike_counts() -> None:
    book, cache = TraceBook(), names_only()
    add(book, cache, "nonce", [0, 99, *range(10, 60)])
    add(book, cache, "other", [0, *range(500, 550)])
    alike = book.closest("", as_array([0, 77, *range(10, 60)]), "", BLOCK)
    assert alike is not None and alike.trace.id == "nonce"
    assert book.closest("", as_array([0, *range(900, 950)]), "", BLOCK) is None


async def test_tenants_do_not_see_each_other() -> None:
    book, cache = TraceBook(), names_only()
    add(book, cache, "a", [1] * 20, salt="one")
    assert book.closest("two", as_array([1] * 20), "", BLOCK) is None and book.recent("two") == []
    assert await book.get(cache, "two", "a") is None and await book.get(cache, "one", "a") is not None


async def test_a_new_book_brings_back_what_was_stored_in_order() -> None:
    cache, before = names_only(), TraceBook()
    for i in range(3):
        add(before, cache, f"r{i}", [i] * 20)
    add(before, cache, "memory only", [7] * 20, ttl_s=None)
    book = TraceBook()
    add(book, cache, "new", [9] * 20)
    await book.recall(cache, "")
    ids = [trace.id for trace, _ in book.recent("")]
    assert ids[0] == "new" and set(ids) == {"new", "r0", "r1", "r2"}
    assert {int(tokens[0]) for _, tokens in book.recent("")} == {0, 1, 2, 9}
    assert all(trace.packed == b"" for trace, _ in book.recent(""))


async def test_what_is_erased_is_nowhere() -> None:
    cache, book = names_only(), TraceBook()
    add(book, cache, "a", [1] * 20)
    await book.erase(cache, "", "a")
    assert book.recent("") == [] and await book.get(cache, "", "a") is None
    assert [known async for known in book.all(cache, "")] == []


async def test_a_foreign_record_is_no_trace() -> None:
    cache = names_only()
    await cache.put(NAMESPACE, "", "x", b"\x93\x01\x02\x03")
    await cache.put(NAMESPACE, "", "y", msgspec.msgpack.encode({"id": "y"}))
    empty = Trace(id="z", model="m", weights="w", created_at=1.0, count=7, packed=b"no tokens")
    await cache.put(NAMESPACE, "", "z", msgspec.msgpack.encode(empty))
    book = TraceBook()
    assert [await book.get(cache, "", id) for id in "xyz"] == [None] * 3
    await book.recall(cache, "")
    assert book.recent("") == []


def test_memory_is_bounded_and_the_quietest_tenant_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_trace, "MAX_MEMORY_BYTES", 100_000)
    book, cache = TraceBook(), names_only()
    add(book, cache, "quiet", [1] * 10, salt="quiet", ttl_s=None)
    for i in range(500):
        add(book, cache, f"r{i}", [i] * 100, salt="busy", ttl_s=None)
    assert book.recent("quiet") == []
    kept = book.recent("busy")
    assert kept[0].trace.id == "r499" and 50 < len(kept) < 100
    add(book, cache, "huge", np.zeros(1_000_000, np.int32).tolist(), ttl_s=None)
    assert book.recent("") == [] and book._bytes == 0
