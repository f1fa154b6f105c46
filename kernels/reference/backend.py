"""Loading and stepping on the reference backend. It knows op codes only through the table in `ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..backend import BackendError, StepLimits, Tensor, check_ops
from ..batch import F32, SlotTables, StepBatch, StepOutput
from ..program import Program, Rows
from ..quant import FORMATS, dequantize
from ..sampling import sample_step
from .memory import KVPool, make_pools
from .ops import OPS, Run, rotations

KV_LAYOUT = "reference-1"


def backend() -> ReferenceBackend:
    return ReferenceBackend()


class ReferenceBackend:
    """Plain torch on the CPU, float32 throughout; a row's result never depends on its neighbours."""

    name = "reference"
    kv_layout = KV_LAYOUT

    def ops(self) -> frozenset[str]:
        return frozenset(OPS)

    def formats(self) -> frozenset[str]:
        return frozenset(FORMATS)

    def load(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        tables: SlotTables,
        kv_blocks: Sequence[int],
        limits: StepLimits,
        threads: int,
    ) -> ReferenceExecutor:
        """See `Backend.load`. Dequantises every weight to float32 (4 bytes an element). `threads` is set
        for torch in the whole process."""
        check_ops(program, self)
        if program.tail_rows:
            raise BackendError(f"backend reference cannot select the {Rows.TAIL} rows of {program.name}")
        pools = make_pools(program.kv_groups, kv_blocks)
        loaded = {name: _load_weight(name, spec.shape, weights) for name, spec in program.weights.items()}
        torch.set_num_threads(threads)
        return ReferenceExecutor(program, loaded, pools, tables, limits)


class ReferenceExecutor:
    """A program with its float32 weights and KV pools."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, torch.Tensor],
        pools: tuple[KVPool, ...],
        tables: SlotTables,
        limits: StepLimits,
    ) -> None:
        self._program, self._weights, self._pools = program, dict(weights), pools
        self._tables, self._limits = tables, limits
        self._rotations = {
            op.weights[0]: rotations(
                torch.tensor(program.constants[op.weights[0]], dtype=torch.float32), tables.max_len
            )
            for op in program.ops
            if op.code == "rope"
        }
        self._last_use = {index: at for at, op in enumerate(program.ops) for index in op.inputs}
        self.logits: F32 = np.zeros((0, program.vocab_size), np.float32)
        """[R, V] of the latest step, before sampling; for comparisons with other backends."""

    def step(self, batch: StepBatch, output: StepOutput) -> None:
        """See `Executor.step`. Raises `ValueError` when the step is larger than the limits."""
        limits = self._limits
        if batch.rows > limits.rows or batch.logits_rows > limits.logits_rows:
            raise ValueError(
                f"a step of {batch.rows} rows and {batch.logits_rows} logits rows exceeds the limits "
                f"({limits.rows} and {limits.logits_rows})"
            )
        for group, source, target in batch.copies.tolist():
            self._pools[group].copy_block(source, target)
        if batch.hidden not in (0, self._program.hidden_size):
            raise ValueError(f"hidden rows have {self._program.hidden_size} values, not {batch.hidden}")
        with torch.inference_mode():
            logits, hidden = self._forward(batch)
            self.logits = logits.numpy()
            if hidden is not None:
                output.hidden[:] = hidden.numpy()
        batch.await_mask()
        sample_step(self.logits, batch, self._tables, output)

    def open_queue(self) -> None:
        """None: torch is called from the caller's thread."""

    @property
    def kv_layout(self) -> str:
        """See `Executor.kv_layout`."""
        return KV_LAYOUT

    def export_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """See `Executor.export_block`."""
        self._pool(group).export_block(block, out)

    def import_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """See `Executor.import_block`."""
        self._pool(group).import_block(block, data)

    def _pool(self, group: int) -> KVPool:
        if not 0 <= group < len(self._pools):
            raise BackendError(f"backend reference: there is no KV group {group}")
        return self._pools[group]

    def memory_bytes(self) -> Mapping[str, int]:
        """Buffers are allocated per step and not counted."""
        return {
            "weights": sum(weight.nbytes for weight in self._weights.values()),
            "kv": sum(pool.nbytes for pool in self._pools),
            "buffers": 0,
        }

    def close(self) -> None:
        self._weights.clear()
        self._pools = ()

    def _forward(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, and the hidden rows if they are wanted."""
        run, hidden = self._start(batch), None
        for at, op in enumerate(self._program.ops):
            result = OPS[op.code](run, op)
            for index in set(op.inputs):
                if self._last_use[index] == at:
                    del run.buffers[index]
            if result is not None:
                run.buffers[op.outputs[0]] = result
                if batch.hidden and op.outputs[0] == self._program.hidden:
                    hidden = result
        return run.buffers[self._program.logits], hidden

    def _start(self, batch: StepBatch) -> Run:
        counts = batch.counts.astype(np.int64)
        ends = np.cumsum(counts)
        within = np.arange(batch.rows) - np.repeat(ends - counts, counts)
        wanted = within >= np.repeat(counts - batch.logits, counts)
        return Run(
            program=self._program,
            weights=self._weights,
            rotations=self._rotations,
            pools=self._pools,
            tables=self._tables,
            batch=batch,
            slots=torch.from_numpy(np.repeat(batch.slots, counts).astype(np.int64)),
            positions=torch.from_numpy(np.repeat(batch.starts, counts) + within),
            logits_rows=torch.from_numpy(np.flatnonzero(wanted)),
            buffers={},
        )


def _load_weight(name: str, shape: tuple[int, ...], weights: Mapping[str, Tensor]) -> torch.Tensor:
    if name not in weights:
        raise BackendError(f"weight {name} is missing")
    tensor = weights[name]
    if tensor.shape != shape:
        raise BackendError(f"weight {name} has shape {tensor.shape}, the program needs {shape}")
    try:
        values = dequantize(tensor)
    except ValueError as err:
        raise BackendError(f"weight {name}: {err}") from err
    return torch.from_numpy(values).clone()  # torch aligns its own memory; kernels may depend on it
