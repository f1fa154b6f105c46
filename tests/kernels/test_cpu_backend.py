"""Loading and stepping on the cpu backend: refusals by name, isolation, memory, conversion, blocks."""

import gc
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from random_weights import f32_tensor, random_weights
from stepping import Segment, Session, open_session
from tiny_programs import GEMMA, LLAMA, logits_program, logits_weights, store, stored

from artesian.engine.models.registry import build_program
from artesian.kernels.backend import BackendError, StepLimits, Tensor, open_backend
from artesian.kernels.batch import SlotTables, StepBatch, StepOutput
from artesian.kernels.cpu import native
from artesian.kernels.cpu.backend import CpuBackend, CpuExecutor
from artesian.kernels.kv import KVKind, KVSpec
from artesian.kernels.program import Program, Recorder, Rows
from artesian.kernels.quant import dequantize

PROGRAM = build_program(LLAMA, block_tokens=16)
PROMPT = list(range(1, 40))


def session_of(program: Program = PROGRAM, weights: dict[str, Tensor] | None = None, **room: int) -> Session:
    return open_session(open_backend("cpu"), program, weights or random_weights(program, gain=1.5), **room)


def executor_of(session: Session) -> CpuExecutor:
    assert isinstance(session.executor, CpuExecutor)
    return session.executor


def test_serving_needs_no_torch() -> None:
    code = "import sys; from artesian.kernels.backend import open_backend; open_backend('cpu')"
    code += "; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library_path", lambda: None)
    native.library.cache_clear()
    with pytest.raises(BackendError, match="C compiler"):
        open_backend("cpu")
    native.library.cache_clear()


def test_foreign_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(native, "library_path", lambda: path)
    native.library.cache_clear()
    with pytest.raises(BackendError, match="cannot load"):
        open_backend("cpu")
    native.library.cache_clear()


BAD_WEIGHTS: dict[str, tuple[str, Callable[[dict[str, Tensor]], object]]] = {
    "missing": ("output_norm.weight is missing", lambda w: w.pop("output_norm.weight")),
    "shape": ("has shape", lambda w: w.update({"token_embd.weight": f32_tensor(np.zeros((4, 4)))})),
    "format": ("IQ4_NL", lambda w: w.update({"a": w["token_embd.weight"]} | reformatted(w, "IQ4_NL"))),
    "bytes": ("bytes", lambda w: w.update(reformatted(w, "F16"))),
}


def reformatted(weights: dict[str, Tensor], format: str) -> dict[str, Tensor]:
    return {"token_embd.weight": replace(weights["token_embd.weight"], format=format)}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weight_that_does_not_fit_is_named(case: str) -> None:
    message, spoil = BAD_WEIGHTS[case]
    weights = random_weights(PROGRAM)
    spoil(weights)
    with pytest.raises(BackendError, match=message):
        session_of(weights=weights)


def test_op_that_the_backend_lacks_is_named() -> None:
    recorder = Recorder("r")
    x = recorder.embed(recorder.weight("table", 8, 8))
    recorder.op("mixture", (x,), ())
    program = recorder.finish(recorder.select(x, Rows.LOGITS))
    with pytest.raises(BackendError, match="no op 'mixture'"):
        session_of(program)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (KVSpec("g", KVKind.FULL, (0,), 1, 8, "bf16"), "as bf16"),
        (KVSpec("g", KVKind.FULL, (0,), 1, 12, "f16"), "head_dim=12"),
        (KVSpec("g", KVKind.STATE, (0,), 1, 8, "f16"), "kind state"),
    ],
)
def test_kv_group_that_does_not_fit_is_named(spec: KVSpec, message: str) -> None:
    program = replace(PROGRAM, kv_groups=(spec,))
    with pytest.raises(BackendError, match=message):
        session_of(program)


