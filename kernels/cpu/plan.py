"""Compiles a `Program` into what the native executor walks: ops in phases, buffers in one arena.

A phase needs no barrier inside: a chain of row ops (each row runs the whole chain), linears that read
nothing of one another, or one attention. Ops are moved forward into the earliest such phase, so q, k
and v, or gate and up, become one. Inputs of quantised linears are quantised once, by an op of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ..backend import BackendError, StepLimits
from ..program import Op, Program, Rows
from .native import OpCode, Packed, PhaseKind

ALIGN = 64
ROW_KINDS = {Rows.TOKENS: 0, Rows.LOGITS: 1}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}

_CODES = {
    "embed": OpCode.EMBED,
    "rms_norm": OpCode.RMS_NORM,
    "linear": OpCode.LINEAR,
    "rope": OpCode.ROPE,
    "kv_write": OpCode.KV_WRITE,
    "attention": OpCode.ATTENTION,
    "glu": OpCode.GLU,
    "add": OpCode.ADD,
    "scale": OpCode.SCALE,
    "softcap": OpCode.SOFTCAP,
    "select": OpCode.SELECT,
}
OPS = frozenset(_CODES)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One native op before its buffers have addresses."""

    code: OpCode
    rows: Rows
    width: int
    inputs: tuple[int, ...] = ()
    output: int = -1
    weight: str = ""
    """The packed matrix, if any."""
    vector: str = ""
    """The float vector: norm weight, bias, inv_freq."""
    layer: int = -1
    group: int = -1
    ints: Mapping[str, int] = field(default_factory=dict)
    floats: Mapping[str, float] = field(default_factory=dict)

    @property
    def phase(self) -> PhaseKind:
        if self.code is OpCode.LINEAR:
            return PhaseKind.LINEAR
        return PhaseKind.ATTENTION if self.code is OpCode.ATTENTION else PhaseKind.ROWS


@dataclass(frozen=True, slots=True)
class Plan:
    """Phases of steps, and the arena offset of every buffer."""

    phases: tuple[tuple[Step, ...], ...]
    offsets: Mapping[int, int]
    arena_bytes: int


def compile_program(program: Program, formats: Mapping[str, Packed], limits: StepLimits) -> Plan:
    """Return the plan of `program` with its matrices packed as `formats`.

    Raises:
        BackendError: an op selects rows that the backend cannot.
    """
    steps, sizes = _lower(program, formats, limits)
    phases = _schedule(steps)
    offsets, arena = _place(phases, sizes, keep={program.logits, program.hidden})
    return Plan(phases, offsets, arena)


# -- lowering ------------------------------------------------------------------------------------------


