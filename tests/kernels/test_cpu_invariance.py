"""A row's bits on the cpu backend depend on its own tokens alone: not on batch, chunks or threads."""

from functools import cache

import numpy as np
import pytest
from random_weights import random_weights
from stepping import Segment, Session, open_session
from tiny_programs import GEMMA, LLAMA, stored

from artesian.engine.models.registry import build_program
from artesian.kernels.batch import SlotSampling
from artesian.kernels.cpu.backend import CpuBackend, CpuExecutor

MODELS = {"llama": (LLAMA, 16), "gemma": (GEMMA, 16), "odd blocks": (GEMMA, 5)}
FORMATS = {"llama": "Q4_1", "gemma": "Q8_0", "odd blocks": "F16"}
LENGTHS = [300, 1, 70, 33, 5, 128, 64, 17, 3, 40, 299, 65, 2, 90, 16, 31]


def session_of(model: str, isa: str, threads: int = 1) -> Session:
    config, block_tokens = MODELS[model]
    program = build_program(config, block_tokens=block_tokens)
    weights = stored(random_weights(program, gain=1.5), FORMATS[model])
    return open_session(CpuBackend(isa), program, weights, slots=16, max_len=310, rows=2048, threads=threads)


def prompt(index: int) -> list[int]:
    generator = np.random.default_rng(index)
    return [int(token) for token in generator.integers(0, LLAMA.vocab, LENGTHS[index])]


def start(session: Session, index: int) -> int:
    sampling = SlotSampling(temperature=0.9, top_p=0.95, seed=index, prompt_len=LENGTHS[index])
    return session.start(prompt(index), sampling)


def bits(session: Session) -> bytes:
    executor = session.executor
    assert isinstance(executor, CpuExecutor)
    return executor.logits.tobytes()


@cache
def alone(model: str, isa: str, index: int) -> tuple[list[bytes], list[int]]:
    """The logits of every row computed in one piece, then of three decodes, and the tokens drawn."""
    session = session_of(model, isa)
    slot = start(session, index)
    session.step(Segment(slot, LENGTHS[index], logits=LENGTHS[index]))
    rows = [bits(session)]
    for _ in range(3):
        session.step(Segment(slot))
        rows.append(bits(session))
    drawn = session.tables.tokens[slot, LENGTHS[index] : LENGTHS[index] + 4]
    session.executor.close()
    return rows, drawn.tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 5, 64, 300])
@pytest.mark.parametrize("model", MODELS)
def test_chunks_and_threads_do_not_change_a_bit(model: str, chunk: int, threads: int) -> None:
    session = session_of(model, "best", threads)
    slot = start(session, 0)
    rows = b""
    for first in range(0, LENGTHS[0], chunk):
        count = min(chunk, LENGTHS[0] - first)
        session.step(Segment(slot, count, logits=count, sample=first + count == LENGTHS[0]))
        rows += bits(session)
    assert rows == alone(model, "best", 0)[0][0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [2, 3, 7, 16])
@pytest.mark.parametrize("model", MODELS)
def test_neighbours_do_not_change_a_bit(model: str, batch: int, threads: int) -> None:
    session = session_of(model, "best", threads)
    slots = [start(session, index) for index in range(batch)]
    session.step(*(Segment(slot, LENGTHS[i], logits=LENGTHS[i]) for i, slot in enumerate(slots)))
    steps = [bits(session)]
    for _ in range(3):
        session.step(*(Segment(slot) for slot in slots))
        steps.append(bits(session))
    for step, got in enumerate(steps):
        assert got == b"".join(alone(model, "best", index)[0][step] for index in range(batch))
    for index, slot in enumerate(slots):
        drawn = session.tables.tokens[slot, LENGTHS[index] : LENGTHS[index] + 4].tolist()
        assert drawn == alone(model, "best", index)[1]


@pytest.mark.parametrize("model", MODELS)
def test_portable_kernels_are_invariant_too(model: str) -> None:
    session = session_of(model, "portable", 2)
    slots = [start(session, index) for index in (3, 4, 1)]
    rows = []
    session.step(*(Segment(slot, 1, logits=1, sample=slot == slots[2]) for slot in slots))
    rows.append(bits(session))
    session.step(Segment(slots[0], 32, logits=32), Segment(slots[1], 4, logits=4))
    rows.append(bits(session))
    width = LLAMA.vocab * 4
    want = [alone(model, "portable", index)[0][0] for index in (3, 4, 1)]
    assert rows[0] == b"".join(row[:width] for row in want)
    assert rows[1] == want[0][width:] + want[1][width:]


def test_mixed_step_of_prefill_and_decode_equals_separate_steps() -> None:
    session = session_of("llama", "best", 2)
    first, second = start(session, 2), start(session, 5)
    session.step(Segment(first, LENGTHS[2]))
    session.step(Segment(first), Segment(second, 100, logits=0, sample=False))
    assert bits(session) == alone("llama", "best", 2)[0][1]
    session.step(Segment(second, 28), Segment(first))
    width = LLAMA.vocab * 4
    assert bits(session) == alone("llama", "best", 5)[0][0][-width:] + alone("llama", "best", 2)[0][2]
