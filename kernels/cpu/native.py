"""The native library as ctypes sees it: the structs of `abi.h`, the functions of `library.h`.

It knows layouts and addresses; what the numbers mean is decided in `plan` and `backend`.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from ..backend import BackendError


class OpCode(IntEnum):
    EMBED = 0
    ANGLES = 1
    RMS_NORM = 2
    QUANTISE = 3
    ROPE = 4
    KV_WRITE = 5
    GLU = 6
    ADD = 7
    SCALE = 8
    SOFTCAP = 9
    SELECT = 10
    LINEAR = 11
    ATTENTION = 12


class PhaseKind(IntEnum):
    ROWS = 0
    LINEAR = 1
    ATTENTION = 2


class Packed(IntEnum):
    """Formats that the kernels compute with."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4 = 3
    Q8 = 4


SOURCES = {"F32": 0, "F16": 1, "BF16": 2, "Q4_0": 3, "Q4_1": 4, "Q8_0": 5}
ISAS = {"best": 0, "portable": 1, "avx2": 2}

STATUS_TEXT = {
    1: "out of memory",
    2: "a thread could not be started",
    3: "this CPU lacks the instruction set",
    4: "a weight's bytes do not fit its shape",
    5: "no such slot",
    6: "the segment's rows or logits rows are out of range",
    7: "a block that the rows need is missing from the block table",
    8: "a block copy names a group or block that does not exist",
    9: "more rows than the executor was loaded for",
    10: "more logits rows or top logprobs than the executor was loaded for",
    11: "the step queue is full",
}


class Op(ctypes.Structure):
    _fields_ = (
        [(name, c_int64) for name in ("in0", "in1", "out")]
        + [
            (name, c_int32)
            for name in ("code", "rows", "width", "weight", "vector", "act", "kv_group", "layer")
        ]
        + [(name, c_int32) for name in ("heads", "head_dim", "rotary", "interleaved")]
        + [("scale", c_float), ("softcap", c_float)]
    )


class Phase(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("kind", "rows", "first", "count")]


class Matrix(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("format", "rows", "cols")]


class Vector(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("length", c_int64)]


class KV(ctypes.Structure):
    _fields_ = [
        ("table", c_void_p),
        *((name, c_int32) for name in ("table_blocks", "blocks", "layers", "heads", "head_dim")),
        *((name, c_int32) for name in ("block_tokens", "window", "half")),
    ]


class Sampling(ctypes.Structure):
    """`SAMPLING_DTYPE`, here only for its size."""

    _fields_ = [
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "repetition")),
        *((name, c_double) for name in ("presence", "frequency")),
        *((name, c_uint64) for name in ("seed", "bias_ids", "bias_values", "stop_ids", "allowed")),
        *((name, c_int32) for name in ("top_k", "bias_count", "stop_count", "prompt_len", "min_len", "pad")),
    ]


class Plan(ctypes.Structure):
    _fields_ = [
        ("ops", POINTER(Op)),
        ("phases", POINTER(Phase)),
        ("matrices", POINTER(Matrix)),
        ("vectors", POINTER(Vector)),
        ("kv", POINTER(KV)),
        ("tokens", c_void_p),
        ("sampling", c_void_p),
        ("arena_bytes", c_int64),
        ("logits", c_int64),
        ("hidden", c_int64),
        *(
            (name, c_int32)
            for name in ("op_count", "phase_count", "matrix_count", "vector_count", "kv_count")
        ),
        *(
            (name, c_int32)
            for name in ("slots", "max_len", "vocab", "hidden_size", "max_rows", "max_logits", "max_top")
        ),
        *((name, c_int32) for name in ("threads", "isa", "pad")),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("slots", "starts", "counts", "logits", "sample")),
        *((name, c_void_p) for name in ("mask", "mask_ready", "copies")),
        *((name, c_void_p) for name in ("tokens", "logprobs", "ranks", "finite")),
        *((name, c_void_p) for name in ("top_tokens", "top_logprobs", "hidden")),
        *((name, c_int32) for name in ("segments", "copy_count", "top", "pad")),
    ]


class Completion(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("queued_ns", "started_ns", "ended_ns")),
        *((name, c_int32) for name in ("status", "failed")),
    ]


class Memory(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("weights", "kv", "buffers")]


ABI_VERSION = 3  # as in abi.h


def library_path() -> Path | None:
    """Where the compiled library lies beside this module, or None."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_native{suffix}"
        if path.exists():
            return path
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library.

    Raises:
        BackendError: it was not compiled, cannot be loaded, or was built from other sources.
    """
    path = library_path()
    if path is None:
        raise BackendError(
            "backend cpu has no compiled library: install a C compiler (gcc or clang) and reinstall artesian "
            "with `pip install --force-reinstall --no-deps .`, or use the reference backend"
        )
    try:
        native = ctypes.CDLL(str(path))
        native.artesian_abi.restype = c_int64
        abi = native.artesian_abi()
    except (OSError, AttributeError) as err:
        raise BackendError(f"backend cpu cannot load {path}: {err}") from err
    if abi != _expected_abi():
        raise BackendError(
            f"backend cpu: {path} was built from other sources; reinstall artesian to rebuild it"
        )
    native.artesian_create.argtypes = [POINTER(Plan), POINTER(c_void_p)]
    native.artesian_destroy.argtypes = [c_void_p]
    native.artesian_destroy.restype = None
    native.artesian_pack.argtypes = [c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int32, c_int32]
    native.artesian_step.argtypes = [c_void_p, POINTER(Step), POINTER(c_int32)]
    native.artesian_queue_open.argtypes = [c_void_p, c_int32, POINTER(c_void_p)]
    native.artesian_queue_submit.argtypes = [c_void_p, POINTER(Step)]
    native.artesian_queue_take.argtypes = [c_void_p, POINTER(Completion)]
    native.artesian_queue_close.argtypes = [c_void_p]
    native.artesian_queue_close.restype = None
    native.artesian_export_block.argtypes = [c_void_p, c_int32, c_int32, c_void_p, c_int64]
    native.artesian_import_block.argtypes = [c_void_p, c_int32, c_int32, c_void_p, c_int64]
    native.artesian_logits.argtypes = [c_void_p]
    native.artesian_logits.restype = POINTER(c_float)
    native.artesian_memory.argtypes = [c_void_p, POINTER(Memory)]
    native.artesian_memory.restype = None
    native.artesian_isa.argtypes = [c_void_p]
    native.artesian_isa.restype = c_char_p
    native.artesian_isa_for.argtypes = [c_int32]
    native.artesian_isa_for.restype = c_char_p
    return native


def check(status: int, what: str) -> None:
    """Raise `BackendError` when a native call failed."""
    if status:
        raise BackendError(f"backend cpu: {what}: {STATUS_TEXT.get(status, f'error {status}')}")


def _expected_abi() -> int:
    sizes = [(Plan, 48), (Step, 36), (Op, 24), (Sampling, 12), (KV, 0)]
    digest = ABI_VERSION
    for struct, shift in sizes:
        digest ^= ctypes.sizeof(struct) << shift
    return digest