BAD_STEPS: dict[str, tuple[str, dict[str, object]]] = {
    "slot": ("no such slot", {"slots": [8]}),
    "start": ("out of range", {"starts": [-1]}),
    "end": ("out of range", {"starts": [250]}),
    "count": ("out of range", {"counts": [0]}),
    "logits": ("out of range", {"logits": [11]}),
    "sample": ("out of range", {"logits": [0], "sample": [1]}),
    "rows": ("more rows", {"counts": [101]}),
    "block": ("block", {"starts": [100]}),
    "top": ("top logprobs", {"top_logprobs": 21}),
    "copy": ("block copy", {"copies": [[0, 0, 10_000]]}),
    "group": ("block copy", {"copies": [[1, 0, 0]]}),
    "mask": ("mask must have shape", {"mask": np.zeros((1, 2), np.uint32)}),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_step_that_does_not_fit_is_refused_and_the_next_one_runs(case: str) -> None:
    message, changes = BAD_STEPS[case]
    session = session_of(rows=100)
    slot = session.start(PROMPT[:10])
    batch = session.batch([Segment(slot, 10)])
    arrays = {
        name: np.array(value, np.uint8 if name == "sample" else np.int32)
        if isinstance(value, list)
        else value
        for name, value in changes.items()
    }
    bad: StepBatch = replace(batch, **arrays)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=message):
        session.executor.step(bad, StepOutput.empty(max(1, bad.logits_rows), bad.top_logprobs))
    output = StepOutput.empty(1, 0)
    session.executor.step(batch, output)
    assert output.finite.tolist() == [1]


def test_output_that_cannot_be_written_is_refused() -> None:
    session = session_of()
    batch = session.batch([Segment(session.start(PROMPT), len(PROMPT))])
    with pytest.raises(BackendError, match="output array"):
        session.executor.step(batch, replace(StepOutput.empty(1, 0), tokens=np.zeros(1, np.int64)))


def test_closed_executor_refuses_steps() -> None:
    session = session_of()
    session.executor.close()
    session.executor.close()
    with pytest.raises(BackendError, match="closed"):
        session.step(Segment(session.start(PROMPT)))


def test_memory_is_counted_by_purpose() -> None:
    weights = stored(random_weights(PROGRAM), "Q4_1")
    memory = session_of(weights=weights, slots=2, max_len=64).executor.memory_bytes()
    assert memory["kv"] == 2 * 4 * PROGRAM.kv_groups[0].block_bytes
    stored_bytes = sum(tensor.data.nbytes for tensor in weights.values())
    assert stored_bytes <= memory["weights"] < 1.3 * stored_bytes
    assert memory["buffers"] > 0


def test_many_executors_run_side_by_side() -> None:
    sessions = [session_of(threads=3) for _ in range(4)]
    results: list[list[int]] = [[] for _ in sessions]

    def run(index: int) -> None:
        session = sessions[index]
        results[index] = session.generate(session.start(PROMPT), 12)

    threads = [Thread(target=run, args=(index,)) for index in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results[0]) == 12
    assert all(result == results[0] for result in results)


def test_executors_without_owner_release_their_threads() -> None:
    before = thread_count()
    for _ in range(3):
        session_of(threads=4)
        gc.collect()
    assert thread_count() == before


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_poisoned_sequence_is_reported_and_stays_alone() -> None:
    weights = random_weights(PROGRAM, gain=1.5)
    table = dequantize(weights["token_embd.weight"])
    table[77] = np.nan
    weights = stored(weights | {"output.weight": weights["token_embd.weight"]}, "Q4_1")
    weights["token_embd.weight"] = f32_tensor(table)
    session = session_of(build_program(replace(LLAMA, tied=False), block_tokens=16), weights)
    clean, poisoned = session.start(PROMPT), session.start([*PROMPT, 77])
    output = session.step(Segment(clean, len(PROMPT)), Segment(poisoned, len(PROMPT) + 1))
    assert output.finite.tolist() == [1, 0]
    session.end(poisoned)
    reuse = session.start(PROMPT)
    session.step(Segment(reuse, len(PROMPT)))
    again = session.step(Segment(clean), Segment(reuse))
    assert again.finite.tolist() == [1, 1]
    assert again.tokens[0] == again.tokens[1]


