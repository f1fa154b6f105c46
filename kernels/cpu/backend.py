"""Loading a program on the CPU and stepping it: checks, weight packing, one native call a step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int32, c_void_p

import numpy as np
from numpy.typing import NDArray

from ..backend import BackendError, StepLimits, Tensor, check_ops
from ..batch import F32, I32, SlotTables, StepBatch, StepOutput
from ..kv import KVKind, KVSpec
from ..program import Program
from ..quant import FORMATS, dequantize, stored_bytes
from . import native
from .native import ISAS, SOURCES, Packed, check
from .plan import OPS, ROW_KINDS, Plan, Step, compile_program
from .queue import STEP_REFUSED, CpuStepQueue

logger = logging.getLogger(__name__)

PACKED = {
    "F32": Packed.F32,
    "F16": Packed.F16,
    "BF16": Packed.BF16,
    "Q4_0": Packed.Q4,
    "Q4_1": Packed.Q4,
    "Q8_0": Packed.Q8,
}
CONVERTED = "Q8_0"
"""What the formats without kernels become, at load."""
KV_LAYOUT = "cpu-1"
"""Raised when a block's bytes change their order or the kernels their rounding."""
CHUNK_ELEMENTS = 1 << 22
"""Elements converted at a time, so that a large tensor is never held in float32."""


def backend() -> CpuBackend:
    """The backend of this machine.

    Raises:
        BackendError: the native library was not compiled; says how to get it.
    """
    native.library()
    return CpuBackend()


class CpuBackend:
    """Native kernels for the CPU. `isa` names one instruction set instead of the best that the CPU has."""

    name = "cpu"

    def __init__(self, isa: str = "best") -> None:
        self._isa = isa

    @property
    def kv_layout(self) -> str:
        """See `Backend.kv_layout`."""
        isa: bytes = native.library().artesian_isa_for(ISAS[self._isa])
        return f"{KV_LAYOUT}-{isa.decode()}"

    def ops(self) -> frozenset[str]:
        return OPS

    def formats(self) -> frozenset[str]:
        return frozenset(PACKED)

    def load(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        tables: SlotTables,
        kv_blocks: Sequence[int],
        limits: StepLimits,
        threads: int,
    ) -> CpuExecutor:
        """See `Backend.load`. `threads` includes the caller of `step`. Weights are copied into the kernels'
        layout, tensor by tensor; `weights` is not kept."""
        check_ops(program, self)
        _check_kv(program.kv_groups, kv_blocks)
        _check_weights(program, weights)
        if threads < 1:
            raise BackendError(f"backend cpu needs at least one thread, got threads={threads}")
        matrices = list(
            dict.fromkeys(
                op.weights[0] for op in program.ops if op.code in ("embed", "linear") and op.weights
            )
        )
        formats = {name: PACKED.get(weights[name].format, PACKED[CONVERTED]) for name in matrices}
        plan = compile_program(program, formats, limits)
        vectors = {name: np.asarray(values, np.float32) for name, values in program.constants.items()}
        for step in (step for phase in plan.phases for step in phase):
            if step.vector and step.vector not in vectors:
                vectors[step.vector] = dequantize(weights[step.vector])
        native_plan = _NativePlan(program, plan, formats, vectors, tables, kv_blocks, limits)
        handle = native_plan.create(threads, ISAS[self._isa])
        executor = CpuExecutor(handle, program, tables)
        converted = Counter(weights[name].format for name in matrices if weights[name].format not in PACKED)
        for format, count in converted.items():
            logger.warning("converted tensors=%d from=%s to=%s", count, format, CONVERTED)
        try:
            for index, name in enumerate(matrices):
                _pack(handle, index, name, weights[name])
        except BaseException:
            executor.close()
            raise
        logger.info("loaded program=%s isa=%s threads=%d", program.name, executor.isa, threads)
        return executor


