"""A block's bytes carry everything: moved to another block of another executor, they give the same logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from random_weights import random_weights
from stepping import Segment, Session, open_session
from tiny_programs import GEMMA, LLAMA, stored

from artesian.engine.models.registry import build_program
from artesian.kernels.backend import BackendError, open_backend

BLOCK, PROMPT = 16, 50
BACKENDS = ["cpu", "reference"]


@contextmanager
def opened(backend: str, family: str = "llama", dtype: str = "f16") -> Iterator[Session]:
    config = {"llama": LLAMA, "gemma": GEMMA}[family]
    program = build_program(config, kv_dtype=dtype, block_tokens=BLOCK)  # type: ignore[arg-type]
    weights = stored(random_weights(program, gain=1.5), "Q8_0")
    session = open_session(open_backend(backend), program, weights, slots=4, max_len=128)
    yield session
    session.executor.close()


def prompt() -> list[int]:
    return [int(t) for t in np.random.default_rng(3).integers(0, LLAMA.vocab, PROMPT)]


def exported(session: Session, slot: int) -> list[list[np.ndarray]]:
    """The bytes of a slot's full blocks, by group."""
    out = []
    for group, spec in enumerate(session.groups):
        rows = []
        for index in range(PROMPT // BLOCK):
            data = np.zeros(spec.block_bytes, np.uint8)
            session.executor.export_block(group, int(session.tables.block_tables[group][slot, index]), data)
            rows.append(data)
        out.append(rows)
    return out


def continued(session: Session, slot: int, count: int, *, chunk: int = 0) -> list[tuple[int, bytes]]:
    """The next tokens, each with the bits of the logits that it was drawn from."""
    out = []
    for _ in range(count):
        (token,) = session.generate(slot, 1, chunk=chunk)
        out.append((token, session.executor.logits[-1].tobytes()))  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_go_on_bit_by_bit_from_imported_blocks(backend: str, family: str, dtype: str) -> None:
    with opened(backend, family, dtype) as first, opened(backend, family, dtype) as second:
        slot = first.start(prompt())
        expected = continued(first, slot, 8, chunk=7)
        blocks = exported(first, slot)

        second.start([1])  # so that block numbers differ
        second.step(Segment(0))
        other = second.start(prompt())
        full = PROMPT // BLOCK * BLOCK
        second._reserve(other, full)
        for group, rows in enumerate(blocks):
            for index, data in enumerate(rows):
                block = int(second.tables.block_tables[group][other, index])
                second.executor.import_block(group, block, data)
        second.computed[other] = full
        assert continued(second, other, 8) == expected
        assert [a.tobytes() for rows in exported(second, other) for a in rows] == [
            a.tobytes() for rows in blocks for a in rows
        ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_sizes_groups_and_blocks_are_refused(backend: str) -> None:
    with opened(backend) as session:
        size = session.groups[0].block_bytes
        for group, block, given in [
            (1, 0, size),
            (-1, 0, size),
            (0, -1, size),
            (0, 1 << 20, size),
            (0, 0, size - 1),
        ]:
            data = np.zeros(given, np.uint8)
            with pytest.raises(BackendError):
                session.executor.export_block(group, block, data)
            with pytest.raises(BackendError):
                session.executor.import_block(group, block, data)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_are_copied_out_beside_running_steps(backend: str) -> None:
    with opened(backend) as session:
        slot = session.start(prompt())
        session.prefill(slot)
        before = exported(session, slot)
        seen: list[bool] = []

        def export() -> None:
            for _ in range(20):
                now = exported(session, slot)
                seen.append(all(np.array_equal(a, b) for a, b in zip(now[0], before[0], strict=True)))

        thread = threading.Thread(target=export)
        thread.start()
        session.generate(slot, 30)
        thread.join()
        assert seen == [True] * 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_are_filled_beside_running_steps(backend: str) -> None:
    with opened(backend) as quiet:
        alone = continued(quiet, quiet.start(prompt()), 30)
    with opened(backend) as session:
        slot = session.start(prompt())
        spare = session.free[0].pop(0)
        data = np.random.default_rng(1).integers(0, 256, session.groups[0].block_bytes, np.uint8)
        back = np.zeros_like(data)

        def fill() -> None:
            for _ in range(20):
                session.executor.import_block(0, spare, data)

        thread = threading.Thread(target=fill)
        thread.start()
        beside = continued(session, slot, 30)
        thread.join()
        session.executor.export_block(0, spare, back)
        assert beside == alone and np.array_equal(back, data)


def test_the_layout_names_the_backend_and_its_kernels() -> None:
    with opened("cpu") as native, opened("reference") as reference:
        assert native.executor.kv_layout.startswith("cpu-") and native.executor.kv_layout.count("-") == 2
        assert native.executor.kv_layout != reference.executor.kv_layout
