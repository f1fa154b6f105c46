"""Qwen 2 and 2.5: Llama with biases on q, k and v. Qwen 3: Llama with a norm on every q and k head."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.kv import KVDtype
from ...kernels.program import Program
from .config import ModelConfig
from .layers import decoder
from .llama import block


def build_qwen2(config: ModelConfig, kv_dtype: KVDtype, block_tokens: int) -> Program:
    return decoder(replace(config, qkv_bias=True), block, kv_dtype, block_tokens)


def build_qwen3(config: ModelConfig, kv_dtype: KVDtype, block_tokens: int) -> Program:
    return decoder(replace(config, qk_norm=True), block, kv_dtype, block_tokens)