class CpuExecutor:
    """A loaded program. Owns its memory and threads until `close`."""

    def __init__(self, handle: c_void_p, program: Program, tables: SlotTables) -> None:
        self._handle: c_void_p | None = handle
        self._vocab, self._hidden_size = program.vocab_size, program.hidden_size
        self._tables = tables  # the native side holds their addresses
        self._library = native.library()
        self._logits_rows = 0

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        name: bytes = self._library.artesian_isa(self._open())
        return name.decode()

    @property
    def logits(self) -> F32:
        """[R, V] of the latest step, before sampling; valid until the next step."""
        rows, stride = self._logits_rows, -(-self._vocab // 8) * 8
        array = np.ctypeslib.as_array(self._library.artesian_logits(self._open()), (rows, stride))
        return array[:, : self._vocab]

    def step(self, batch: StepBatch, output: StepOutput) -> None:
        """See `Executor.step`.

        Raises:
            BackendError: the step exceeds the limits, or names slots, rows or blocks that do not exist.
        """
        step, _arrays = self._native_step(batch, output)
        failed = c_int32(0)
        status = self._library.artesian_step(self._open(), byref(step), byref(failed))
        self._logits_rows = 0 if status else batch.logits_rows
        check(status, STEP_REFUSED.format(failed.value))

    def open_queue(self) -> CpuStepQueue:
        """See `Executor.open_queue`."""
        return CpuStepQueue(self._open(), self._native_step)

    def _native_step(
        self, batch: StepBatch, output: StepOutput
    ) -> tuple[native.Step, list[NDArray[np.generic]]]:
        """A step's addresses, and the arrays that must live as long as they are used."""
        rows, top = batch.logits_rows, batch.top_logprobs
        if batch.hidden not in (0, self._hidden_size):
            raise BackendError(
                f"backend cpu: hidden rows have {self._hidden_size} values, not {batch.hidden}"
            )
        arrays: list[NDArray[np.generic]] = []

        def read(array: NDArray[np.generic], dtype: type[np.generic]) -> int:
            arrays.append(np.ascontiguousarray(array, dtype))
            return arrays[-1].ctypes.data

        step = native.Step(
            slots=read(batch.slots, np.int32),
            starts=read(batch.starts, np.int32),
            counts=read(batch.counts, np.int32),
            logits=read(batch.logits, np.int32),
            sample=read(batch.sample, np.uint8),
            mask=None if batch.mask is None else read(self._checked_mask(batch), np.uint32),
            mask_ready=None if batch.mask_ready is None else read(batch.mask_ready, np.int32),
            copies=read(batch.copies, np.int32),
            tokens=_written(output.tokens, np.int32, rows),
            logprobs=_written(output.logprobs, np.float32, rows),
            ranks=_written(output.ranks, np.int32, rows),
            finite=_written(output.finite, np.uint8, rows),
            top_tokens=_written(output.top_tokens, np.int32, rows * top),
            top_logprobs=_written(output.top_logprobs, np.float32, rows * top),
            hidden=_written(output.hidden, np.float32, rows * batch.hidden) if batch.hidden else None,
            segments=len(batch.slots),
            copy_count=len(batch.copies),
            top=top,
        )
        return step, arrays

    @property
    def kv_layout(self) -> str:
        """See `Executor.kv_layout`."""
        return f"{KV_LAYOUT}-{self.isa}"

    def export_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """See `Executor.export_block`."""
        address = _written(out, np.uint8, 0)
        status = self._library.artesian_export_block(self._open(), group, block, address, out.nbytes)
        check(status, f"export of block {block} of KV group {group} to {out.nbytes} bytes")

    def import_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """See `Executor.import_block`."""
        data = np.ascontiguousarray(data, np.uint8)
        status = self._library.artesian_import_block(
            self._open(), group, block, data.ctypes.data, data.nbytes
        )
        check(status, f"import of block {block} of KV group {group} from {data.nbytes} bytes")

    def memory_bytes(self) -> Mapping[str, int]:
        memory = native.Memory()
        self._library.artesian_memory(self._open(), byref(memory))
        return {"weights": memory.weights, "kv": memory.kv, "buffers": memory.buffers}

    def close(self) -> None:
        """Release memory and threads; further steps raise `BackendError`. Closing twice is fine."""
        if self._handle is not None:
            self._library.artesian_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> c_void_p:
        if self._handle is None:
            raise BackendError("backend cpu: the executor is closed")
        return self._handle

    def _checked_mask(self, batch: StepBatch) -> NDArray[np.uint32]:
        shape = (len(batch.slots), -(-self._vocab // 32))
        if batch.mask is None or batch.mask.shape != shape:
            raise BackendError(f"backend cpu: the step's mask must have shape {shape}")
        return batch.mask


class _NativePlan:
    """The ctypes form of a plan; keeps the arrays that it points to alive until the executor is created."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        formats: Mapping[str, Packed],
        vectors: Mapping[str, F32],
        tables: SlotTables,
        kv_blocks: Sequence[int],
        limits: StepLimits,
    ) -> None:
        self._vectors = {name: np.ascontiguousarray(values) for name, values in vectors.items()}
        self._matrix_index = {name: index for index, name in enumerate(formats)}
        self._vector_index = {name: index for index, name in enumerate(self._vectors)}
        steps = [step for phase in plan.phases for step in phase]
        self._ops = (native.Op * len(steps))(*(self._op(step, plan.offsets) for step in steps))
        firsts = np.cumsum([0, *(len(phase) for phase in plan.phases)])
        self._phases = (native.Phase * len(plan.phases))(
            *(
                native.Phase(phase[0].phase, ROW_KINDS[phase[0].rows], int(first), len(phase))
                for phase, first in zip(plan.phases, firsts, strict=False)
            )
        )
        self._matrices = (native.Matrix * len(formats))(
            *(native.Matrix(formats[name], *program.weights[name].shape) for name in formats)
        )
        self._vector_specs = (native.Vector * len(self._vectors))(
            *(native.Vector(values.ctypes.data, values.size) for values in self._vectors.values())
        )
        groups = zip(program.kv_groups, tables.block_tables, kv_blocks, strict=True)
        self._kv = (native.KV * len(program.kv_groups))(*(_kv(*group) for group in groups))
        self._plan = native.Plan(
            ops=self._ops,
            phases=self._phases,
            matrices=self._matrices,
            vectors=self._vector_specs,
            kv=self._kv,
            tokens=tables.tokens.ctypes.data,
            sampling=tables.sampling.ctypes.data,
            arena_bytes=plan.arena_bytes,
            logits=plan.offsets[program.logits],
            hidden=plan.offsets.get(program.hidden, -1),
            op_count=len(steps),
            phase_count=len(plan.phases),
            matrix_count=len(formats),
            vector_count=len(self._vectors),
            kv_count=len(program.kv_groups),
            slots=tables.slots,
            max_len=tables.max_len,
            vocab=program.vocab_size,
            hidden_size=program.hidden_size,
            max_rows=limits.rows,
            max_logits=limits.logits_rows,
            max_top=limits.top_logprobs,
        )

    def create(self, threads: int, isa: int) -> c_void_p:
        self._plan.threads, self._plan.isa = threads, isa
        handle = c_void_p()
        check(native.library().artesian_create(byref(self._plan), byref(handle)), "load")
        return handle

    def _op(self, step: Step, offsets: Mapping[int, int]) -> native.Op:
        inputs = [offsets[index] for index in step.inputs] + [-1, -1]
        return native.Op(
            in0=inputs[0],
            in1=inputs[1],
            out=offsets.get(step.output, -1),
            code=step.code,
            rows=ROW_KINDS[step.rows],
            width=step.width,
            weight=self._matrix_index.get(step.weight, -1),
            vector=self._vector_index.get(step.vector, -1),
            kv_group=step.group,
            layer=step.layer,
            **step.ints,
            **step.floats,
        )


def _kv(spec: KVSpec, table: I32, blocks: int) -> native.KV:
    return native.KV(
        table=table.ctypes.data,
        table_blocks=table.shape[1],
        blocks=blocks,
        layers=len(spec.layers),
        heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_tokens=spec.block_tokens,
        window=spec.window,
        half=spec.dtype == "f16",
    )


def _pack(handle: c_void_p, index: int, name: str, tensor: Tensor) -> None:
    """Copy one matrix into the executor, converting formats that have no kernels in runs of rows."""
    rows, columns = tensor.shape
    if tensor.format in PACKED:
        _pack_rows(handle, index, name, tensor.format, np.ascontiguousarray(tensor.data), 0, rows)
        return
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    row_bytes, run = stored_bytes(tensor.format, (columns,)), max(1, CHUNK_ELEMENTS // columns)
    for first in range(0, rows, run):
        count = min(run, rows - first)
        part = tensor.data[first * row_bytes : (first + count) * row_bytes]
        values = dequantize(Tensor(tensor.format, (count, columns), part))
        packed = np.ascontiguousarray(quantize(values, GGMLQuantizationType[CONVERTED]))
        _pack_rows(handle, index, name, CONVERTED, packed, first, count)


def _pack_rows(
    handle: c_void_p, index: int, name: str, format: str, data: NDArray[np.uint8], first: int, rows: int
) -> None:
    status = native.library().artesian_pack(
        handle, index, SOURCES[format], data.ctypes.data, data.nbytes, first, rows
    )
    check(status, f"packing weight {name} ({format})")


def _written(array: NDArray[np.generic], dtype: type[np.generic], size: int) -> int:
    """Address of an array that the step writes; it must be right as it is, a copy would be lost."""
    if array.dtype != dtype or array.size < size or not array.flags.c_contiguous or not array.flags.writeable:
        raise BackendError(
            f"backend cpu: an output array must be contiguous {dtype.__name__} of {size} values"
        )
    address: int = array.ctypes.data
    return address


def _check_kv(groups: Sequence[KVSpec], kv_blocks: Sequence[int]) -> None:
    if len(groups) != len(kv_blocks):
        raise BackendError(f"the program has {len(groups)} KV groups, got {len(kv_blocks)} block counts")
    for spec in groups:
        if spec.kind not in (KVKind.FULL, KVKind.WINDOW) or spec.tokens_per_entry != 1 or spec.entry_bytes:
            raise BackendError(f"backend cpu cannot keep KV group {spec.name} of kind {spec.kind}")
        if spec.dtype not in ("f16", "f32"):
            raise BackendError(
                f"backend cpu cannot keep KV group {spec.name} as {spec.dtype}; use f16 or f32"
            )
        if spec.head_dim % 8:
            raise BackendError(
                f"backend cpu: KV group {spec.name}: head_dim={spec.head_dim} is no multiple of 8"
            )


def _check_weights(program: Program, weights: Mapping[str, Tensor]) -> None:
    for name, spec in program.weights.items():
        if name not in weights:
            raise BackendError(f"weight {name} is missing")
        tensor = weights[name]
        if tensor.shape != spec.shape:
            raise BackendError(f"weight {name} has shape {tensor.shape}, the program needs {spec.shape}")
        if tensor.format not in FORMATS:
            raise BackendError(f"weight {name}: backend cpu cannot read format {tensor.format}")
        try:
            needed = stored_bytes(tensor.format, tensor.shape)
        except ValueError as err:
            raise BackendError(f"weight {name}: {err}") from err
        if tensor.data.nbytes != needed:
            raise BackendError(
                f"weight {name} has {tensor.data.nbytes} bytes, {tensor.format} needs {needed}"
            )
