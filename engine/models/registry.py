"""The table of model families: one row an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...kernels.kv import KVDtype
from ...kernels.program import Program, ShapeError
from ..errors import ModelError
from . import gemma, llama, qwen
from .config import ModelConfig

Build = Callable[[ModelConfig, KVDtype, int], Program]

FAMILIES: Mapping[str, Build] = {
    "llama": llama.build,
    "qwen2": qwen.build_qwen2,
    "qwen3": qwen.build_qwen3,
    "gemma3": gemma.build,
}


def build_program(config: ModelConfig, *, kv_dtype: KVDtype = "f16", block_tokens: int = 64) -> Program:
    """Record the forward pass that `config` describes; its KV groups take `kv_dtype` and `block_tokens`.

    Raises:
        ModelError: the architecture is unknown, or the config's sizes do not fit together.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"architecture {config.architecture!r} is not supported (supported: {known})")
    try:
        return family(config, kv_dtype, block_tokens)
    except ShapeError as err:
        raise ModelError(f"{config.architecture}: {err}") from err
