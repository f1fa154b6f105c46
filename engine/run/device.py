"""Who runs the steps: the device's own queue where it has one, else a thread of ours. It knows plans and the
executor; what a step means is the loop's affair."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...kernels.backend import Executor, StepQueue, StepTiming
from ...kernels.batch import StepOutput
from ..schedule import StepPlan

SWITCH_INTERVAL_S = 0.0005
"""The interpreter's default of 5 ms lets a busy loop thread keep a finished step waiting for longer than
the step took; at 0.5 ms the device thread gets the interpreter back in time to start the next one."""


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that has run, or the error that kept it from running."""

    plan: StepPlan
    output: StepOutput
    timing: StepTiming
    idle_s: float | None
    """Time the device stood still before this step although it was already queued; None if the device
    was waiting for work."""

    @property
    def seconds(self) -> float:
        return self.timing.ended - self.timing.started


class Device(Protocol):
    """Runs plans in the order of `submit`; each ends in a call of `completed` on the loop's thread."""

    def submit(self, plan: StepPlan) -> None: ...

    def close(self) -> None:
        """End the device; nothing may be in flight."""
        ...


def open_device(executor: Executor, completed: Callable[[CompletedStep], None]) -> Device:
    """The executor's own queue, or a thread that steps it. To be called on the event loop."""
    steps = executor.open_queue()
    return ThreadDevice(executor, completed) if steps is None else QueueDevice(steps, completed)


class _Ledger:
    """Steps in flight and the idle time between them."""

    def __init__(self, completed: Callable[[CompletedStep], None]) -> None:
        self._completed = completed
        self._in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        self._last_end = 0.0

    def open(self, plan: StepPlan) -> StepOutput:
        output = StepOutput.empty(plan.batch.logits_rows, plan.batch.top_logprobs, plan.batch.hidden)
        self._in_flight.append((plan, output))
        return output

    def settle(self, timing: StepTiming) -> None:
        plan, output = self._in_flight.popleft()
        idle_s = timing.started - self._last_end if timing.queued < self._last_end else None
        self._last_end = timing.ended
        self._completed(CompletedStep(plan, output, timing, idle_s))


class QueueDevice:
    """A device that goes from step to step without the interpreter."""

    def __init__(self, steps: StepQueue, completed: Callable[[CompletedStep], None]) -> None:
        self._steps = steps
        self._ledger = _Ledger(completed)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(steps.fileno(), self._take)

    def submit(self, plan: StepPlan) -> None:
        self._steps.submit(plan.batch, self._ledger.open(plan))

    def close(self) -> None:
        self._loop.remove_reader(self._steps.fileno())
        self._steps.close()

    def _take(self) -> None:
        for timing in self._steps.completed():
            self._ledger.settle(timing)


class ThreadDevice:
    """A thread that calls `Executor.step`. After each step it needs the interpreter to start the next."""

    def __init__(self, executor: Executor, completed: Callable[[CompletedStep], None]) -> None:
        self._executor = executor
        self._ledger = _Ledger(completed)
        self._loop = asyncio.get_running_loop()
        self._plans: queue.SimpleQueue[tuple[StepPlan, StepOutput, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put((plan, self._ledger.open(plan), time.perf_counter()))

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._plans.get()) is not None:
            plan, output, queued = item
            error: Exception | None = None
            started = time.perf_counter()
            try:
                self._executor.step(plan.batch, output)
            except Exception as err:  # whatever a step raises fails that step's requests, not the engine
                error = err
            timing = StepTiming(queued, started, time.perf_counter(), error)
            self._loop.call_soon_threadsafe(self._ledger.settle, timing)
