"""The native sampler against its numpy definition, step after step on logits that the test chooses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stepping import Segment, Session, open_session
from tiny_programs import logits_program, logits_weights

from artesian.kernels.batch import SlotSampling, StepOutput
from artesian.kernels.cpu.backend import CpuBackend
from artesian.kernels.sampling import sample_step

F32 = NDArray[np.float32]
VOCAB = 515
WORDS = -(-VOCAB // 32)
GREEDY = SlotSampling(temperature=0.0)


def random_table(spread: float = 3.0, vocab: int = VOCAB, rows: int = VOCAB) -> F32:
    """Rows of logits with ties."""
    noise = np.random.default_rng(0).standard_normal((rows, vocab)) * spread
    return noise.round(1).astype(np.float32)


def session_of(table: F32, isa: str = "best", threads: int = 2) -> Session:
    program = logits_program(table.shape[1], len(table))
    return open_session(CpuBackend(isa), program, logits_weights(table), threads=threads, top_logprobs=20)


def assert_as_defined(session: Session, *segments: Segment, top: int = 5, **step: Any) -> StepOutput:
    """Run a step natively and by `sample_step` on the same logits; everything must agree."""
    before = session.tables.tokens.copy()
    batch = session.batch(segments, top_logprobs=top, **step)
    got, want = (StepOutput.empty(batch.logits_rows, top) for _ in range(2))
    session.executor.step(batch, got)
    after = session.tables.tokens.copy()
    session.tables.tokens[:] = before
    sample_step(np.array(session.executor.logits), batch, session.tables, want)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(after, session.tables.tokens)
    for name in ("tokens", "ranks", "finite", "top_tokens"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=2e-6, err_msg=name)
    return got


CASES: dict[str, SlotSampling] = {
    "greedy": GREEDY,
    "plain": SlotSampling(),
    "hot": SlotSampling(temperature=50.0),
    "cold": SlotSampling(temperature=0.01),
    "top_k": SlotSampling(top_k=7),
    "top_k beyond the vocabulary": SlotSampling(top_k=10_000),
    "top_k one": SlotSampling(top_k=1),
    "top_p": SlotSampling(top_p=0.8),
    "top_p zero": SlotSampling(top_p=0.0),
    "min_p": SlotSampling(min_p=0.05),
    "all cuts": SlotSampling(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01),
    "repetition": SlotSampling(repetition=1.3),
    "frequency and presence": SlotSampling(frequency=0.7, presence=-0.3),
    "all penalties, greedy": SlotSampling(temperature=0.0, repetition=1.1, frequency=0.5, presence=0.2),
    "bias": SlotSampling(
        bias_ids=np.array([3, 9, 3], np.int32), bias_values=np.array([5, -100, 2], np.float32)
    ),
    "allowed": SlotSampling(allowed=np.arange(WORDS, dtype=np.uint32) * 0x01010101),
    "min_len": SlotSampling(temperature=0.0, min_len=12, stop_ids=np.arange(0, VOCAB, 2, dtype=np.int32)),
}


@pytest.mark.parametrize("isa", ["best", "portable"])
@pytest.mark.parametrize("case", CASES)
def test_drawn_tokens_are_as_defined(case: str, isa: str) -> None:
    session = session_of(random_table(), isa)
    slots = [
        session.start([7, 7, 400 + seed], replace(CASES[case], seed=seed << 40 | seed, prompt_len=3))
        for seed in range(4)
    ]
    assert_as_defined(session, *(Segment(slot, 3) for slot in slots))
    for _ in range(20):
        assert_as_defined(session, *(Segment(slot) for slot in slots))


def test_large_vocabulary_is_drawn_as_defined() -> None:
    session = session_of(random_table(vocab=49152, rows=64))
    sampling = SlotSampling(temperature=0.8, top_p=0.95, seed=5)
    slots = [session.start([seed], replace(sampling, seed=seed)) for seed in range(5)]
    slots += [session.start([9], SlotSampling(temperature=1.0, seed=seed)) for seed in range(3)]
    for _ in range(4):
        assert_as_defined(session, *(Segment(slot) for slot in slots), top=20)


def test_step_mask_applies_to_its_own_segment() -> None:
    session = session_of(random_table())
    slots = [session.start([seed], SlotSampling(seed=seed)) for seed in range(3)]
    mask = np.full((3, WORDS), 0xFFFFFFFF, np.uint32)
    mask[1] = 0
    mask[1, 4] = 1 << 9
    output = assert_as_defined(session, *(Segment(slot) for slot in slots), mask=mask)
    assert output.tokens[1] == 4 * 32 + 9


def test_scored_rows_report_the_token_that_follows() -> None:
    session = session_of(random_table())
    slot = session.start([5, 6, 7, 8], GREEDY)
    output = assert_as_defined(session, Segment(slot, 4, logits=3))
    assert output.tokens[:2].tolist() == [7, 8]


def test_tokens_stop_at_the_end_of_the_table() -> None:
    session = session_of(random_table())
    length = session.tables.max_len
    slots = [session.start([1] * length, GREEDY), session.start([2] * length, GREEDY)]
    output = assert_as_defined(session, Segment(slots[0], length), Segment(slots[1], length, 2, sample=False))
    assert output.tokens[0] != 0
    assert output.tokens[1:].tolist() == [2, 0]


def test_two_segments_of_a_slot_are_settled_in_order() -> None:
    session = session_of(random_table())
    slot = session.start([5, 6], SlotSampling(seed=1, presence=4.0, prompt_len=1))
    assert_as_defined(session, Segment(slot), Segment(slot))


BROKEN: dict[str, tuple[float, slice]] = {
    "nan": (np.nan, slice(3, 4)),
    "inf": (np.inf, slice(514, 515)),
    "all -inf": (-np.inf, slice(0, VOCAB)),
    "some -inf": (-np.inf, slice(0, 512)),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", BROKEN)
def test_rows_that_are_not_finite_are_reported(case: str, temperature: float) -> None:
    table = random_table()
    value, where = BROKEN[case]
    table[11, where] = value
    session = session_of(table)
    slots = [session.start([token], SlotSampling(temperature=temperature)) for token in (10, 11, 12)]
    output = assert_as_defined(session, *(Segment(slot) for slot in slots))
    assert output.finite.tolist() == [1, int(case == "some -inf"), 1]


def test_nothing_allowed_is_not_finite() -> None:
    session = session_of(random_table())
    slot = session.start([1], SlotSampling(allowed=np.zeros(WORDS, np.uint32)))
    assert assert_as_defined(session, Segment(slot)).finite.tolist() == [0]


def test_tokens_outside_the_vocabulary_do_no_harm() -> None:
    session = session_of(random_table())
    slot = session.start([-5, 1 << 30, VOCAB], SlotSampling(repetition=1.5, frequency=1.0))
    output = session.step(Segment(slot, 3, logits=3))
    assert output.tokens[:2].tolist() == [1 << 30, VOCAB]
    assert 0 <= output.tokens[2] < VOCAB
