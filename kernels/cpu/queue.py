"""Steps on the native library's own thread, which needs no interpreter to go on to the next one."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from ctypes import byref, c_void_p

import numpy as np
from numpy.typing import NDArray

from ..backend import BackendError, StepTiming
from ..batch import StepBatch, StepOutput
from . import native
from .native import check

STEP_REFUSED = "step refused at segment or copy {}"


class CpuStepQueue:
    """Steps on the library's own thread (see `StepQueue`); the executor must outlive it."""

    def __init__(
        self,
        executor: c_void_p,
        native_step: Callable[[StepBatch, StepOutput], tuple[native.Step, list[NDArray[np.generic]]]],
    ) -> None:
        self._native_step = native_step
        self._library = native.library()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._alive: deque[object] = deque()
        self._handle: c_void_p | None = c_void_p()
        try:
            check(self._library.artesian_queue_open(executor, self._event, byref(self._handle)), "step queue")
        except BaseException:
            os.close(self._event)
            raise

    def fileno(self) -> int:
        return self._event

    def submit(self, batch: StepBatch, output: StepOutput) -> None:
        step, arrays = self._native_step(batch, output)
        check(self._library.artesian_queue_submit(self._handle, byref(step)), "submit")
        self._alive.append((arrays, batch, output))

    def completed(self) -> list[StepTiming]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        timings: list[StepTiming] = []
        done = native.Completion()
        while self._library.artesian_queue_take(self._handle, byref(done)):
            self._alive.popleft()
            error = None
            try:
                check(done.status, STEP_REFUSED.format(done.failed))
            except BackendError as err:
                error = err
            timings.append(
                StepTiming(done.queued_ns / 1e9, done.started_ns / 1e9, done.ended_ns / 1e9, error)
            )
        return timings

    def close(self) -> None:
        if self._handle is not None:
            self._library.artesian_queue_close(self._handle)
            self._handle = None
            os.close(self._event)
