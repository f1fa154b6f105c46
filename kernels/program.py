"""A model's forward pass, recorded once as a flat list of ops over symbolic buffers.

A family file drives a `Recorder`; the result is a `Program` that any backend runs once per engine
step. The program knows shapes and weights' names, and nothing of requests, blocks or devices. Row
counts stay symbolic (`Rows`): a step with one decode and a step with 500 prefill rows run the same
program.

Widths are float32 unless a buffer says otherwise. A buffer is written by exactly one op (single
assignment); a backend may alias buffers whose lives do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .kv import KVKind, KVSpec

Attr = int | float | str | bool | tuple[int, ...]


class Rows(StrEnum):
    """Symbolic row counts of a buffer."""

    TOKENS = "tokens"
    """T: every row of the step, sequences back to back."""
    LOGITS = "logits"
    """R: the rows whose logits are wanted (sampled, scored or verified)."""
    TAIL = "tail"
    """The last K rows of each sequence's prompt (K is the program's `tail_rows`)."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A symbolic [rows, width] array."""

    id: int
    name: str
    rows: Rows
    width: int
    dtype: str = "f32"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight that the program reads: its canonical name and its logical shape (outermost first)."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded op. `weights` are names into `Program.weights`; optional inputs are left out, and
    what was given is said by the attrs (`has_bias`, `has_residual`)."""

    code: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[str, ...]
    attrs: Mapping[str, Attr]

    def integer(self, name: str) -> int:
        """The attr as a whole number; raises `TypeError` when it is none."""
        value = self.attrs[name]
        if not isinstance(value, int):
            raise TypeError(f"{self.code}: attr {name} is {value!r}, expected a whole number")
        return value

    def number(self, name: str) -> float:
        """The attr as a float; raises `TypeError` when it is no number."""
        value = self.attrs[name]
        if not isinstance(value, int | float):
            raise TypeError(f"{self.code}: attr {name} is {value!r}, expected a number")
        return float(value)


@dataclass(frozen=True, slots=True)
class Program:
    """What a backend loads."""

    name: str
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    weights: Mapping[str, WeightSpec]
    constants: Mapping[str, Sequence[float]]
    """Small float32 vectors that belong to the model and not to the file (rope frequencies)."""
    kv_groups: tuple[KVSpec, ...]
    logits: int
    """The buffer [R, vocab] that is sampled."""
    hidden: int = -1
    """The buffer [R, hidden] that the logits are made of: what embeddings are pooled from. -1 = none."""
    tail_rows: int = 0

    @property
    def vocab_size(self) -> int:
        return self.buffers[self.logits].width

    @property
    def hidden_size(self) -> int:
        """Width of `hidden`, 0 without one."""
        return self.buffers[self.hidden].width if self.hidden >= 0 else 0

    def op_codes(self) -> frozenset[str]:
        return frozenset(op.code for op in self.ops)

    def segments(self) -> list[tuple[Op, ...]]:
        """Runs of ops between collectives: what a rank may execute without meeting its peers."""
        runs: list[list[Op]] = [[]]
        for op in self.ops:
            if op.code in COLLECTIVES:
                runs.append([op])
                runs.append([])
            else:
                runs[-1].append(op)
        return [tuple(run) for run in runs if run]

    def render(self) -> str:
        """The program as text, one op a line."""
        lines = [f"program {self.name}: {len(self.ops)} ops, {len(self.weights)} weights"]
        for group in self.kv_groups:
            lines.append(
                f"  kv {group.name}: {group.kind} layers={len(group.layers)} heads={group.kv_heads} "
                f"dim={group.head_dim} {group.dtype} window={group.window} "
                f"bytes/token={group.bytes_per_token:g}"
            )
        for op in self.ops:
            outs = ", ".join(self._buffer_text(i) for i in op.outputs)
            args = [f"%{i}" for i in op.inputs] + list(op.weights)
            args += [
                f"{key}={value:.7g}" if isinstance(value, float) else f"{key}={value}"
                for key, value in op.attrs.items()
            ]
            lines.append(f"  {outs + ' = ' if outs else ''}{op.code}({', '.join(args)})")
        return "\n".join(lines)

    def _buffer_text(self, index: int) -> str:
        buffer = self.buffers[index]
        return f"%{index}:{buffer.name}[{buffer.rows}, {buffer.width}]"


class ShapeError(ValueError):
    """A family recorded an op whose operands do not fit; the message names the op and the operand."""


COLLECTIVES = frozenset({"all_reduce", "all_gather", "all_to_all"})


@dataclass(slots=True)
class Recorder:
    """Records a forward pass. The named methods are the op set that every backend should have;
    `op` records any other op (a macro-op of one family), which a backend may lack.

    Op semantics, for all rows independently unless said otherwise:

    embed           out[t] = table[token(t)] * scale
    rms_norm        per group of `group` columns: x * rsqrt(mean(x^2) + eps) * weight (weight has
                    `group` elements and is shared by the groups)
    linear          out = x @ weight^T (+ bias) (+ residual); weight is [n, k]
    rope            rotates the first `rotary` columns of each head of `head_dim` at the row's position
                    with angles f32(position * inv_freq[i]); cos and sin are multiplied by `magnitude`.
                    interleaved: pairs (2i, 2i+1), otherwise (i, i + rotary/2)
    kv_write        stores k and v at the row's position, rounded to the group's dtype
    attention       softmax(scale * q . K^T) V over the positions p <= t of the row's sequence (and
                    p > t - window), K and V as stored, that is after rounding; query head h reads
                    KV head h // (heads / kv_heads). softcap: s = cap * tanh(s / cap) before softmax
    glu             act(gate) * up; act is silu, gelu_tanh or gelu (erf)
    add, scale      elementwise
    softcap         cap * tanh(x / cap)
    select          the rows named by the step, in its order (TOKENS -> LOGITS or TAIL)
    all_reduce      a collective: ends a segment
    """

    name: str
    kv_groups: tuple[KVSpec, ...] = ()
    tail_rows: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    constants: dict[str, Sequence[float]] = field(default_factory=dict)

    def buffer(self, name: str, rows: Rows, width: int, dtype: str = "f32") -> Buffer:
        new = Buffer(len(self.buffers), name, rows, width, dtype)
        self.buffers.append(new)
        return new

    def weight(self, name: str, *shape: int) -> str:
        """Declare a weight; the same name must always have the same shape (tied weights share one)."""
        spec = WeightSpec(name, shape)
        if self.weights.setdefault(name, spec).shape != shape:
            raise ShapeError(f"weight {name}: declared as {self.weights[name].shape} and as {shape}")
        return name

    def constant(self, name: str, values: Sequence[float]) -> str:
        if name in self.constants and list(self.constants[name]) != list(values):
            raise ShapeError(f"constant {name} declared twice with different values")
        self.constants[name] = values
        return name

    def op(
        self,
        code: str,
        inputs: Iterable[Buffer],
        outputs: Iterable[Buffer],
        weights: Iterable[str] = (),
        **attrs: Attr,
    ) -> None:
        """Record an op as given. Raises `ShapeError` when a weight was never declared."""
        names = tuple(weights)
        for name in names:
            if name not in self.weights and name not in self.constants:
                raise ShapeError(f"{code}: weight {name} is not declared")
        self.ops.append(Op(code, tuple(b.id for b in inputs), tuple(b.id for b in outputs), names, attrs))

    # -- the common op set -------------------------------------------------------------------------

    def embed(self, table: str, *, scale: float = 1.0) -> Buffer:
        out = self.buffer("embed", Rows.TOKENS, self._shape(table, 2, "embed")[1])
        self.op("embed", (), (out,), (table,), scale=scale)
        return out

    def rms_norm(self, x: Buffer, weight: str, *, eps: float, group: int = 0) -> Buffer:
        group = group or x.width
        if self._shape(weight, 1, "rms_norm") != (group,) or x.width % group:
            raise ShapeError(f"rms_norm: {weight} and group={group} do not fit width {x.width}")
        return self._unary("rms_norm", x, (weight,), eps=eps, group=group)

    def linear(
        self, x: Buffer, weight: str, *, bias: str | None = None, residual: Buffer | None = None
    ) -> Buffer:
        n, k = self._shape(weight, 2, "linear")
        if k != x.width:
            raise ShapeError(f"linear: {weight} is [{n}, {k}], its input has width {x.width}")
        if bias is not None and self._shape(bias, 1, "linear") != (n,):
            raise ShapeError(f"linear: bias {bias} must be [{n}]")
        if residual is not None:
            self._same("linear residual", residual, x.rows, n)
        out = self.buffer(weight, x.rows, n)
        inputs = (x,) if residual is None else (x, residual)
        weights = (weight,) if bias is None else (weight, bias)
        self.op(
            "linear",
            inputs,
            (out,),
            weights,
            has_bias=bias is not None,
            has_residual=residual is not None,
        )
        return out

    def rope(
        self, x: Buffer, inv_freq: str, *, head_dim: int, interleaved: bool, magnitude: float = 1.0
    ) -> Buffer:
        rotary = 2 * len(self.constants[inv_freq])
        if x.width % head_dim or rotary > head_dim:
            raise ShapeError(f"rope: width {x.width}, head_dim {head_dim}, rotary {rotary}")
        return self._unary(
            "rope",
            x,
            (inv_freq,),
            head_dim=head_dim,
            rotary=rotary,
            interleaved=interleaved,
            magnitude=magnitude,
        )

    def kv_write(self, k: Buffer, v: Buffer, *, group: int, layer: int) -> None:
        """`layer` is the model's layer number; it must belong to KV group `group`."""
        spec, index = self._kv_layer("kv_write", group, layer)
        for operand in (k, v):
            self._same("kv_write", operand, Rows.TOKENS, spec.kv_heads * spec.head_dim)
        self.op("kv_write", (k, v), (), (), group=group, layer=index)

    def attention(self, q: Buffer, *, group: int, layer: int, scale: float, softcap: float = 0.0) -> Buffer:
        spec, index = self._kv_layer("attention", group, layer)
        heads, rest = divmod(q.width, spec.head_dim)
        if rest or heads % spec.kv_heads:
            raise ShapeError(f"attention: width {q.width} is no multiple of the group's heads")
        return self._unary(
            "attention",
            q,
            (),
            group=group,
            layer=index,
            heads=heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            window=spec.window,
            scale=scale,
            softcap=softcap,
        )

    def glu(self, gate: Buffer, up: Buffer, *, act: str) -> Buffer:
        self._same("glu", up, gate.rows, gate.width)
        if act not in ("silu", "gelu_tanh", "gelu"):
            raise ShapeError(f"glu: unknown activation {act}")
        out = self.buffer("glu", gate.rows, gate.width)
        self.op("glu", (gate, up), (out,), (), act=act)
        return out

    def add(self, a: Buffer, b: Buffer) -> Buffer:
        self._same("add", b, a.rows, a.width)
        out = self.buffer("add", a.rows, a.width)
        self.op("add", (a, b), (out,))
        return out

    def scale(self, x: Buffer, factor: float) -> Buffer:
        return self._unary("scale", x, (), factor=factor)

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        return self._unary("softcap", x, (), cap=cap)

    def select(self, x: Buffer, rows: Rows) -> Buffer:
        out = self.buffer(x.name, rows, x.width, x.dtype)
        self.op("select", (x,), (out,), (), rows=str(rows))
        return out

    def all_reduce(self, x: Buffer) -> Buffer:
        return self._unary("all_reduce", x, ())

    def finish(self, logits: Buffer, hidden: Buffer | None = None) -> Program:
        """Close the recording; `logits` must be a [R, vocab] buffer, `hidden` has as many rows."""
        for name, buffer in (("logits", logits), ("hidden", hidden)):
            if buffer is not None and buffer.rows is not Rows.LOGITS:
                raise ShapeError(f"the {name} buffer has rows {buffer.rows}, expected {Rows.LOGITS}")
        self._check_single_assignment()
        return Program(
            self.name,
            tuple(self.buffers),
            tuple(self.ops),
            dict(self.weights),
            dict(self.constants),
            self.kv_groups,
            logits.id,
            -1 if hidden is None else hidden.id,
            self.tail_rows,
        )

    # -- checks ------------------------------------------------------------------------------------

    def _unary(self, code: str, x: Buffer, weights: Sequence[str], **attrs: Attr) -> Buffer:
        out = self.buffer(code, x.rows, x.width)
        self.op(code, (x,), (out,), weights, **attrs)
        return out

    def _shape(self, weight: str, rank: int, code: str) -> tuple[int, ...]:
        if weight not in self.weights:
            raise ShapeError(f"{code}: weight {weight} is not declared")
        shape = self.weights[weight].shape
        if len(shape) != rank:
            raise ShapeError(f"{code}: weight {weight} has shape {shape}, expected {rank} dimensions")
        return shape

    def _kv_layer(self, code: str, group: int, layer: int) -> tuple[KVSpec, int]:
        """The group and the layer's index in it; the op addresses entries of one K and one V a token."""
        spec = self.kv_groups[group]
        if spec.kind not in (KVKind.FULL, KVKind.WINDOW):
            raise ShapeError(f"{code}: KV group {spec.name} is {spec.kind}, which needs ops of its own")
        if layer not in spec.layers:
            raise ShapeError(f"{code}: layer {layer} does not belong to KV group {spec.name}")
        return spec, spec.layers.index(layer)

    @staticmethod
    def _same(code: str, x: Buffer, rows: Rows, width: int) -> None:
        if (x.rows, x.width) != (rows, width):
            raise ShapeError(f"{code}: got [{x.rows}, {x.width}], expected [{rows}, {width}]")

    def _check_single_assignment(self) -> None:
        written: set[int] = set()
        for op in self.ops:
            for source in op.inputs:
                if source not in written:
                    raise ShapeError(f"{op.code} reads %{source} before it is written")
            for target in op.outputs:
                if target in written:
                    raise ShapeError(f"{op.code} writes %{target} a second time")
                written.add(target)
