"""The reference backend: single ops against their definitions, KV memory, errors, and batch invariance."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from random_weights import f32_tensor, random_weights
from stepping import Segment, Session, open_session
from tiny_programs import GEMMA, LLAMA

from artesian.engine.models.config import ModelConfig, RopeConfig
from artesian.engine.models.registry import build_program
from artesian.kernels.backend import BackendError, StepLimits, Tensor, open_backend
from artesian.kernels.batch import SlotTables
from artesian.kernels.kv import KVDtype, KVKind, KVSpec
from artesian.kernels.program import Buffer, Program, Recorder, Rows
from artesian.kernels.quant import dequantize

F32 = NDArray[np.float32]

SMOLLM = replace(  # its sizes, with few layers and words
    LLAMA,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab=997,
    rope=RopeConfig(interleaved=True),
)
MODELS = {"tiny": LLAMA, "smollm": SMOLLM, "gemma": GEMMA}


def session_of(config: ModelConfig, kv_dtype: KVDtype = "f16", *, threads: int = 1) -> Session:
    program = build_program(config, kv_dtype=kv_dtype, block_tokens=16)
    weights = random_weights(program, gain=1.5)
    return open_session(
        open_backend("reference"), program, weights, slots=17, max_len=192, rows=2048, threads=threads
    )


def tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, LLAMA.vocab, count)]


def logits_of(session: Session) -> F32:
    logits: F32 = session.executor.logits.copy()  # type: ignore[attr-defined]
    return logits


# -- ops against their definitions -----------------------------------------------------------------


def run_on_embeddings(recorder: Recorder, x: Buffer, table: F32, **weights: F32) -> F32:
    """Finish a program whose rows are `table[0], table[1], ...` at positions 0, 1, ... and return x.

    The logits are x and columns of zeros behind it, so that every row's token is in the vocabulary.
    """
    rows = len(table)
    wide = np.eye(max(rows, x.width), x.width, dtype=np.float32)
    logits = recorder.linear(recorder.select(x, Rows.LOGITS), recorder.weight("wide", *wide.shape))
    tensors = {name: f32_tensor(value) for name, value in weights.items()}
    tensors |= {"table": f32_tensor(table), "wide": f32_tensor(wide)}
    session = open_session(
        open_backend("reference"), recorder.finish(logits), tensors, slots=1, max_len=rows + 1
    )
    slot = session.start(list(range(rows)))
    session.step(Segment(slot, rows, logits=rows, sample=False))
    return logits_of(session)[:, : x.width]


def recorder_of(table: F32, *groups: KVSpec) -> tuple[Recorder, Buffer]:
    recorder = Recorder("ops", groups)
    return recorder, recorder.embed(recorder.weight("table", *table.shape))


def noise(*shape: int) -> F32:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_rms_norm_normalises_each_group_of_columns() -> None:
    table, weight = noise(20, 12), noise(4)
    recorder, x = recorder_of(table)
    out = recorder.rms_norm(x, recorder.weight("w", 4), eps=1e-5, group=4)
    grouped = table.reshape(20, 3, 4)
    want = grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + 1e-5) * weight
    assert np.allclose(run_on_embeddings(recorder, out, table, w=weight), want.reshape(20, 12), atol=1e-6)


def test_linear_adds_bias_and_residual() -> None:
    table, matrix, bias = noise(20, 12), noise(12, 12), noise(12)
    recorder, x = recorder_of(table)
    out = recorder.linear(x, recorder.weight("m", 12, 12), bias=recorder.weight("b", 12), residual=x)
    got = run_on_embeddings(recorder, out, table, m=matrix, b=bias)
    assert np.allclose(got, table @ matrix.T + bias + table, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_by_the_position_and_keeps_the_other_columns(interleaved: bool) -> None:
    table, inv_freq = noise(20, 16), [1.0, 0.1]
    recorder, x = recorder_of(table)
    constant = recorder.constant("f", inv_freq)
    out = recorder.rope(x, constant, head_dim=8, interleaved=interleaved, magnitude=1.5)
    want = table.reshape(20, 2, 8).astype(np.complex128)
    for i in range(2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
        turn = 1.5 * np.exp(1j * np.arange(20) * inv_freq[i])[:, None]
        z = (want[..., a] + 1j * want[..., b]) * turn
        want[..., a], want[..., b] = z.real, z.imag
    assert np.allclose(run_on_embeddings(recorder, out, table), want.real.reshape(20, 16), atol=1e-5)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gelu"])
def test_glu_matches_torch(act: str) -> None:
    import torch
    from torch.nn import functional

    table = 3 * noise(20, 12)
    recorder, x = recorder_of(table)
    got = run_on_embeddings(recorder, recorder.glu(x, x, act=act), table)
    wide = torch.from_numpy(table).double()
    acted = {
        "silu": functional.silu(wide),
        "gelu_tanh": functional.gelu(wide, approximate="tanh"),
        "gelu": functional.gelu(wide),
    }[act]
    assert np.allclose(got, (acted * wide).numpy(), atol=1e-5)


def test_scale_softcap_and_add_are_elementwise() -> None:
    table = noise(5, 6)
    recorder, x = recorder_of(table)
    out = recorder.add(recorder.scale(x, 0.5), recorder.softcap(x, 2.0))
    assert np.allclose(run_on_embeddings(recorder, out, table), table / 2 + 2 * np.tanh(table / 2), atol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 1, 5, 70])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_attention_reads_the_rounded_keys_and_values_inside_its_window(
    dtype: KVDtype, window: int, softcap: float
) -> None:
    rows, heads, dim = 100, 4, 8
    table = noise(rows, heads * dim)
    group = KVSpec("g", KVKind.WINDOW if window else KVKind.FULL, (0,), 2, dim, dtype, window, 16)
    recorder, q = recorder_of(table, group)
    narrow = noise(2 * dim, heads * dim) * np.float32(0.25)
    k = recorder.linear(q, recorder.weight("narrow", *narrow.shape))
    recorder.kv_write(k, k, group=0, layer=0)
    out = recorder.attention(q, group=0, layer=0, scale=0.5, softcap=softcap)
    got = run_on_embeddings(recorder, out, table, narrow=narrow)

    kv = rounded(table @ narrow.T, dtype).astype(np.float64).reshape(rows, 2, dim).repeat(2, axis=1)
    scores = 0.5 * np.einsum("qhd,khd->hqk", table.astype(np.float64).reshape(rows, heads, dim), kv)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    age = np.arange(rows)[:, None] - np.arange(rows)
    scores[:, (age < 0) | (age >= (window or rows))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), kv)
    # A product on the edge of two stored values may round the other way: one step of bf16 or f16.
    tolerance = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3}[dtype]
    assert np.abs(got - want.reshape(rows, -1)).max() < tolerance


def rounded(x: F32, dtype: KVDtype) -> F32:
    if dtype == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return x.astype(np.float16 if dtype == "f16" else np.float32).astype(np.float32)


def test_quantised_weights_compute_as_their_dequantised_values() -> None:
    from gguf import GGMLQuantizationType, quantize

    program = build_program(replace(LLAMA, hidden=64, ffn=96))
    exact = random_weights(program)
    packed = {
        name: Tensor("Q8_0", t.shape, quantize(dequantize(t), GGMLQuantizationType.Q8_0).reshape(-1))
        if len(t.shape) == 2
        else t
        for name, t in exact.items()
    }
    results = []
    for weights in (packed, {name: f32_tensor(dequantize(t)) for name, t in packed.items()}, exact):
        session = open_session(open_backend("reference"), program, weights)
        session.step(Segment(session.start(tokens(0, 9)), 9))
        results.append(logits_of(session))
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


# -- KV memory -------------------------------------------------------------------------------------


def test_copied_block_continues_a_sequence_in_another_slot() -> None:
    session = session_of(LLAMA)
    prompt = tokens(1, 24)
    first = session.start(prompt)
    session.prefill(first)
    want = logits_of(session)
    twin = session.start(prompt)
    session.computed[twin] = 16
    table = session.tables.block_tables[0]
    table[twin, 0] = session.free[0].pop()
    session.step(Segment(twin, 8), copies=np.array([[0, table[first, 0], table[twin, 0]]], np.int32))
    assert np.array_equal(logits_of(session), want)


def test_blocks_behind_the_window_may_be_taken_away() -> None:
    session = session_of(GEMMA)
    prompt = tokens(2, 70)
    kept, trimmed = session.start(prompt), session.start(prompt)
    session.prefill(kept)
    session.prefill(trimmed)
    window_group = next(i for i, spec in enumerate(session.groups) if spec.window)
    behind = (70 - GEMMA.window + 1) // 16
    session.tables.block_tables[window_group][trimmed, :behind] = -1
    session.step(Segment(kept), Segment(trimmed))
    logits = logits_of(session)
    assert behind == 2
    assert np.array_equal(logits[0], logits[1])


def test_garbage_in_a_reused_block_is_not_read() -> None:
    session = session_of(LLAMA)
    slot = session.start(tokens(3, 20))
    session.prefill(slot)
    want = logits_of(session)
    session.end(slot)
    for pool in session.executor._pools:  # type: ignore[attr-defined]
        pool.entries.fill_(math.nan)
    session.prefill(session.start(tokens(3, 20)))
    assert np.array_equal(logits_of(session), want)


def test_memory_is_counted_by_purpose() -> None:
    session = session_of(LLAMA)
    program = build_program(LLAMA)
    weights = sum(4 * math.prod(spec.shape) for spec in program.weights.values())
    kv = 17 * 12 * session.groups[0].block_bytes
    assert session.executor.memory_bytes() == {"weights": weights, "kv": kv, "buffers": 0}


# -- batch invariance ------------------------------------------------------------------------------

LENGTH = 150


def all_rows(session: Session, prompt: list[int], chunk: int) -> F32:
    """Logits of every row of a prompt computed in chunks."""
    slot = session.start(prompt)
    rows = []
    for start in range(0, len(prompt), chunk):
        count = min(chunk, len(prompt) - start)
        session.step(Segment(slot, count, logits=count, sample=False))
        rows.append(logits_of(session))
    session.end(slot)
    return np.concatenate(rows)


@pytest.fixture(scope="module", params=MODELS)
def session(request: pytest.FixtureRequest) -> Session:
    return session_of(MODELS[request.param])


@pytest.fixture(scope="module")
def alone(session: Session) -> F32:
    """Logits of every row of the prompt computed in one step without neighbours."""
    return all_rows(session, tokens(10, LENGTH), LENGTH)


@pytest.mark.parametrize("chunk", [1, 5, 64, 149])
def test_row_has_the_same_bits_however_the_prompt_is_chunked(
    session: Session, alone: F32, chunk: int
) -> None:
    assert np.array_equal(all_rows(session, tokens(10, LENGTH), chunk), alone)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("others", [1, 2, 6, 15])
def test_row_has_the_same_bits_whatever_shares_the_step(
    session: Session, alone: F32, others: int, place: str
) -> None:
    neighbours = [session.start(tokens(100 + i, 3 + 7 * i)) for i in range(others)]
    slot = session.start(tokens(10, LENGTH))
    for chunk in (1, 63, 80, 6):
        own = Segment(slot, chunk, logits=1, sample=False)
        rest = [Segment(neighbour, 1 + i % 3, sample=False) for i, neighbour in enumerate(neighbours)]
        session.step(*([own, *rest] if place == "first" else [*rest, own]))
        row = logits_of(session)[0 if place == "first" else -1]
        assert np.array_equal(row, alone[session.computed[slot] - 1])
    for used in (slot, *neighbours):
        session.end(used)


@pytest.mark.parametrize("hit", [16, 64, 144])
def test_row_has_the_same_bits_wherever_a_prefix_hit_ended(session: Session, alone: F32, hit: int) -> None:
    prompt = tokens(10, LENGTH)
    source = session.start(prompt)
    session.prefill(source, chunk=37)
    reader = session.start(prompt)
    session.computed[reader] = hit
    for table in session.tables.block_tables:
        table[reader, : hit // 16] = table[source, : hit // 16]
    session.step(Segment(reader, LENGTH - hit, logits=LENGTH - hit, sample=False))
    rows = logits_of(session)
    for table in session.tables.block_tables:
        table[reader, : hit // 16] = -1
    session.end(reader)
    session.end(source)
    assert np.array_equal(rows, alone[hit:])


def test_sampled_tokens_do_not_depend_on_the_batch() -> None:
    from artesian.kernels.batch import SlotSampling

    session = session_of(LLAMA)
    sampling = SlotSampling(temperature=1.3, top_p=0.95, presence=0.5, seed=9, prompt_len=20)
    alone = session.generate(session.start(tokens(4, 20), sampling), 12)
    slots = [session.start(tokens(4, 20), sampling), session.start(tokens(5, 31))]
    for count in (7, 13):
        session.step(*[Segment(slot, count, sample=count == 13) for slot in slots])
    for _ in range(11):
        session.step(*[Segment(slot) for slot in slots])
    assert session.tables.tokens[slots[0], 20:32].tolist() == alone


# -- errors ----------------------------------------------------------------------------------------


def load(program: Program, weights: dict[str, Tensor], blocks: list[int]) -> None:
    tables = SlotTables(1, 64, program.kv_groups)
    open_backend("reference").load(program, weights, tables, blocks, StepLimits(8, 8), 1)


def test_missing_weight_is_named() -> None:
    program = build_program(LLAMA)
    weights = random_weights(program)
    del weights["blk.1.ffn_up.weight"]
    with pytest.raises(BackendError, match=r"blk\.1\.ffn_up\.weight is missing"):
        load(program, weights, [4])


def test_weight_of_another_shape_is_named() -> None:
    program = build_program(LLAMA)
    weights = random_weights(program) | {"output_norm.weight": f32_tensor(np.zeros(3))}
    with pytest.raises(BackendError, match=r"output_norm\.weight has shape \(3,\)"):
        load(program, weights, [4])


def test_unknown_format_is_named() -> None:
    program = build_program(LLAMA)
    weights = random_weights(program)
    weights["output_norm.weight"] = replace(weights["output_norm.weight"], format="IQ1_S")
    with pytest.raises(BackendError, match=r"output_norm\.weight: format IQ1_S"):
        load(program, weights, [4])


def test_packed_kv_and_wrong_group_count_are_refused() -> None:
    program = build_program(LLAMA, kv_dtype="packed")
    with pytest.raises(BackendError, match="packed"):
        load(program, random_weights(program), [4])
    with pytest.raises(BackendError, match="1 KV groups, got 2"):
        load(build_program(LLAMA), random_weights(program), [4, 4])


def test_step_beyond_the_limits_is_refused() -> None:
    session = session_of(LLAMA)
    slots = [session.start(tokens(i, 150)) for i in range(14)]
    with pytest.raises(ValueError, match="2100 rows"):
        session.step(*[Segment(slot, 150) for slot in slots])


def test_without_torch_the_backend_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("artesian.kernels.reference")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match="needs the package torch"):
        open_backend("reference")
