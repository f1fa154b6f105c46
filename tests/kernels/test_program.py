"""The recorder: what it accepts, what it refuses by name, and what a program says of itself."""

from collections.abc import Callable

import pytest

from artesian.kernels.backend import BackendError, check_ops, open_backend
from artesian.kernels.kv import KVKind, KVSpec
from artesian.kernels.program import Buffer, Program, Recorder, Rows, ShapeError

FULL = KVSpec("full", KVKind.FULL, (0, 2), 2, 4, "f16")
LATENT = KVSpec("latent", KVKind.LATENT, (1,), 1, 4, "packed", entry_bytes=8)


def small_program() -> Program:
    recorder = Recorder("small", (FULL,))
    x = recorder.embed(recorder.weight("table", 10, 8))
    recorder.kv_write(x, x, group=0, layer=2)
    x = recorder.attention(x, group=0, layer=2, scale=0.5)
    x = recorder.all_reduce(x)
    x = recorder.select(x, Rows.LOGITS)
    return recorder.finish(recorder.linear(x, "table"))


def test_program_knows_its_vocabulary_and_its_ops() -> None:
    program = small_program()
    assert program.vocab_size == 10
    assert program.op_codes() == {"embed", "kv_write", "attention", "all_reduce", "select", "linear"}


def test_kv_ops_name_the_layer_by_its_place_in_the_group() -> None:
    program = small_program()
    assert [op.integer("layer") for op in program.ops if "layer" in op.attrs] == [1, 1]


def test_collective_stands_alone_between_segments() -> None:
    codes = [[op.code for op in segment] for segment in small_program().segments()]
    assert codes == [["embed", "kv_write", "attention"], ["all_reduce"], ["select", "linear"]]


def test_rendered_program_has_a_line_for_every_op_and_group() -> None:
    lines = small_program().render().splitlines()
    assert lines[0] == "program small: 6 ops, 1 weights"
    assert "kv full: full" in lines[1]
    assert lines[2].strip() == "%0:embed[tokens, 8] = embed(table, scale=1)"
    assert lines[-1].strip().startswith("%4:table[logits, 10] = linear(%3, table,")


def test_tied_weight_keeps_one_shape() -> None:
    recorder = Recorder("r")
    recorder.weight("w", 4, 4)
    with pytest.raises(ShapeError, match="weight w"):
        recorder.weight("w", 4, 5)


def test_constant_keeps_its_values() -> None:
    recorder = Recorder("r")
    recorder.constant("c", [1.0])
    with pytest.raises(ShapeError, match="constant c"):
        recorder.constant("c", [2.0])


BAD: dict[str, tuple[str, Callable[[Recorder, Buffer], object]]] = {
    "undeclared": ("nothing is not declared", lambda r, x: r.linear(x, "nothing")),
    "width": (r"odd is \[4, 7\]", lambda r, x: r.linear(x, r.weight("odd", 4, 7))),
    "rank": ("vector has shape", lambda r, x: r.linear(x, r.weight("vector", 8))),
    "bias": ("bias b", lambda r, x: r.linear(x, r.weight("m", 4, 8), bias=r.weight("b", 8))),
    "residual": ("linear residual", lambda r, x: r.linear(x, r.weight("m", 4, 8), residual=x)),
    "group": ("rms_norm", lambda r, x: r.rms_norm(x, r.weight("n", 3), eps=0.0, group=3)),
    "rotary": ("rope", lambda r, x: r.rope(x, r.constant("c", [1.0] * 3), head_dim=4, interleaved=True)),
    "heads": ("attention", lambda r, x: r.attention(narrow(r, x, 12), group=0, layer=0, scale=1.0)),
    "foreign layer": ("layer 1 does not", lambda r, x: r.attention(x, group=0, layer=1, scale=1.0)),
    "latent": ("is latent", lambda r, x: r.kv_write(x, x, group=1, layer=1)),
    "activation": ("unknown activation", lambda r, x: r.glu(x, x, act="relu")),
    "rows": ("add", lambda r, x: r.add(x, r.select(x, Rows.LOGITS))),
    "logits": ("the logits buffer", lambda r, x: r.finish(x)),
}


def narrow(recorder: Recorder, x: Buffer, width: int) -> Buffer:
    return recorder.linear(x, recorder.weight("narrow", width, x.width))


@pytest.mark.parametrize("case", BAD)
def test_operand_that_does_not_fit_is_named(case: str) -> None:
    message, record = BAD[case]
    recorder = Recorder("bad", (FULL, LATENT))
    x = recorder.embed(recorder.weight("table", 10, 8))
    with pytest.raises(ShapeError, match=message):
        record(recorder, x)


def test_buffer_is_written_once_and_before_it_is_read() -> None:
    recorder = Recorder("r")
    loose = recorder.buffer("loose", Rows.TOKENS, 4)
    logits = recorder.select(loose, Rows.LOGITS)
    with pytest.raises(ShapeError, match="before it is written"):
        recorder.finish(logits)
    recorder.ops.insert(0, recorder.ops[0])
    recorder.op("fill", (), (loose,))
    recorder.ops.insert(0, recorder.ops.pop())
    with pytest.raises(ShapeError, match="a second time"):
        recorder.finish(logits)


def test_attr_of_another_type_is_named() -> None:
    op = small_program().ops[0]
    assert op.number("scale") == 1.0
    with pytest.raises(TypeError, match="embed: attr scale"):
        op.integer("scale")


def test_backend_that_lacks_an_op_refuses_it_by_name() -> None:
    with pytest.raises(BackendError, match="reference has no op 'all_reduce', which small needs"):
        check_ops(small_program(), open_backend("reference"))


@pytest.mark.parametrize("name", ["nowhere", "../cpu", "kv"])
def test_backend_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(BackendError, match="does not exist"):
        open_backend(name)
