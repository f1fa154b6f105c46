"""Small programs and weights for kernel tests: model shapes that differ in every op, and stored formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from random_weights import f32_tensor

from artesian.engine.models.config import ModelConfig, RopeConfig
from artesian.kernels.backend import Tensor
from artesian.kernels.program import Program, Recorder, Rows
from artesian.kernels.quant import dequantize

LLAMA = ModelConfig(
    architecture="llama",
    layers=2,
    hidden=96,
    heads=6,
    kv_heads=2,
    head_dim=16,
    ffn=160,
    vocab=104,
    max_position=256,
    norm_eps=1e-5,
    activation="silu",
    tied=True,
    rope=RopeConfig(),
)
GEMMA = replace(
    LLAMA,
    architecture="gemma3",
    layers=3,
    activation="gelu_tanh",
    window=24,
    window_layers=(0, 2),
    attention_softcap=5.0,
    logits_softcap=3.0,
)


def stored(weights: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    """The same weights with every matrix rounded to a GGUF format; vectors stay as they are."""
    return {
        name: store(tensor, format) if len(tensor.shape) == 2 else tensor for name, tensor in weights.items()
    }


def store(tensor: Tensor, format: str) -> Tensor:
    values = dequantize(tensor)
    if format == "F16":
        data = values.astype(np.float16).view(np.uint8)
    else:
        data = quantize(values, GGMLQuantizationType[format])
    return Tensor(format, tensor.shape, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def logits_program(vocab: int, rows: int = 0) -> Program:
    """Logits that are a row of the weight `table`, chosen by the input token: a sampler without a model."""
    recorder = Recorder("logits")
    x = recorder.embed(recorder.weight("table", rows or vocab, vocab))
    return recorder.finish(recorder.select(x, Rows.LOGITS))


def logits_weights(table: np.ndarray) -> dict[str, Tensor]:
    return {"table": f32_tensor(table)}