def _lower(
    program: Program, formats: Mapping[str, Packed], limits: StepLimits
) -> tuple[list[Step], dict[int, int]]:
    """Translate the ops, adding quantised inputs and rope angles. Returns the steps and buffer bytes."""
    most = {Rows.TOKENS: limits.rows, Rows.LOGITS: limits.logits_rows}
    for buffer in program.buffers:
        if buffer.rows not in most:
            raise BackendError(f"backend cpu cannot select the {buffer.rows} rows of {program.name}")
    sizes = {b.id: most[b.rows] * -(-b.width // 8) * 32 for b in program.buffers}
    steps: list[Step] = []
    extra: dict[tuple[str, int], int] = {}

    def derived(kind: str, key: int, size: int, step: Step) -> int:
        if (kind, key) not in extra:
            index = extra[kind, key] = len(program.buffers) + len(extra)
            sizes[index] = size
            steps.append(replace(step, output=index))
        return extra[kind, key]

    constants = list(program.constants)
    for op in program.ops:
        step = _translate(program, op)
        if step.code is OpCode.LINEAR and formats[step.weight] >= Packed.Q4:
            source = program.buffers[op.inputs[0]]
            quantise = Step(OpCode.QUANTISE, source.rows, source.width, (source.id,))
            tiles = -(-most[source.rows] // 4)
            packed = derived("q8", source.id, tiles * (source.width // 32) * 160, quantise)
            step = replace(step, inputs=(packed, *op.inputs[1:]))
        if step.code is OpCode.ROPE:
            rotary = step.ints["rotary"]
            angles = Step(OpCode.ANGLES, Rows.TOKENS, rotary, vector=step.vector, ints={"rotary": rotary})
            key = constants.index(step.vector)
            table = derived("angles", key, limits.rows * -(-rotary // 8) * 32, angles)
            step = replace(step, inputs=(*op.inputs, table))
        steps.append(step)
    return steps, sizes


def _translate(program: Program, op: Op) -> Step:
    if op.code == "kv_write":
        buffer = program.buffers[op.inputs[0]]
        output = -1
    else:
        buffer = program.buffers[op.outputs[0]]
        output = buffer.id
    step = Step(_CODES[op.code], buffer.rows, buffer.width, op.inputs, output)
    match op.code:
        case "embed":
            return replace(step, weight=op.weights[0], floats={"scale": op.number("scale")})
        case "rms_norm":
            ints = {"head_dim": op.integer("group")}
            return replace(step, vector=op.weights[0], ints=ints, floats={"scale": op.number("eps")})
        case "linear":
            return replace(step, weight=op.weights[0], vector=op.weights[1] if op.attrs["has_bias"] else "")
        case "rope":
            ints = {name: op.integer(name) for name in ("head_dim", "rotary", "interleaved")}
            floats = {"scale": op.number("magnitude")}
            return replace(step, vector=op.weights[0], ints=ints, floats=floats)
        case "kv_write":
            return replace(step, group=op.integer("group"), layer=op.integer("layer"))
        case "attention":
            ints = {name: op.integer(name) for name in ("heads", "head_dim")}
            floats = {name: op.number(name) for name in ("scale", "softcap")}
            group, layer = op.integer("group"), op.integer("layer")
            return replace(step, group=group, layer=layer, ints=ints, floats=floats)
        case "glu":
            return replace(step, ints={"act": ACTIVATIONS[str(op.attrs["act"])]})
        case "scale":
            return replace(step, floats={"scale": op.number("factor")})
        case "softcap":
            return replace(step, floats={"softcap": op.number("cap")})
        case _:
            return step


# -- phases --------------------------------------------------------------------------------------------


def _schedule(steps: Sequence[Step]) -> tuple[tuple[Step, ...], ...]:
    """Group the steps into phases. Row ops run as soon as they can, then all linears that are ready."""
    left = list(steps)
    done: set[int] = set()
    phases: list[tuple[Step, ...]] = []
    while left:
        first = min((step for step in left if _is_ready(step, left, done)), key=lambda step: step.phase)
        phase: list[Step] = []
        available = set(done)
        for step in left:
            if (step.phase, step.rows) != (first.phase, first.rows) or not _is_ready(step, left, available):
                continue
            phase.append(step)
            if step.phase is PhaseKind.ROWS:
                available.add(step.output)
            if step.phase is PhaseKind.ATTENTION:
                break
        done.update(step.output for step in phase)
        chosen = set(phase)
        left = [step for step in left if step not in chosen]
        phases.append(tuple(phase))
    return tuple(phases)


def _is_ready(step: Step, left: Sequence[Step], available: set[int]) -> bool:
    """Whether its inputs are there; attention also waits for the K/V writes recorded before it."""
    if not all(index in available for index in step.inputs):
        return False
    if step.code is not OpCode.ATTENTION:
        return True
    for other in left:
        if other is step:
            return True
        if other.code is OpCode.KV_WRITE and (other.group, other.layer) == (step.group, step.layer):
            return False
    return True


# -- addresses -----------------------------------------------------------------------------------------


def _place(
    phases: Sequence[Sequence[Step]], sizes: Mapping[int, int], keep: Set[int]
) -> tuple[dict[int, int], int]:
    """Give every buffer an offset; buffers whose lives (in phases, ends included) do not meet may share."""
    born: dict[int, int] = {}
    dies: dict[int, int] = dict.fromkeys(keep, len(phases))
    for at, phase in enumerate(phases):
        for step in phase:
            if step.output >= 0:
                born[step.output] = at
                dies.setdefault(step.output, at)
            for index in step.inputs:
                dies[index] = max(dies.get(index, at), at)
    offsets: dict[int, int] = {}
    live: list[int] = []
    arena = 0
    for index in sorted(born, key=lambda index: born[index]):
        live = [other for other in live if dies[other] >= born[index]]
        size = -(-sizes[index] // ALIGN) * ALIGN
        offset = 0
        for other in sorted(live, key=lambda other: offsets[other]):
            if offset + size <= offsets[other]:
                break
            offset = max(offset, offsets[other] + -(-sizes[other] // ALIGN) * ALIGN)
        offsets[index] = offset
        live.append(index)
        arena = max(arena, offset + size)
    return offsets, arena
