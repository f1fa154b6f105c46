"""Steps that run by themselves: order, errors, results, and masks that arrive while the forward runs."""

import select
import threading
import time

import numpy as np
import pytest
from random_weights import random_weights
from stepping import Segment, Session, open_session
from tiny_programs import LLAMA

from artesian.engine.models.registry import build_program
from artesian.kernels.backend import BackendError, StepQueue, StepTiming, open_backend
from artesian.kernels.batch import StepBatch, StepOutput

PROGRAM = build_program(LLAMA, block_tokens=16)


def session_of(backend: str) -> Session:
    return open_session(open_backend(backend), PROGRAM, random_weights(PROGRAM, gain=1.5), threads=2)


def queue_of(session: Session) -> StepQueue:
    queue = session.executor.open_queue()
    assert queue is not None
    return queue


def wait(queue: StepQueue, count: int) -> list[StepTiming]:
    done: list[StepTiming] = []
    while len(done) < count:
        assert select.select([queue], [], [], 10.0)[0], "the queue does not answer"
        done += queue.completed()
    return done


def test_queued_steps_run_in_order_and_feed_each_other() -> None:
    plain, queued = session_of("cpu"), session_of("cpu")
    want = plain.generate(plain.start([5, 6, 7]), 7)
    queue, slot = queue_of(queued), queued.start([5, 6, 7])
    steps = []
    for count in (3, 1, 1, 1, 1, 1, 1):  # none of them waits for the token of the one before
        batch = queued.batch([Segment(slot, count)])
        steps.append((batch, StepOutput.empty(1, 0)))
        queue.submit(*steps[-1])
    timings = wait(queue, 7)
    queue.close()
    assert [int(output.tokens[0]) for _, output in steps] == want
    times = [t for timing in timings for t in (timing.started, timing.ended)]
    assert times == sorted(times) and all(t.error is None for t in timings)


def test_refused_step_is_reported_and_the_next_one_runs() -> None:
    session = session_of("cpu")
    queue, slot = queue_of(session), session.start([5, 6, 7])
    bad = session.batch([Segment(slot, 3)])
    bad.slots = np.array([99], np.int32)
    session.rollback(slot, 3)
    good, output = session.batch([Segment(slot, 3)]), StepOutput.empty(1, 0)
    queue.submit(bad, StepOutput.empty(1, 0))
    queue.submit(good, output)
    first, second = wait(queue, 2)
    queue.close()
    assert isinstance(first.error, BackendError) and "slot" in str(first.error)
    assert second.error is None and output.finite[0] == 1


def test_full_queue_is_an_error_and_loses_nothing() -> None:
    session = session_of("cpu")
    queue, slot = queue_of(session), session.start([5])
    batches = [session.batch([Segment(slot)]) for _ in range(9)]
    gate = np.zeros(1, np.int32)
    batches[0].mask_ready = gate
    for batch in batches[:8]:
        queue.submit(batch, StepOutput.empty(1, 0))
    with pytest.raises(BackendError, match="full"):
        queue.submit(batches[8], StepOutput.empty(1, 0))
    gate[0] = 1
    assert len(wait(queue, 8)) == 8
    queue.close()


def test_closing_runs_what_is_queued() -> None:
    session = session_of("cpu")
    queue, slot = queue_of(session), session.start([5, 6, 7])
    batch, output = session.batch([Segment(slot, 3)]), StepOutput.empty(1, 0)
    queue.submit(batch, output)
    queue.close()
    assert output.finite[0] == 1


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sampling_waits_for_a_mask_that_is_filled_during_the_forward(backend: str) -> None:
    session = session_of(backend)
    slot = session.start([5, 6, 7])
    words = -(-PROGRAM.vocab_size // 32)
    mask, ready = np.zeros((1, words), np.uint32), np.zeros(1, np.int32)
    batch: StepBatch = session.batch([Segment(slot, 3)], mask=mask)
    batch.mask_ready = ready
    output = StepOutput.empty(1, 0)
    step = threading.Thread(target=session.executor.step, args=(batch, output))
    step.start()
    time.sleep(0.05)
    assert step.is_alive(), "the step did not wait for its mask"
    mask[0, 77 // 32] = 1 << 77 % 32
    ready[0] = 1
    step.join(10.0)
    assert output.tokens[0] == 77
