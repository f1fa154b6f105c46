"""Rope tables against transformers' own functions."""

from typing import Any

import numpy as np
import pytest
from hf_models import rope_config
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from artesian.engine.models.config import RopeConfig
from artesian.engine.models.rope import rope_table

HEAD_DIM = 64
MAX_POSITION = 4096
FACTORS = [1.0 + i / 16 for i in range(HEAD_DIM // 2)]

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 256,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 1024,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": FACTORS,
        "long_factor": [2 * factor for factor in FACTORS],
        "original_max_position_embeddings": 1024,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def transformers_table(rope: dict[str, Any], length: int | None = None) -> tuple[np.ndarray, float]:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 50000.0, **rope},
    )
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None, seq_len=length)
    return inv_freq.numpy(), magnitude


def our_table(rope: dict[str, Any], length: int = MAX_POSITION, **fields: Any) -> tuple[np.ndarray, float]:
    config = rope_config({"rope_theta": 50000.0, **rope, **fields})
    table = rope_table(config, HEAD_DIM, length)
    return np.array(table.inv_freq), table.magnitude


@pytest.mark.parametrize("name", SCALINGS)
def test_scaling_matches_transformers_at_the_longest_sequence(name: str) -> None:
    want, want_magnitude = transformers_table(SCALINGS[name], MAX_POSITION)
    got, magnitude = our_table(SCALINGS[name])
    assert np.allclose(got, want, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(want_magnitude, rel=1e-12)


def test_longrope_takes_the_short_factors_up_to_the_trained_length() -> None:
    want, _ = transformers_table(SCALINGS["longrope"], 1024)
    assert np.allclose(our_table(SCALINGS["longrope"], 1024)[0], want, rtol=1e-6, atol=0)


def test_dynamic_stretches_the_base_beyond_the_trained_length() -> None:
    want, _ = transformers_table(SCALINGS["dynamic"], 3 * MAX_POSITION)
    got, _ = our_table(SCALINGS["dynamic"], 3 * MAX_POSITION, original_max_position_embeddings=MAX_POSITION)
    assert np.allclose(got, want, rtol=1e-6, atol=0)


def test_unscaled_frequencies_are_powers_of_theta() -> None:
    table = rope_table(RopeConfig(theta=100.0), 4, MAX_POSITION)
    assert table == ((1.0, float(np.float32(0.1))), 1.0)


def test_partial_rotary_has_frequencies_for_its_columns_only() -> None:
    table = rope_table(RopeConfig(theta=100.0, rotary_dim=4), 64, MAX_POSITION)
    assert table.inv_freq == (1.0, float(np.float32(0.1)))


def test_frequency_factors_divide_the_frequencies() -> None:
    table = rope_table(RopeConfig(theta=100.0, frequency_factors=(1.0, 8.0)), 4, MAX_POSITION)
    assert table.inv_freq == (1.0, float(np.float32(0.1 / 8.0)))
