"""The Llama family (also Mistral and SmolLM): pre-norm attention and a gated MLP.

Biases, q/k norms and windows come from the config; every other family is a variation of this file.
"""

from __future__ import annotations

from ...kernels.kv import KVDtype
from ...kernels.program import Buffer, Program
from .config import ModelConfig
from .layers import Layer, decoder


def block(layer: Layer, x: Buffer) -> Buffer:
    config = layer.config
    attended = layer.attention(layer.norm(x, "attn_norm"))
    x = layer.branch(attended, "attn_output", bias=config.out_bias, residual=x)
    gated = layer.gated(layer.norm(x, "ffn_norm"))
    return layer.branch(gated, "ffn_down", bias=config.mlp_bias, residual=x)


def build(config: ModelConfig, kv_dtype: KVDtype, block_tokens: int) -> Program:
    return decoder(config, block, kv_dtype, block_tokens)
