"""Hyper-parameters out of config.json, in the spellings of the years."""

from typing import Any

import pytest

from artesian.engine.errors import ModelError
from artesian.engine.load.config import config_from_json
from artesian.engine.load.fields import Fields
from artesian.engine.models.config import ModelConfig, RopeConfig

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 320,
}
GEMMA = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 12, "head_dim": 16, "sliding_window": 32}


def config(base: dict[str, Any], **fields: Any) -> ModelConfig:
    return config_from_json(Fields("config.json", base | fields))


def rope(**scaling: Any) -> RopeConfig:
    return config(LLAMA, rope_theta=5e5, rope_scaling=scaling).rope


def test_what_an_old_llama_config_leaves_out_has_its_defaults() -> None:
    plain = config(LLAMA)
    assert (plain.kv_heads, plain.head_dim, plain.norm_eps, plain.tied) == (4, 16, 1e-6, False)
    assert plain.rope == RopeConfig(theta=10000.0)
    assert (plain.activation, plain.window_layers, plain.qkv_bias) == ("silu", (), False)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_the_scaling_type_are_read(key: str) -> None:
    assert rope(**{key: "linear", "factor": 4.0}) == RopeConfig(theta=5e5, scaling="linear", factor=4.0)


def test_llama3_scaling_is_read_whole() -> None:
    fields = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert rope(rope_type="llama3", factor=32.0, **fields) == RopeConfig(
        theta=5e5,
        scaling="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    yarn = rope(type="yarn", original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5)
    assert (yarn.factor, yarn.original_max_position, yarn.beta_fast) == (4.0, 64, 32.0)
    assert (yarn.mscale, yarn.mscale_all_dim, yarn.attention_factor) == (1.0, 0.5, 0.0)


def test_longrope_takes_the_original_length_from_outside_its_section() -> None:
    section = {"type": "su", "short_factor": [1] * 8, "long_factor": [2.5] * 8}
    long = config(LLAMA, rope_scaling=section, original_max_position_embeddings=128).rope
    assert (long.scaling, long.original_max_position, long.factor) == ("longrope", 128, 2.0)
    assert long.short_factors == (1.0,) * 8 and long.long_factors == (2.5,) * 8


def test_longrope_needs_one_factor_for_each_rotated_pair() -> None:
    with pytest.raises(ModelError, match=r"short_factors has 3 entries, expected 8"):
        rope(type="longrope", short_factor=[1.0] * 3, long_factor=[1.0] * 8)


def test_dynamic_scaling_starts_at_the_trained_length() -> None:
    assert rope(type="dynamic", factor=2.0).original_max_position == 256


def test_yarn_without_rounded_bounds_is_refused() -> None:
    with pytest.raises(ModelError, match=r"rope_scaling\.truncate"):
        rope(type="yarn", factor=2.0, truncate=False)


def test_mistral_is_a_llama_whose_layers_all_have_the_window() -> None:
    mistral = config(LLAMA, model_type="mistral", sliding_window=64)
    assert (mistral.architecture, mistral.window, mistral.window_layers) == ("llama", 64, (0, 1, 2, 3))
    assert config(LLAMA, model_type="mistral", sliding_window=None).window_layers == ()


def test_qwen_biases_are_fixed_by_the_family() -> None:
    qwen2, qwen3 = (config(LLAMA, model_type=name) for name in ("qwen2", "qwen3"))
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


def test_gemma_has_a_full_layer_after_every_five_local_ones() -> None:
    gemma = config(GEMMA)
    assert set(range(12)) - set(gemma.window_layers) == {5, 11}
    assert (gemma.window, gemma.tied, gemma.activation) == (32, True, "gelu_tanh")
    assert gemma.embedding_scale == 8.0 and gemma.attention_scale == 256**-0.5


def test_gemmas_pattern_may_be_an_interval_or_a_list() -> None:
    kinds = ["full_attention"] + ["sliding_attention"] * 11
    assert config(GEMMA, sliding_window_pattern=2).window_layers == (0, 2, 4, 6, 8, 10)
    assert config(GEMMA, layer_types=kinds).window_layers == tuple(range(1, 12))
    with pytest.raises(ModelError, match="layer_types"):
        config(GEMMA, layer_types=kinds[1:])


def test_gemmas_old_scaling_belongs_to_the_full_layers_alone() -> None:
    gemma = config(GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_base_freq=2e4)
    assert gemma.rope == RopeConfig(theta=1e6, scaling="linear", factor=8.0)
    assert gemma.rope_local == RopeConfig(theta=2e4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a finite number, got 'tiny'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0, got 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"vocab_size": True}, "vocab_size must be an integer >= 1, got True"),
        ({"hidden_act": 3}, "hidden_act must be a string, got 3"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_was_expected(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: {said}"):
        config(LLAMA, **fields)
