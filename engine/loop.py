"""The loop's side of stepping: plan, launch, settle. One step deep ahead of the device, or not at all.

    overlap:  while step N runs, step N+1 is queued behind it and N-1 is settled
    serial:   plan, run, settle, one after the other (the same code with one step in flight)

Since sampled tokens reach the next step through the device's own token table, a plan never waits for a
result. A sequence whose end is found late has at most one step too many in flight; that step's token is
dropped when it settles.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..kernels.backend import Executor
from .masks import StepMasks
from .request import Sequence, Settled
from .run.device import CompletedStep, Device, open_device
from .schedule import CostModel, Scheduler

logger = logging.getLogger(__name__)

DEPTH = {"overlap": 2, "serial": 1}
IDLE_SAMPLES = 4096


@dataclass(slots=True)
class StepStats:
    """Plain counters of the loop."""

    steps: int = 0
    rows: int = 0
    device_s: float = 0.0
    idle_s: deque[float] = field(default_factory=lambda: deque(maxlen=IDLE_SAMPLES))
    """Recent idle times of the device between two steps of which the second was already queued."""


class StepLoop:
    """Drives one executor. `settled` gets each step's results, `failed` the sequences of a failed one."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        cost: CostModel,
        mode: str,
        masks: StepMasks,
        settled: Callable[[CompletedStep, list[Settled]], None],
        failed: Callable[[list[Sequence]], None],
    ) -> None:
        self.stats = StepStats()
        self._scheduler, self._executor, self._cost, self._masks = scheduler, executor, cost, masks
        self._depth = DEPTH[mode]
        self._settled, self._failed = settled, failed
        self._completed: deque[CompletedStep] = deque()
        self._wake = asyncio.Event()
        self._in_flight = 0

    def wake(self) -> None:
        """Something may have become plannable."""
        self._wake.set()

    async def run(self) -> None:
        """Run until cancelled; then the steps in flight are waited for and settled."""
        device = open_device(self._executor, self._take)
        try:
            while True:
                self._fill(device)
                await self._settle_next()
        finally:
            while self._in_flight:
                await self._settle_next()
            device.close()

    def _take(self, step: CompletedStep) -> None:
        self._completed.append(step)
        self._wake.set()

    async def _settle_next(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        self._settle_completed()

    def _fill(self, device: Device) -> None:
        while self._in_flight < self._depth:
            plan = self._scheduler.plan()
            if plan is None:
                return
            self._in_flight += 1
            self._masks.open(plan)
            device.submit(plan)
            self._masks.fill()

    def _settle_completed(self) -> None:
        while self._completed:
            step = self._completed.popleft()
            self._in_flight -= 1
            error = step.timing.error
            if error is not None:
                logger.error("step=%d failed", step.plan.number, exc_info=error)
                failed = self._scheduler.fail(step.plan)
                self._masks.fill()
                self._failed(failed)
                continue
            self._account(step)
            results = self._scheduler.settle(step.plan, step.output)
            self._masks.advance(results)
            self._masks.fill()  # first: the device waits for it
            self._settled(step, results)

    def _account(self, step: CompletedStep) -> None:
        stats, seconds = self.stats, step.seconds
        stats.steps += 1
        stats.rows += step.plan.batch.rows
        stats.device_s += seconds
        if step.idle_s is not None:
            stats.idle_s.append(step.idle_s)
        self._cost.observe(step.plan.estimated_ms, 1000 * seconds)