@pytest.mark.parametrize("format", ["Q4_K", "Q5_K", "Q6_K", "Q5_1"])
def test_other_formats_are_converted_with_a_notice(format: str, caplog: pytest.LogCaptureFixture) -> None:
    generator = np.random.default_rng(0)
    matrix = random_blocks(format, 40, 512, generator)
    inputs = generator.standard_normal((8, 512)).astype(np.float32)
    recorder = Recorder("converted")
    x = recorder.embed(recorder.weight("table", *inputs.shape))
    x = recorder.linear(x, recorder.weight("matrix", 40, 512))
    program = recorder.finish(recorder.select(x, Rows.LOGITS))
    with caplog.at_level(logging.WARNING):
        session = session_of(program, {"table": f32_tensor(inputs), "matrix": matrix})
    assert f"from={format} to=Q8_0" in caplog.text
    session.step(Segment(session.start(list(range(8))), 8, logits=8, sample=False))
    want = inputs @ dequantize(matrix).T
    error = np.abs(executor_of(session).logits - want).max()
    assert error < 0.02 * np.abs(want).max()


def random_blocks(format: str, rows: int, columns: int, generator: np.random.Generator) -> Tensor:
    """A tensor of a format that the gguf package can read but not write: random codes, sane scales."""
    if format == "Q5_1":
        return store(f32_tensor(generator.standard_normal((rows, columns))), format)
    size, scales = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}[format]
    data = generator.integers(0, 256, (rows * columns // 256, size), np.uint8)
    for at in scales:
        data[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    return Tensor(format, (rows, columns), data.reshape(-1))


@pytest.mark.parametrize("layout", ["llama", "gemma"])
def test_copied_blocks_continue_a_sequence(layout: str) -> None:
    program = build_program({"llama": LLAMA, "gemma": GEMMA}[layout], block_tokens=16)
    session = session_of(program, threads=2)
    slot = session.start(PROMPT)
    session.prefill(slot)
    twin = session.start(PROMPT)
    session.tables.tokens[twin] = session.tables.tokens[slot]
    session.computed[twin], session.length[twin] = session.computed[slot], session.length[slot]
    session._reserve(twin, session.length[twin])
    copies = [
        [group, table[slot, index], table[twin, index]]
        for group, table in enumerate(session.tables.block_tables)
        for index in range(3)
    ]
    session.step(Segment(slot), Segment(twin), copies=np.array(copies, np.int32))
    logits = executor_of(session).logits
    assert (logits[0] == logits[1]).all()


def test_blocks_behind_the_window_may_be_given_back() -> None:
    program = build_program(GEMMA, block_tokens=16)
    session = session_of(program)
    long = PROMPT * 3
    slots = [session.start(long), session.start(long)]
    for slot in slots:
        session.prefill(slot)
    window = next(i for i, group in enumerate(program.kv_groups) if group.kind is KVKind.WINDOW)
    gone = (len(long) + 1 - GEMMA.window) // 16
    session.tables.block_tables[window][slots[0], :gone] = -1
    session.step(*(Segment(slot) for slot in slots))
    logits = executor_of(session).logits
    assert (logits[0] == logits[1]).all()


def test_weights_are_not_kept() -> None:
    weights = stored(random_weights(PROGRAM, gain=1.5), "Q8_0")
    session = session_of(weights=weights)
    slot = session.start(PROMPT)
    for tensor in weights.values():
        tensor.data[:] = 0
    assert session.step(Segment(slot, len(PROMPT))).finite.tolist() == [1]
    assert np.ptp(executor_of(session).logits) > 0


def test_steps_without_logits_or_segments_do_nothing_else() -> None:
    session = session_of()
    slot = session.start(PROMPT)
    assert len(session.step(Segment(slot, 5, logits=0, sample=False)).tokens) == 0
    assert len(session.step().tokens) == 0


def test_limits_of_the_plan_hold_the_largest_step() -> None:
    program = logits_program(40)
    tables = SlotTables(2, 16, program.kv_groups)
    weights = logits_weights(np.eye(40, dtype=np.float32))
    executor = CpuBackend().load(program, weights, tables, [], StepLimits(rows=7, logits_rows=7), 2)
    session = Session(executor, tables, program.kv_groups, [])
    output = session.step(Segment(session.start([1, 2, 3, 4, 5, 6, 7]), 7, logits=7))
    assert output.ranks[0] == 2
    assert output.tokens.tolist()[:6] == [2, 3, 4, 5, 6, 7]
