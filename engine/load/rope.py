"""Rotary parameters from either kind of file, in one shape. Frequencies are computed by the families."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from ..errors import ModelError
from ..models.config import RopeConfig
from .fields import Fields

Scaling = Literal["none", "linear", "llama3", "yarn", "longrope", "dynamic"]

# Every spelling met in config.json ("su" is Phi-3's first name for longrope) and in GGUF.
SCALINGS: dict[str, Scaling] = {
    "default": "none",
    "none": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "dynamic": "dynamic",
}


def rope_from_json(config: Fields, head_dim: int, max_position: int, theta: float) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (before).

    `theta` is the family's default base. A dictionary per layer type is the caller's to pick from.
    """
    base = RopeConfig(theta=config.positive("rope_theta", theta))
    section = config.section("rope_parameters") or config.section("rope_scaling")
    return rope_section(section or Fields(config.file, {}), config, base, head_dim, max_position)


def rope_section(
    section: Fields, config: Fields, base: RopeConfig, head_dim: int, max_position: int
) -> RopeConfig:
    """Read one dictionary of rope parameters; `config` holds what old files keep outside of it."""
    rope = replace(base, theta=section.positive("rope_theta", base.theta))
    for fields in (section, config):  # no family here has it; transformers ignores it without scaling
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            fields.refuse("partial_rotary_factor", "must be 1 in this architecture")
    kind = "rope_type" if section.has("rope_type") else "type"
    name = section.text(kind, "default")
    if name not in SCALINGS:
        section.refuse(kind, f"unknown rope scaling (known: {', '.join(SCALINGS)})")
    # Phi-3 keeps it outside the section; transformers gives that one precedence.
    original = config.integer(
        "original_max_position_embeddings",
        section.integer("original_max_position_embeddings", max_position, minimum=1),
        minimum=1,
    )
    match SCALINGS[name]:
        case "none":
            return rope
        case "linear":
            return replace(rope, scaling="linear", factor=section.positive("factor"))
        case "dynamic":
            return replace(
                rope, scaling="dynamic", factor=section.positive("factor"), original_max_position=max_position
            )
        case "llama3":
            return replace(
                rope,
                scaling="llama3",
                factor=section.positive("factor"),
                low_freq_factor=section.positive("low_freq_factor"),
                high_freq_factor=section.positive("high_freq_factor"),
                original_max_position=original,
            )
        case "yarn":
            if not section.flag("truncate", True):
                section.refuse("truncate", "yarn without rounded bounds is not supported")
            return replace(
                rope,
                scaling="yarn",
                factor=section.positive("factor", max_position / original),
                original_max_position=original,
                beta_fast=section.positive("beta_fast", 32.0),
                beta_slow=section.positive("beta_slow", 1.0),
                attention_factor=section.number("attention_factor", 0.0),
                mscale=section.number("mscale", 0.0),
                mscale_all_dim=section.number("mscale_all_dim", 0.0),
            )
        case "longrope":
            longrope = replace(
                rope,
                scaling="longrope",
                factor=section.positive("factor", max_position / original),
                original_max_position=original,
                attention_factor=section.number("attention_factor", 0.0),
                short_factors=section.numbers("short_factor"),
                long_factors=section.numbers("long_factor"),
            )
            check_factors(longrope, head_dim, section.file)
            return longrope


def rope_from_gguf(
    fields: Fields,
    head_dim: int,
    max_position: int,
    *,
    theta: float,
    interleaved: bool,
    frequency_factors: tuple[float, ...],
    short_factors: tuple[float, ...],
    long_factors: tuple[float, ...],
) -> RopeConfig:
    """Read `<architecture>.rope.*`; the factors are the file's rope tensors, empty where it has none.

    Source: llama_model_base::load_hparams in llama.cpp.
    """
    rope = RopeConfig(
        theta=fields.positive("rope.freq_base", theta),
        rotary_dim=_rotary_dim(fields.integer("rope.dimension_count", head_dim, minimum=2), fields, head_dim),
        interleaved=interleaved,
        frequency_factors=frequency_factors,
        short_factors=short_factors,
        long_factors=long_factors,
    )
    check_factors(rope, head_dim, fields.file)
    # A file with a factor and no type means linear; "rope.scale_linear" is its name in old files.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    name = fields.text("rope.scaling.type", "linear" if factor > 0 else "none")
    if name not in ("none", "linear", "yarn", "longrope"):
        fields.refuse("rope.scaling.type", "unknown rope scaling (known: none, linear, yarn, longrope)")
    original = fields.integer("rope.scaling.original_context_length", max_position, minimum=1)
    if long_factors:
        factor = factor or max_position / original
        return replace(
            rope,
            scaling="longrope",
            factor=factor,
            original_max_position=original,
            attention_factor=fields.number("rope.scaling.attn_factor", 0.0),
        )
    if name == "longrope":
        fields.refuse("rope.scaling.type", "needs the tensors rope_factors_long and rope_factors_short")
    if name == "none" or factor in (0.0, 1.0):
        return rope
    if factor < 0:
        fields.refuse("rope.scaling.factor", "must be > 0")
    if name == "linear":
        return replace(rope, scaling="linear", factor=factor)
    scale = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    return replace(
        rope,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.positive("rope.scaling.yarn_beta_slow", 1.0),
        # The file's factor multiplies what yarn prescribes; config.json's replaces it.
        attention_factor=0.0 if scale == 1.0 else scale * (0.1 * math.log(factor) + 1.0),
    )


def check_factors(rope: RopeConfig, head_dim: int, file: str) -> None:
    """Raise `ModelError` when a list of frequency factors has not one entry per rotated pair."""
    pairs = (rope.rotary_dim or head_dim) // 2
    for name in ("frequency_factors", "short_factors", "long_factors"):
        factors = getattr(rope, name)
        if factors and len(factors) != pairs:
            raise ModelError(f"{file}: rope {name} has {len(factors)} entries, expected {pairs}")
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise ModelError(f"{file}: rope {name} must be finite and > 0")
    if bool(rope.short_factors) != bool(rope.long_factors):
        raise ModelError(f"{file}: rope has short or long factors, it needs both")


def _rotary_dim(columns: int, fields: Fields, head_dim: int) -> int:
    """The rotated columns, 0 standing for the whole head."""
    if columns % 2 or not 0 < columns <= head_dim:
        raise ModelError(
            f"{fields.file}: rope turns {columns} columns of a head of {head_dim}; it must be an even part"
        )
    return 0 if columns == head_dim else columns
