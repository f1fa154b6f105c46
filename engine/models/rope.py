"""Rotary frequencies of every scaling, as the numbers a program carries.

It knows positions' angles, not how they are applied. Everything is decided once, at load: scalings that
depend on the length in use (longrope, dynamic) take the longest sequence that will be served, because
stored keys keep the rotation they were written with.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import RopeConfig

F64 = NDArray[np.float64]


class RopeTable(NamedTuple):
    """Inverse frequencies [rotary / 2] and the factor of cos and sin."""

    inv_freq: tuple[float, ...]
    """Values of float32 precision."""
    magnitude: float


def rope_table(rope: RopeConfig, head_dim: int, max_position: int) -> RopeTable:
    """Resolve `rope` for heads of `head_dim` and sequences of at most `max_position` tokens.

    Computed in float64 and rounded once. Definitions: transformers' `modeling_rope_utils` (5.24);
    `frequency_factors` divide the result, as ggml's rope does with `rope_freqs.weight`.
    """
    rotary = rope.rotary_dim or head_dim
    magnitude = 1.0
    inv_freq = _frequencies(rope.theta, rotary)
    match rope.scaling:
        case "none":
            pass
        case "linear":
            inv_freq = inv_freq / rope.factor
        case "llama3":
            inv_freq = _llama3(rope, inv_freq)
        case "yarn":
            inv_freq, magnitude = _yarn(rope, inv_freq, rotary), _yarn_magnitude(rope)
        case "longrope":
            is_long = max_position > rope.original_max_position
            inv_freq = inv_freq / np.array(rope.long_factors if is_long else rope.short_factors)
            magnitude = _longrope_magnitude(rope)
        case "dynamic":
            inv_freq = _frequencies(_dynamic_theta(rope, rotary, max_position), rotary)
    if rope.frequency_factors:
        inv_freq = inv_freq / np.array(rope.frequency_factors)
    return RopeTable(tuple(inv_freq.astype(np.float32).tolist()), rope.attention_factor or magnitude)


def _frequencies(theta: float, rotary: int) -> F64:
    return np.asarray(theta ** -(np.arange(0, rotary, 2, dtype=np.float64) / rotary), np.float64)


def _llama3(rope: RopeConfig, inv_freq: F64) -> F64:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended linearly."""
    rotations = rope.original_max_position * inv_freq / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((rotations - rope.low_freq_factor) / span, 0.0, 1.0)
    return inv_freq * ((1.0 - keep) / rope.factor + keep)


def _yarn(rope: RopeConfig, inv_freq: F64, rotary: int) -> F64:
    """Dimensions that turn often keep their frequency, those that turn rarely are interpolated."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rotary * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), rotary - 1)
    width = high - low or 0.001  # a ramp of no width would divide by zero
    interpolate = np.clip((np.arange(rotary // 2) - low) / width, 0.0, 1.0)
    return inv_freq * (interpolate / rope.factor + (1.0 - interpolate))


def _yarn_magnitude(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope_magnitude(rope: RopeConfig) -> float:
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_max_position))


def _dynamic_theta(rope: RopeConfig, rotary: int, max_position: int) -> float:
    """NTK-aware base for sequences longer than the model was trained on."""
    trained = rope.original_max_position or max_position
    stretch = max(max_position / trained, 1.0)
    exponent = rotary / (rotary - 2)
    return float(rope.theta * (rope.factor * stretch - (rope.factor - 1.0)) ** exponent)
