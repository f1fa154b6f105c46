"""What the registry records: groups, weights and errors."""

from dataclasses import replace

import pytest
from tiny_programs import LLAMA

from artesian.engine.errors import ModelError
from artesian.engine.models.config import RopeConfig
from artesian.engine.models.registry import build_program
from artesian.kernels.kv import KVKind

CONFIG = replace(LLAMA, layers=4, hidden=32, heads=4, head_dim=8, ffn=48, vocab=64, tied=False)


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        build_program(replace(CONFIG, architecture="mamba"))


def test_sizes_that_do_not_fit_are_a_model_error() -> None:
    with pytest.raises(ModelError, match="llama: attention"):
        build_program(replace(CONFIG, heads=3))


def test_full_layers_come_before_window_layers() -> None:
    config = replace(CONFIG, architecture="gemma3", window=16, window_layers=(0, 1, 3))
    groups = build_program(config, kv_dtype="bf16", block_tokens=32).kv_groups
    assert [(g.kind, g.layers, g.window) for g in groups] == [
        (KVKind.FULL, (2,), 0),
        (KVKind.WINDOW, (0, 1, 3), 16),
    ]
    assert {(g.dtype, g.block_tokens, g.prefix_cacheable) for g in groups} == {("bf16", 32, True)}


def test_model_of_one_kind_has_one_group() -> None:
    assert [g.kind for g in build_program(CONFIG).kv_groups] == [KVKind.FULL]
    windowed = replace(CONFIG, window=16, window_layers=(0, 1, 2, 3))
    assert [g.kind for g in build_program(windowed).kv_groups] == [KVKind.WINDOW]


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("llama", set()),
        ("qwen2", {"attn_q.bias", "attn_k.bias", "attn_v.bias"}),
        ("qwen3", {"attn_q_norm.weight", "attn_k_norm.weight"}),
        (
            "gemma3",
            {
                "attn_q_norm.weight",
                "attn_k_norm.weight",
                "post_attention_norm.weight",
                "post_ffw_norm.weight",
            },
        ),
    ],
)
def test_family_reads_its_own_weights(architecture: str, extra: set[str]) -> None:
    common = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"}
    common |= {"ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}
    program = build_program(replace(CONFIG, architecture=architecture))
    layer = {name.removeprefix("blk.3.") for name in program.weights if name.startswith("blk.3.")}
    assert layer == {f"{name}.weight" for name in common} | extra


def test_tied_model_has_no_output_matrix() -> None:
    assert "output.weight" in build_program(CONFIG).weights
    assert "output.weight" not in build_program(replace(CONFIG, tied=True)).weights


def test_window_layers_have_their_own_rope() -> None:
    config = replace(
        CONFIG, window=16, window_layers=(1,), rope=RopeConfig(theta=1e6), rope_local=RopeConfig(theta=1e4)
    )
    program = build_program(config)
    used = [op.weights[0] for op in program.ops if op.code == "rope"]
    assert used[:4] == ["rope.inv_freq"] * 2 + ["rope.local.inv_freq"] * 2
    assert program.constants["rope.inv_freq"] != program.constants["rope.local.inv_freq"]


def test_scaled_residual_branches_are_added_after_their_scale() -> None:
    codes = [op.code for op in build_program(replace(CONFIG, residual_scale=0.25)).ops]
    assert codes.count("scale") == codes.count("add") == 2 * CONFIG.layers
