"""A transformers model as Artesian sees it: its config and its float32 weights by canonical name.

Written by hand and apart from the loader, so that the families can be checked without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from random_weights import f32_tensor

from artesian.engine.models.config import ModelConfig, RopeConfig
from artesian.kernels.backend import Tensor

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def describe(model: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return what `build_program` and a backend need to compute the same function as `model`."""
    hf = model.config
    architecture = {"gemma3_text": "gemma3"}.get(hf.model_type, hf.model_type)
    gemma = architecture == "gemma3"
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    kinds = getattr(hf, "layer_types", None) or []
    rope = hf.rope_parameters
    config = ModelConfig(
        architecture=architecture,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        ffn=hf.intermediate_size,
        vocab=hf.vocab_size,
        max_position=hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        activation="gelu_tanh" if gemma else "silu",
        tied=hf.tie_word_embeddings,
        rope=rope_config(rope["full_attention"] if gemma else rope),
        rope_local=rope_config(rope["sliding_attention"]) if gemma else None,
        attention_scale=hf.query_pre_attn_scalar**-0.5 if gemma else 0.0,
        embedding_scale=hf.hidden_size**0.5 if gemma else 1.0,
        window=hf.sliding_window if gemma else 0,
        window_layers=tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention"),
        attention_softcap=(hf.attn_logit_softcapping or 0.0) if gemma else 0.0,
        logits_softcap=(hf.final_logit_softcapping or 0.0) if gemma else 0.0,
    )
    return config, {
        canonical_name(name, gemma): f32_tensor(_values(name, parameter, gemma))
        for name, parameter in model.named_parameters()
    }


def rope_config(rope: dict[str, Any]) -> RopeConfig:
    """A transformers rope dictionary as a `RopeConfig`."""
    kind = rope["rope_type"]
    return RopeConfig(
        theta=rope["rope_theta"],
        scaling="none" if kind == "default" else kind,
        factor=rope.get("factor", 1.0),
        original_max_position=rope.get("original_max_position_embeddings", 0),
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
        beta_fast=rope.get("beta_fast", 32.0),
        beta_slow=rope.get("beta_slow", 1.0),
        attention_factor=rope.get("attention_factor", 0.0),
        mscale=rope.get("mscale", 0.0),
        mscale_all_dim=rope.get("mscale_all_dim", 0.0),
        short_factors=tuple(rope.get("short_factor", ())),
        long_factors=tuple(rope.get("long_factor", ())),
    )


def canonical_name(name: str, gemma: bool = False) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    part, suffix = name.rsplit(".", 1)
    if part in _ENDS:
        return f"{_ENDS[part]}.{suffix}"
    layer, part = part.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{(_PARTS | (_GEMMA_NORMS if gemma else _LLAMA_NORMS))[part]}.{suffix}"


def _values(name: str, parameter: torch.Tensor, gemma: bool) -> np.ndarray:
    values = parameter.detach().numpy()
    return values + np.float32(1) if gemma and "norm" in name else values
