"""The rows that logits are made of, as a step reports them."""

import numpy as np
import pytest
from random_weights import random_weights
from stepping import Segment, Session, open_session
from tiny_programs import GEMMA, LLAMA

from artesian.engine.models.registry import build_program
from artesian.kernels.backend import BackendError, open_backend
from artesian.kernels.batch import F32
from artesian.kernels.quant import dequantize

PROGRAM = build_program(LLAMA, block_tokens=16)
WEIGHTS = random_weights(PROGRAM, gain=1.5)
WIDTH = PROGRAM.hidden_size


def session_of(backend: str) -> Session:
    return open_session(open_backend(backend), PROGRAM, WEIGHTS)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_hidden_rows_times_the_head_are_the_logits(backend: str) -> None:
    session = session_of(backend)
    slot = session.start(list(range(1, 30)))
    output = session.step(Segment(slot, 29, logits=20, sample=False), hidden=WIDTH)
    head = "output.weight" if "output.weight" in WEIGHTS else "token_embd.weight"
    expected = output.hidden @ dequantize(WEIGHTS[head]).reshape(PROGRAM.vocab_size, WIDTH).T
    assert output.hidden.shape == (20, WIDTH) and np.abs(output.hidden).min(axis=1).max() > 0
    logits: F32 = session.executor.logits  # type: ignore[attr-defined]
    np.testing.assert_allclose(logits, expected, atol=float(0.05 * np.abs(expected).max()))


def test_backends_agree_on_hidden_rows() -> None:
    rows = []
    for backend in ("cpu", "reference"):
        session = session_of(backend)
        slot = session.start(list(range(1, 30)))
        rows.append(session.step(Segment(slot, 29, logits=29, sample=False), hidden=WIDTH).hidden)
    np.testing.assert_allclose(rows[0], rows[1], atol=float(0.02 * np.abs(rows[1]).max()))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_hidden_rows_have_the_programs_width(backend: str) -> None:
    session = session_of(backend)
    slot = session.start([1, 2, 3])
    with pytest.raises((BackendError, ValueError), match=f"{WIDTH} values, not 7"):
        session.step(Segment(slot, 3), hidden=7)


def test_every_family_has_hidden_rows() -> None:
    assert build_program(GEMMA, block_tokens=16).hidden_size == GEMMA.hidden
