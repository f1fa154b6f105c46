"""Gemma 3: norms before and after each branch, q/k norms, most layers see a sliding window only.

Window layers have their own rope (`rope_local`). Norm weights are stored with their 1 already added.
"""

from __future__ import annotations

from dataclasses import replace

from ...kernels.kv import KVDtype
from ...kernels.program import Buffer, Program
from .config import ModelConfig
from .layers import Layer, decoder


def block(layer: Layer, x: Buffer) -> Buffer:
    config, recorder = layer.config, layer.recorder
    attended = layer.attention(layer.norm(x, "attn_norm"))
    out = layer.linear(attended, "attn_output", config.hidden, bias=config.out_bias)
    x = recorder.add(x, layer.norm(out, "post_attention_norm"))
    gated = layer.gated(layer.norm(x, "ffn_norm"))
    out = layer.linear(gated, "ffn_down", config.hidden, bias=config.mlp_bias)
    return recorder.add(x, layer.norm(out, "post_ffw_norm"))


def build(config: ModelConfig, kv_dtype: KVDtype, block_tokens: int) -> Program:
    return decoder(replace(config, qk_norm=True), block, kv_dtype, block_tokens)
