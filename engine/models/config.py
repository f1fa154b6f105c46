"""A model's hyper-parameters in one shape, whatever file they came from; loaders fill it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer, with its scaling already resolved by `kind`."""

    theta: float = 10000.0
    rotary_dim: int = 0
    """Rotated columns of a head; 0 = the whole head."""
    interleaved: bool = False
    """Pairs (2i, 2i+1), as in GGUF files of the llama architecture; otherwise (i, i + rotary/2)."""
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope", "dynamic"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    """Magnitude of cos and sin; 0 = what the scaling prescribes."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    frequency_factors: tuple[float, ...] = ()
    """Divisors of the inverse frequencies given by the file itself (GGUF `rope_freqs.weight`)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a family needs to record its forward pass."""

    architecture: str
    """Row of `engine.models.registry`: llama, qwen2, qwen3, gemma3."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_position: int
    norm_eps: float
    activation: Activation
    tied: bool
    """The output matrix is the embedding table."""
    rope: RopeConfig
    rope_local: RopeConfig | None = None
    """Rope of the sliding-window layers where it differs."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float = 0.0
    """0 = head_dim ** -0.5."""
    embedding_scale: float = 1.0
    window: int = 0
    window_layers: tuple[int, ...] = ()
    """Layers that see only the last `window` tokens."""
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    logits_scale: float = 1.0
    residual_scale: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    extra: dict[str, object] = field(default_factory=dict)
