"""The door to a device: load a program with its weights, run steps.

A backend is found by name: the module `artesian.kernels.<name>` (reference) or the sub-package
`artesian.kernels.<name>.backend` (cpu, cuda, ...), which must have `backend() -> Backend`. Adding a
device is adding a file.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .batch import SlotTables, StepBatch, StepOutput
from .program import Program


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight as it lies in the file: raw bytes of one format, possibly memory-mapped.

    `data` is a flat uint8 array; rows (the last dimension) are stored one after another and never share
    a quantisation block. `format` is GGUF's name of the type: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1
    Q4_K Q5_K Q6_K.
    """

    format: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step an executor must be able to run; buffers are sized by it once, at load."""

    rows: int
    logits_rows: int
    top_logprobs: int = 20


class BackendError(RuntimeError):
    """A program cannot be loaded or run on a backend; says which op, weight or format is missing."""


class StepTiming(NamedTuple):
    """A queued step that has run. Times are of `time.perf_counter`."""

    queued: float
    started: float
    ended: float
    error: Exception | None


class StepQueue(Protocol):
    """A device that runs steps by itself, in the order of `submit`. Used from one thread."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when a step has ended."""
        ...

    def submit(self, batch: StepBatch, output: StepOutput) -> None:
        """Queue a step; never blocks. The queue keeps the arrays alive until the step has ended."""
        ...

    def completed(self) -> list[StepTiming]:
        """The steps that have ended since the last call, in order; clears the descriptor."""
        ...

    def close(self) -> None:
        """Run what is queued, then end the thread. To be called before the executor's `close`."""
        ...


class Executor(Protocol):
    """A loaded program with its KV memory."""

    def step(self, batch: StepBatch, output: StepOutput) -> None:
        """Run one step: block copies, forward, sampling; fill `output`; append the sampled tokens to the
        slot tables. Blocking, releases the GIL while it computes, called from one thread at a time."""
        ...

    def open_queue(self) -> StepQueue | None:
        """The device's own queue, if it has one; otherwise the caller runs `step` on a thread of its own."""
        ...

    @property
    def kv_layout(self) -> str:
        """Names all that shapes the bytes of a block besides weights and `KVSpec`s: the backend, its memory
        layout, and whatever changes a value's low bits (the instruction set). Part of a block's identity."""
        ...

    def export_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block's bytes out, `out` [spec.block_bytes]. May run beside a step on any thread, several
        at once: the caller holds the block, and no step in flight writes it. Releases the GIL.

        Raises:
            BackendError: no such block, or `out` has the wrong size.
        """
        ...

    def import_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """Fill a block with bytes of `export_block`. May run beside a step: no step names the block yet.

        Raises:
            BackendError: no such block, or `data` has the wrong size.
        """
        ...

    def memory_bytes(self) -> Mapping[str, int]:
        """Resident bytes by purpose: weights, kv, buffers."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A device and its op set."""

    name: str

    @property
    def kv_layout(self) -> str:
        """The `Executor.kv_layout` of what `load` would make."""
        ...

    def ops(self) -> frozenset[str]:
        """Codes of the ops this backend runs."""
        ...

    def formats(self) -> frozenset[str]:
        """Weight formats it computes with; others it may convert, with a notice in the log."""
        ...

    def load(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        tables: SlotTables,
        kv_blocks: Sequence[int],
        limits: StepLimits,
        threads: int,
    ) -> Executor:
        """Prepare a program: check ops and weights, pack weights, allocate KV (`kv_blocks[g]` blocks for
        group g) and buffers.

        Raises:
            BackendError: an op, weight, shape or format is not supported; names it.
        """
        ...


def open_backend(name: str) -> Backend:
    """Return the backend called `name`.

    Raises:
        BackendError: there is no such backend, or this machine lacks what it needs (a package, a
            compiled library, a device); says which and how to get it.
    """
    if not name.isidentifier():
        raise BackendError(f"backend {name!r} does not exist")
    for module_name in (f".{name}.backend", f".{name}"):
        full = importlib.util.resolve_name(module_name, __package__)
        try:
            module = importlib.import_module(full)
        except ModuleNotFoundError as err:
            if err.name is not None and full.startswith(err.name):
                continue
            raise BackendError(
                f"backend {name} needs the package {err.name}: pip install {err.name}"
            ) from err
        if hasattr(module, "backend"):
            opened: Backend = module.backend()
            return opened
    raise BackendError(f"backend {name!r} does not exist")


def check_ops(program: Program, backend: Backend) -> None:
    """Raise `BackendError` naming the first op of `program` that `backend` lacks."""
    for op in program.ops:
        if op.code not in backend.ops():
            raise BackendError(f"backend {backend.name} has no op {op.code!r}, which {program.name} needs")
