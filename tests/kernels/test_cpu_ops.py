"""The cpu backend's forward against the reference backend and against exact int8 arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from random_weights import f32_tensor, random_weights
from stepping import Segment, Session, open_session
from tiny_programs import GEMMA, LLAMA, store, stored

from artesian.engine.models.config import ModelConfig, RopeConfig
from artesian.engine.models.registry import build_program
from artesian.kernels.backend import Backend, Tensor, open_backend
from artesian.kernels.batch import SlotSampling
from artesian.kernels.cpu.backend import CpuBackend
from artesian.kernels.kv import KVDtype
from artesian.kernels.program import Program, Recorder, Rows
from artesian.kernels.quant import dequantize

F32 = NDArray[np.float32]

ISAS = ["best", "portable"]
VARIANTS: dict[str, ModelConfig] = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "interleaved": replace(LLAMA, rope=RopeConfig(interleaved=True)),
    "partial rotary": replace(LLAMA, head_dim=24, rope=RopeConfig(rotary_dim=12)),
    "one KV head each": replace(LLAMA, heads=3, kv_heads=3, head_dim=40),
    "eight to one": replace(LLAMA, heads=8, kv_heads=1, head_dim=8),
    "seven to one": replace(LLAMA, heads=14, kv_heads=2, head_dim=8),
    "odd widths": replace(LLAMA, hidden=50, ffn=77, vocab=103),
    "gelu": replace(LLAMA, activation="gelu"),
    "biases": replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True, tied=False),
    "head norms": replace(LLAMA, architecture="qwen3", qk_norm=True, logits_scale=0.5),
}
LENGTHS = (130, 37, 1)


def logits_of_steps(
    backend: Backend, program: Program, weights: dict[str, Tensor], threads: int = 2
) -> list[F32]:
    """Prefill three prompts together, all rows with logits, then decode twice with fixed tokens."""
    session = open_session(backend, program, weights, slots=3, max_len=192, threads=threads)
    generator = np.random.default_rng(1)
    slots = [
        session.start(generator.integers(0, program.vocab_size, length + 2).tolist(), SlotSampling())
        for length in LENGTHS
    ]
    segments = [Segment(slot, count, count, False) for slot, count in zip(slots, LENGTHS, strict=True)]
    session.step(*segments)
    results = [logits_of(session)]
    for _ in range(2):
        session.step(*(Segment(slot, sample=False) for slot in slots))
        results.append(logits_of(session))
    session.executor.close()
    return results


def logits_of(session: Session) -> F32:
    logits: F32 = np.array(session.executor.logits)  # type: ignore[attr-defined]
    return logits


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_agrees_with_the_reference(variant: str, isa: str) -> None:
    program = build_program(VARIANTS[variant], kv_dtype="f32", block_tokens=16)
    weights = random_weights(program, gain=1.5)
    want = logits_of_steps(open_backend("reference"), program, weights, threads=1)
    for got, expected in zip(logits_of_steps(CpuBackend(isa), program, weights), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=3e-5)


@pytest.mark.parametrize("block_tokens", [1, 5, 64, 400])
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("f32", 3e-5), ("f16", 3e-3)])
def test_block_sizes_and_kv_types_agree_with_the_reference(
    block_tokens: int, kv_dtype: KVDtype, tolerance: float
) -> None:
    program = build_program(GEMMA, kv_dtype=kv_dtype, block_tokens=block_tokens)
    weights = random_weights(program)
    want = logits_of_steps(open_backend("reference"), program, weights, threads=1)
    for got, expected in zip(logits_of_steps(CpuBackend(), program, weights), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["F16", "BF16"])
def test_half_precision_weights_are_exact(format: str, isa: str) -> None:
    program = build_program(VARIANTS["odd widths"], kv_dtype="f32", block_tokens=16)
    weights = stored(random_weights(program, gain=1.5), format)
    want = logits_of_steps(open_backend("reference"), program, weights, threads=1)
    for got, expected in zip(logits_of_steps(CpuBackend(isa), program, weights), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=3e-5)


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_quantised_models_stay_close_to_the_reference(format: str) -> None:
    program = build_program(LLAMA, kv_dtype="f32", block_tokens=16)
    weights = stored(random_weights(program), format)
    want = np.concatenate(logits_of_steps(open_backend("reference"), program, weights, threads=1))
    got = np.concatenate(logits_of_steps(CpuBackend(), program, weights))
    cosine = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
    assert cosine.min() > 0.998


def rounded_activations(x_TK: F32) -> F32:
    """x as the int8 kernels see it: blocks of 32 columns, scale = max |x| / 127."""
    blocks = x_TK.reshape(len(x_TK), -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    rounded: F32 = np.rint(blocks / np.where(scale == 0, 1, scale)) * scale
    return rounded.reshape(x_TK.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 97, 130])
@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_linear_is_the_exact_product_of_what_is_stored(format: str, rows: int, isa: str) -> None:
    generator = np.random.default_rng(rows)
    inputs = generator.standard_normal((130, 96)).astype(np.float32)
    inputs[0, :32] = 0
    matrix = store(f32_tensor(generator.standard_normal((136, 96)).astype(np.float32)), format)
    recorder = Recorder("linear")
    x = recorder.embed(recorder.weight("table", *inputs.shape))
    x = recorder.linear(x, recorder.weight("matrix", *matrix.shape))
    program = recorder.finish(recorder.select(x, Rows.LOGITS))
    tensors = {"table": f32_tensor(inputs), "matrix": matrix}
    session = open_session(CpuBackend(isa), program, tensors, slots=1, max_len=256, threads=2)
    slot = session.start(list(range(rows)))
    session.step(Segment(slot, rows, logits=rows, sample=False))
    want = rounded_activations(inputs[:rows]).astype(np.float64) @ dequantize(matrix).T.astype(np.float64)
    np.testing.assert_allclose(logits_of(session), want, atol=5e-5)


def test_extreme_quants_do_not_overflow() -> None:
    """All weights and activations at the ends of their ranges: the int16 sums are at their largest."""
    width = 64
    blocks = np.zeros((32, width // 32, 20), np.uint8)
    blocks[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    blocks[:, :, 4:] = 0xFF
    q8 = np.zeros((32, width // 32, 34), np.uint8)
    q8[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    q8[:, :, 2:] = 0x80
    for format, data, value in (("Q4_1", blocks, 15.0), ("Q8_0", q8, -128.0)):
        recorder = Recorder("extreme")
        x = recorder.embed(recorder.weight("table", 8, width))
        x = recorder.linear(x, recorder.weight("matrix", 32, width))
        tensors = {
            "table": f32_tensor(np.full((8, width), 127.0, np.float32)),
            "matrix": Tensor(format, (32, width), data.reshape(-1)),
        }
        program = recorder.finish(recorder.select(x, Rows.LOGITS))
        for rows in (1, 6):
            session = open_session(CpuBackend(), program, tensors, slots=1, max_len=8)
            session.step(Segment(session.start([0] * rows), rows, logits=rows, sample=False))
            assert (logits_of(session) == 127.0 * value * width).all()
