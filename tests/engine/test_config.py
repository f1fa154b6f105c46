"""Knobs refuse values that cannot mean anything, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from artesian.cache import CacheConfig
from artesian.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_model_len", -1),
        ("max_num_queued_reqs", -1),
        ("max_num_queued_tokens", -1),
        ("threads", -1),
        ("step_budget_ms", 0.0),
        ("step_budget_ms", float("nan")),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        EngineConfig(Path(), **{name: value})  # type: ignore[arg-type]


def test_a_block_has_whole_groups_of_eight_tokens() -> None:
    for tokens in (0, 4, 20):
        with pytest.raises(ValueError, match=f"block_tokens={tokens}"):
            CacheConfig(block_tokens=tokens)
