"""The one thread that runs steps. It knows plans and the executor; what a step means is the loop's affair."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...kernels.backend import Executor
from ...kernels.batch import StepOutput
from ..schedule import StepPlan

SWITCH_INTERVAL_S = 0.0005
"""The interpreter's default of 5 ms lets a busy loop thread keep a finished step waiting for longer than
the step took; at 0.5 ms the device thread gets the interpreter back in time to start the next one."""


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that has run, or the error that kept it from running. Times are of `time.perf_counter`."""

    plan: StepPlan
    output: StepOutput
    error: Exception | None
    started: float
    ended: float
    idle_s: float | None
    """Time the device stood still before this step although the step was already queued; None if the
    device was waiting for work."""


class DeviceThread:
    """Runs plans in the order of `submit`. `completed` is called on this thread and must only hand over."""

    def __init__(self, executor: Executor, completed: Callable[[CompletedStep], None]) -> None:
        self._executor = executor
        self._completed = completed
        self._plans: queue.SimpleQueue[tuple[StepPlan, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put((plan, time.perf_counter()))

    def close(self) -> None:
        """Finish what is queued and end the thread; blocks until then."""
        self._plans.put(None)
        self._thread.join()

    def _run(self) -> None:
        last_end = 0.0
        while (item := self._plans.get()) is not None:
            plan, queued = item
            output = StepOutput.empty(plan.batch.logits_rows, plan.batch.top_logprobs)
            error: Exception | None = None
            started = time.perf_counter()
            try:
                self._executor.step(plan.batch, output)
            except Exception as err:  # whatever a step raises fails that step's requests, not the engine
                error = err
            ended = time.perf_counter()
            idle_s = started - last_end if queued < last_end else None
            last_end = ended
            self._completed(CompletedStep(plan, output, error, started, ended, idle_s))
